"""The fence of a receiver endpoint: prepare, stop_and_wait, drain, and failure of the running attempt.

A newer attempt is installed only after everything of the older one was drained (D3), and after a second look at the
tag. Finish attempts and proved restores have nothing to write: they are drained from the start. A stop is sticky (D28)
and also keeps a late prepare of the same attempt out. Replies that promise a drain are given when the drain ended;
repeated calls just wait with them.

Paper: Section 6.3; Algorithm B.1 (prepare, stop_and_wait)   Spec: EndpointPrepare, RefusePrepare, StopAndWait,
FailReceiver, StartRestore   Proofs: fence_stops_old_writes, version_alignment   Conditions: SC7
"""

from __future__ import annotations

from dataclasses import replace

from nemo_dcr.ids import AttemptId, PayloadKey
from nemo_dcr.protocol import alignment
from nemo_dcr.protocol import endpoint_guards as guards
from nemo_dcr.protocol.endpoint_report import Step, emit, refuse, reply, report
from nemo_dcr.protocol.endpoint_state import (
    Drain,
    EndpointEffect,
    EndpointState,
    PushReport,
    SetGate,
    StartIntake,
    Waiting,
)
from nemo_dcr.protocol.messages import PrepareReceiver, StopReceiver
from nemo_dcr.protocol.tags import Tag, TagKind
from nemo_dcr.record import AttemptMode
from nemo_dcr.trace import Action

STALE = "stale: a later attempt was prepared"
SLEEPS = "the engine sleeps"


def prepare(state: EndpointState, call_id: int, call: PrepareReceiver) -> Step:
    """Begin to install `call`: check, stop the older attempt, drain it; `drained` goes on from there."""
    if not guards.is_addressed(state, call.incarnation):
        return refuse(state, call_id, Action.IGNORE_STALE, f"incarnation {call.incarnation} is gone", call.attempt)
    if call == state.current:
        return state, (reply(state, call_id),)
    if call == state.install:
        return replace(state, waiting=(*state.waiting, Waiting(call_id, call))), ()
    if not guards.is_newer(state, call.attempt):
        return refuse(state, call_id, Action.IGNORE_STALE, STALE, call.attempt)
    if refusal := _why_not_eligible(state, call):
        return refuse(state, call_id, Action.REFUSE_PREPARE, refusal, call.attempt)
    superseded = tuple(each for each in state.waiting if isinstance(each.call, PrepareReceiver))
    kept = tuple(each for each in state.waiting if each not in superseded)
    state = replace(state, install=call, stopped=True, flushing=False, waiting=(*kept, Waiting(call_id, call)))
    refused = tuple(reply(state, each.call_id, STALE) for each in superseded)
    state, effects = _drain(state)
    return state, refused + effects


def stop(state: EndpointState, call_id: int, call: StopReceiver) -> Step:
    """stop_and_wait: at once for a replaced attempt, otherwise after the drain; also keeps a late prepare out."""
    if not guards.is_addressed(state, call.incarnation):
        return refuse(state, call_id, Action.IGNORE_STALE, f"incarnation {call.incarnation} is gone", call.attempt)
    if call.attempt < state.attempt:
        return state, (reply(state, call_id), emit(state, Action.IGNORE_STALE, call.attempt, reason="stop"))
    fences = guards.raises_fence(state, call.attempt)
    state = replace(state, fenced=AttemptId(max(state.fenced, call.attempt)))
    fenced: tuple[EndpointEffect, ...] = (emit(state, Action.STOP_AND_WAIT, call.attempt),) if fences else ()
    installing = state.install is not None and state.install.attempt == call.attempt
    if call.attempt > state.attempt and not installing:
        return state, (reply(state, call_id), *fenced)
    if state.stopped and state.drained:
        return state, (reply(state, call_id), *fenced)
    state = replace(state, stopped=True, flushing=False, waiting=(*state.waiting, Waiting(call_id, call)))
    state, effects = _drain(state)
    return state, (*fenced, *effects)


def fail(state: EndpointState, reason: str) -> Step:
    """Fail the running attempt here: nothing more is taken in, written or acknowledged; drain it."""
    state = replace(state, failure=reason, stopped=True, flushing=False)
    failed = emit(state, Action.FAIL_RECEIVER, reason=reason)
    state, effects = _drain(state)
    return state, (failed, *effects, PushReport(report(state)))


def drained(state: EndpointState, attempt: AttemptId) -> Step:
    """The stopped attempt is gone: install what waits for it, and give the replies that wait."""
    if not guards.is_current(state, attempt) or not state.stopped:
        return state, ()
    none = frozenset[PayloadKey]()
    waiting, install, was_drained = state.waiting, state.install, state.drained
    state = replace(state, drained=True, draining=False, pending=none, writing=none, waiting=(), install=None)
    effects: tuple[EndpointEffect, ...] = () if was_drained else (emit(state, Action.STOP_AND_WAIT),)
    refusal = ""
    if install is not None:
        state, refusal, installed = _install_or_refuse(state, install)
        effects += installed
    for each in waiting:
        effects += (reply(state, each.call_id, refusal if isinstance(each.call, PrepareReceiver) else ""),)
    return state, effects


def _drain(state: EndpointState) -> Step:
    if state.draining:
        return state, ()
    if state.drained:
        return drained(state, state.attempt)
    return replace(state, draining=True), (Drain(state.attempt),)


def _why_not_eligible(state: EndpointState, call: PrepareReceiver) -> str:
    if state.asleep:
        return SLEEPS
    if not guards.is_eligible(state.tag, call):
        return f"storage is {state.tag}, which a {call.mode} attempt on version {call.version} does not repair"
    return ""


def _install_or_refuse(
    state: EndpointState, call: PrepareReceiver
) -> tuple[EndpointState, str, tuple[EndpointEffect, ...]]:
    """After the drain: a stop may have come meanwhile, and the last writes may have changed the tag (D6)."""
    if call.attempt <= state.fenced:
        stale = "stale: the attempt was stopped before it was installed"
        return state, stale, (emit(state, Action.IGNORE_STALE, call.attempt, reason=stale),)
    if refusal := _why_not_eligible(state, call):
        return state, refusal, (emit(state, Action.REFUSE_PREPARE, call.attempt, reason=refusal),)
    state, effects = _install(state, call)
    return state, "", effects


def _install(state: EndpointState, call: PrepareReceiver) -> Step:
    tag = state.tag
    if alignment.is_committed_done(tag, call.record_attempt):
        tag = Tag(TagKind.CLEAN, call.version)
    finish, restore = call.mode is AttemptMode.FINISH, call.mode is AttemptMode.RESTORE
    proved = guards.is_proved(state, call)
    closes = state.gate_open and guards.closes_gate(call)
    state = replace(
        state,
        attempt=call.attempt,
        current=call,
        tag=tag,
        gate_open=state.gate_open and not closes,
        seen={},
        manifests={},
        apply_open=False,
        started=False,
        flushing=False,
        acked=proved,
        applied_digest=b"",
        stopped=False,
        drained=finish or proved,
        failure="",
    )
    if restore:
        installed = emit(state, Action.START_RESTORE, base=call.version, proved=proved)
    else:
        args = {"mode": call.mode.value, "base": call.version, "candidate": call.candidate}
        installed = emit(state, Action.ENDPOINT_PREPARE, **args)
    effects: tuple[EndpointEffect, ...] = (installed,)
    if closes:
        effects += (SetGate(False),)
    if not state.drained:
        effects += (StartIntake(call.attempt, call.owners),)
    return state, effects
