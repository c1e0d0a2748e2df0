"""An owner and a receiver with threads of their own, led by a hand that stands for the coordinator.

Every stage runs as in a process: compare, encode and publish on the owner's side; intake, decode and application on the
receiver's. Only sockets, the commit record and the coordinator are left out.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import CodecConfig, GateMode, QueueConfig
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Incarnation, Member, OwnerId, ReceiverId, Version
from nemo_dcr.protocol.messages import (
    CloseGate,
    EndTransition,
    FinishRestore,
    OpenApply,
    OpenGate,
    OwnerCall,
    OwnerReply,
    PrepareOwner,
    PrepareReceiver,
    ReceiverCall,
    ReceiverReply,
    StopOwner,
    StopReceiver,
    StreamOwner,
    UpdateBaseline,
)
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.timings import Timings, TimingsOf
from nemo_dcr.testing.local_oracle import DenseOracle, stored_bits
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Rule, ToyModel
from nemo_dcr.transport.base import Transport

OWNER, RECEIVER, LIFE = OwnerId(0), ReceiverId("e0/0"), Incarnation(1)
STEP_S = 0.02
TIMEOUT_S = 30.0


def pause(seconds: float) -> None:
    """Let other threads work."""
    threading.Event().wait(seconds)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for it; an assertion names what did not come."""
    for _ in range(int(TIMEOUT_S / 0.0005)):
        if condition():
            return
        pause(0.0005)
    raise AssertionError(f"{what} did not come")


class DirectRefit:
    """Use it as a context manager, so that its threads end."""

    def __init__(
        self,
        transport: Transport,
        tensors: Sequence[TensorMeta],
        rules: Mapping[str, Rule],
        *,
        source: LocalSource | None = None,
        queue: QueueConfig | None = None,
        apart: bool = True,
    ) -> None:
        """`apart` False: the stages of each node take turns, as in a simulated cluster."""
        self.source = source or LocalSource(tensors, seed=8)
        self.rank = self.source.ranks[OWNER]
        self.oracle = DenseOracle(self.source, rules)
        self.transport = transport
        self.attempts = itertools.count(2)
        self.candidates = itertools.count(1)
        self.version = Version(0)
        self.committed = AttemptId(1)
        self.candidate = NO_CANDIDATE
        self._rules = rules
        delta = self.rank.new_delta()
        delta.capture(Version(0))
        codec: CodecConfig = self.source.codec
        self.owner = OwnerNode(
            delta=delta,
            incarnation=LIFE,
            tracker=TrackerTag(TrackerKind.AT, Version(0)),
            resident=NO_CANDIDATE,
            trainer=self.rank,
            transport=transport,
            codec=codec,
            queue=queue,
        )
        self.model = ToyModel(self.source.tensors, rules)
        self.oracle.load(self.model, NO_CANDIDATE)
        self.receiver = ReceiverNode(
            member=Member(RECEIVER, LIFE),
            ranks=1,
            model=self.model,
            transport=transport,
            codec=codec,
            queue=queue,
            loaded_digest=b"version 0",
        )
        classes, _ = self.receiver.prewarm(self.source.tensors)
        self.classes = {name: PathClass(path).value for name, path in classes.items()}
        steps: list[Callable[[float], object]] = [self.owner.work, self.receiver.intake, self.receiver.work]
        if apart:
            self.owner.run_apart()
            self.receiver.run_apart()
            steps.append(self.receiver.decode)
        self._over = threading.Event()
        self.faults: list[BaseException] = []
        self._threads = [threading.Thread(target=self._loop, args=(step,)) for step in steps]

    def __enter__(self) -> DirectRefit:
        for thread in self._threads:
            thread.start()
        restore = PrepareReceiver(
            RECEIVER, LIFE, AttemptId(1), AttemptMode.RESTORE, GateMode.SYNC, Version(0), AttemptId(1),
            NO_CANDIDATE, (OWNER,), b"version 0",
        )  # fmt: skip
        assert self.ask_receiver(restore).accepted
        assert self.ask_receiver(FinishRestore(RECEIVER, LIFE, AttemptId(1), Version(0))).accepted
        self.open_gate(AttemptId(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        assert self.faults == []

    def _loop(self, step: Callable[[float], object]) -> None:
        try:
            while not self._over.is_set():
                step(STEP_S)
        except BaseException as fault:
            self.faults.append(fault)

    # ------------------------------------------------------------------------------------------------------- calls

    def ask_owner(self, call: OwnerCall) -> OwnerReply:
        """One call, and its reply."""
        replies: list[OwnerReply] = []
        self.owner.call(call, replies.append)
        until(lambda: bool(replies), f"the reply to {call}")
        return replies[0]

    def ask_receiver(self, call: ReceiverCall) -> ReceiverReply:
        """One call, and its reply."""
        replies: list[ReceiverReply] = []
        self.receiver.call(call, replies.append)
        until(lambda: bool(replies), f"the reply to {call}")
        return replies[0]

    def open_gate(self, attempt: AttemptId) -> None:
        """Serve the version that the attempt brought."""
        assert self.ask_receiver(OpenGate(RECEIVER, LIFE, attempt, self.committed, self.version)).accepted

    # ----------------------------------------------------------------------------------------------------- a refit

    def train(self, rate: float = 0.5) -> None:
        """New weights, frozen; the ones before the committed ones are forgotten."""
        candidate = CandidateId(f"c{next(self.candidates)}")
        weights = self.source.weights
        for old in set(weights) - {NO_CANDIDATE, self.candidate}:
            del weights[old]
        self.source.draw(candidate, self.candidate, rate)
        self.owner.weights_changed()
        self.rank.load(candidate)
        self.rank.frozen = candidate
        assert self.owner.freeze(candidate) == ""

    def begin(self, mode: AttemptMode, gate: GateMode = GateMode.SYNC) -> AttemptId:
        """Prepare both sides and let the stream run."""
        attempt, candidate = AttemptId(next(self.attempts)), self.rank.frozen
        version, record = self.version, self.committed
        prepare = PrepareReceiver(RECEIVER, LIFE, attempt, mode, gate, version, record, candidate, (OWNER,), b"")
        assert self.ask_owner(PrepareOwner(OWNER, LIFE, attempt, mode, version, candidate, self.classes)).accepted
        assert self.ask_receiver(prepare).accepted
        if gate is GateMode.SYNC:
            self.open_apply(attempt)
        assert self.ask_owner(StreamOwner(OWNER, LIFE, attempt)).accepted
        return attempt

    def open_apply(self, attempt: AttemptId) -> None:
        """Let the receiver write."""
        assert self.ask_receiver(OpenApply(RECEIVER, LIFE, attempt)).accepted

    def cancel(self, attempt: AttemptId) -> None:
        """stop_and_wait on both sides."""
        assert self.ask_owner(StopOwner(OWNER, LIFE, attempt)).accepted
        assert self.ask_receiver(StopReceiver(RECEIVER, LIFE, attempt)).accepted

    def commit(self, attempt: AttemptId) -> None:
        """Wait for the acknowledgement, then do what follows a joint commit."""
        until(lambda: self._acknowledged(attempt), f"the end of attempt {attempt}")
        assert self.receiver.report.failure == self.owner.report.failure == ""
        candidate, version = self.rank.frozen, Version(self.version + 1)
        self.version, self.committed, self.candidate = version, attempt, candidate
        assert self.ask_owner(UpdateBaseline(OWNER, candidate, version)).accepted
        until(lambda: self.owner.report.tracker == TrackerTag(TrackerKind.AT, version), "the baseline update")
        assert self.ask_owner(EndTransition(OWNER, candidate, version)).accepted
        self.open_gate(attempt)
        self.transport.cleanup(attempt)

    def _acknowledged(self, attempt: AttemptId) -> bool:
        """As a coordinator sees it: receivers may have everything before the owner knows that its stream ended."""
        report, owner = self.receiver.report, self.owner.report
        acked = report.attempt == attempt and report.acked and owner.attempt == attempt and owner.end is not None
        return acked or bool(report.failure or owner.failure or self.faults)

    def refit(self, *, gate: GateMode = GateMode.SYNC, rate: float = 0.5) -> AttemptId:
        """One transition without a failure; returns its attempt."""
        self.train(rate)
        attempt = self.begin(AttemptMode.XOR, gate)
        if gate is GateMode.ASYNC:
            until(lambda: self.receiver.report.staged, "the whole delta")
            self.close_gate_and_open_apply(attempt)
        self.commit(attempt)
        return attempt

    def close_gate_and_open_apply(self, attempt: AttemptId) -> None:
        """The asynchronous gate closes after everything is staged."""
        assert self.ask_receiver(CloseGate(RECEIVER, LIFE, attempt)).accepted
        self.open_apply(attempt)

    def timings(self, attempt: AttemptId) -> tuple[Timings, Timings]:
        """Of the owner and of the receiver."""
        return self.owner.timings.of(TimingsOf(attempt)), self.receiver.timings.of(TimingsOf(attempt))

    def require_dense(self) -> None:
        """Every stored bit equals a dense load of version 0 and of the committed weights after it."""
        oracle = DenseOracle(self.source, self._rules)
        assert stored_bits(self.model) == oracle.expected(0, 1, self.candidate)
