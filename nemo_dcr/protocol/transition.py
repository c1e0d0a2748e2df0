"""Algorithm B.2: take over, retry until the joint commit, roll forward, restore and abort.

The loop is always the same: survey the endpoints, read the record, decide, act, look again. What to do follows from the
record and the endpoints alone (`decision`), so a new coordinator continues wherever the old one stopped. The epoch is
acquired before the first read. A commit without a reply is settled by one read after its deadline (D14); everything
else without a reply is asked again or found out by reading. Any sign of another coordinator: step down.

Not handled: one attempt (attempt); waiting, repeating and timers (runtime); when training pauses (trainer).

Paper: Section 6.3; Algorithm B.2   Spec: BecomeCoordinator, SendCommit, ResolveCommit, StepDown
Proofs: joint_commit_binds, baseline_follows_commit, restore_exact   Conditions: SC3, SC4, SC7
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from nemo_dcr.ids import NO_CANDIDATE, AttemptId, Version
from nemo_dcr.protocol import attempt as attempts
from nemo_dcr.protocol import membership, rounds
from nemo_dcr.protocol.attempt import AttemptPhase, AttemptPlan, AttemptState, OwnerMember
from nemo_dcr.protocol.coordinator_events import (
    AbortRequested,
    AcquireEpoch,
    AskBootstrap,
    AskCommit,
    AttemptEvent,
    BecomeCoordinator,
    CommitDeadlinePassed,
    ControlReplied,
    ControlReply,
    ControlUnknown,
    CoordinatorEvent,
    LookAgain,
    OwnerReported,
    ReadRecord,
    SteppedDown,
    Surveyed,
    VersionCommitted,
    WaitCommitDeadline,
)
from nemo_dcr.protocol.decision import decide
from nemo_dcr.protocol.rounds import OWNER_ROUNDS, RECEIVER_ROUNDS, look_again
from nemo_dcr.protocol.transition_state import CoordinatorConfig, CoordinatorState, CoordinatorStep, Phase, emit
from nemo_dcr.record import (
    DELTA_MODES,
    Acquired,
    AttemptMode,
    Committed,
    ControlView,
    Killed,
    Prepared,
    Record,
    Refusal,
    Refused,
)
from nemo_dcr.trace import Action, Emit, emits_first

READS = frozenset({Phase.READING, Phase.RESOLVING, Phase.CONFIRMING})
FATAL = frozenset({Refusal.STALE_EPOCH, Refusal.MALFORMED})


def start(config: CoordinatorConfig) -> CoordinatorState:
    """State of a new coordinator process: out, until BecomeCoordinator."""
    return CoordinatorState(config=config)


def step(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorStep:
    """Take one event. Events that the phase does not wait for change nothing."""
    state, effects = _take(state, event)
    return state, emits_first(effects)


def _take(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorStep:
    match event:
        case BecomeCoordinator():
            fresh = CoordinatorState(config=state.config, phase=Phase.ACQUIRING)
            return fresh, (AcquireEpoch(),)
        case _ if state.phase is Phase.OUT:
            return state, ()
        case AbortRequested():
            return _abort(replace(state, aborting=True))
        case ControlReplied(reply):
            return _replied(state, reply)
        case ControlUnknown():
            return _unknown(state)
        case Surveyed(receivers, owners) if state.phase is Phase.SURVEYING:
            seen = {report.receiver: report for report in receivers}
            state = replace(state, receivers=seen, owners={report.owner: report for report in owners})
            return _read(state, Phase.READING)
        case LookAgain() if state.phase is Phase.READY:
            return look_again(state, delayed=False)
        case CommitDeadlinePassed(attempt) if state.phase is Phase.WAITING_DEADLINE:
            running = state.attempt is not None and state.attempt.plan.attempt == attempt
            return _read(state, Phase.RESOLVING) if running else (state, ())
        case _ if state.phase is Phase.RUNNING:
            return _run(state, event)
        case _ if state.phase in OWNER_ROUNDS | RECEIVER_ROUNDS:
            return rounds.step(state, event)
        case _:
            return state, ()


def _read(state: CoordinatorState, phase: Phase) -> CoordinatorStep:
    """Read the record, and what is known of the candidate that the owners hold."""
    candidates = sorted(owner.candidate for owner in state.owners.values() if owner.candidate)
    committed = "" if state.record is None else state.record.candidate
    candidate = next((each for each in candidates if each != committed), NO_CANDIDATE)
    return replace(state, phase=phase, view_candidate=candidate), (ReadRecord(candidate),)


def _replied(state: CoordinatorState, reply: ControlReply) -> CoordinatorStep:
    match reply:
        case Acquired(epoch) if state.phase is Phase.ACQUIRING:
            state, effects = look_again(replace(state, epoch=epoch), delayed=False)
            return state, (*effects, emit(state, Action.BECOME_COORDINATOR))
        case ControlView() if state.phase in READS:
            return _viewed(state, reply)
        case Prepared() if state.phase is Phase.PREPARING:
            return _prepared(state, reply)
        case Committed(record) if state.phase is Phase.COMMITTING:
            return _committed(state, record)
        case Committed(record) if state.phase is Phase.BOOTSTRAPPING:
            state = _with_record(state, record)
            state, effects = rounds.finish_restores(state, record)
            return state, (VersionCommitted(record), *effects)
        case Killed(candidate) if state.phase is Phase.KILLING:
            return rounds.drop_candidate(state, candidate)
        case Refused():
            return _refused(state, reply)
        case _:
            return state, ()


def _refused(state: CoordinatorState, refused: Refused) -> CoordinatorStep:
    if refused.reason in FATAL:
        return _step_down(state, f"{refused.reason}: {refused.detail}")
    if state.phase is Phase.COMMITTING and _is_ours(refused.record, state):
        return _committed(state, refused.record)
    if state.phase is Phase.COMMITTING:
        state, effects = look_again(state, delayed=False)
        return state, (_resolved(state, refused.reason.value), *effects)
    if state.phase in (Phase.PREPARING, Phase.KILLING, Phase.BOOTSTRAPPING):
        return look_again(state, delayed=True)
    return state, ()


def _unknown(state: CoordinatorState) -> CoordinatorStep:
    """No reply came. Only a commit needs its deadline (D14): everything else is asked again or found out by reading."""
    match state.phase:
        case Phase.ACQUIRING:
            return state, (AcquireEpoch(),)
        case Phase.READING | Phase.RESOLVING | Phase.CONFIRMING:
            return state, (ReadRecord(state.view_candidate),)
        case Phase.COMMITTING if state.attempt is not None:
            return replace(state, phase=Phase.WAITING_DEADLINE), (WaitCommitDeadline(state.attempt.plan.attempt),)
        case Phase.PREPARING | Phase.KILLING | Phase.BOOTSTRAPPING:
            return look_again(state, delayed=True)
        case _:
            return state, ()


def _viewed(state: CoordinatorState, view: ControlView) -> CoordinatorStep:
    if view.epoch != state.epoch:
        return _step_down(state, f"epoch {state.epoch} was replaced by epoch {view.epoch}")
    phase, state = state.phase, replace(state, view=view)
    if phase is Phase.RESOLVING:
        if _is_ours(view.record, state):
            return _committed(state, view.record)
        state, effects = look_again(state, delayed=False)
        return state, (_resolved(state, "not committed"), *effects)
    if phase is Phase.CONFIRMING and state.attempt is not None:
        plan = state.attempt.plan
        if not restore_confirmed(plan, view):
            return look_again(state, delayed=True)
        state = replace(state, fenced=plan.attempt)
        if view.record is not None:
            return rounds.finish_restores(state, view.record)
        return _bootstrap(state)
    return decide(state)


def _prepared(state: CoordinatorState, prepared: Prepared) -> CoordinatorStep:
    request, refit = state.request, state.config.refit
    if request is None or state.view is None:
        return look_again(state, delayed=True)
    plan = AttemptPlan(
        attempt=prepared.attempt,
        mode=request.mode,
        gate=refit.gate,
        candidate=request.candidate,
        record=request.expect,
        required=request.required,
        owners=tuple(OwnerMember(owner, state.owners[owner].incarnation) for owner in request.owners),
        deadline_s=refit.attempt_deadline_s,
        baseline_digest=membership.common_digest(state.owners.values()),
    )
    running, effects = attempts.start(plan)
    view = replace(state.view, last_attempt=prepared.attempt)
    return replace(state, phase=Phase.RUNNING, view=view, attempt=running, request=None), effects


def _run(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorStep:
    if state.attempt is None or not isinstance(event, AttemptEvent):
        return state, ()
    attempt, effects = attempts.step(state.attempt, event)
    state = replace(state, attempt=attempt)
    if isinstance(event, OwnerReported):
        state = rounds.merge(state, event.report)
    match attempt.phase:
        case AttemptPhase.ACKED:
            state, more = _acked(state)
        case AttemptPhase.FAILED:
            delta = attempt.plan.mode in DELTA_MODES
            state, more = look_again(replace(state, last_failure=attempt.reason), delayed=not delta)
        case _:
            more = ()
    return state, effects + more


def _acked(state: CoordinatorState) -> CoordinatorStep:
    if state.attempt is None or state.record is None:
        return _read(state, Phase.CONFIRMING)
    plan, record = state.attempt.plan, state.record
    match plan.mode:
        case AttemptMode.RESTORE:
            return _read(state, Phase.CONFIRMING)
        case AttemptMode.FINISH:
            state = replace(state, fenced=plan.attempt)
            if membership.needs_roll_forward(record, state.owners.values()):
                return rounds.update_baselines(state, record)
            return rounds.open_gates(state, record)
        case _:
            return _commit(state, plan, record)


def _commit(state: CoordinatorState, plan: AttemptPlan, record: Record) -> CoordinatorStep:
    if state.attempt is None or not may_commit(state.attempt, state.record):
        return look_again(state, delayed=True)
    new = Record(
        version=Version(record.version + 1),
        candidate=plan.candidate,
        digest=attempts.next_digest(state.attempt),
        attempt=plan.attempt,
        required=plan.required,
        baseline=record.version,
        epoch=state.epoch,
    )
    state = replace(state, phase=Phase.COMMITTING)
    sent = emit(state, Action.SEND_COMMIT, plan.attempt, digest=new.digest.hex())
    return state, (sent, AskCommit(state.epoch, plan.attempt, record, new, state.config.refit.commit_deadline_s))


def may_commit(attempt: AttemptState, record: Record | None) -> bool:
    """Every required receiver acknowledged this attempt, on the record that the coordinator still believes in."""
    return attempt.phase is AttemptPhase.ACKED and attempts.has_all_acks(attempt) and attempt.plan.record == record


def restore_confirmed(plan: AttemptPlan, view: ControlView) -> bool:
    """The record is the one that was restored, and no later attempt was prepared meanwhile (D19)."""
    return view.record == plan.record and view.last_attempt == plan.attempt


def _committed(state: CoordinatorState, record: Record) -> CoordinatorStep:
    state = replace(_with_record(state, record), fenced=record.attempt)
    resolved = _resolved(state, "committed")
    state, effects = rounds.update_baselines(state, record)
    return state, (resolved, VersionCommitted(record), *effects)


def _bootstrap(state: CoordinatorState) -> CoordinatorStep:
    if state.attempt is None:
        return look_again(state, delayed=True)
    plan = state.attempt.plan
    record = Record(
        version=Version(0),
        candidate=NO_CANDIDATE,
        digest=attempts.next_digest(state.attempt),
        attempt=plan.attempt,
        required=plan.required,
        baseline=Version(0),
        epoch=state.epoch,
    )
    return replace(state, phase=Phase.BOOTSTRAPPING), (AskBootstrap(state.epoch, record),)


def _abort(state: CoordinatorState) -> CoordinatorStep:
    if state.phase is Phase.READY:
        return look_again(state, delayed=False)
    delta = state.attempt is not None and state.attempt.plan.mode in DELTA_MODES
    return _run(state, AbortRequested()) if state.phase is Phase.RUNNING and delta else (state, ())


def _step_down(state: CoordinatorState, reason: str) -> CoordinatorStep:
    state = replace(state, phase=Phase.OUT, waiting=frozenset())
    return state, (SteppedDown(reason), emit(state, Action.STEP_DOWN, reason=reason))


def _resolved(state: CoordinatorState, outcome: str) -> Emit:
    attempt = state.attempt.plan.attempt if state.attempt else AttemptId(0)
    return emit(state, Action.RESOLVE_COMMIT, attempt, outcome=outcome)


def _with_record(state: CoordinatorState, record: Record) -> CoordinatorState:
    return state if state.view is None else replace(state, view=replace(state.view, record=record))


def _is_ours(record: Record | None, state: CoordinatorState) -> TypeGuard[Record]:
    """The record is the one that this coordinator's attempt asked for."""
    return record is not None and state.attempt is not None and record.attempt == state.attempt.plan.attempt
