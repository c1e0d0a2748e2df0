"""What the control plane decides in each step: named guards, refusals in a fixed order, and what is written.

`decide_*(facts, request, ...) -> Decision` is the whole semantics of prepare, commit, kill, bootstrap, acquire, read;
back ends add only a transaction around it. `now` is the control plane's clock, passed in, and read after the lock is
held. The order of refusals matters: a replaced coordinator always learns that it was replaced, whatever else is wrong.

Not handled: storage (control/); deadlines at the coordinator (protocol.transition).

Paper: Section 6.3; Appendix B (control plane)   Spec: CanPrepare, CanCommit, CanKill, CanBootstrap,
Conflict   Proofs: joint_commit_binds, version_alignment   Conditions: SC3, SC7
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId, CandidateId, Epoch, Member
from nemo_dcr.record import (
    DELTA_MODES,
    Acquired,
    AttemptEntry,
    AttemptMode,
    CommitRequest,
    Committed,
    ControlView,
    Decision,
    Facts,
    JournalEntry,
    Killed,
    Prepared,
    PrepareRequest,
    Record,
    Refusal,
    Refused,
)
from nemo_dcr.trace import Action, Scalar

T = TypeVar("T")
Reason = tuple[Refusal, str]


def holds_epoch(current: Epoch, epoch: Epoch) -> bool:
    """The caller is the active coordinator."""
    return epoch == current


def record_matches(record: Record | None, expect: Record | None) -> bool:
    """The compare of compare-and-set."""
    return record == expect


def is_latest(last: AttemptId, attempt: AttemptId) -> bool:
    """No later prepare fenced the attempt."""
    return attempt == last


def in_time(now: float, deadline: float) -> bool:
    """The deadline has not passed on the control plane's clock."""
    return now <= deadline


def may_xor(candidate_attempts: int) -> bool:
    """Only the first attempt of a candidate may send XOR records (D9)."""
    return candidate_attempts == 0


def _members_valid(required: tuple[Member, ...]) -> bool:
    names = [member.receiver for member in required]
    return bool(required) and list(required) == sorted(required) and len(set(names)) == len(names)


def _prepare_malformed(request: PrepareRequest) -> str | None:
    if not _members_valid(request.required):
        return "required must be sorted, not empty, one incarnation a receiver"
    if list(request.owners) != sorted(set(request.owners)):
        return "owners must be sorted and unique"
    if not request.owners and request.mode is not AttemptMode.FINISH:
        return f"mode {request.mode} needs owners"
    if request.expect is None and request.mode is not AttemptMode.RESTORE:
        return f"mode {request.mode} needs a first record"
    if request.mode in DELTA_MODES and request.candidate == NO_CANDIDATE:
        return f"mode {request.mode} needs a candidate"
    committed = NO_CANDIDATE if request.expect is None else request.expect.candidate
    if request.mode not in DELTA_MODES and request.candidate not in (NO_CANDIDATE, committed):
        return f"mode {request.mode} takes the committed candidate or none, not {request.candidate!r}"
    return None


def why_not_prepare(facts: Facts, request: PrepareRequest) -> Reason | None:
    """None when prepare may allocate; otherwise the reason."""
    if not holds_epoch(facts.epoch, request.epoch):
        return _replaced(facts, request.epoch)
    if not record_matches(facts.record, request.expect):
        return _MOVED
    if malformed := _prepare_malformed(request):
        return Refusal.MALFORMED, malformed
    if request.mode in DELTA_MODES:
        if facts.candidate_dead:
            return Refusal.DEAD_CANDIDATE, f"candidate {request.candidate!r} was aborted"
        if facts.record is not None and facts.record.candidate == request.candidate:
            return Refusal.COMMITTED_CANDIDATE, f"candidate {request.candidate!r} is version {facts.record.version}"
        if request.mode is AttemptMode.XOR and not may_xor(facts.candidate_attempts):
            return Refusal.XOR_RETRY, f"candidate {request.candidate!r} had {facts.candidate_attempts} attempts"
    return None


def _commit_malformed(request: CommitRequest, entry: AttemptEntry | None) -> str | None:
    new, expect = request.new, request.expect
    if entry is None or entry.attempt != request.attempt:
        return f"attempt {request.attempt} is not in the table"
    if entry.mode not in DELTA_MODES:
        return f"an attempt in mode {entry.mode} is never committed"
    if new.version != expect.version + 1 or new.baseline != expect.version or entry.baseline != expect.version:
        return f"version {new.version} on baseline {new.baseline} does not follow version {expect.version}"
    if (new.attempt, new.candidate, new.required) != (entry.attempt, entry.candidate, entry.required):
        return "the new record does not carry the attempt's id, candidate and required set"
    if new.epoch != request.epoch:
        return f"the new record carries epoch {new.epoch}, the request {request.epoch}"
    return None


def why_not_commit(facts: Facts, request: CommitRequest, now: float) -> Reason | None:
    """None when the record may change; otherwise the reason."""
    if not holds_epoch(facts.epoch, request.epoch):
        return _replaced(facts, request.epoch)
    if not record_matches(facts.record, request.expect):
        return _MOVED
    if not is_latest(facts.last, request.attempt):
        return Refusal.NOT_LATEST, f"attempt {request.attempt} was fenced by attempt {facts.last}"
    if facts.candidate_dead:
        return Refusal.DEAD_CANDIDATE, f"candidate {request.new.candidate!r} was aborted"
    if malformed := _commit_malformed(request, facts.entry):
        return Refusal.MALFORMED, malformed
    limit = commit_limit(facts, request)
    if not in_time(now, limit):
        return Refusal.DEADLINE, f"the commit arrived {now - limit:.3f} s after its deadline"
    return None


def commit_limit(facts: Facts, request: CommitRequest) -> float:
    """The earlier deadline of the request and its attempt, in seconds of the control plane's clock."""
    return request.deadline if facts.entry is None else min(request.deadline, facts.entry.deadline)


def why_not_kill(facts: Facts, epoch: Epoch, candidate: CandidateId) -> Reason | None:
    """None when the candidate may be declared dead; a committed one may not."""
    if not holds_epoch(facts.epoch, epoch):
        return _replaced(facts, epoch)
    if candidate == NO_CANDIDATE:
        return Refusal.MALFORMED, "there is no candidate to kill"
    if facts.record is not None and facts.record.candidate == candidate:
        return Refusal.COMMITTED_CANDIDATE, f"candidate {candidate!r} is version {facts.record.version}"
    return None


def why_not_bootstrap(facts: Facts, epoch: Epoch, new: Record) -> Reason | None:
    """None when the first record may be written: the latest attempt restored exactly its members, before any record."""
    if not holds_epoch(facts.epoch, epoch):
        return _replaced(facts, epoch)
    if not record_matches(facts.record, None):
        return Refusal.RECORD_MOVED, "there is a record already"
    if not is_latest(facts.last, new.attempt) or facts.entry is None:
        return Refusal.NOT_LATEST, f"attempt {new.attempt} was fenced by attempt {facts.last}"
    if facts.entry.mode is not AttemptMode.RESTORE or new.required != facts.entry.required:
        return Refusal.MALFORMED, "the first record follows a restore attempt of exactly its receivers"
    if (new.version, new.baseline, new.candidate, new.epoch) != (0, 0, NO_CANDIDATE, epoch):
        return Refusal.MALFORMED, "the first record has version 0, baseline 0, no candidate and the caller's epoch"
    return None


def decide_read(facts: Facts, clock: int) -> Decision[ControlView]:
    """Read; `facts.candidate_*` speak of the candidate that the caller asked for."""
    tick = _tick(facts, clock)
    view = ControlView(
        record=facts.record,
        epoch=facts.epoch,
        last_attempt=facts.last,
        candidate_attempts=facts.candidate_attempts,
        candidate_dead=facts.candidate_dead,
        clock=tick,
    )
    return Decision(view, tick)


def decide_acquire_epoch(facts: Facts, clock: int) -> Decision[Acquired]:
    """Hand out the next epoch (D2)."""
    tick = _tick(facts, clock)
    epoch = Epoch(facts.epoch + 1)
    journal = _journal(facts, tick, Action.ACQUIRE_EPOCH, NO_ATTEMPT, {}, {"epoch": epoch})
    return Decision(Acquired(epoch, tick), tick, journal, epoch=epoch)


def decide_prepare(facts: Facts, request: PrepareRequest, now: float, clock: int) -> Decision[Prepared | Refused]:
    """Allocate the next attempt id and its row, or refuse."""
    if reason := why_not_prepare(facts, request):
        return _refuse(facts, clock, "prepare", reason, request.epoch, NO_ATTEMPT)
    tick = _tick(facts, clock)
    entry = AttemptEntry(
        attempt=AttemptId(facts.last + 1),
        epoch=request.epoch,
        candidate=request.candidate,
        mode=request.mode,
        baseline=None if request.expect is None else request.expect.version,
        required=request.required,
        owners=request.owners,
        deadline=now + request.lifetime_s,
    )
    args: dict[str, Scalar] = {
        "epoch": entry.epoch,
        "candidate": entry.candidate,
        "mode": entry.mode.value,
        "baseline": entry.baseline,
        "required": members_text(entry.required),
    }
    journal = _journal(facts, tick, Action.PREPARE, entry.attempt, args, {"last": entry.attempt})
    return Decision(Prepared(entry.attempt, entry.deadline, tick), tick, journal, entry=entry)


def decide_commit(facts: Facts, request: CommitRequest, now: float, clock: int) -> Decision[Committed | Refused]:
    """Replace the record, or refuse. `facts.entry` is row `request.attempt`, `candidate_*` speak of `new.candidate`."""
    if reason := why_not_commit(facts, request, now):
        return _refuse(facts, clock, "commit", reason, request.epoch, request.attempt)
    return replace(_write_record(facts, clock, Action.COMMIT, request.new, now), not_after=commit_limit(facts, request))


def decide_kill(facts: Facts, epoch: Epoch, candidate: CandidateId, clock: int) -> Decision[Killed | Refused]:
    """Mark the candidate dead, or refuse. Killing a dead candidate again changes and journals nothing."""
    if reason := why_not_kill(facts, epoch, candidate):
        return _refuse(facts, clock, "kill", reason, epoch, NO_ATTEMPT)
    tick = _tick(facts, clock)
    if facts.candidate_dead:
        return Decision(Killed(candidate, tick), tick)
    args: dict[str, Scalar] = {"epoch": epoch, "candidate": candidate}
    journal = _journal(facts, tick, Action.KILL_CANDIDATE, NO_ATTEMPT, args, {"epoch": facts.epoch})
    return Decision(Killed(candidate, tick), tick, journal, dead=candidate)


def decide_bootstrap(
    facts: Facts, epoch: Epoch, new: Record, clock: int, now: float = 0.0
) -> Decision[Committed | Refused]:
    """Write the first record, or refuse. `facts.entry` is row `new.attempt`."""
    if reason := why_not_bootstrap(facts, epoch, new):
        return _refuse(facts, clock, "bootstrap", reason, epoch, new.attempt)
    return _write_record(facts, clock, Action.BOOTSTRAP, new, now)


def members_text(members: tuple[Member, ...]) -> str:
    """Trace form of a member set: `receiver@incarnation`, comma separated."""
    return ",".join(f"{member.receiver}@{member.incarnation}" for member in members)


_MOVED: Reason = (Refusal.RECORD_MOVED, "the record is not the expected one")


def _replaced(facts: Facts, epoch: Epoch) -> Reason:
    return Refusal.STALE_EPOCH, f"epoch {epoch} was replaced by epoch {facts.epoch}"


def _tick(facts: Facts, clock: int) -> int:
    return max(facts.clock, clock) + 1


def _journal(
    facts: Facts, tick: int, action: Action, attempt: AttemptId, args: dict[str, Scalar], post: dict[str, Scalar]
) -> JournalEntry:
    return JournalEntry(facts.journal_seq, tick, action, attempt, args, post)


def _refuse(
    facts: Facts, clock: int, operation: str, reason: Reason, epoch: Epoch, attempt: AttemptId
) -> Decision[T | Refused]:
    tick = _tick(facts, clock)
    args: dict[str, Scalar] = {"operation": operation, "reason": reason[0].value, "epoch": epoch}
    journal = _journal(facts, tick, Action.CONFLICT, attempt, args, {"epoch": facts.epoch, "last": facts.last})
    return Decision(Refused(reason[0], reason[1], facts.record, tick), tick, journal)


def _write_record(facts: Facts, clock: int, action: Action, new: Record, now: float) -> Decision[Committed | Refused]:
    tick, new = _tick(facts, clock), replace(new, time=now)
    args: dict[str, Scalar] = {
        "epoch": new.epoch,
        "candidate": new.candidate,
        "digest": new.digest.hex(),
        "required": members_text(new.required),
    }
    journal = _journal(facts, tick, action, new.attempt, args, {"version": new.version, "baseline": new.baseline})
    return Decision(Committed(new, tick), tick, journal, record=new)
