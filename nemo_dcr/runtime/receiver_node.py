"""One receiver: drives the endpoint machine with a subscription, an applier and the engine's own thread.

Four threads meet here. Calls arrive on any thread and are answered through `respond`, at once or after a drain. Intake
runs on its own thread: it fetches, validates and stages compressed payloads. After `run_apart` another decodes them.
Neither touches weights. Application runs in `work`, on the thread that the engine lends, one loader call for a group of
payloads. The machine decides; this class performs its effects in order under one lock, and never holds that lock while
it decodes, spills or writes weights.
Not handled: sockets and thread loops (see serve), which attempt to run (coordinator).

Paper: Section 6.3; Appendix B; Figure C.2 (staging)   Spec: ReceiverProgress   Decisions: D3, D23, D25, D28, D30
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import VerifiedPayload
from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import CodecConfig, QueueConfig, RefitConfig
from nemo_dcr.errors import AttemptFailed, InternalError
from nemo_dcr.ids import AttemptId, Member, OwnerId, PayloadKey
from nemo_dcr.protocol import endpoint
from nemo_dcr.protocol.endpoint_report import report
from nemo_dcr.protocol.endpoint_state import (
    AdmitRequest,
    ApplyFailed,
    ApplyRequested,
    Called,
    DenyApply,
    Drain,
    Drained,
    EndpointEffect,
    EndpointEvent,
    EndpointState,
    EngineSlept,
    EngineWoke,
    Flush,
    Flushed,
    ItemApplied,
    ManifestSeen,
    PayloadRejected,
    PayloadsApplied,
    PayloadStaged,
    PermitApply,
    PushReport,
    RefuseRequest,
    Reply,
    RequestArrived,
    RequestDone,
    SetGate,
    Stage,
    StartIntake,
    WakeApply,
)
from nemo_dcr.protocol.messages import ReceiverCall, ReceiverReply, ReceiverReport
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.ingest import DecodedPayload
from nemo_dcr.receiver.paths import LoaderTable
from nemo_dcr.receiver.prewarm import ByteCopy, Checksums, prewarm
from nemo_dcr.receiver.residents import NativeModel
from nemo_dcr.runtime.chronicle import Told, tell_nobody
from nemo_dcr.runtime.node_story import NodeStory
from nemo_dcr.runtime.receiver_stages import ReceiverStages, device_synchronize
from nemo_dcr.runtime.stepper import Stepper
from nemo_dcr.runtime.timings import StageClock
from nemo_dcr.trace import Emit, NullTracer, Tracer
from nemo_dcr.transport.base import Announcement, Manifest, Transport

Job = Callable[[], None]


class ReceiverNode:
    """One rank of one engine instance, without sockets and thread loops."""

    def __init__(
        self,
        *,
        member: Member,
        ranks: int,
        model: NativeModel,
        transport: Transport,
        tracer: Tracer | None = None,
        refit: RefitConfig | None = None,
        codec: CodecConfig | None = None,
        queue: QueueConfig | None = None,
        loaded_digest: bytes = b"",
        set_gate: Callable[[bool], None] = lambda is_open: None,
        told: Told = tell_nobody,
    ) -> None:
        """`set_gate` hears when requests may be admitted, `told` of timings; `loaded_digest` names the checkpoint."""
        self.member = member
        self.timings = StageClock(member.receiver)
        self.model = model
        self._transport = transport
        self._tracer = tracer or NullTracer()
        self._refit = refit or RefitConfig()
        self._codec = codec or CodecConfig()
        self._queue = queue or QueueConfig()
        self._set_gate = set_gate
        self._story = NodeStory(self.timings, told)
        self._changed = threading.Condition(threading.RLock())
        start = endpoint.start(member, ranks=ranks, loaded_digest=loaded_digest)
        self._machine = Stepper(start, endpoint.step, self._perform, self._changed)
        self._calls = itertools.count()
        self._responders: dict[int, Callable[[ReceiverReply], None]] = {}
        self._jobs: deque[Job] = deque()
        self._apart = False
        self._arriving: VerifiedPayload | None = None
        self._stages: ReceiverStages | None = None
        self._permitted: tuple[PayloadKey, ...] = ()
        self._admitted = False
        self._applying: AttemptId | None = None
        self._drain: AttemptId | None = None
        self._flush: AttemptId | None = None
        self._table: LoaderTable | None = None
        self._metas: Mapping[str, TensorMeta] = {}
        self._applier: Applier | None = None
        self._machine.begin()

    def run_apart(self) -> None:
        """From now on another thread calls `decode`, and `work` only applies; call it before the first attempt."""
        self._apart = True

    # ------------------------------------------------------------------------------------------------- any thread

    def call(self, call: ReceiverCall, respond: Callable[[ReceiverReply], None]) -> None:
        """Take one control call; `respond` gets the reply, now or after a drain."""
        with self._changed:
            call_id = next(self._calls)
            self._responders[call_id] = respond
            self._feed(Called(call_id, call))

    @property
    def report(self) -> ReceiverReport:
        """The endpoint as it stands."""
        with self._changed:
            return report(self._state)

    def admit(self, request: str) -> bool:
        """Ask whether a request may start now; if so, `finish` must follow."""
        with self._changed:
            self._admitted = False
            self._feed(RequestArrived(request))
            return self._admitted

    def finish(self, request: str) -> None:
        """An admitted request ended."""
        with self._changed:
            self._feed(RequestDone(request))

    @property
    def requests(self) -> frozenset[str]:
        """Admitted requests that did not finish."""
        with self._changed:
            return self._state.requests

    @property
    def queue_depths(self) -> dict[str, int]:
        """How many payloads of the running attempt wait in each queue."""
        stages = self._stages
        return {"staged": 0, "decoded": 0} if stages is None else stages.ingest.depths

    @property
    def wants_engine(self) -> bool:
        """True while `work` would do something."""
        with self._changed:
            ready = self._stages is not None and self._stages.ingest.is_ready
            return bool(self._jobs) or self._flush is not None or ready

    def trouble(self, attempt: AttemptId, detail: str) -> None:
        """The engine cannot do what this attempt needs; the attempt fails unless it is over."""
        self._feed(ApplyFailed(attempt, detail))

    def slept(self, *, keeps_storage: bool) -> None:
        """The engine went to sleep: no requests, no writes. Without its storage it needs a restore after it woke."""
        self._feed(EngineSlept(keeps_storage))

    def woke(self) -> None:
        """The engine is back; its gate stays closed until the coordinator opens it."""
        self._feed(EngineWoke())

    def on_engine(self, job: Job) -> None:
        """Run `job` on the thread that the engine lends, before further application."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def prewarm(self, tensors: Sequence[TensorMeta]) -> tuple[dict[str, PathClass], dict[str, tuple[str, str]]]:
        """Discover the loader paths on a shadow and reserve the scratch. Runs on the engine's thread.

        Returns the path class of each canonical name, and (condition, detail) of unsupported ones; the coordinator
        refuses those for all ranks.
        """
        table = prewarm(self.model, tensors, keep=ByteCopy if self._refit.prewarm_copy else Checksums)
        applier = Applier(self.model, table, post_apply_check=self._refit.post_apply_check)
        with self._changed:
            self._table, self._applier = table, applier
            self._metas = {meta.name: meta for meta in tensors}
        return table.classes, table.reasons

    # ---------------------------------------------------------------------------------------------- intake thread

    def intake(self, timeout_s: float) -> bool:
        """Take one announcement or manifest; True when there was one. Waits at most `timeout_s` seconds."""
        with self._changed:
            stages = self._stages
            if stages is None:
                self._changed.wait(timeout_s)
            if stages is None or not stages.await_room(timeout_s):
                return False
        try:
            match found := stages.subscription.poll(timeout_s):
                case None:
                    return False
                case Manifest():
                    self._feed(ManifestSeen(found.attempt, found.owner, len(found.payloads), found.digest))
                case Announcement():
                    self._take(stages, found)
        except AttemptFailed as problem:
            self._feed(PayloadRejected(stages.attempt, str(problem)))
        return True

    def _take(self, stages: ReceiverStages, found: Announcement) -> None:
        with self._changed:
            known = self._state.seen.get(found.key.owner, {}).get(found.key.payload)
            if found.key.attempt != stages.attempt or known == found.digest:
                self._feed(PayloadStaged(found.key, found.digest))  # stale or a duplicate: not fetched
                return
        verified = stages.fetch(found)
        with self._changed:
            self._arriving = verified
            self._feed(PayloadStaged(verified.key, verified.digest))
            self._arriving = None
        del verified
        stages.spill()

    # ---------------------------------------------------------------------------------------------- decode thread

    def decode(self, timeout_s: float) -> bool:
        """Decode one staged payload; True when there was one. Waits at most `timeout_s` seconds."""
        with self._changed:
            stages = self._stages
            if stages is None:
                self._changed.wait(timeout_s)
            if stages is None or not stages.await_decoding(timeout_s):
                return False
        found = True
        try:
            self._require_applier()
            found = stages.decode()
        except AttemptFailed as problem:
            self._feed(ApplyFailed(stages.attempt, f"{type(problem).__name__}: {problem}"))
        with self._changed:
            self._changed.notify_all()
        return found

    # ---------------------------------------------------------------------------------------------- engine thread

    def work(self, timeout_s: float) -> bool:
        """Do one thing that needs the engine's thread: a job, a flush, or one group of payloads; True when it did."""
        with self._changed:
            step = self._next_step()
            if step is None:
                self._changed.wait(timeout_s)
                step = self._next_step()
        if step is None:
            return False
        step()
        return True

    def _next_step(self) -> Job | None:
        if self._jobs:
            return self._jobs.popleft()
        if self._flush is not None:
            attempt, self._flush = self._flush, None
            return lambda: self._synchronize(attempt)
        stages = self._stages
        if stages is None or not stages.ingest.is_ready:
            return None
        self._applying = stages.attempt
        return lambda: self._apply(stages)

    def _is_permitted(self, attempt: AttemptId, keys: tuple[PayloadKey, ...]) -> bool:
        """Ask the machine to write `keys` now; it marks the storage dirty first. It refuses a stopped attempt."""
        with self._changed:
            self._permitted = ()
            self._feed(ApplyRequested(attempt, keys))
            return bool(self._permitted)

    def _synchronize(self, attempt: AttemptId) -> None:
        device_synchronize()
        self.timings.mark(attempt, "flushed")
        self._feed(Flushed(attempt))
        self._story.measured(attempt)

    def _apply(self, stages: ReceiverStages) -> None:
        """Write the next group with one loader call. A drain that comes meanwhile waits for the end."""
        attempt = stages.attempt
        try:
            applier = self._require_applier()
            group = stages.take_group()
            with self._changed:
                self._changed.notify_all()  # slots are free
            if group and self._is_permitted(attempt, tuple(payload.key for payload in group)):
                self._write(stages, group, applier)
        except AttemptFailed as problem:
            self._feed(ApplyFailed(attempt, f"{type(problem).__name__}: {problem}"))
        finally:
            with self._changed:
                self._applying = None
                self._finish_drain()
                self._changed.notify_all()

    def _write(self, stages: ReceiverStages, group: tuple[DecodedPayload, ...], applier: Applier) -> None:
        attempt = stages.attempt
        stages.apply(group, applier, lambda key, name: self._feed(ItemApplied(attempt, key, name)))
        self._feed(PayloadsApplied(attempt, tuple(payload.key for payload in group)))

    def _require_applier(self) -> Applier:
        if self._applier is None:
            raise AttemptFailed(f"{self.member.receiver} was not prewarmed; prewarm it before its first attempt")
        return self._applier

    # ------------------------------------------------------------------------------------------------ the machine

    @property
    def _state(self) -> EndpointState:
        return self._machine.state

    def _feed(self, event: EndpointEvent) -> None:
        self._machine.feed(event)

    def _perform(self, effect: EndpointEffect) -> None:
        match effect:
            case Emit():
                self._tracer.emit(effect)
            case Reply(call_id, reply):
                self._responders.pop(call_id)(reply)
            case StartIntake(attempt, owners):
                self._start_intake(attempt, owners)
            case Stage(key):
                if self._arriving is None or self._arriving.key != key or self._stages is None:
                    raise InternalError(f"payload {key} was accepted but did not arrive")
                self._stages.ingest.stage(self._arriving)
            case WakeApply():
                if self._stages is not None:
                    self._stages.ingest.release()
            case PermitApply(_, keys):
                self._permitted = keys
            case Flush(attempt):
                self._flush = attempt
            case Drain(attempt):
                self._stop_intake()
                self._drain = attempt
                self._finish_drain()
            case SetGate(is_open):
                self._set_gate(is_open)
                self._story.gate(self._state.attempt, self._state.tag, is_open)
            case AdmitRequest():
                self._admitted = True
            case RefuseRequest() | DenyApply() | PushReport():
                pass  # the threads look at the state again; reports are read by the next status call

    def _start_intake(self, attempt: AttemptId, owners: tuple[OwnerId, ...]) -> None:
        try:
            subscription = self._transport.subscribe(attempt, owners)
        except AttemptFailed as problem:
            self._feed(PayloadRejected(attempt, str(problem)))
            return
        self._stages = ReceiverStages(
            attempt,
            subscription,
            self._metas,
            skipped=self._table.skipped if self._table is not None else frozenset(),
            codec=self._codec,
            queue=self._queue,
            apart=self._apart,
            timings=self.timings,
            changed=self._changed,
        )
        self.timings.mark(attempt, "intake_began")

    def _stop_intake(self) -> None:
        if self._stages is not None:
            self._stages.stop()
            self._stages = None
        self._flush = None

    def _finish_drain(self) -> None:
        """A drain ends once no group is being written; issued device work has then finished too."""
        if self._drain is not None and self._applying is None:
            attempt, self._drain = self._drain, None
            device_synchronize()
            self._feed(Drained(attempt))
            self._story.measured(attempt)
