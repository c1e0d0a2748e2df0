"""Algorithms B.1 and B.2 at an owner: stream an attempt, update the baseline after the commit, end a transition.

`step` takes one event to the next state and the effects; it is total. A stream starts only from a baseline at the
expected version and the attempt's frozen candidate. The baseline moves only to the frozen candidate, by an idempotent
copy, after the commit. Every call may come from a replaced coordinator: it names the candidate, and is refused or
changes nothing unless that is the current one (D11, D22).

Not handled: the comparison, encoding and copying themselves (source/); when to call what (protocol.transition).

Paper: Section 6.3; Figure B.3; Algorithms B.1, B.2   Spec: StartOwner, BeginTransition, OwnerPrepare, EmitPayload,
EndStream, StopOwner, FailOwner, UpdateBaseline, CopyItem, BaselineFilled, RebuildBaseline, LoseBaseline, EndTransition,
DropCandidate
Proofs: baseline_follows_commit   Conditions: SC3, SC4
"""

from __future__ import annotations

from dataclasses import replace

from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Incarnation, OwnerId
from nemo_dcr.protocol import owner_state as guards
from nemo_dcr.protocol.digests import manifest_digest
from nemo_dcr.protocol.messages import (
    DropCandidate,
    EndTransition,
    OwnerCall,
    OwnerReply,
    OwnerReport,
    OwnerStatus,
    PrepareOwner,
    RebuildBaseline,
    StopOwner,
    StreamEnd,
    StreamOwner,
    StreamStatus,
    UpdateBaseline,
)
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
    OwnerWaiting,
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
)
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.record import AttemptMode
from nemo_dcr.trace import Action, Emit, Scalar, emits_first

OwnerStep = tuple[OwnerState, tuple[OwnerEffect, ...]]

STALE = "stale: a later attempt was prepared"


def start(
    owner: OwnerId,
    incarnation: Incarnation,
    *,
    tracker: TrackerTag,
    candidate: CandidateId = NO_CANDIDATE,
    resident: CandidateId | None = None,
    baseline_digest: bytes = b"",
) -> OwnerStep:
    """State of a new process. `tracker` is lost unless the baseline is known to be a version, as at the first start."""
    state = OwnerState(owner, incarnation, tracker, candidate, resident, baseline_digest, resident or NO_CANDIDATE)
    return state, (_emit(state, Action.START_OWNER),)


def step(state: OwnerState, event: OwnerEvent) -> OwnerStep:
    """Take one event. Every event is legal in every state."""
    state, effects = _take(replace(state, revision=state.revision + 1), event)
    return state, emits_first(effects)


def _take(state: OwnerState, event: OwnerEvent) -> OwnerStep:
    match event:
        case OwnerCalled(call_id, call):
            return _called(state, call_id, call)
        case CandidateFrozen(candidate):
            return _freeze(state, candidate)
        case WeightsChanged():
            return _change_weights(state)
        case PayloadFormed():
            return _formed(state, event)
        case PayloadPublished():
            return _published(state, event)
        case StreamEnded(attempt, digest):
            return _ended(state, attempt, digest)
        case StreamFailed(attempt, detail):
            if attempt != state.attempt or state.status is not StreamStatus.STREAMING:
                return state, ()
            return _fail(state, detail)
        case StreamStopped(attempt):
            return _stopped(state, attempt)
        case ItemCopied(version) | BaselineFilled(version) if version != state.filling:
            return state, ()
        case ItemCopied(_, name):
            return state, (_emit(state, Action.COPY_ITEM, name=name),)
        case BaselineFilled(version):
            state = replace(state, tracker=TrackerTag(TrackerKind.AT, version), filling=None)
            return state, (_emit(state, Action.BASELINE_FILLED), PushOwnerReport(report(state)))
        case BaselineLost(detail):
            return _lose_baseline(state, detail)
        case WeightsReloaded(candidate):
            return replace(state, resident=candidate, reloading=False), ()


def report(state: OwnerState) -> OwnerReport:
    """What every reply and push carries."""
    return OwnerReport(
        owner=state.owner,
        incarnation=state.incarnation,
        revision=state.revision,
        attempt=state.attempt,
        status=state.status,
        tracker=state.tracker,
        candidate=state.candidate,
        resident=state.resident,
        end=state.end,
        failure=state.failure,
        payloads=len(state.published),
        baseline_digest=state.baseline_digest,
        filling=state.filling is not None,
    )


def _called(state: OwnerState, call_id: int, call: OwnerCall) -> OwnerStep:
    match call:
        case OwnerStatus():
            return state, (_answer(state, call_id),)
        case PrepareOwner() | StreamOwner() | StopOwner() if call.incarnation != state.incarnation:
            return _ignore(state, call_id, call.attempt, f"incarnation {call.incarnation} is gone")
        case PrepareOwner():
            return _prepare(state, call_id, call)
        case StreamOwner():
            return _stream(state, call_id, call)
        case StopOwner():
            return _stop(state, call_id, call)
        case UpdateBaseline():
            return _update_baseline(state, call_id, call)
        case RebuildBaseline():
            return _rebuild(state, call_id, call)
        case EndTransition():
            return _end_transition(state, call_id, call)
        case DropCandidate():
            return _drop(state, call_id, call)


def _prepare(state: OwnerState, call_id: int, call: PrepareOwner) -> OwnerStep:
    if call == state.current:
        return state, (_answer(state, call_id),)
    if call == state.install:
        return replace(state, waiting=(*state.waiting, OwnerWaiting(call_id, call))), ()
    if not guards.owner_is_newer(state, call.attempt):
        return _ignore(state, call_id, call.attempt, STALE)
    superseded = tuple(each for each in state.waiting if isinstance(each.call, PrepareOwner))
    kept = tuple(each for each in state.waiting if each not in superseded)
    state = replace(state, install=call, waiting=(*kept, OwnerWaiting(call_id, call)))
    refused = tuple(_answer(state, each.call_id, STALE) for each in superseded)
    state, effects = _stop_stream(state)
    return state, refused + effects


def _stop(state: OwnerState, call_id: int, call: StopOwner) -> OwnerStep:
    if call.attempt < state.attempt:
        return state, (_answer(state, call_id), _emit(state, Action.IGNORE_STALE, call.attempt, reason="stop"))
    fences = guards.owner_raises_fence(state, call.attempt)
    state = replace(state, fenced=AttemptId(max(state.fenced, call.attempt)))
    fenced: tuple[OwnerEffect, ...] = (_emit(state, Action.STOP_OWNER, call.attempt),) if fences else ()
    installing = state.install is not None and state.install.attempt == call.attempt
    if call.attempt > state.attempt and not installing:
        return state, (_answer(state, call_id), *fenced)
    state, effects = _stop_stream(replace(state, waiting=(*state.waiting, OwnerWaiting(call_id, call))))
    return state, (*fenced, *effects)


def _stop_stream(state: OwnerState) -> OwnerStep:
    if state.stopping:
        return state, ()
    if state.status is StreamStatus.STREAMING:
        return replace(state, stopping=True), (StopStream(state.attempt),)
    return _stopped(state, state.attempt)


def _stopped(state: OwnerState, attempt: AttemptId) -> OwnerStep:
    """No stream runs: install, answer and drop what waited for that."""
    if attempt != state.attempt:
        return state, ()
    streaming = state.status in (StreamStatus.STREAMING, StreamStatus.PREPARED)
    status = StreamStatus.STOPPED if streaming else state.status
    waiting, install = state.waiting, state.install
    state = replace(state, status=status, stopping=False, waiting=(), install=None)
    effects: tuple[OwnerEffect, ...] = (_emit(state, Action.STOP_OWNER),) if streaming else ()
    refusal = ""
    if install is not None:
        state, refusal, installed = _install(state, install)
        effects += installed
    for each in waiting:
        match each.call:
            case PrepareOwner():
                effects += (_answer(state, each.call_id, refusal),)
            case StopOwner():
                effects += (_answer(state, each.call_id),)
            case DropCandidate():
                state, dropped = _drop(state, each.call_id, each.call)
                effects += dropped
    return state, effects


def _install(state: OwnerState, call: PrepareOwner) -> tuple[OwnerState, str, tuple[OwnerEffect, ...]]:
    if call.attempt <= state.fenced:
        stale = "stale: the attempt was stopped before it was installed"
        return state, stale, (_emit(state, Action.IGNORE_STALE, call.attempt, reason=stale),)
    if not guards.may_stream(state, call):
        refusal = (
            f"a {call.mode} attempt on version {call.version} needs that baseline and candidate {call.candidate!r}, "
            f"but the baseline is {state.tracker} and the frozen candidate {state.candidate!r}"
        )
        return state, refusal, (_emit(state, Action.REFUSE_PREPARE, call.attempt, reason=refusal),)
    state = replace(
        state,
        attempt=call.attempt,
        current=call,
        status=StreamStatus.PREPARED,
        published=(),
        end=None,
        failure="",
    )
    return state, "", (_emit(state, Action.OWNER_PREPARE, mode=call.mode.value, base=call.version),)


def _stream(state: OwnerState, call_id: int, call: StreamOwner) -> OwnerStep:
    current = state.current
    if current is None or call.attempt != state.attempt or state.install is not None:
        return _ignore(state, call_id, call.attempt, STALE if call.attempt < state.attempt else "not prepared")
    if state.status in (StreamStatus.STREAMING, StreamStatus.ENDED):
        return state, (_answer(state, call_id),)
    if state.status is StreamStatus.STOPPED or current.mode is AttemptMode.FINISH:
        return _ignore(state, call_id, call.attempt, f"stopped: {state.failure or 'stop_and_wait'}")
    if not guards.may_stream(state, current):
        refusal = f"the baseline became {state.tracker} or the candidate {state.candidate!r} since the prepare"
        return _ignore(state, call_id, call.attempt, refusal)
    state = replace(state, status=StreamStatus.STREAMING)
    started = StartStream(state.attempt, current.mode, current.version, current.candidate, current.classes)
    return state, (started, _answer(state, call_id))


def _formed(state: OwnerState, event: PayloadFormed) -> OwnerStep:
    """The line comes before the payload, so that nobody takes in one that no line tells of."""
    names = ",".join(sorted(event.names))
    emitted = _emit(state, Action.EMIT_PAYLOAD, event.attempt, payload=event.number, names=names, xor=event.xor)
    return state, (emitted,)


def _published(state: OwnerState, event: PayloadPublished) -> OwnerStep:
    if event.attempt != state.attempt or state.status is not StreamStatus.STREAMING:
        return state, ()
    if event.number != len(state.published):
        return _fail(state, f"payload {event.number} was published as number {len(state.published)}")
    return replace(state, published=(*state.published, event.digest)), ()


def _ended(state: OwnerState, attempt: AttemptId, digest: bytes) -> OwnerStep:
    if attempt != state.attempt or state.status is not StreamStatus.STREAMING or state.failure:
        return state, ()
    if digest != manifest_digest(state.published):
        return _fail(state, "the manifest does not list exactly the published payloads")
    state = replace(state, status=StreamStatus.ENDED, end=StreamEnd(state.published, digest))
    return state, (_emit(state, Action.END_STREAM, count=len(state.published)), PushOwnerReport(report(state)))


def _lose_baseline(state: OwnerState, detail: str) -> OwnerStep:
    lost: tuple[OwnerEffect, ...] = ()
    if state.tracker.kind is not TrackerKind.LOST or state.filling is not None:
        state = replace(state, tracker=TrackerTag(TrackerKind.LOST), filling=None, baseline_digest=b"")
        lost = (_emit(state, Action.LOSE_BASELINE, reason=detail), PushOwnerReport(report(state)))
    if state.status is not StreamStatus.STREAMING or state.failure:
        return state, lost
    state, effects = _fail(state, f"the baseline is lost: {detail}")
    return state, (*lost[:1], *effects)


def _fail(state: OwnerState, reason: str) -> OwnerStep:
    if state.failure:  # a stream fails once
        return state, ()
    state = replace(state, failure=reason)
    failed = _emit(state, Action.FAIL_OWNER, reason=reason)
    state, effects = _stop_stream(state)
    return state, (failed, *effects, PushOwnerReport(report(state)))


def _change_weights(state: OwnerState) -> OwnerStep:
    if not guards.may_step(state):
        busy = (
            "the committed weights are being loaded" if state.reloading else f"candidate {state.candidate!r} is frozen"
        )
        return state, (AnswerTrainer(state.candidate, f"{busy}: wait until its transition ended"),)
    state, answer = replace(state, resident=None), AnswerTrainer(NO_CANDIDATE, "")
    if state.filling is None:
        return state, (answer,)
    state, lost = _lose_baseline(state, "the weights changed while it was refilled from them")
    return state, (answer, *lost)


def _freeze(state: OwnerState, candidate: CandidateId) -> OwnerStep:
    if guards.is_frozen(state, candidate):
        return state, (AnswerTrainer(candidate, ""),)
    if not guards.may_freeze(state, candidate):
        refusal = (
            f"candidate {candidate!r} was committed before: give every step a new name"
            if candidate == state.ended
            else f"candidate {state.candidate!r} is frozen and the baseline {state.tracker}: end that transition first"
        )
        return state, (AnswerTrainer(candidate, refusal),)
    state = replace(state, candidate=candidate, resident=None)
    return state, (AnswerTrainer(candidate, ""), _emit(state, Action.BEGIN_TRANSITION))


def _update_baseline(state: OwnerState, call_id: int, call: UpdateBaseline) -> OwnerStep:
    if guards.holds_version(state.tracker, call.version):
        return state, (_answer(state, call_id),)
    if state.filling == call.version and guards.is_frozen(state, call.candidate):
        return state, (_answer(state, call_id),)
    if not guards.may_update_baseline(state, call):
        refusal = f"frozen is {state.candidate!r}, baseline {state.tracker}, stream {state.status}"
        return _ignore(state, call_id, state.attempt, f"update to {call.candidate!r} refused: {refusal}")
    tracker = TrackerTag(TrackerKind.UPDATING, state.tracker.version)
    state = replace(state, tracker=tracker, filling=call.version, baseline_digest=b"")
    copy = CopyCandidate(call.candidate, call.version, call.digest)
    return state, (copy, _answer(state, call_id), _emit(state, Action.UPDATE_BASELINE, version=call.version))


def _rebuild(state: OwnerState, call_id: int, call: RebuildBaseline) -> OwnerStep:
    if guards.holds_version(state.tracker, call.version):
        return state, (_answer(state, call_id),)
    if state.filling == call.version:
        return state, (_answer(state, call_id),)
    if not guards.may_rebuild(state, call):
        refusal = f"resident weights are {state.resident!r}, baseline {state.tracker}, frozen {state.candidate!r}"
        return _ignore(state, call_id, state.attempt, f"rebuild of version {call.version} refused: {refusal}")
    state = replace(state, filling=call.version)
    refill = RefillBaseline(call.candidate, call.version, call.digest)
    return state, (refill, _answer(state, call_id), _emit(state, Action.REBUILD_BASELINE, version=call.version))


def _end_transition(state: OwnerState, call_id: int, call: EndTransition) -> OwnerStep:
    if guards.has_ended(state, call):
        return state, (_answer(state, call_id),)
    if not guards.may_end_transition(state, call):
        refusal = f"end of {call.candidate!r} refused: frozen is {state.candidate!r}, baseline {state.tracker}"
        return _ignore(state, call_id, state.attempt, refusal)
    state = replace(state, candidate=NO_CANDIDATE, resident=call.candidate, ended=call.candidate)
    thaw = ThawCandidate(call.candidate)
    return state, (thaw, _answer(state, call_id), _emit(state, Action.END_TRANSITION, candidate=call.candidate))


def _drop(state: OwnerState, call_id: int, call: DropCandidate) -> OwnerStep:
    if not guards.is_frozen(state, call.candidate):
        return state, (_answer(state, call_id),)
    if not guards.may_drop(state):
        return _ignore(state, call_id, state.attempt, f"candidate {call.candidate!r} is committed")
    if state.status is StreamStatus.STREAMING:
        return _stop_stream(replace(state, waiting=(*state.waiting, OwnerWaiting(call_id, call))))
    state = replace(state, candidate=NO_CANDIDATE, resident=None, reloading=True)
    reload = ReloadCommitted(call.candidate)
    return state, (reload, _answer(state, call_id), _emit(state, Action.DROP_CANDIDATE, candidate=call.candidate))


def _ignore(state: OwnerState, call_id: int, attempt: AttemptId, refusal: str) -> OwnerStep:
    return state, (_answer(state, call_id, refusal), _emit(state, Action.IGNORE_STALE, attempt, reason=refusal))


def _answer(state: OwnerState, call_id: int, refusal: str = "") -> OwnerAnswer:
    return OwnerAnswer(call_id, OwnerReply(accepted=not refusal, refusal=refusal, report=report(state)))


def _emit(state: OwnerState, action: Action, attempt: AttemptId | None = None, /, **args: Scalar) -> Emit:
    post: dict[str, Scalar] = {"att": state.attempt, "tracker": str(state.tracker), "frozen": state.candidate}
    return Emit(action, state.attempt if attempt is None else attempt, args, post)
