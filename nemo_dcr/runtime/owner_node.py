"""One owner: drives the owner machine with the delta loop, a publisher and the trainer that it sits in.

Calls arrive on any thread. Streams, baseline copies and reloads are long, so they run one after another in `work`, on
one worker thread; after `run_apart` the payloads of a stream are made ahead of it, on threads that end with the stream.
A stop interrupts a stream between chunks, while it waits for a payload, and inside a blocked publish. The machine
decides what may start; nothing here looks at versions or candidates.
Not handled: sockets and thread loops (see serve); when to step the optimizer (the trainer asks `freeze` first).

Paper: Section 5; Figure B.3   Spec: OwnerProgress   Decisions: D8, D11, D12   Conditions: SC3, SC4
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from nemo_dcr.config import CodecConfig, QueueConfig
from nemo_dcr.errors import AttemptFailed, AttemptStopped, ConditionViolated
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Incarnation, Version
from nemo_dcr.protocol import owner
from nemo_dcr.protocol.messages import OwnerCall, OwnerReply, OwnerReport
from nemo_dcr.protocol.owner_state import (
    AnswerTrainer,
    BaselineFilled,
    BaselineLost,
    CandidateFrozen,
    CopyCandidate,
    ItemCopied,
    OwnerAnswer,
    OwnerCalled,
    OwnerEffect,
    OwnerEvent,
    OwnerState,
    PayloadFormed,
    PayloadPublished,
    PushOwnerReport,
    RefillBaseline,
    ReloadCommitted,
    StartStream,
    StopStream,
    StreamEnded,
    StreamFailed,
    StreamStopped,
    ThawCandidate,
    WeightsChanged,
    WeightsReloaded,
    holds_version,
)
from nemo_dcr.protocol.tags import TrackerTag
from nemo_dcr.record import DELTA_MODES, AttemptMode
from nemo_dcr.runtime.change_log import ChangeLog
from nemo_dcr.runtime.chronicle import Told, tell_nobody
from nemo_dcr.runtime.node_story import NodeStory
from nemo_dcr.runtime.payload_stream import FormedPayload, PayloadStream
from nemo_dcr.runtime.publish_window import PublishWindow
from nemo_dcr.runtime.stepper import Stepper
from nemo_dcr.runtime.timings import StageClock
from nemo_dcr.source.baseline import BaselineState, Copied
from nemo_dcr.source.delta import Counts, DeltaOwner
from nemo_dcr.trace import Emit, NullTracer, Tracer
from nemo_dcr.transport.base import Publisher, Transport

Job = Callable[[], None]


class FrozenTrainer(Protocol):
    """What the owner needs of the trainer that it sits in."""

    def end_transition(self, candidate: CandidateId) -> None:
        """The frozen weights are committed and the baseline holds them: optimizer steps are allowed again."""
        ...

    def reload(self, delta: DeltaOwner) -> CandidateId:
        """The candidate is dead: set the weights back to the baseline of `delta` and allow optimizer steps again.

        When the baseline is lost they come from the trainer's own checkpoint of the committed version. Returns the
        committed candidate that the weights are now.
        """
        ...


class OwnerNode:
    """One trainer rank's owner, without sockets and thread loops."""

    def __init__(
        self,
        *,
        delta: DeltaOwner,
        incarnation: Incarnation,
        tracker: TrackerTag,
        resident: CandidateId | None,
        trainer: FrozenTrainer,
        transport: Transport,
        candidate: CandidateId = NO_CANDIDATE,
        tracer: Tracer | None = None,
        codec: CodecConfig | None = None,
        queue: QueueConfig | None = None,
        baseline_digest: bytes = b"",
        changes: ChangeLog | None = None,
        told: Told = tell_nobody,
    ) -> None:
        """`tracker` and `resident` say what baseline and weights are known to hold at the start.

        `candidate`: after a restart inside a transition, the frozen candidate that the weights were brought back to.
        `changes` is told what each committed version changed, `told` the timings of each attempt.
        """
        self.delta = delta
        self.timings = StageClock(f"owner-{delta.owner}")
        self._trainer = trainer
        self._transport = transport
        self._tracer = tracer or NullTracer()
        self._codec = codec or CodecConfig()
        self._queue = queue or QueueConfig()
        self._apart = False
        self._changed = threading.Condition(threading.RLock())
        start = owner.start(
            delta.owner,
            incarnation,
            tracker=tracker,
            candidate=candidate,
            resident=resident,
            baseline_digest=baseline_digest,
        )
        self._machine = Stepper(start, owner.step, self._perform, self._changed)
        self._calls = itertools.count()
        self._responders: dict[int, Callable[[OwnerReply], None]] = {}
        self._jobs: deque[Job] = deque()
        self._refusal = ""
        self._stream: AttemptId | None = None
        self._publisher: Publisher | None = None
        self._payloads: PayloadStream | None = None
        self._stop: AttemptId | None = None
        self._changes = changes
        self._story = NodeStory(self.timings, told)
        self._streamed: tuple[CandidateId, Counts] | None = None
        """The candidate of the last complete stream of changes, and what it counted."""
        self._machine.begin()

    def run_apart(self) -> None:
        """From now on, construct and encode on threads of their own, ahead of `work`, which publishes."""
        self._apart = True

    # ------------------------------------------------------------------------------------------------- any thread

    def call(self, call: OwnerCall, respond: Callable[[OwnerReply], None]) -> None:
        """Take one control call; `respond` gets the reply, now or after the stream stopped."""
        with self._changed:
            call_id = next(self._calls)
            self._responders[call_id] = respond
            self._feed(OwnerCalled(call_id, call))

    @property
    def report(self) -> OwnerReport:
        """The owner as it stands."""
        with self._changed:
            return owner.report(self._state)

    @property
    def queue_depths(self) -> dict[str, int]:
        """How many buckets and payloads of the running stream wait for the next stage."""
        stream = self._payloads
        return {"constructed": 0, "encoded": 0} if stream is None else stream.depths

    @property
    def counts(self) -> Counts:
        """Counts of the latest stream (Appendix D)."""
        return self.delta.counts

    def freeze(self, candidate: CandidateId) -> str:
        """Offer the paused trainer's weights as the candidate of a transition; a text says why it may not begin."""
        with self._changed:
            self._refusal = ""
            self._feed(CandidateFrozen(candidate))
            return self._refusal

    def weights_changed(self) -> None:
        """The optimizer is about to step: the resident weights stop being a committed version.

        Raises: ConditionViolated (SC4) while they are a frozen candidate or are being loaded; do not step then.
        """
        with self._changed:
            self._refusal = ""
            self._feed(WeightsChanged())
            if self._refusal:
                raise ConditionViolated("SC4", f"owner {self._state.owner}", self._refusal)

    def lose_baseline(self, reason: str) -> None:
        """Give up the baseline, so that the next attempt sends every element; it follows the next commit again.

        Raises: ConditionViolated (SC3) while a stream or a copy uses it.
        """
        with self._changed:
            if self._stream is not None or self._jobs or self._state.filling is not None:
                raise ConditionViolated("SC3", f"owner {self._state.owner}", "its baseline is in use: end that first")
            self.delta.lose_baseline()
            self._feed(BaselineLost(reason))

    # ---------------------------------------------------------------------------------------------- worker thread

    def work(self, timeout_s: float) -> bool:
        """Run one stream, copy or reload; True when there was one. Waits at most `timeout_s` seconds."""
        with self._changed:
            if not self._jobs:
                self._changed.wait(timeout_s)
            if not self._jobs:
                return False
            job = self._jobs.popleft()
        job()
        return True

    def _run_stream(self, start: StartStream) -> None:
        attempt = start.attempt
        self.timings.mark(attempt, "construct_began")
        publisher: Publisher | None = None
        try:
            self._give_up_other_baseline(start)
            publisher = self._transport.publisher(attempt, self.delta.owner)
            with self._changed:
                self._publisher = publisher
                if self._is_stopped(attempt):
                    publisher.stop()
            stream = PayloadStream(
                self.delta,
                start,
                codec=self._codec,
                queue=self._queue,
                timings=self.timings,
                stopped=lambda: self._is_stopped(attempt),
                apart=self._apart,
            )
            self._payloads = stream
            with stream as payloads:
                self._send_all(publisher, attempt, payloads)
            self.timings.mark(attempt, "construct_ended")
            manifest = publisher.close_set()
            self._count(attempt)
            if start.mode in DELTA_MODES:
                self._streamed = start.candidate, self.delta.counts
            self._feed(StreamEnded(attempt, manifest.digest))
        except AttemptStopped:
            pass  # asked for by stop_and_wait, which is answered below
        except AttemptFailed as problem:
            self._feed(StreamFailed(attempt, f"{type(problem).__name__}: {problem}"))
        finally:
            with self._changed:
                if publisher is not None:
                    publisher.stop()
                self._publisher = self._payloads = None
                if self._stream == attempt:  # the end may have let a later attempt in already
                    self._stream = None
                self._finish_stop()
            self._story.measured(attempt)

    def _give_up_other_baseline(self, start: StartStream) -> None:
        """A dense attempt over a baseline of another version, as after a start from an old checkpoint: it is of no use.

        Lost, it follows the next commit; kept, it could not, and each attempt would fail (SC3).
        """
        tag = self.delta.tag
        if start.mode is not AttemptMode.DENSE or tag is None or tag.version in (None, start.version):
            return
        self.delta.lose_baseline()
        self._feed(BaselineLost(f"it is {tag} and the record is at {start.version}; the next attempt sends everything"))
        raise AttemptStopped(start.attempt, "the baseline was given up")

    def _send_all(self, publisher: Publisher, attempt: AttemptId, payloads: PayloadStream) -> None:
        """Every payload goes out: its line first, so that nobody takes in one that no line tells of."""

        def going(payload: FormedPayload) -> None:
            if self._is_stopped(attempt):
                raise AttemptStopped(attempt, "its stream was stopped")
            self._feed(PayloadFormed(attempt, payload.number, payload.names, payload.masks))

        def publish(payload: FormedPayload) -> None:
            encoded = payload.encoded
            with self.timings.stage(attempt, "publish", str(payload.number)):
                publisher.publish(encoded.key, encoded.data, encoded.digest)
            self.timings.count(attempt, "payloads", 1)
            self.timings.count(attempt, "payload_bytes", len(encoded.data))

        def published(number: int, digest: bytes) -> None:
            self._feed(PayloadPublished(attempt, number, digest))

        if not self._apart:  # whoever steps this node owns the schedule
            for payload in payloads:
                going(payload)
                publish(payload)
                published(payload.number, payload.encoded.digest)
            return
        name = f"publish-{self.delta.owner}"
        with PublishWindow(
            publisher, self._queue, name=name, going=going, publish=publish, published=published
        ) as window:
            for payload in payloads:
                window.send(payload)
            window.finish()

    def _count(self, attempt: AttemptId) -> None:
        counts = self.delta.counts
        told = ("source_elements", "changed_elements", "emitted", "emitted_changed", "xor_items", "overwrite_items")
        for name in told:
            self.timings.count(attempt, name, getattr(counts, name))

    def _copy(self, copy: CopyCandidate) -> None:
        attempt, tag, candidate = self._state.attempt, self.delta.tag, copy.candidate
        copied = self._teller(copy.version)
        try:
            with self.timings.stage(attempt, "baseline"):
                if tag is not None and tag.state is BaselineState.LOST:
                    self.delta.rebuild(copy.version, copied, open_candidate=candidate, committed_candidate=candidate)
                else:
                    self.delta.update_baseline(copy.version, copied)
        except AttemptFailed as problem:
            self.delta.lose_baseline()
            self._feed(BaselineLost(str(problem)))
        else:
            self.timings.mark(attempt, "baseline_updated")
            if self._changes is not None and self._streamed is not None and self._streamed[0] == candidate:
                self._changes.append(copy.version, candidate, self._streamed[1])
            self._feed(BaselineFilled(copy.version))
            self.delta.seal(candidate, copy.digest)
        self._story.measured(attempt)

    def _refill(self, refill: RefillBaseline) -> None:
        try:
            self.delta.rebuild(
                refill.version,
                self._teller(refill.version),
                open_candidate=self._state.candidate,
                committed_candidate=refill.candidate,
            )
        except AttemptFailed as problem:
            self.delta.lose_baseline()
            self._feed(BaselineLost(str(problem)))
        else:
            self._feed(BaselineFilled(refill.version))
            if holds_version(self._state.tracker, refill.version):
                self.delta.seal(refill.candidate, refill.digest)
            else:
                self.delta.lose_baseline()  # the weights changed under the copy

    def _teller(self, version: Version) -> Copied:
        return lambda name: self._feed(ItemCopied(version, name))

    def _reload(self) -> None:
        self._feed(WeightsReloaded(self._trainer.reload(self.delta)))

    # ------------------------------------------------------------------------------------------------ the machine

    def _is_stopped(self, attempt: AttemptId) -> bool:
        return self._stop == attempt

    @property
    def _state(self) -> OwnerState:
        return self._machine.state

    def _feed(self, event: OwnerEvent) -> None:
        self._machine.feed(event)

    def _perform(self, effect: OwnerEffect) -> None:
        match effect:
            case Emit():
                self._tracer.emit(effect)
            case OwnerAnswer(call_id, reply):
                self._responders.pop(call_id)(reply)
            case AnswerTrainer(_, refusal):
                self._refusal = refusal
            case StartStream(attempt=attempt):
                self._stream = attempt
                self._enqueue(lambda: self._run_stream(effect))
            case StopStream(attempt):
                self._stop = attempt
                if self._publisher is not None:
                    self._publisher.stop()
                self._finish_stop()
            case CopyCandidate():
                self._enqueue(lambda: self._copy(effect))
            case RefillBaseline():
                self._enqueue(lambda: self._refill(effect))
            case ReloadCommitted():
                self._enqueue(self._reload)
            case ThawCandidate(candidate):
                self._trainer.end_transition(candidate)
            case PushOwnerReport():
                pass  # read by the next status call

    def _enqueue(self, job: Job) -> None:
        self._jobs.append(job)
        self._changed.notify_all()

    def _finish_stop(self) -> None:
        """A stop ends once the stream does not run any more."""
        if self._stop is not None and self._stream is None:
            attempt, self._stop = self._stop, None
            self._feed(StreamStopped(attempt))
