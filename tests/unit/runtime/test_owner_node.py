"""The owner node: streams stop at any point, baselines follow commits, restarts go on inside a transition."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import AttemptFailed, ConditionViolated, TransportFailed
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Incarnation, OwnerId, PayloadKey, Version
from nemo_dcr.protocol.messages import (
    DropCandidate,
    EndTransition,
    OwnerCall,
    OwnerReply,
    OwnerStatus,
    PrepareOwner,
    RebuildBaseline,
    StopOwner,
    StreamOwner,
    StreamStatus,
    UpdateBaseline,
)
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.timings import TimingsOf
from nemo_dcr.source.baseline import BaselineState, Copied, committed
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.trace import Action, Emit
from nemo_dcr.transport.base import Announcement, Buffer, Manifest, Publisher
from nemo_dcr.transport.memory import MemoryTransport

OWNER, LIFE, FIRST = OwnerId(0), Incarnation(3), CandidateId("c1")
TENSORS = (TensorMeta("a", (8, 4), "BF16"), TensorMeta("b", (40,), "F32"), TensorMeta("c", (6, 6), "F16"))
CLASSES = {tensor.name: "xor" for tensor in TENSORS}


class Bench:
    """One node inside a local trainer, stepped by hand; its baseline is version 0."""

    def __init__(
        self,
        transport: MemoryTransport | None = None,
        *,
        residual: bool = False,
        lost: bool = False,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self.source = LocalSource(TENSORS, seed=2, residual=residual)
        self.rank = self.source.ranks[OWNER]
        self.transport = transport or MemoryTransport(window=1 << 10)
        self.trace: list[Emit] = []
        self.node = self.start(TrackerTag() if lost else TrackerTag(TrackerKind.AT))

    def emit(self, emitted: Emit) -> None:
        self.trace.append(emitted)

    def copied(self) -> list[str]:
        """The copy into the baseline as traced: the names in order, between its first and its last line."""
        began = (Action.UPDATE_BASELINE, Action.REBUILD_BASELINE)
        first = next(n for n, line in enumerate(self.trace) if line.action in began)
        last = next(n for n, line in enumerate(self.trace) if line.action is Action.BASELINE_FILLED)
        assert {line.action for line in self.trace[first + 1 : last]} == {Action.COPY_ITEM}
        return [str(line.args["name"]) for line in self.trace[first + 1 : last]]

    def start(self, tracker: TrackerTag) -> OwnerNode:
        delta = self.rank.new_delta()
        if tracker.kind is TrackerKind.AT:
            delta.capture(tracker.version)
        node = OwnerNode(
            delta=delta,
            incarnation=LIFE,
            tracker=tracker,
            resident=None if self.rank.frozen else self.rank.committed,
            candidate=self.rank.frozen,
            trainer=self.rank,
            transport=self.transport,
            tracer=self,
            codec=self.source.codec,
        )
        if self.apart:
            node.run_apart()
        return node

    def train(self, candidate: CandidateId = FIRST) -> str:
        self.source.draw(candidate, self.rank.committed, 0.6)
        self.node.weights_changed()
        self.rank.load(candidate)
        self.rank.frozen = candidate
        return self.node.freeze(candidate)

    def send(self, call: OwnerCall) -> list[OwnerReply]:
        """The replies so far, and those to come."""
        replies: list[OwnerReply] = []
        self.node.call(call, replies.append)
        return replies

    def ask(self, call: OwnerCall) -> OwnerReply:
        (reply,) = self.send(call)
        return reply

    def prepare(self, attempt: int, mode: AttemptMode = AttemptMode.XOR, version: int = 0) -> OwnerReply:
        call = PrepareOwner(OWNER, LIFE, AttemptId(attempt), mode, Version(version), FIRST, CLASSES)
        return self.ask(call)

    def stream(self, attempt: int) -> OwnerReply:
        return self.ask(StreamOwner(OWNER, LIFE, AttemptId(attempt)))

    def drive(self) -> None:
        while self.node.work(0):
            pass

    def commit(self) -> None:
        """The call that follows a commit of the frozen candidate as version 1, and its work."""
        assert self.ask(UpdateBaseline(OWNER, FIRST, Version(1))).accepted
        self.drive()


class GatedTransport(MemoryTransport):
    """Its publishers wait before the payload `hold`, as a full queue does; a stop releases them."""

    def __init__(self, hold: int) -> None:
        super().__init__(window=1 << 10)
        self.hold = hold
        self.waiting = threading.Event()

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        return _Gated(super().publisher(attempt, owner), self)


class _Gated:
    def __init__(self, inner: Publisher, transport: GatedTransport) -> None:
        self._inner = inner
        self._transport = transport
        self._stopped = threading.Event()

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        if key.payload == self._transport.hold:
            self._transport.waiting.set()
            assert self._stopped.wait(20.0)
        return self._inner.publish(key, data, digest)

    def close_set(self) -> Manifest:
        return self._inner.close_set()

    def stop(self) -> None:
        self._inner.stop()
        self._stopped.set()


class BrokenTransport(MemoryTransport):
    """A store that cannot be written."""

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        raise TransportFailed("memory", "the disk is full")


def names(bench: Bench) -> list[str]:
    """Canonical tensors that the owner holds something of, sorted."""
    return [tensor.name for tensor in bench.node.delta.tensor_table()]


def manifest(bench: Bench, attempt: int) -> Sequence[Announcement]:
    subscription = bench.transport.subscribe(AttemptId(attempt), [OWNER])
    while not isinstance(found := subscription.poll(0), Manifest):
        assert found is not None
    return found.payloads


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_stream_publishes_its_payloads_closes_the_set_and_reports_its_end(apart: bool) -> None:
    bench = Bench(apart=apart)
    assert bench.train() == ""
    assert bench.prepare(1).accepted
    assert bench.stream(1).report.status is StreamStatus.STREAMING
    bench.drive()
    report = bench.node.report
    assert (report.status, report.failure) == (StreamStatus.ENDED, "")
    assert report.payloads > 1
    assert report.end.payload_digests == tuple(payload.digest for payload in manifest(bench, 1))
    timings = bench.node.timings.of(TimingsOf(AttemptId(1)))
    assert timings.counts["payloads"] == report.payloads
    assert timings.counts["changed_elements"] == bench.node.counts.changed_elements > 0
    assert {"construct", "encode", "publish"} <= set(timings.seconds)


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_retry_finds_the_same_changes_and_sends_overwrites_only(apart: bool) -> None:
    bench = Bench(apart=apart)
    bench.train()
    found = []
    for attempt, mode in ((1, AttemptMode.XOR), (2, AttemptMode.OVERWRITE)):
        bench.prepare(attempt, mode)
        bench.stream(attempt)
        bench.drive()
        found.append(bench.node.counts)
    assert found[0].emitted == found[1].emitted > 0
    assert (found[0].xor_items > 0, found[1].xor_items) == (True, 0)


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_stop_inside_a_blocked_publish_is_answered_when_the_stream_is_over(apart: bool) -> None:
    """C2 at the sender: after the answer nothing of the attempt can be published any more."""
    transport = GatedTransport(hold=1)
    bench = Bench(transport, apart=apart)
    bench.train()
    bench.prepare(1)
    bench.stream(1)
    worker = threading.Thread(target=bench.node.work, args=(0,))
    worker.start()
    assert transport.waiting.wait(20.0)
    deadline = time.monotonic() + 20.0
    while bench.node.report.payloads < 1 and time.monotonic() < deadline:  # the payload before it is on its way too
        time.sleep(0.001)
    assert bench.ask(OwnerStatus(OWNER)).report.payloads == 1
    replies = bench.send(StopOwner(OWNER, LIFE, AttemptId(1)))
    worker.join(20.0)
    (reply,) = replies
    assert (reply.accepted, reply.report.status, reply.report.payloads) == (True, StreamStatus.STOPPED, 1)
    assert not bench.node.work(0)


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_stop_before_the_stream_runs_leaves_nothing_behind(apart: bool) -> None:
    bench = Bench(apart=apart)
    bench.train()
    bench.prepare(1)
    bench.stream(1)
    replies = bench.send(StopOwner(OWNER, LIFE, AttemptId(1)))
    assert replies == []
    bench.drive()
    assert [reply.report.status for reply in replies] == [StreamStatus.STOPPED]
    assert bench.node.report.payloads == 0


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_prepare_stops_the_older_stream_first(apart: bool) -> None:
    transport = GatedTransport(hold=0)
    bench = Bench(transport, apart=apart)
    bench.train()
    bench.prepare(1)
    bench.stream(1)
    worker = threading.Thread(target=bench.node.work, args=(0,))
    worker.start()
    assert transport.waiting.wait(20.0)
    replies = bench.send(PrepareOwner(OWNER, LIFE, AttemptId(2), AttemptMode.OVERWRITE, Version(0), FIRST, CLASSES))
    worker.join(20.0)
    assert [(reply.accepted, reply.report.attempt) for reply in replies] == [(True, 2)]
    transport.hold = -1
    bench.stream(2)
    bench.drive()
    assert bench.node.report.status is StreamStatus.ENDED


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_transport_that_cannot_be_opened_fails_the_attempt_and_not_the_owner(apart: bool) -> None:
    bench = Bench(BrokenTransport(), apart=apart)
    bench.train()
    bench.prepare(1)
    bench.stream(1)
    bench.drive()
    assert "the disk is full" in bench.node.report.failure
    assert bench.ask(StopOwner(OWNER, LIFE, AttemptId(1))).report.status is StreamStatus.STOPPED
    assert bench.prepare(2, AttemptMode.OVERWRITE).accepted


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_missing_loader_class_fails_the_attempt_with_the_tensor_named(apart: bool) -> None:
    bench = Bench(apart=apart)
    bench.train()
    bench.ask(PrepareOwner(OWNER, LIFE, AttemptId(1), AttemptMode.XOR, Version(0), FIRST, {}))
    bench.stream(1)
    bench.drive()
    assert "LC3" in bench.node.report.failure
    assert "prewarm again" in bench.node.report.failure


def test_the_baseline_follows_the_commit_and_the_candidate_thaws_only_then() -> None:
    bench = Bench()
    bench.train()
    assert not bench.ask(EndTransition(OWNER, FIRST, Version(1))).accepted
    assert bench.rank.committed == NO_CANDIDATE
    bench.commit()
    assert bench.node.delta.tag == committed(Version(1))
    for tensor, box, words in bench.node.delta.tracker_words():
        assert words.tolist() == box.take(bench.source.weights[FIRST][tensor.name]).tolist()
    assert bench.copied() == names(bench)
    assert bench.ask(EndTransition(OWNER, FIRST, Version(1))).accepted
    assert (bench.rank.committed, bench.node.report.resident) == (FIRST, FIRST)
    assert bench.train(CandidateId("c2")) == ""


def test_an_open_transition_refuses_another_candidate() -> None:
    bench = Bench()
    bench.train()
    assert "end that transition first" in bench.node.freeze(CandidateId("c2"))
    assert bench.node.report.candidate == FIRST


@pytest.mark.parametrize("residual", [False, True])
def test_an_owner_that_restarts_inside_a_transition_sends_everything_and_tracks_the_commit(residual: bool) -> None:
    """D12: trackers are lost; before the commit only dense attempts are accepted, after it the candidate is taken."""
    bench = Bench(residual=residual)
    bench.train()
    bench.node = bench.start(TrackerTag())
    assert bench.node.report.candidate == FIRST
    assert not bench.prepare(1, AttemptMode.OVERWRITE).accepted
    assert bench.prepare(2, AttemptMode.DENSE).accepted
    bench.stream(2)
    bench.drive()
    assert bench.node.counts.emitted == sum(tensor.numel for tensor in TENSORS)
    bench.commit()
    assert bench.node.report.tracker == TrackerTag(TrackerKind.AT, Version(1))
    assert bench.node.delta.tag == committed(Version(1))


@pytest.mark.parametrize("residual", [False, True])
def test_an_owner_that_restarts_after_the_commit_takes_the_candidate_without_a_stream(residual: bool) -> None:
    """D10, D12: nothing was compared in this life, and nothing has to be."""
    bench = Bench(residual=residual)
    bench.train()
    bench.node = bench.start(TrackerTag())
    bench.commit()
    assert bench.node.delta.tag == committed(Version(1))
    canonical = bench.source.canonical(FIRST)
    scaled = {tensor.name for tensor in bench.source.scaled}
    for tensor, box, words in bench.node.delta.tracker_words():
        full = canonical if tensor.name in scaled else bench.source.weights[FIRST]
        assert words.tolist() == box.take(full[tensor.name]).tolist()
    assert sorted(bench.copied()) == names(bench)


def test_a_baseline_that_cannot_be_copied_is_lost_and_the_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.train()

    def fail(version: Version, copied: Copied) -> None:
        copied(TENSORS[0].name)
        raise AttemptFailed("a shard drifted")

    with monkeypatch.context() as patched:
        patched.setattr(bench.node.delta, "update_baseline", fail)
        bench.commit()
    assert bench.node.report.tracker.kind is TrackerKind.LOST
    assert bench.node.delta.tag.state is BaselineState.LOST
    assert [line.action for line in bench.trace[-2:]] == [Action.COPY_ITEM, Action.LOSE_BASELINE]
    bench.trace.clear()
    bench.commit()
    assert bench.copied() == names(bench)
    assert bench.node.report.tracker == TrackerTag(TrackerKind.AT, Version(1))


@pytest.mark.parametrize("residual", [False, True])
def test_a_baseline_update_that_dies_between_two_tensors_can_be_repeated(residual: bool) -> None:
    """Each line of the copy is a point where the owner may die; a repeated copy ends in the same bits."""

    class Killed(BaseException):
        pass

    for survived in range(len(TENSORS)):
        bench = Bench(residual=residual)
        bench.train()
        bench.prepare(1)
        bench.stream(1)
        bench.drive()
        delta, seen = bench.node.delta, list[str]()

        def die(name: str, seen: list[str] = seen, survived: int = survived) -> None:
            seen.append(name)
            if len(seen) > survived:
                raise Killed

        with pytest.raises(Killed):
            delta.update_baseline(Version(1), die)
        assert len(seen) == survived + 1
        again: list[str] = []
        delta.update_baseline(Version(1), again.append)
        assert sorted(again) == names(bench)
        assert delta.tag == committed(Version(1))
        canonical, scaled = bench.source.canonical(FIRST), {tensor.name for tensor in bench.source.scaled}
        for tensor, box, words in delta.tracker_words():
            full = canonical if tensor.name in scaled else bench.source.weights[FIRST]
            assert words.tolist() == box.take(full[tensor.name]).tolist()
        if residual:
            with pytest.raises(ConditionViolated, match="no complete stream"):
                delta.update_baseline(Version(2))


@pytest.mark.parametrize("residual", [False, True])
def test_a_baseline_of_another_version_is_given_up_by_the_first_dense_attempt_and_made_anew_by_the_commit(
    residual: bool,
) -> None:
    """A trainer from an old checkpoint: its base is never used, and does not fail attempts for ever."""
    bench = Bench(residual=residual)
    assert bench.train() == ""
    for version in (4, 4):
        attempt = 1 + bench.node.report.attempt
        assert bench.prepare(attempt, AttemptMode.DENSE, version).accepted
        bench.stream(attempt)
        bench.drive()
    lost = [line for line in bench.trace if line.action is Action.LOSE_BASELINE]
    assert [line.args["reason"] for line in lost] == [
        "it is committed(0) and the record is at 4; the next attempt sends everything"
    ]
    report = bench.node.report
    assert (report.status, report.tracker, report.failure) == (StreamStatus.ENDED, TrackerTag(), "")
    assert bench.ask(UpdateBaseline(OWNER, FIRST, Version(5))).accepted
    bench.drive()
    assert bench.node.report.tracker == TrackerTag(TrackerKind.AT, Version(5))
    for tensor, box, words in bench.node.delta.tracker_words():
        if tensor not in bench.source.scaled:
            assert words.tolist() == box.take(bench.source.weights[FIRST][tensor.name]).tolist()


def test_a_dead_candidate_is_replaced_by_the_baseline_it_started_from() -> None:
    bench = Bench()
    before = bench.source.weights[NO_CANDIDATE]
    bench.train()
    assert bench.ask(DropCandidate(OWNER, FIRST)).accepted
    assert bench.node.freeze(CandidateId("c2")) != ""
    bench.drive()
    assert (bench.node.report.candidate, bench.node.report.resident) == (NO_CANDIDATE, NO_CANDIDATE)
    for task in bench.node.delta._tasks:
        assert task.words().tolist() == task.map.take(before[task.tensor.name]).tolist()


def test_a_lost_baseline_is_rebuilt_only_from_committed_resident_weights() -> None:
    bench = Bench(lost=True)
    assert bench.ask(RebuildBaseline(OWNER, NO_CANDIDATE, Version(0))).accepted
    bench.drive()
    assert bench.node.report.tracker == TrackerTag(TrackerKind.AT, Version(0))
    assert bench.copied() == names(bench)
    other = Bench(lost=True)
    other.node.weights_changed()
    assert not other.ask(RebuildBaseline(OWNER, NO_CANDIDATE, Version(0))).accepted
    assert other.node.report.tracker.kind is TrackerKind.LOST


@pytest.mark.parametrize("residual", [False, True])
def test_a_baseline_that_is_given_up_makes_the_next_attempt_dense_and_follows_its_commit(residual: bool) -> None:
    bench = Bench(residual=residual)
    bench.train()
    bench.node.lose_baseline("everything is to be sent")
    assert bench.node.report.tracker.kind is TrackerKind.LOST
    assert bench.trace[-1].action is Action.LOSE_BASELINE
    assert bench.trace[-1].args["reason"] == "everything is to be sent"
    assert not bench.prepare(1).accepted
    assert bench.prepare(2, AttemptMode.DENSE).accepted
    bench.stream(2)
    bench.drive()
    assert bench.node.counts.emitted == sum(tensor.numel for tensor in TENSORS)
    bench.commit()
    assert bench.node.report.tracker == TrackerTag(TrackerKind.AT, Version(1))
    assert bench.node.delta.tag == committed(Version(1))


def test_a_baseline_in_use_is_not_given_up() -> None:
    bench = Bench()
    bench.train()
    assert bench.prepare(1).accepted
    bench.stream(1)
    with pytest.raises(ConditionViolated, match="in use") as caught:
        bench.node.lose_baseline("too early")
    assert caught.value.condition == "SC3"
    bench.drive()
    bench.commit()
    assert bench.node.delta.tag == committed(Version(1))


def test_an_optimizer_step_inside_a_transition_is_refused_before_the_weights_change() -> None:
    bench = Bench()
    bench.train()
    with pytest.raises(ConditionViolated, match="is frozen") as caught:
        bench.node.weights_changed()
    assert caught.value.condition == "SC4"


def test_a_refill_whose_weights_change_under_it_leaves_no_baseline() -> None:
    bench = Bench(lost=True)
    assert bench.ask(RebuildBaseline(OWNER, NO_CANDIDATE, Version(0))).accepted
    bench.node.weights_changed()
    bench.drive()
    assert bench.node.report.tracker.kind is TrackerKind.LOST
    assert bench.node.delta.tag.state is BaselineState.LOST
    assert bench.node.freeze(CandidateId("c1")) == ""
