"""Who takes part in the next attempt, and in which mode: decided from the record and one survey of reports.

Membership changes only here, between attempts. An engine instance takes part with all its ranks or not at all. XOR is
for the first attempt of a candidate over receivers that hold exactly the committed version; a baseline that is not at
that version makes the attempt dense; everything else is overwrites (D9, D12).

Paper: Section 6.3; Algorithm B.2   Spec: Holders, Closed, Strays, EligibleFor, ModeFor, NeedsRollForward
Proofs: version_alignment, retry_repairs   Conditions: SC3, SC7
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from nemo_dcr.ids import CandidateId, Member, OwnerId, Version, instance_of
from nemo_dcr.protocol import alignment
from nemo_dcr.protocol.messages import OwnerReport, ReceiverReport
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.record import AttemptMode, Record


def complete_instances(
    reports: Iterable[ReceiverReport], takes_part: Callable[[ReceiverReport], bool]
) -> tuple[Member, ...]:
    """Members of every instance of which all ranks answered, are awake and take part; sorted."""
    instances: dict[str, list[ReceiverReport]] = defaultdict(list)
    for report in reports:
        instances[instance_of(report.receiver)].append(report)
    return tuple(
        sorted(
            Member(report.receiver, report.incarnation)
            for ranks in instances.values()
            if len(ranks) == ranks[0].ranks and all(takes_part(rank) and not rank.asleep for rank in ranks)
            for report in ranks
        )
    )


def holders(record: Record, reports: Iterable[ReceiverReport]) -> tuple[Member, ...]:
    """Members of instances that hold exactly the committed version."""
    return complete_instances(reports, lambda r: alignment.holds_record(r.tag, record.version, record.attempt))


def closed(record: Record, reports: Iterable[ReceiverReport]) -> tuple[Member, ...]:
    """Members of instances that hold the committed version and do not serve it yet."""
    reports = tuple(reports)
    serving = complete_instances(reports, lambda report: report.gate_open)
    return tuple(member for member in holders(record, reports) if member not in serving)


def strays(record: Record | None, reports: Iterable[ReceiverReport]) -> tuple[Member, ...]:
    """Members of complete instances that need a restore: some rank holds something else than the committed version."""
    reports = tuple(reports)
    everyone = complete_instances(reports, lambda _: True)
    held = frozenset(holders(record, reports)) if record is not None else frozenset()
    return tuple(member for member in everyone if member not in held)


def all_hold(owners: Iterable[OwnerReport], version: Version) -> bool:
    """Every baseline is exactly `version` (SC3)."""
    return all(owner.tracker == TrackerTag(TrackerKind.AT, version) for owner in owners)


def ahead_of(record: Record, owners: Iterable[OwnerReport]) -> list[OwnerId]:
    """Owners whose baseline is a later version than the record, which is read after they reported: not of this run."""
    return sorted(owner.owner for owner in owners if owner.tracker.version > record.version)


def is_first_attempt(candidate_attempts: int) -> bool:
    """The candidate had no attempt yet, of any coordinator (D9)."""
    return candidate_attempts == 0


def choose_attempt(
    record: Record,
    candidate: CandidateId,
    candidate_attempts: int,
    receivers: Iterable[ReceiverReport],
    owners: Iterable[OwnerReport],
) -> tuple[AttemptMode, tuple[Member, ...]]:
    """Mode and required set of the next attempt of `candidate`; the set is empty when nobody is eligible."""
    if not all_hold(owners, record.version):
        mode = AttemptMode.DENSE
    elif is_first_attempt(candidate_attempts):
        mode = AttemptMode.XOR
    else:
        mode = AttemptMode.OVERWRITE
    required = complete_instances(receivers, lambda report: is_eligible(report, mode, record, candidate))
    return mode, required


def is_eligible(report: ReceiverReport, mode: AttemptMode, record: Record, candidate: CandidateId) -> bool:
    """The reported tag fits; the receiver looks again when it is prepared (D6)."""
    return alignment.is_eligible(
        report.tag, mode=mode, version=record.version, record_attempt=record.attempt, candidate=candidate
    )


def open_candidates(record: Record | None, owners: Iterable[OwnerReport]) -> frozenset[CandidateId]:
    """Frozen candidates that are not the committed one."""
    committed = "" if record is None else record.candidate
    return frozenset(owner.candidate for owner in owners if owner.candidate not in ("", committed))


def needs_roll_forward(record: Record, owners: Iterable[OwnerReport]) -> bool:
    """Some owner still holds the committed candidate frozen: the commit happened, its transition did not end (D10)."""
    return record.candidate != "" and any(owner.candidate == record.candidate for owner in owners)


def has_followed(record: Record, owner: OwnerReport) -> bool:
    """The baseline is the committed one; or it is lost and this owner has no committed candidate to take it from."""
    if owner.tracker == TrackerTag(TrackerKind.AT, record.version):
        return True
    return owner.tracker.kind is TrackerKind.LOST and owner.candidate != record.candidate


def can_rebuild(record: Record, owner: OwnerReport) -> bool:
    """The baseline is lost, no transition is open here, and the resident weights are the committed version (D12)."""
    lost = owner.tracker.kind is TrackerKind.LOST
    return lost and owner.candidate == "" and owner.resident == record.candidate


def common_digest(owners: Iterable[OwnerReport]) -> bytes:
    """The checkpoint digest that all baselines still equal, or empty."""
    digests = {owner.baseline_digest for owner in owners}
    return digests.pop() if len(digests) == 1 else b""
