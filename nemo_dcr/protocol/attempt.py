"""Algorithm B.1 at the coordinator: run one attempt over its fixed members until it is acknowledged or failed.

Prepare all receivers and owners; then, with the synchronous gate, open application and stream at once; with the
asynchronous gate stream, wait until everything is staged everywhere, close the gates, wait for running requests, open
application. Acknowledged means: every required receiver, in the prepared incarnation, flushed exactly the payloads of
every owner's END. Anything else is a failure that names the endpoint; then every reachable endpoint is stopped and
waited for. Unreachable ones are left behind; the next prepare fences them.

The machine reads levels, not edges: every reply and push carries a full report, so lost or repeated ones do not matter.

Not handled: ids, modes and membership (transition); repeating calls, deadlines, liveness of peers (runtime).

Paper: Section 6.3; Section 7 (gate); Algorithm B.1   Spec: StartAttempt, CompleteAttempt, FailAttempt
Proofs: fence_stops_old_writes, joint_commit_binds   Conditions: SC7
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nemo_dcr.config import GateMode
from nemo_dcr.control_rules import members_text
from nemo_dcr.ids import NO_ATTEMPT, AttemptId, CandidateId, Incarnation, Member, OwnerId, ReceiverId, Version
from nemo_dcr.protocol.coordinator_events import (
    AbortRequested,
    ArmDeadline,
    AttemptEnded,
    AttemptEvent,
    CallOwner,
    CallReceiver,
    CoordinatorEffect,
    DeadlinePassed,
    OwnerAnswered,
    OwnerLost,
    OwnerReported,
    ReceiverAnswered,
    ReceiverLost,
    ReceiverReported,
)
from nemo_dcr.protocol.digests import applied_digest, candidate_digest
from nemo_dcr.protocol.messages import (
    CloseGate,
    OpenApply,
    OwnerReport,
    PrepareOwner,
    PrepareReceiver,
    ReceiverReport,
    StopOwner,
    StopReceiver,
    StreamOwner,
    StreamStatus,
)
from nemo_dcr.record import AttemptMode, Record
from nemo_dcr.trace import Action, Emit, Scalar


class AttemptPhase(StrEnum):
    """Where the coordinator stands in the attempt."""

    PREPARING = "preparing"
    STAGING = "staging"
    """Asynchronous gate: payloads travel while requests are served."""
    CLOSING = "closing"
    """Asynchronous gate: gates are closed, running requests finish."""
    APPLYING = "applying"
    ACKED = "acked"
    STOPPING = "stopping"
    """Failed; reachable endpoints are being stopped and waited for."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class OwnerMember:
    """An owner bound to one incarnation."""

    owner: OwnerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """What the control plane fixed for one attempt."""

    attempt: AttemptId
    mode: AttemptMode
    gate: GateMode
    candidate: CandidateId
    record: Record | None
    required: tuple[Member, ...]
    owners: tuple[OwnerMember, ...]
    deadline_s: float
    baseline_digest: bytes = b""

    @property
    def version(self) -> Version:
        """K.ver, 0 before the first record."""
        return Version(0) if self.record is None else self.record.version

    @property
    def staged_first(self) -> bool:
        """Payloads are staged before the gates close."""
        return self.gate is GateMode.ASYNC and self.mode is not AttemptMode.RESTORE


@dataclass(frozen=True, slots=True)
class AttemptState:
    """One running attempt."""

    plan: AttemptPlan
    phase: AttemptPhase = AttemptPhase.PREPARING
    receivers: Mapping[ReceiverId, ReceiverReport] = field(default_factory=dict)
    """Newest report of the member's own incarnation."""
    owners: Mapping[OwnerId, OwnerReport] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    """Lost or stopped members, by name: stop_and_wait waits for no answer of these."""
    reason: str = ""


AttemptStep = tuple[AttemptState, tuple[CoordinatorEffect, ...]]


def start(plan: AttemptPlan) -> AttemptStep:
    """Prepare every endpoint of the plan."""
    record_attempt = NO_ATTEMPT if plan.record is None else plan.record.attempt
    owners = tuple(each.owner for each in plan.owners)
    calls: list[CoordinatorEffect] = [
        CallReceiver(
            PrepareReceiver(
                receiver=member.receiver,
                incarnation=member.incarnation,
                attempt=plan.attempt,
                mode=plan.mode,
                gate=plan.gate,
                version=plan.version,
                record_attempt=record_attempt,
                candidate=plan.candidate,
                owners=() if plan.mode is AttemptMode.FINISH else owners,
                baseline_digest=plan.baseline_digest,
            )
        )
        for member in plan.required
    ]
    calls += [
        CallOwner(PrepareOwner(each.owner, each.incarnation, plan.attempt, plan.mode, plan.version, plan.candidate))
        for each in plan.owners
    ]
    args: dict[str, Scalar] = {
        "mode": plan.mode.value,
        "base": plan.version,
        "required": members_text(plan.required),
        "gate": plan.gate.value,
        "owners": ",".join(f"{each.owner}@{each.incarnation}" for each in plan.owners),
    }
    started = Emit(Action.START_ATTEMPT, plan.attempt, args, {"phase": AttemptPhase.PREPARING.value})
    return AttemptState(plan), (started, ArmDeadline(plan.attempt, plan.deadline_s), *calls)


def step(state: AttemptState, event: AttemptEvent) -> AttemptStep:
    """Take one event; ACKED and FAILED are final."""
    if state.phase in (AttemptPhase.ACKED, AttemptPhase.FAILED):
        return state, ()
    attempt = state.plan.attempt
    match event:
        case ReceiverReported(report):
            return _see_receiver(state, report)
        case OwnerReported(report):
            return _see_owner(state, report)
        case ReceiverAnswered(StopReceiver() as call, _) if call.attempt == attempt:
            return _gone(state, call.receiver)
        case OwnerAnswered(StopOwner() as call, _) if call.attempt == attempt:
            return _gone(state, _owner_name(call.owner))
        case ReceiverAnswered(PrepareReceiver() | OpenApply() | CloseGate() as call, reply):
            if call.attempt == attempt and not reply.accepted:
                return _fail(state, f"receiver {call.receiver} refused: {reply.refusal}")
            return _see_receiver(state, reply.report)
        case OwnerAnswered(PrepareOwner() | StreamOwner() as call, reply):
            if call.attempt == attempt and not reply.accepted:
                return _fail(state, f"owner {call.owner} refused: {reply.refusal}")
            return _see_owner(state, reply.report)
        case ReceiverAnswered(_, reply):
            return _see_receiver(state, reply.report)
        case OwnerAnswered(_, reply):
            return _see_owner(state, reply.report)
        case ReceiverLost(receiver, incarnation, detail):
            if not _is_member(state.plan, receiver, incarnation):
                return state, ()
            state = replace(state, gone=state.gone | {receiver})
            return _fail(state, f"receiver {receiver} is lost: {detail}")
        case OwnerLost(owner, detail):
            if owner not in {each.owner for each in state.plan.owners}:
                return state, ()
            state = replace(state, gone=state.gone | {_owner_name(owner)})
            return _fail(state, f"owner {owner} is lost: {detail}")
        case DeadlinePassed(passed):
            return _fail(state, f"deadline passed {_laggards(state)}") if passed == attempt else (state, ())
        case AbortRequested():
            return _fail(state, "abort was requested")


def is_prepared(plan: AttemptPlan, report: ReceiverReport) -> bool:
    """Installed here, and quiet where writes follow at once."""
    quiet = report.quiet or plan.staged_first or plan.mode is AttemptMode.FINISH
    return report.attempt == plan.attempt and not report.stopped and quiet


def is_ended(plan: AttemptPlan, report: OwnerReport) -> bool:
    """The owner published its whole set under this attempt."""
    return report.attempt == plan.attempt and report.end is not None


def is_acked(plan: AttemptPlan, member: Member, report: ReceiverReport) -> bool:
    """The member, in the prepared incarnation, acknowledged this attempt (D5)."""
    return report.acked and report.attempt == plan.attempt and report.incarnation == member.incarnation


def has_all_acks(state: AttemptState) -> bool:
    """Every required receiver acknowledged."""
    reports = [(member, state.receivers.get(member.receiver)) for member in state.plan.required]
    return all(report is not None and is_acked(state.plan, member, report) for member, report in reports)


def digest_agrees(state: AttemptState, report: ReceiverReport) -> bool:
    """The receiver applied exactly what the owners' ENDs list; a restore proved by digest applied nothing."""
    if state.plan.mode is AttemptMode.RESTORE and report.applied_digest == b"" and report.payloads == 0:
        return True
    ends = {owner: owned.end.payload_digests for owner, owned in state.owners.items() if owned.end is not None}
    return report.applied_digest == applied_digest(ends)


def next_digest(state: AttemptState) -> bytes:
    """Digest for the next commit record, over the parent's digest and every payload of the attempt.

    The parent of the first record is the digest of the checkpoint that the baseline was loaded from, if known.
    """
    parent = state.plan.baseline_digest if state.plan.record is None else state.plan.record.digest
    ends = [owned.end for owned in state.owners.values() if owned.end is not None]
    return candidate_digest(parent, [digest for end in ends for digest in end.payload_digests])


def _see_receiver(state: AttemptState, report: ReceiverReport) -> AttemptStep:
    plan = state.plan
    member = next((each for each in plan.required if each.receiver == report.receiver), None)
    if member is None or report.incarnation < member.incarnation:
        return state, ()
    if report.incarnation > member.incarnation:
        return _fail(state, f"receiver {member.receiver} restarted")
    known = state.receivers.get(member.receiver)
    if known is not None and report.revision < known.revision:
        return state, ()
    state = replace(state, receivers={**state.receivers, member.receiver: report})
    if report.attempt > plan.attempt:
        return _fail(state, f"receiver {member.receiver} was prepared for attempt {report.attempt}")
    if report.attempt == plan.attempt and report.stopped:
        return _fail(state, f"receiver {member.receiver}: {report.failure or 'was stopped'}")
    return _advance(state)


def _see_owner(state: AttemptState, report: OwnerReport) -> AttemptStep:
    plan = state.plan
    member = next((each for each in plan.owners if each.owner == report.owner), None)
    if member is None or report.incarnation < member.incarnation:
        return state, ()
    if report.incarnation > member.incarnation:
        return _fail(state, f"owner {member.owner} restarted")
    known = state.owners.get(member.owner)
    if known is not None and report.revision < known.revision:
        return state, ()
    state = replace(state, owners={**state.owners, member.owner: report})
    if report.attempt > plan.attempt:
        return _fail(state, f"owner {member.owner} was prepared for attempt {report.attempt}")
    if report.attempt == plan.attempt and (report.failure or report.status is StreamStatus.STOPPED):
        return _fail(state, f"owner {member.owner}: {report.failure or 'was stopped'}")
    return _advance(state)


def _advance(state: AttemptState) -> AttemptStep:
    plan = state.plan
    reports = [state.receivers.get(member.receiver) for member in plan.required]
    present = [report for report in reports if report is not None]
    owners = [state.owners.get(each.owner) for each in plan.owners]
    ended = all(report is not None and is_ended(plan, report) for report in owners)
    everyone = len(present) == len(plan.required)
    match state.phase:
        case AttemptPhase.PREPARING:
            ready = everyone and all(is_prepared(plan, report) for report in present)
            if ready and all(report is not None and report.attempt == plan.attempt for report in owners):
                return _start_stream(state)
        case AttemptPhase.STAGING:
            if ended and everyone and all(r.staged and r.attempt == plan.attempt for r in present):
                return _move(state, AttemptPhase.CLOSING, _to_receivers(plan, CloseGate))
        case AttemptPhase.CLOSING:
            if all(report.quiet for report in present):
                return _move(state, AttemptPhase.APPLYING, _to_receivers(plan, OpenApply))
        case AttemptPhase.APPLYING:
            if ended and has_all_acks(state):
                wrong = [report.receiver for report in present if not digest_agrees(state, report)]
                if wrong:
                    return _fail(state, f"receiver {wrong[0]} acknowledged other payloads than the owners sent")
                return _complete(state)
        case _:
            pass
    return state, ()


def _start_stream(state: AttemptState) -> AttemptStep:
    plan = state.plan
    if plan.mode is AttemptMode.FINISH or (plan.mode is AttemptMode.RESTORE and has_all_acks(state)):
        return _complete(state)
    stream = tuple(CallOwner(StreamOwner(each.owner, each.incarnation, plan.attempt)) for each in plan.owners)
    if plan.staged_first:
        return _move(state, AttemptPhase.STAGING, stream)
    return _move(state, AttemptPhase.APPLYING, (*_to_receivers(plan, OpenApply), *stream))


def _move(state: AttemptState, phase: AttemptPhase, effects: tuple[CoordinatorEffect, ...]) -> AttemptStep:
    """Enter a phase, and see at once whether it is over already."""
    state, more = _advance(replace(state, phase=phase))
    return state, effects + more


def _complete(state: AttemptState) -> AttemptStep:
    state = replace(state, phase=AttemptPhase.ACKED)
    completed = Emit(Action.COMPLETE_ATTEMPT, state.plan.attempt, {}, {"phase": state.phase.value})
    return state, (completed, AttemptEnded(state.plan.attempt, ""))


def _fail(state: AttemptState, reason: str) -> AttemptStep:
    """Stop the attempt. What is told names the process, why, and the phase in which it happened."""
    if state.phase is AttemptPhase.STOPPING:
        return _gone(state)
    plan = state.plan
    reason = f"{reason}, in phase {state.phase.value}"
    state = replace(state, phase=AttemptPhase.STOPPING, reason=reason)
    failed = Emit(Action.FAIL_ATTEMPT, plan.attempt, {"reason": reason}, {"phase": state.phase.value})
    stops: list[CoordinatorEffect] = [
        CallReceiver(StopReceiver(member.receiver, member.incarnation, plan.attempt))
        for member in plan.required
        if member.receiver not in state.gone
    ]
    stops += [
        CallOwner(StopOwner(each.owner, each.incarnation, plan.attempt))
        for each in plan.owners
        if _owner_name(each.owner) not in state.gone
    ]
    state, over = _gone(state)
    return state, (failed, *stops, *over)


def _gone(state: AttemptState, *names: str) -> AttemptStep:
    """Note stopped or lost members; the attempt has failed for good when none is left."""
    state = replace(state, gone=state.gone | set(names))
    members = {member.receiver for member in state.plan.required} | {_owner_name(o.owner) for o in state.plan.owners}
    if state.phase is not AttemptPhase.STOPPING or not members <= state.gone:
        return state, ()
    return replace(state, phase=AttemptPhase.FAILED), (AttemptEnded(state.plan.attempt, state.reason),)


def _laggards(state: AttemptState) -> str:
    """Name who had not finished."""
    plan = state.plan
    late = [m.receiver for m in plan.required if not _finished(plan, m, state.receivers.get(m.receiver))]
    waits = [
        _owner_name(o.owner) for o in plan.owners if (r := state.owners.get(o.owner)) is None or not is_ended(plan, r)
    ]
    return f"without {', '.join([*late, *waits]) or 'nobody'}"


def _is_member(plan: AttemptPlan, receiver: ReceiverId, incarnation: Incarnation) -> bool:
    """The loss concerns this attempt: the member itself, or a process that came after it. 0 means not known."""
    known = [member.incarnation for member in plan.required if member.receiver == receiver]
    return bool(known) and (incarnation == 0 or incarnation >= known[0])


def _finished(plan: AttemptPlan, member: Member, report: ReceiverReport | None) -> bool:
    return report is not None and is_acked(plan, member, report)


def _to_receivers(plan: AttemptPlan, call: type[OpenApply] | type[CloseGate]) -> tuple[CoordinatorEffect, ...]:
    return tuple(CallReceiver(call(member.receiver, member.incarnation, plan.attempt)) for member in plan.required)


def _owner_name(owner: OwnerId) -> str:
    return f"owner {owner}"
