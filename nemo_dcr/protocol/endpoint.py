"""Algorithm B.1 at a receiver: the state machine of one endpoint, and its request gate.

`step` takes one event to the next state and the effects; it is total. An older attempt is drained before a newer one is
installed (D3), so a fenced write can never land later. The tag is lowered before the first write (D25) and becomes
`done` only after the flush. Calls and payloads of a replaced attempt are ignored and traced; they are no errors.

Not handled: which attempt to run, when to open apply, gate or restore (coordinator); bytes, tensors, threads (runtime).

Paper: Section 6.3; Section 7 (gate); Algorithm B.1   Spec: CloseGate, OpenApply, OpenGate, FinishRestore, AdmitRequest,
FinishRequest, StartReceiver   Proofs: fence_stops_old_writes,
restore_exact   Conditions: SC7
"""

from __future__ import annotations

from dataclasses import replace

from nemo_dcr.ids import Member
from nemo_dcr.protocol import endpoint_fence as fence
from nemo_dcr.protocol import endpoint_guards as guards
from nemo_dcr.protocol import endpoint_intake as intake
from nemo_dcr.protocol.endpoint_report import Step, emit, payload_args, refuse, reply, report
from nemo_dcr.protocol.endpoint_state import (
    AdmitRequest,
    ApplyFailed,
    ApplyRequested,
    Called,
    Drained,
    EndpointEffect,
    EndpointEvent,
    EndpointState,
    EngineSlept,
    EngineWoke,
    Flushed,
    ItemApplied,
    ManifestSeen,
    PayloadRejected,
    PayloadsApplied,
    PayloadStaged,
    PushReport,
    RefuseRequest,
    RequestArrived,
    RequestDone,
    SetGate,
)
from nemo_dcr.protocol.messages import (
    CloseGate,
    FinishRestore,
    OpenApply,
    OpenGate,
    PrepareReceiver,
    ReceiverStatus,
    StopReceiver,
)
from nemo_dcr.protocol.tags import Tag, TagKind
from nemo_dcr.trace import Action, emits_first

RELEASED = "the engine released its weights"
CALLED = "the coordinator called"


def start(member: Member, *, ranks: int, loaded_digest: bytes = b"") -> Step:
    """State of a new process: nothing is known about its storage, the gate is closed."""
    state = EndpointState(member=member, ranks=ranks, loaded_digest=loaded_digest)
    return state, (emit(state, Action.START_RECEIVER, ranks=ranks, loaded=loaded_digest.hex()),)


def step(state: EndpointState, event: EndpointEvent) -> Step:
    """Take one event. Every event is legal in every state."""
    state, effects = _take(replace(state, revision=state.revision + 1), event)
    return state, emits_first(effects)


def _take(state: EndpointState, event: EndpointEvent) -> Step:
    match event:
        case Called(call_id, call):
            return _called(state, call_id, call)
        case PayloadStaged():
            return intake.accept(state, event)
        case ManifestSeen():
            return intake.see_manifest(state, event)
        case PayloadRejected(attempt, detail) | ApplyFailed(attempt, detail):
            if guards.may_fail(state, attempt):
                return fence.fail(state, detail)
            return state, (emit(state, Action.IGNORE_STALE, attempt, reason="failure"),)
        case ApplyRequested(attempt, keys):
            return intake.request_apply(state, attempt, keys)
        case ItemApplied(attempt, key, name):
            return state, (emit(state, Action.APPLY_ITEM, attempt, **payload_args(key), name=name),)
        case PayloadsApplied(attempt, keys):
            return intake.applied(state, attempt, keys)
        case Flushed(attempt):
            return intake.flushed(state, attempt)
        case Drained(attempt):
            return fence.drained(state, attempt)
        case RequestArrived(request):
            return _admit(state, request)
        case RequestDone(request):
            return _request_done(state, request)
        case EngineSlept(keeps_storage):
            return _slept(state, keeps_storage)
        case EngineWoke():
            return replace(state, asleep=False), ()


Call = PrepareReceiver | CloseGate | OpenApply | StopReceiver | OpenGate | FinishRestore | ReceiverStatus


def _called(state: EndpointState, call_id: int, call: Call) -> Step:
    match call:
        case PrepareReceiver():
            return fence.prepare(state, call_id, call)
        case StopReceiver():
            return fence.stop(state, call_id, call)
        case ReceiverStatus():
            return state, (reply(state, call_id),)
    if not guards.is_addressed(state, call.incarnation):
        return refuse(state, call_id, Action.IGNORE_STALE, f"incarnation {call.incarnation} is gone", call.attempt)
    match call:
        case CloseGate():
            return _close_gate(state, call_id, call)
        case OpenApply():
            return _open_apply(state, call_id, call)
        case OpenGate():
            return _open_gate(state, call_id, call)
        case FinishRestore():
            return _finish_restore(state, call_id, call)


def _close_gate(state: EndpointState, call_id: int, call: CloseGate) -> Step:
    if not guards.is_running(state, call.attempt):
        return refuse(state, call_id, Action.IGNORE_STALE, _not_running(state, call.attempt), call.attempt)
    if not state.gate_open:
        return state, (reply(state, call_id),)
    if not guards.may_close_gate(state, call.attempt):
        return refuse(state, call_id, Action.IGNORE_STALE, "late: the attempt ended and its gate opened", call.attempt)
    state = replace(state, gate_open=False)
    return state, (SetGate(False), reply(state, call_id), emit(state, Action.CLOSE_GATE, reason=CALLED))


def _open_apply(state: EndpointState, call_id: int, call: OpenApply) -> Step:
    if not guards.is_running(state, call.attempt):
        return refuse(state, call_id, Action.IGNORE_STALE, _not_running(state, call.attempt), call.attempt)
    if state.apply_open:
        return state, (reply(state, call_id),)
    state = replace(state, apply_open=True)
    opened = emit(state, Action.OPEN_APPLY)
    state, effects = intake.wake_if_quiet(state)
    return state, (*effects, reply(state, call_id), opened)


def _open_gate(state: EndpointState, call_id: int, call: OpenGate) -> Step:
    if not guards.may_open_gate(state, call):
        refusal = f"attempt {state.attempt} with storage {state.tag} does not open the gate"
        return refuse(state, call_id, Action.IGNORE_STALE, refusal, call.attempt)
    if state.gate_open:
        return state, (reply(state, call_id),)
    state = replace(state, gate_open=True, tag=Tag(TagKind.CLEAN, call.version))
    return state, (SetGate(True), reply(state, call_id), emit(state, Action.OPEN_GATE, version=call.version))


def _finish_restore(state: EndpointState, call_id: int, call: FinishRestore) -> Step:
    if not guards.may_finish_restore(state, call):
        refusal = f"the restore of version {call.version} under attempt {call.attempt} is not complete"
        return refuse(state, call_id, Action.IGNORE_STALE, refusal, call.attempt)
    restored = Tag(TagKind.CLEAN, call.version)
    if state.tag == restored:
        return state, (reply(state, call_id),)
    state = replace(state, tag=restored)
    return state, (reply(state, call_id), emit(state, Action.FINISH_RESTORE, version=call.version))


def _not_running(state: EndpointState, attempt: int) -> str:
    if attempt < state.attempt:
        return fence.STALE
    return "not prepared" if attempt > state.attempt else f"stopped: {state.failure or 'stop_and_wait'}"


def _admit(state: EndpointState, request: str) -> Step:
    if not guards.may_admit(state, request):
        return state, (RefuseRequest(request),)
    state = replace(state, requests=state.requests | {request})
    return state, (AdmitRequest(request), emit(state, Action.ADMIT_REQUEST, request=request))


def _request_done(state: EndpointState, request: str) -> Step:
    if request not in state.requests:
        return state, ()
    state = replace(state, requests=state.requests - {request})
    done = emit(state, Action.FINISH_REQUEST, request=request)
    state, effects = intake.wake_if_quiet(state)
    if guards.is_quiet(state):
        effects += (PushReport(report(state)),)
    return state, (*effects, done)


def _slept(state: EndpointState, keeps_storage: bool) -> Step:
    was_open = state.gate_open
    state = replace(state, asleep=True, gate_open=False)
    effects: tuple[EndpointEffect, ...] = ()
    if was_open:
        effects = (SetGate(False), emit(state, Action.CLOSE_GATE, reason=fence.SLEEPS))
    if keeps_storage:
        return state, effects
    claimed, state = state.tag, replace(state, tag=Tag(), loaded_digest=b"")
    if state.current is not None and not state.stopped:
        state, failed = fence.fail(replace(state, acked=False), RELEASED)
        return state, (*effects, *failed)
    if claimed != state.tag:  # no attempt fails; the line tells why the claim is gone
        effects += (emit(state, Action.FAIL_RECEIVER, reason=RELEASED),)
    return state, effects
