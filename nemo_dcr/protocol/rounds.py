"""Rounds of calls: update and rebuild baselines, end or drop a transition, finish restores, open gates.

A round sends one idempotent call to each endpoint and ends when each of them answered, reached the wanted state or is
lost. Then the next round begins, or everything is looked at again. The order is the point: gates open only after every
baseline followed the record (D20), and a candidate is thawed only then (SC3, SC4).

Not handled: which round is due (transition); repetition of calls (runtime).

Paper: Section 6.3; Figure B.3; Algorithm B.2 (roll forward, abort)   Spec: RollForward, UpdateBaseline, EndTransition,
OpenGate, DropCandidate, RebuildBaseline, FinishRestore   Proofs: baseline_follows_commit   Conditions: SC3, SC4
"""

from __future__ import annotations

from dataclasses import replace

from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Member, OwnerId, ReceiverId
from nemo_dcr.protocol import membership
from nemo_dcr.protocol.coordinator_events import (
    CallOwner,
    CallReceiver,
    Cleanup,
    CoordinatorEffect,
    CoordinatorEvent,
    OwnerAnswered,
    OwnerLost,
    OwnerReported,
    ReceiverAnswered,
    ReceiverLost,
    Survey,
    TransitionAborted,
    TransitionEnded,
)
from nemo_dcr.protocol.messages import (
    DropCandidate,
    EndTransition,
    FinishRestore,
    OpenGate,
    OwnerReport,
    RebuildBaseline,
    UpdateBaseline,
)
from nemo_dcr.protocol.transition_state import CoordinatorState, CoordinatorStep, Phase, emit
from nemo_dcr.record import Record
from nemo_dcr.trace import Action

OWNER_CALLS = {
    Phase.REBUILDING: RebuildBaseline,
    Phase.UPDATING: UpdateBaseline,
    Phase.ENDING: EndTransition,
    Phase.DROPPING: DropCandidate,
}
OWNER_ROUNDS = frozenset(OWNER_CALLS)
RECEIVER_ROUNDS = frozenset({Phase.RESTORING, Phase.OPENING})


def look_again(state: CoordinatorState, *, delayed: bool) -> CoordinatorStep:
    """Survey the endpoints, then read the record and decide."""
    return replace(state, phase=Phase.SURVEYING, waiting=frozenset(), request=None), (Survey(delayed),)


def merge(state: CoordinatorState, report: OwnerReport) -> CoordinatorState:
    """Take in an owner's report unless a newer one is known."""
    known = state.owners.get(report.owner)
    newest = known is None or (report.incarnation, report.revision) >= (known.incarnation, known.revision)
    return replace(state, owners={**state.owners, report.owner: report}) if newest else state


def update_baselines(state: CoordinatorState, record: Record) -> CoordinatorStep:
    """Roll forward, first round: every baseline takes the committed candidate."""
    calls = {
        o: CallOwner(UpdateBaseline(o, record.candidate, record.version, record.digest)) for o in state.config.owners
    }
    state = replace(state, ending=record.candidate, phase=Phase.UPDATING)
    rolled = emit(state, Action.ROLL_FORWARD, record.attempt, candidate=record.candidate)
    state, effects = _begin_owners(state, Phase.UPDATING, calls)
    return state, (rolled, *effects)


def rebuild_baselines(state: CoordinatorState, record: Record) -> CoordinatorStep:
    """Refill lost baselines whose resident weights are the committed version."""
    calls = {
        o: CallOwner(RebuildBaseline(o, record.candidate, record.version, record.digest)) for o in state.config.owners
    }
    return _begin_owners(state, Phase.REBUILDING, calls)


def drop_candidate(state: CoordinatorState, candidate: CandidateId) -> CoordinatorStep:
    """Every owner gives up a candidate that the control plane declared dead."""
    calls = {o: CallOwner(DropCandidate(o, candidate)) for o in state.config.owners}
    return _begin_owners(replace(state, view_candidate=candidate), Phase.DROPPING, calls)


def finish_restores(state: CoordinatorState, record: Record) -> CoordinatorStep:
    """Tell the restored receivers that their storage is the committed version."""
    attempt, members = _fenced_members(state)
    version = record.version
    calls = {m.receiver: CallReceiver(FinishRestore(m.receiver, m.incarnation, attempt, version)) for m in members}
    return _begin_receivers(state, Phase.RESTORING, calls)


def open_gates(state: CoordinatorState, record: Record) -> CoordinatorStep:
    """The members of the last acknowledged attempt serve the committed version."""
    attempt, members = _fenced_members(state)
    calls = {
        m.receiver: CallReceiver(OpenGate(m.receiver, m.incarnation, attempt, record.attempt, record.version))
        for m in members
    }
    return _begin_receivers(state, Phase.OPENING, calls)


def step(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorStep:
    """Take one event of a round."""
    record = state.record
    if record is None and state.phase is not Phase.DROPPING:
        return look_again(state, delayed=True)
    match event:
        case OwnerAnswered(call, reply) if state.phase in OWNER_ROUNDS:
            state = merge(state, reply.report)
            asked = isinstance(call, OWNER_CALLS[state.phase])
            if asked and not reply.accepted and not _is_reached(state, call.owner):
                return look_again(state, delayed=True)
            return _see_owner(replace(state, answered=state.answered | {call.owner}) if asked else state, call.owner)
        case OwnerReported(report) if state.phase in OWNER_ROUNDS:
            return _see_owner(merge(state, report), report.owner)
        case OwnerLost() if state.phase in OWNER_ROUNDS:
            return look_again(state, delayed=True)
        case ReceiverAnswered(OpenGate() as call, _) if state.phase is Phase.OPENING:
            return _next_if_over(replace(state, waiting=state.waiting - {call.receiver}))
        case ReceiverAnswered(FinishRestore() as call, _) if state.phase is Phase.RESTORING:
            return _next_if_over(replace(state, waiting=state.waiting - {call.receiver}))
        case ReceiverLost(receiver, _, _) if state.phase in RECEIVER_ROUNDS:
            return _next_if_over(replace(state, waiting=state.waiting - {receiver}))
        case _:
            return state, ()


def all_followed(state: CoordinatorState, record: Record) -> bool:
    """Every owner's baseline is the committed one, or lost for good."""
    return all(membership.has_followed(record, state.owners[owner]) for owner in state.config.owners)


def _is_reached(state: CoordinatorState, owner: OwnerId) -> bool:
    """The owner is where the round wants it."""
    report, record = state.owners[owner], state.record
    if state.phase is Phase.DROPPING:
        return report.candidate != state.view_candidate
    if record is None:
        return False
    if state.phase is Phase.ENDING:
        return report.candidate != record.candidate
    if state.phase is Phase.REBUILDING:
        return not membership.can_rebuild(record, report)
    return membership.has_followed(record, report)


def _see_owner(state: CoordinatorState, owner: OwnerId) -> CoordinatorStep:
    """An owner that accepted the call, is not there and does not copy any more lost its baseline again: start over."""
    report = state.owners.get(owner)
    copied = state.phase in (Phase.UPDATING, Phase.REBUILDING) and owner in state.answered
    if copied and report is not None and not report.filling and not _is_reached(state, owner):
        return look_again(state, delayed=True)
    return _next_if_over(state)


def _next_if_over(state: CoordinatorState) -> CoordinatorStep:
    if state.phase in OWNER_ROUNDS:
        reached = {_name(owner) for owner in state.config.owners if _is_reached(state, owner)}
        state = replace(state, waiting=state.waiting - reached)
    if state.waiting:
        return state, ()
    return _next_round(state)


def _next_round(state: CoordinatorState) -> CoordinatorStep:
    record, owners = state.record, state.config.owners
    match state.phase:
        case Phase.UPDATING if record is not None:
            if not all_followed(state, record):
                return look_again(state, delayed=True)
            calls = {o: CallOwner(EndTransition(o, record.candidate, record.version)) for o in owners}
            return _begin_owners(state, Phase.ENDING, calls)
        case Phase.ENDING if record is not None:
            return open_gates(state, record)
        case Phase.RESTORING if record is not None:
            if membership.open_candidates(record, state.owners.values()):
                return look_again(state, delayed=False)
            return open_gates(state, record)
        case Phase.OPENING if record is not None:
            attempt, _ = _fenced_members(state)
            effects: tuple[CoordinatorEffect, ...] = (Cleanup(attempt),)
            if record.candidate != NO_CANDIDATE and state.ending == record.candidate:
                effects += (TransitionEnded(record.version, record.candidate),)
            state, more = look_again(replace(state, ending=NO_CANDIDATE), delayed=False)
            return state, effects + more
        case Phase.DROPPING:
            dropped = state.view_candidate
            state, more = look_again(replace(state, aborting=False), delayed=False)
            return state, (TransitionAborted(dropped, state.last_failure), *more)
        case _:
            return look_again(state, delayed=False)


def _fenced_members(state: CoordinatorState) -> tuple[AttemptId, tuple[Member, ...]]:
    """The acknowledged attempt that gate and restore calls carry, and its members; nobody when there is none."""
    if state.attempt is None or state.attempt.plan.attempt != state.fenced:
        return state.fenced, ()
    return state.fenced, state.attempt.plan.required


def _begin_owners(state: CoordinatorState, phase: Phase, calls: dict[OwnerId, CallOwner]) -> CoordinatorStep:
    state = replace(state, phase=phase, answered=frozenset())
    open_calls = {owner: call for owner, call in calls.items() if not _is_reached(state, owner)}
    state, effects = _next_if_over(replace(state, waiting=frozenset(_name(owner) for owner in open_calls)))
    return state, (*open_calls.values(), *effects)


def _begin_receivers(state: CoordinatorState, phase: Phase, calls: dict[ReceiverId, CallReceiver]) -> CoordinatorStep:
    state, effects = _next_if_over(replace(state, phase=phase, waiting=frozenset(calls)))
    return state, (*calls.values(), *effects)


def _name(owner: OwnerId) -> str:
    return f"owner {owner}"
