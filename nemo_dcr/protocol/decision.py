"""What the coordinator does next, decided from the record it just read and the endpoints it just surveyed.

No record: restore every receiver, then write the first one. Committed candidate still frozen: roll forward, never retry
(D10). Dead candidate: owners drop it (D27). Another candidate frozen at all owners: its next attempt, or kill it after
too many. Nothing frozen: refill lost baselines, restore receivers that hold something else, open closed gates; else
ready. What cannot be done yet is held, with a reason that names what is missing.

Reports are older than the read. Each action is checked again where it takes effect: prepare at the control plane and at
every endpoint, updates at every owner.

Paper: Section 6.3; Algorithm B.2   Spec: WantsDelta, WantsRestore, WantsFinish, RollForwardCalls
Proofs: baseline_follows_commit, version_alignment   Conditions: SC3, SC4, SC7
"""

from __future__ import annotations

from dataclasses import replace

from nemo_dcr.ids import NO_CANDIDATE, CandidateId, Member, Version, instance_of
from nemo_dcr.protocol import membership, rounds
from nemo_dcr.protocol.coordinator_events import AskKill, AskPrepare, Held, Ready
from nemo_dcr.protocol.rounds import look_again
from nemo_dcr.protocol.transition_state import CoordinatorState, CoordinatorStep, Phase
from nemo_dcr.record import AttemptMode, PrepareRequest, Record


def decide(state: CoordinatorState) -> CoordinatorStep:
    """What the record and the endpoints ask for next. Reports are older than the read, so nothing here trusts them."""
    view, record, owners = state.view, state.record, state.owners.values()
    missing = [owner for owner in state.config.owners if owner not in state.owners]
    if view is None or missing:
        return _hold(state, f"owners {missing} do not answer; restart them or wait")
    if record is None:
        return _decide_bootstrap(state)
    ahead = membership.ahead_of(record, owners)
    if ahead:
        return _hold(
            state,
            f"owners {ahead} hold a later version than {record.version}, the committed one: the record was rolled back "
            f"or belongs to another run; restore the record, or restart those trainers from version {record.version}",
        )
    if membership.needs_roll_forward(record, owners):
        return _roll_forward(state, record)
    candidates = membership.open_candidates(record, owners)
    if len(candidates) > 1:
        return _hold(state, f"owners hold different candidates {sorted(candidates)}; they must agree on one")
    if not candidates:
        return _decide_idle(replace(state, aborting=False), record)
    (candidate,) = candidates
    if candidate != state.view_candidate:
        return look_again(state, delayed=False)
    if view.candidate_dead:
        return rounds.drop_candidate(state, candidate)
    if state.aborting or view.candidate_attempts >= state.config.refit.max_attempts:
        return replace(state, phase=Phase.KILLING), (AskKill(state.epoch, candidate),)
    waiting = sorted(owner.owner for owner in owners if owner.candidate != candidate)
    if waiting:
        return _hold(state, f"owners {waiting} have not frozen candidate {candidate!r}; wait, or abort it")
    mode, required = membership.choose_attempt(
        record, candidate, view.candidate_attempts, state.receivers.values(), owners
    )
    if required:
        return _prepare(state, mode, required, candidate)
    return _restore(state, membership.strays(record, state.receivers.values()))


def _decide_bootstrap(state: CoordinatorState) -> CoordinatorStep:
    everyone = membership.strays(None, state.receivers.values())
    present = {instance_of(member.receiver) for member in everyone}
    if len(present) < state.config.bootstrap_instances:
        return _hold(state, f"{len(present)} of {state.config.bootstrap_instances} engine instances answer")
    return _restore(state, everyone)


def _decide_idle(state: CoordinatorState, record: Record) -> CoordinatorStep:
    reports, owners = state.receivers.values(), state.owners.values()
    if any(membership.can_rebuild(record, owner) for owner in owners):
        return rounds.rebuild_baselines(state, record)
    strays = membership.strays(record, reports)
    if strays and membership.all_hold(owners, record.version):
        return _restore(state, strays)
    closed = membership.closed(record, reports)
    if closed:
        return _prepare(state, AttemptMode.FINISH, closed, record.candidate)
    return replace(state, phase=Phase.READY, held=""), (Ready(record),)


def _restore(state: CoordinatorState, members: tuple[Member, ...]) -> CoordinatorStep:
    version = Version(0) if state.record is None else state.record.version
    if not membership.all_hold(state.owners.values(), version):
        trackers = ", ".join(f"owner {owner.owner}: {owner.tracker}" for owner in state.owners.values())
        return _hold(state, f"nobody can be restored to version {version}: {trackers}; reload the trainer's checkpoint")
    if not members:
        return _hold(state, "no complete engine instance answers; start one")
    return _prepare(state, AttemptMode.RESTORE, members, NO_CANDIDATE)


def _roll_forward(state: CoordinatorState, record: Record) -> CoordinatorStep:
    """Finish the committed transition. Unless this coordinator holds the latest attempt, it first fences (D21)."""
    holders = membership.holders(record, state.receivers.values())
    if is_fenced_by_own(state, record) or not holders:
        return rounds.update_baselines(state, record)
    return _prepare(state, AttemptMode.FINISH, holders, record.candidate)


def is_fenced_by_own(state: CoordinatorState, record: Record) -> bool:
    """The latest attempt is this coordinator's: the committed one, or a finish attempt on this record."""
    if state.attempt is None or state.view is None or state.view.last_attempt != state.fenced:
        return False
    plan = state.attempt.plan
    finishes = plan.mode is AttemptMode.FINISH and plan.record == record
    return plan.attempt == state.fenced and (finishes or plan.attempt == record.attempt)


def _hold(state: CoordinatorState, reason: str) -> CoordinatorStep:
    said = state.held == reason
    state, effects = look_again(replace(state, held=reason), delayed=True)
    return state, effects if said else (Held(reason), *effects)


def _prepare(
    state: CoordinatorState, mode: AttemptMode, required: tuple[Member, ...], candidate: CandidateId
) -> CoordinatorStep:
    refit = state.config.refit
    request = PrepareRequest(
        epoch=state.epoch,
        expect=state.record,
        candidate=candidate,
        mode=mode,
        required=required,
        owners=state.config.owners,
        lifetime_s=refit.attempt_deadline_s + refit.commit_deadline_s + refit.clock_skew_s,
    )
    return replace(state, phase=Phase.PREPARING, request=request, held=""), (AskPrepare(request),)
