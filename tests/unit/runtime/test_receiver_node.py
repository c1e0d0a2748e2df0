"""The receiver node: replies that wait for a drain, intake that never stalls an attempt, writes on the lent thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from nemo_dcr.bits.tensors import copied_words, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import VerifiedPayload, encode_payload
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.config import GateMode, QueueConfig
from nemo_dcr.errors import PayloadCorrupt, TransportFailed
from nemo_dcr.ids import AttemptId, CandidateId, Incarnation, Member, OwnerId, PayloadKey, ReceiverId, Version
from nemo_dcr.protocol.messages import (
    CloseGate,
    FinishRestore,
    OpenApply,
    OpenGate,
    PrepareReceiver,
    ReceiverCall,
    ReceiverReply,
    ReceiverStatus,
    StopReceiver,
)
from nemo_dcr.protocol.tags import TagKind
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.timings import TimingsOf
from nemo_dcr.testing.toy_loader import Parameters, Replicate, ToyModel
from nemo_dcr.trace import Action, Emit
from nemo_dcr.transport.base import Announcement, Manifest, Subscription
from nemo_dcr.transport.faults import FaultPlan
from nemo_dcr.transport.memory import MemoryTransport

RECEIVER, OWNER, LIFE = ReceiverId("e0/0"), OwnerId(0), Incarnation(7)
META = TensorMeta("w", (6,), "BF16")
OLD = np.array([0x3F80, 0x8000, 0x0001, 0x7FC1, 0, 0x4000], dtype="<u2")


class Watched(Replicate):
    """A loader that waits in the middle of a copy when told so."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.leave = threading.Event()
        self.leave.set()

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        self.inside.set()
        assert self.leave.wait(20.0)
        return super().load(name, tensor, parameters, rank, world)


class Recorder:
    """A tracer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Emit] = []

    def emit(self, emitted: Emit) -> None:
        self.events.append(emitted)

    def of(self, action: Action) -> list[Emit]:
        return [event for event in self.events if event.action is action]


class Bench:
    """One node over a memory transport, stepped by hand; it holds version 0 and has its gate open."""

    def __init__(
        self,
        transport: MemoryTransport | None = None,
        *,
        prewarmed: bool = True,
        slots: int = 4,
        apart: bool = False,
        queue: QueueConfig | None = None,
    ) -> None:
        self.apart = apart
        self.rule = Watched()
        self.transport = transport or MemoryTransport()
        self.tracer = Recorder()
        self.model = ToyModel((META,), {"w": self.rule})
        self.model.load_weights([("w", tensor_from_words(OLD.copy(), "BF16", META.shape))])
        self.gates: list[bool] = []
        self.node = ReceiverNode(
            member=Member(RECEIVER, LIFE),
            ranks=1,
            model=self.model,
            transport=self.transport,
            tracer=self.tracer,
            queue=queue or QueueConfig(resident_groups=1, group_payloads=slots // 2),
            loaded_digest=b"first",
            set_gate=self.gates.append,
        )
        if apart:
            self.node.run_apart()
        if prewarmed:
            self.node.prewarm([META])
        self.prepare(1, AttemptMode.RESTORE, baseline_digest=b"first")
        self.ask(FinishRestore(RECEIVER, LIFE, AttemptId(1), Version(0)))
        self.ask(OpenGate(RECEIVER, LIFE, AttemptId(1), AttemptId(1), Version(0)))

    def send(self, call: ReceiverCall) -> list[ReceiverReply]:
        """The replies so far, and those to come."""
        replies: list[ReceiverReply] = []
        self.node.call(call, replies.append)
        return replies

    def ask(self, call: ReceiverCall) -> ReceiverReply:
        """A call that is answered at once."""
        (reply,) = self.send(call)
        return reply

    def prepare(
        self,
        attempt: int,
        mode: AttemptMode = AttemptMode.XOR,
        *,
        gate: GateMode = GateMode.SYNC,
        baseline_digest: bytes = b"",
    ) -> ReceiverReply:
        return self.ask(self.preparation(attempt, mode, gate=gate, baseline_digest=baseline_digest))

    def preparation(
        self, attempt: int, mode: AttemptMode, *, gate: GateMode = GateMode.SYNC, baseline_digest: bytes = b""
    ) -> PrepareReceiver:
        return PrepareReceiver(
            RECEIVER,
            LIFE,
            AttemptId(attempt),
            mode,
            gate,
            Version(0),
            AttemptId(1),
            CandidateId("c"),
            (OWNER,),
            baseline_digest,
        )

    def open_apply(self, attempt: int) -> ReceiverReply:
        return self.ask(OpenApply(RECEIVER, LIFE, AttemptId(attempt)))

    def publish(self, attempt: int, payloads: Sequence[Sequence[int]], *, close: bool = True) -> None:
        """XOR one bit at these places, a payload each."""
        publisher = self.transport.publisher(AttemptId(attempt), OWNER)
        for number, places in enumerate(payloads):
            key = PayloadKey(AttemptId(attempt), OWNER, number)
            ones = np.ones(len(places), dtype="<u2")
            encoded = encode_payload(key, [Item.of(META, Encoding.XOR, np.array(places, dtype=np.int64), ones)])
            publisher.publish(key, encoded.data, encoded.digest)
        if close:
            publisher.close_set()

    def drive(self) -> None:
        """Intake and work until nothing is left to do."""
        while self.node.intake(0) or (self.apart and self.node.decode(0)) or self.node.work(0):
            pass

    @property
    def stored(self) -> list[int]:
        return copied_words(next(iter(self.model.state_dict().values()))).tolist()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.rule.leave.set()


def changed(places: Sequence[int]) -> list[int]:
    words = OLD.copy()
    words[list(places)] ^= 1
    return words.tolist()


def test_a_restore_proved_by_digest_opens_the_gate_without_a_payload(bench: Bench) -> None:
    report = bench.node.report
    assert (report.tag.kind, report.gate_open, report.payloads) == (TagKind.CLEAN, True, 0)
    assert bench.gates == [True]


def test_payloads_are_staged_applied_in_groups_flushed_and_acknowledged(bench: Bench) -> None:
    assert bench.prepare(2).accepted
    bench.open_apply(2)
    bench.publish(2, [[0], [1], [5]])
    bench.drive()
    report = bench.node.report
    assert (report.acked, report.payloads, report.tag.kind) == (True, 3, TagKind.DONE)
    assert bench.stored == changed([0, 1, 5])
    assert bench.gates == [True, False]


def test_the_asynchronous_gate_stages_everything_and_writes_nothing_before_open_apply(bench: Bench) -> None:
    """More payloads than the queue has slots: the whole delta is staged while requests are served."""
    bench.prepare(2, gate=GateMode.ASYNC)
    bench.publish(2, [[0], [1], [2], [3], [4], [5]])
    bench.drive()
    report = bench.node.report
    assert (report.staged, report.gate_open, report.acked) == (True, True, False)
    assert bench.stored == OLD.tolist()


def test_a_request_holds_the_writes_back_until_it_ends(bench: Bench) -> None:
    assert bench.node.admit("q")
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[3]])
    bench.drive()
    assert (bench.stored, bench.node.report.requests) == (OLD.tolist(), 1)
    assert not bench.node.admit("r")
    bench.node.finish("q")
    bench.drive()
    assert bench.stored == changed([3])
    assert bench.node.report.acked


def test_a_full_queue_holds_the_intake_and_not_the_attempt() -> None:
    bench = Bench(slots=2)
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[number] for number in range(6)])
    taken = 0
    while bench.node.intake(0):
        taken += 1
    assert taken == 2
    bench.drive()
    assert bench.node.report.acked
    assert bench.stored == changed(range(6))


def writing(bench: Bench) -> threading.Thread:
    """A thread that is in the middle of writing the only payload of attempt 2."""
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[0]])
    while bench.node.intake(0):
        pass
    bench.rule.inside.clear()
    bench.rule.leave.clear()
    thread = threading.Thread(target=bench.node.work, args=(0,))
    thread.start()
    assert bench.rule.inside.wait(20.0)
    return thread


def test_stop_and_wait_is_answered_only_when_the_running_write_has_ended(bench: Bench) -> None:
    thread = writing(bench)
    replies = bench.send(StopReceiver(RECEIVER, LIFE, AttemptId(2)))
    status = bench.ask(ReceiverStatus(RECEIVER)).report
    assert (replies, status.stopped, status.drained) == ([], True, False)
    bench.rule.leave.set()
    thread.join(20.0)
    assert [(reply.accepted, reply.report.drained) for reply in replies] == [(True, True)]
    bench.drive()
    assert not bench.node.report.acked


def test_the_next_prepare_is_answered_after_the_drain_and_repeats_wait_with_it(bench: Bench) -> None:
    thread = writing(bench)
    call = bench.preparation(3, AttemptMode.OVERWRITE)
    first, second = bench.send(call), bench.send(call)
    assert (first, second, bench.node.report.attempt) == ([], [], 2)
    bench.rule.leave.set()
    thread.join(20.0)
    assert [reply.accepted for reply in (*first, *second)] == [True, True]
    assert bench.node.report.attempt == 3
    assert bench.node.report.tag.kind is TagKind.DIRTY


def test_a_stop_while_payloads_wait_drops_them(bench: Bench) -> None:
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[0], [1]])
    assert bench.node.intake(0)
    assert bench.ask(StopReceiver(RECEIVER, LIFE, AttemptId(2))).accepted
    bench.drive()
    assert bench.stored == OLD.tolist()
    assert bench.tracer.of(Action.APPLY_ITEM) == []


@pytest.mark.parametrize("apart", [False, True])
def test_the_first_attempt_without_prewarm_fails_with_what_to_do(apart: bool) -> None:
    bench = Bench(prewarmed=False, apart=apart)
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[0]])
    bench.drive()
    assert bench.node.report.stopped
    assert bench.stored == OLD.tolist()
    assert "was not prewarmed; prewarm it" in bench.node.report.failure


class Counting(MemoryTransport):
    """Counts fetches, and may be told to fail."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        super().__init__(plan)
        self.fetched: list[PayloadKey] = []
        self.subscribe_fails = False
        self.poll_fails = False

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> Subscription:
        if self.subscribe_fails:
            raise TransportFailed("memory", "no room")
        return _Counting(super().subscribe(attempt, owners), self)


class _Counting:
    def __init__(self, inner: Subscription, transport: Counting) -> None:
        self._inner = inner
        self._transport = transport

    def poll(self, timeout_s: float) -> Announcement | Manifest | None:
        if self._transport.poll_fails:
            raise PayloadCorrupt("2/0/manifest", "it is truncated")
        return self._inner.poll(timeout_s)

    def fetch(self, announcement: Announcement) -> bytes:
        self._transport.fetched.append(announcement.key)
        return self._inner.fetch(announcement)

    def stop(self) -> None:
        self._inner.stop()


def test_duplicates_and_payloads_of_older_attempts_are_not_fetched() -> None:
    """What was cleaned up meanwhile cannot fail the attempt that runs now."""
    transport = Counting(FaultPlan(repeat=1.0, stale=1.0))
    bench = Bench(transport)
    bench.prepare(2)
    bench.publish(2, [[0], [1]], close=False)
    bench.prepare(3, AttemptMode.OVERWRITE)
    bench.open_apply(3)
    bench.publish(3, [[0], [1]])
    bench.drive()
    assert transport.fetched == [PayloadKey(AttemptId(3), OWNER, 0), PayloadKey(AttemptId(3), OWNER, 1)]
    assert bench.node.report.acked
    assert bench.tracer.of(Action.IGNORE_DUPLICATE)
    assert {event.attempt for event in bench.tracer.of(Action.IGNORE_STALE)} == {2}


@pytest.mark.parametrize("field", ["subscribe_fails", "poll_fails"])
def test_a_transport_that_fails_fails_the_attempt_and_not_the_node(field: str) -> None:
    transport = Counting()
    bench = Bench(transport)
    setattr(transport, field, True)
    bench.prepare(2)
    bench.drive()
    assert bench.node.report.stopped
    assert "no room" in bench.node.report.failure or "truncated" in bench.node.report.failure
    setattr(transport, field, False)
    assert bench.prepare(3, AttemptMode.OVERWRITE).accepted
    bench.open_apply(3)
    bench.publish(3, [[2]])
    bench.drive()
    assert bench.node.report.acked


@pytest.mark.parametrize(
    ("plan", "said"), [(FaultPlan(alter=1.0, seed=4), "not valid"), (FaultPlan(forget=1.0), "missing")]
)
def test_a_payload_that_is_spoiled_or_gone_fails_the_attempt_before_a_write(plan: FaultPlan, said: str) -> None:
    bench = Bench(MemoryTransport(plan))
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[0]])
    bench.drive()
    assert said in bench.node.report.failure
    assert bench.stored == OLD.tolist()


def test_a_sleeping_engine_takes_no_attempt_and_wakes_with_a_closed_gate(bench: Bench) -> None:
    bench.node.slept(keeps_storage=True)
    assert bench.prepare(2).refusal == "the engine sleeps"
    assert not bench.node.admit("q")
    bench.node.woke()
    assert (bench.node.report.gate_open, bench.node.report.tag.kind) == (False, TagKind.CLEAN)
    bench.node.slept(keeps_storage=False)
    bench.node.woke()
    assert bench.node.report.tag.kind is TagKind.NONE
    assert "does not repair" in bench.prepare(3).refusal


def test_jobs_run_on_the_thread_that_is_lent(bench: Bench) -> None:
    ran: list[int] = []
    job: Callable[[], None] = lambda: ran.append(threading.get_ident())  # noqa: E731
    bench.node.on_engine(job)
    assert bench.node.work(0)
    assert not bench.node.work(0)
    assert ran == [threading.get_ident()]


def test_prewarm_reports_the_class_of_each_name(bench: Bench) -> None:
    assert bench.node.prewarm([META]) == ({"w": PathClass.XOR}, {})


def test_apart_the_lent_thread_only_writes_what_another_one_decoded() -> None:
    bench = Bench(apart=True)
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[0], [1]])
    while bench.node.intake(0):
        pass
    assert not bench.node.wants_engine
    assert not bench.node.work(0)
    assert [bench.node.decode(0) for _ in range(3)] == [True, True, False]
    assert bench.node.wants_engine
    bench.drive()
    assert (bench.stored, bench.node.report.acked) == (changed([0, 1]), True)


def test_apart_a_payload_that_does_not_decode_fails_the_attempt_before_a_write() -> None:
    bench = Bench(apart=True)
    bench.prepare(2)
    bench.open_apply(2)
    publisher = bench.transport.publisher(AttemptId(2), OWNER)
    foreign = Item.run(TensorMeta("v", (6,), "BF16"), Encoding.XOR, 0, np.ones(1, dtype="<u2"))
    encoded = encode_payload(PayloadKey(AttemptId(2), OWNER, 0), [foreign])
    publisher.publish(encoded.key, encoded.data, encoded.digest)
    publisher.close_set()
    bench.drive()
    assert "not in the tensor table" in bench.node.report.failure
    assert (bench.stored, bench.node.report.drained) == (OLD.tolist(), True)


def test_a_stop_does_not_wait_for_a_decoder_and_nothing_of_its_work_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(apart=True)
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[0]])
    while bench.node.intake(0):
        pass
    inside, leave, whole = threading.Event(), threading.Event(), VerifiedPayload.decode_some

    def decode_some(self: VerifiedPayload, *args: Any, **options: Any) -> Any:
        inside.set()
        assert leave.wait(20.0)
        return whole(self, *args, **options)

    monkeypatch.setattr(VerifiedPayload, "decode_some", decode_some)
    decoder = threading.Thread(target=bench.node.decode, args=(0,))
    decoder.start()
    assert inside.wait(20.0)
    assert bench.ask(StopReceiver(RECEIVER, LIFE, AttemptId(2))).report.drained
    assert bench.prepare(3, AttemptMode.OVERWRITE).accepted
    leave.set()
    decoder.join(20.0)
    bench.drive()
    assert (bench.stored, bench.node.report.failure) == (OLD.tolist(), "")
    assert not bench.node.wants_engine


def test_a_disk_that_takes_no_spilled_payload_fails_the_attempt_and_says_what_to_do(tmp_path: Path) -> None:
    queue = QueueConfig(staging_bytes=1, spill_directory=str(tmp_path / "absent"))
    bench = Bench(queue=queue)
    bench.prepare(2, gate=GateMode.ASYNC)
    bench.publish(2, [[0], [1]])
    bench.drive()
    assert "raise queue.staging_bytes" in bench.node.report.failure
    assert bench.node.report.drained


@pytest.mark.parametrize("apart", [False, True])
def test_spilled_payloads_are_written_after_open_apply(tmp_path: Path, apart: bool) -> None:
    queue = QueueConfig(staging_bytes=1, spill_directory=str(tmp_path))
    bench = Bench(queue=queue, apart=apart)
    bench.prepare(2, gate=GateMode.ASYNC)
    bench.publish(2, [[0], [1], [5]])
    bench.drive()
    assert (bench.node.report.staged, bench.stored) == (True, OLD.tolist())
    assert bench.node.timings.of(TimingsOf(AttemptId(2))).counts["spilled"] == 3
    assert bench.ask(CloseGate(RECEIVER, LIFE, AttemptId(2))).accepted
    bench.open_apply(2)
    bench.drive()
    assert (bench.stored, bench.node.report.acked) == (changed([0, 1, 5]), True)


def test_waits_for_room_are_counted_once_each() -> None:
    bench = Bench(slots=2)
    bench.prepare(2)
    bench.open_apply(2)
    bench.publish(2, [[number] for number in range(4)])
    for _ in range(3):  # a group holds its slot until the next one is asked for
        while bench.node.intake(0):
            pass
        bench.node.intake(0)
        bench.node.intake(0)
        bench.node.work(0)
    assert bench.node.timings.of(TimingsOf(AttemptId(2))).waits == {"fetch": 2}
