"""The whole pipeline: construction hides behind a slow link, slow receivers slow owners, nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import CodecConfig, GateMode, QueueConfig
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime.timeline import CONSTRUCTION, TRANSPORT, RefitTimeline
from nemo_dcr.runtime.timings import Span
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Composed, PadRows, Parameters, Replicate, Rule, Slice
from nemo_dcr.transport.base import Announcement, Buffer, Manifest, Publisher, Transport
from nemo_dcr.transport.memory import MemoryTransport
from nemo_dcr.transport.object_store import FileObjectStore
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import balanced_tree
from tests.e2e.direct_refit import DirectRefit, pause, until

TENSORS = tuple(TensorMeta(f"t{number:02}", (9, 8), "BF16") for number in range(16))
"""Sixteen tensors of 144 bytes: a payload each, with a chunk and bucket target of 128 bytes."""
KINDS: tuple[Rule, ...] = (Replicate(), Slice(0), PadRows(4), Composed())
RULES = {meta.name: KINDS[number % len(KINDS)] for number, meta in enumerate(TENSORS)}
ONE_AT_A_TIME = QueueConfig(payloads_in_flight=1)
"""A link that carries one payload after another, so that its seconds are those of its payloads."""


def source(tensors: Sequence[TensorMeta] = TENSORS) -> LocalSource:
    made = LocalSource(tensors, seed=8)
    made.codec = CodecConfig(chunk_target_bytes=128, bucket_target_bytes=128)
    return made


class SlowLink:
    """A transport whose publishers take so long for each payload, as a narrow link does; a stop ends it at once."""

    def __init__(self, inner: Transport, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        return _SlowPublisher(self.inner.publisher(attempt, owner), self.seconds)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> object:
        return self.inner.subscribe(attempt, owners)

    def cleanup(self, through: AttemptId) -> None:
        self.inner.cleanup(through)


class _SlowPublisher:
    def __init__(self, inner: Publisher, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self._stopped = threading.Event()

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        self._stopped.wait(self._seconds)
        return self._inner.publish(key, data, digest)

    def close_set(self) -> Manifest:
        return self._inner.close_set()

    def stop(self) -> None:
        self._inner.stop()
        self._stopped.set()


def slow_reads(refit: DirectRefit, seconds: float) -> None:
    """Make construction take so long for each tensor."""
    for task in refit.owner.delta._tasks:
        read = task.read

        def slowly(read: Callable[[], object] = read) -> object:
            pause(seconds)
            return read()

        object.__setattr__(task, "read", slowly)


def spans(found: tuple[Span, ...], stage: str) -> dict[str, Span]:
    return {span.detail: span for span in found if span.stage == stage}


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in turns"])
def test_a_refit_takes_as_long_as_its_longer_stage_and_not_the_sum(apart: bool) -> None:
    """16 payloads of 30 ms on either side; in turns the same refit takes the sum, so the bound can fail."""
    step_s = 0.03
    link = SlowLink(MemoryTransport(), step_s)
    with DirectRefit(link, TENSORS, RULES, source=source(), queue=ONE_AT_A_TIME, apart=apart) as refit:
        refit.refit()
        slow_reads(refit, step_s)
        refit.train()
        attempt = refit.begin(AttemptMode.XOR)
        until(lambda: refit.receiver.report.acked, "the acknowledgement")
        owner, receiver = refit.timings(attempt)
        refit.commit(attempt)
        refit.require_dense()
    construct, publish = spans(owner.spans, "construct"), spans(owner.spans, "publish")
    assert len(publish) >= 15
    overlapping = [
        number for number, span in publish.items()
        if str(int(number) + 1) in construct and construct[str(int(number) + 1)].begin < span.end
        and construct[str(int(number) + 1)].end > span.begin
    ]  # fmt: skip
    sums = owner.seconds["construct"], owner.seconds["publish"]
    window = receiver.marks["flushed"] - owner.marks["construct_began"]
    if apart:
        assert len(overlapping) >= len(publish) - 2
        assert window < 1.3 * max(sums)
        assert window < 0.75 * sum(sums)
    else:
        assert overlapping == []
        assert window > 0.95 * sum(sums)


def test_the_bounds_of_a_refit_over_a_slow_link_hold_and_transport_dominates() -> None:
    link = SlowLink(MemoryTransport(), 0.02)
    with DirectRefit(link, TENSORS, RULES, source=source(), queue=ONE_AT_A_TIME) as refit:
        attempt = refit.refit()
        owner, receiver = refit.timings(attempt)
    found = RefitTimeline("refit", (owner,), (receiver,))
    construction, transport = found.bound_s(CONSTRUCTION), found.bound_s(TRANSPORT)
    assert found.latency_s >= transport > construction > 0.0
    assert transport >= 15 * 0.02
    assert 0.0 < found.finalization_s < found.latency_s
    assert {span.stage for span in owner.spans} == {"construct", "encode", "publish", "baseline"}
    assert {span.stage for span in receiver.spans} == {"fetch", "verify", "decode", "apply"}


class FarLink:
    """A transport that acknowledges nothing before `together` payloads, or all that are left, are under way."""

    def __init__(self, inner: Transport, payloads: int, together: int) -> None:
        self.inner = inner
        self.changed = threading.Condition()
        self.under_way = 0
        self.left = payloads
        self.together = together
        self.most = 0
        self.stopped = False

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        return _FarPublisher(self.inner.publisher(attempt, owner), self)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> object:
        return self.inner.subscribe(attempt, owners)

    def cleanup(self, through: AttemptId) -> None:
        self.inner.cleanup(through)


class _FarPublisher:
    def __init__(self, inner: Publisher, link: FarLink) -> None:
        self._inner = inner
        self._link = link

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        link = self._link
        with link.changed:
            link.under_way += 1
            link.most = max(link.most, link.under_way)
            if link.under_way == min(link.together, link.left):
                link.left -= link.under_way
                link.under_way = 0
                link.changed.notify_all()
            else:
                left = link.left
                arrived = link.changed.wait_for(lambda: link.left < left or link.stopped, 30.0)
                assert arrived, "the owner waits for an acknowledgement with too few payloads under way"
        return self._inner.publish(key, data, digest)

    def close_set(self) -> Manifest:
        return self._inner.close_set()

    def stop(self) -> None:
        with self._link.changed:
            self._link.stopped = True
            self._link.changed.notify_all()
        self._inner.stop()


def test_a_far_link_has_as_many_payloads_under_way_as_are_allowed() -> None:
    """16 payloads in 4 round trips: with one payload at a time the link would carry one in each."""
    link = FarLink(MemoryTransport(), payloads=16, together=4)
    queue = QueueConfig(payloads_in_flight=4)
    with DirectRefit(link, TENSORS, RULES, source=source(), queue=queue) as refit:  # type: ignore[arg-type]
        attempt = refit.refit()
        owner, _ = refit.timings(attempt)
        assert owner.counts["payloads"] == 16
        assert (link.left, link.most) == (0, 4)
        refit.require_dense()


class Held(Replicate):
    """A loader that waits in its first load until it is let go."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.leave.set()

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        self.inside.set()
        assert self.leave.wait(30.0)
        return super().load(name, tensor, parameters, rank, world)


def test_a_receiver_that_falls_behind_slows_the_owner_and_loses_nothing() -> None:
    """4 slots at the receiver, 2 announcements on the way: the owner stands still until the loader goes on."""
    held = Held()
    queue = QueueConfig(resident_groups=1, group_payloads=2)
    rules = {**RULES, "t00": held}
    with DirectRefit(MemoryTransport(window=2), TENSORS, rules, source=source(), queue=queue) as refit:
        refit.refit()
        held.inside.clear()
        held.leave.clear()
        refit.train()
        attempt = refit.begin(AttemptMode.XOR)
        assert held.inside.wait(30.0)
        stands = [-1]
        while (sent := refit.owner.report.payloads) != stands[-1]:
            stands.append(sent)
            pause(0.1)
        assert sent < 12
        held.leave.set()
        refit.commit(attempt)
        owner, receiver = refit.timings(attempt)
        refit.require_dense()
    assert owner.counts["payloads"] == len(spans(receiver.spans, "fetch")) == len(TENSORS)
    assert owner.waits["construct"] >= 1
    assert owner.waits["encode"] >= 1
    assert receiver.waits["fetch"] >= 1
    assert receiver.wait_seconds["fetch"] > 0.05


def test_a_delta_beyond_the_memory_budget_is_spilled_while_requests_are_served(tmp_path: Path) -> None:
    queue = QueueConfig(staging_bytes=1000, spill_directory=str(tmp_path))
    with DirectRefit(MemoryTransport(), TENSORS, RULES, source=source(), queue=queue) as refit:
        attempt = refit.refit(gate=GateMode.ASYNC)
        assert refit.timings(attempt)[1].counts["spilled"] > 0
        refit.require_dense()
        attempt = refit.refit(gate=GateMode.SYNC)
        refit.require_dense()
    assert list(tmp_path.iterdir()) == []


class Footprint:
    """What a process holds: threads, file descriptors, objects, and bytes of memory.

    ZeroMQ closes the descriptors of a connection that ended on a thread of its own, some milliseconds later; what is
    held is in every look, so the fewest of half a second count.
    """

    def __init__(self) -> None:
        gc.collect()
        self.threads = threading.active_count()
        self.descriptors = min(_descriptors() for _ in range(50))
        self.objects = len(gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.bytes = pages * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    pause(0.01)
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def opened(store: str, directory: Path) -> Iterator[Transport]:
    """A transport by name; the relay tree has a root, and a node below it at which the receiver reads."""
    if store != "relay":
        yield MemoryTransport() if store == "memory" else FileObjectStore(directory)
        return
    with contextlib.closing(RelayNode("n0")) as root, contextlib.closing(RelayNode("n1")) as leaf:
        tree = balanced_tree([root.place, leaf.place])
        with contextlib.closing(RelayTransport(tree, local=tree.node("n1"))) as transport:
            yield transport


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "refits"),
    [("memory", 700), ("files", 300), ("relay", 100), pytest.param("relay", 1000, marks=pytest.mark.deep)],
)
def test_a_thousand_refits_with_cancels_among_them_grow_nothing(tmp_path: Path, store: str, refits: int) -> None:
    """Every fourth is cancelled and retried, every seventh is asynchronous, and staging spills all the time."""
    spill = tmp_path / "spill"
    spill.mkdir()
    queue = QueueConfig(resident_groups=1, group_payloads=2, staging_bytes=300, spill_directory=str(spill))
    spilled = cancelled = 0
    with (
        opened(store, tmp_path / "store") as transport,
        DirectRefit(transport, TENSORS[:4], RULES, source=source(TENSORS[:4]), queue=queue) as refit,
    ):
        first = Footprint()
        for number in range(refits):
            if number % 4 == 3:
                refit.train()
                attempt = refit.begin(AttemptMode.XOR, GateMode.ASYNC if number % 8 == 3 else GateMode.SYNC)
                until(lambda: refit.owner.report.payloads > 0 or refit.receiver.report.payloads > 0, "a payload")
                refit.cancel(attempt)
                cancelled += 1
                refit.commit(refit.begin(AttemptMode.OVERWRITE))
            else:
                attempt = refit.refit(gate=GateMode.ASYNC if number % 7 == 6 else GateMode.SYNC)
                spilled += refit.timings(attempt)[1].counts.get("spilled", 0)
            if number == min(100, refits // 4):
                first = Footprint()
            if number % 100 == 0:
                refit.require_dense()
        refit.require_dense()
        last = Footprint()
        assert refit.version == refits
    assert cancelled == refits // 4
    assert spilled > 0
    assert (last.threads, last.descriptors) == (first.threads, first.descriptors)
    assert last.objects - first.objects < 500
    assert last.bytes - first.bytes < 4 << 20
    assert list(spill.iterdir()) == []
