"""The state of a control plane that lies in a store of another host: a small head, and a log of events behind it.

The head holds all that a rule looks at, except what is known of one candidate. Every step replaces it, so a comparison
of the head alone decides a race. Each step that changes more than the clock adds one event to the log: the journal line
and the rows that it wrote. A nonce names the step, in the head and in its event; by it a writer without an answer finds
out whether its step took effect, and two heads are never the same bytes.
Not handled: how the head is compared and replaced, and where events lie (etcd, s3).

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
Proofs: joint_commit_binds   Conditions: SC3, SC7
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from nemo_dcr.errors import InternalError, OperatorNeeded
from nemo_dcr.ids import NO_ATTEMPT, AttemptId, CandidateId, Epoch
from nemo_dcr.record import DELTA_MODES, AttemptEntry, Decision, Facts, JournalEntry, Record

FORMAT = 1
"""Version of what this module stores."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every step reads and replaces."""

    format: int
    identity: str
    """Random name of this commit record, given with the first step: attempt ids are unique within it."""
    nonce: str
    """Of the step that wrote this head."""
    clock: int
    epoch: Epoch
    events: int
    """Number of events so far; the next one gets this number."""
    last: AttemptEntry | None
    """Row of the latest attempt. No rule looks at another: an attempt that is not the latest is refused before."""
    record: Record | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of the log; its number is the journal line's."""

    nonce: str
    line: JournalEntry
    entry: AttemptEntry | None
    record: Record | None
    dead: CandidateId | None


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """What is known of one candidate."""

    attempts: int = 0
    """In a delta mode."""
    dead: bool = False


def first_head() -> Head:
    """The head before the first step; it is in no store."""
    return Head(
        format=FORMAT,
        identity=uuid.uuid4().hex,
        nonce="",
        clock=0,
        epoch=Epoch(0),
        events=0,
        last=None,
        record=None,
    )


def facts_of(head: Head, attempt: AttemptId, candidate: CandidateRow) -> Facts:
    """What the rules are asked with."""
    last = head.last
    return Facts(
        record=head.record,
        epoch=head.epoch,
        last=NO_ATTEMPT if last is None else last.attempt,
        entry=last if last is not None and last.attempt == attempt else None,
        candidate_attempts=candidate.attempts,
        candidate_dead=candidate.dead,
        clock=head.clock,
        journal_seq=head.events,
    )


def advance(head: Head, decision: Decision[Any], nonce: str) -> tuple[Head, Event | None]:
    """The head after a decision, and the event to log; None when the step changed only the clock."""
    line = decision.journal
    if line is None:
        if (decision.epoch, decision.entry, decision.record, decision.dead) != (None, None, None, None):
            raise InternalError("a control-plane step changed something and has no journal line")
        return replace(head, nonce=nonce, clock=decision.clock), None
    if line.seq != head.events:
        raise InternalError(f"journal line {line.seq} does not follow event {head.events - 1}")
    event = Event(nonce=nonce, line=line, entry=decision.entry, record=decision.record, dead=decision.dead)
    after = replace(
        head,
        nonce=nonce,
        clock=decision.clock,
        epoch=head.epoch if decision.epoch is None else decision.epoch,
        events=head.events + 1,
        last=decision.entry or head.last,
        record=decision.record or head.record,
    )
    return after, event


def touched(event: Event, candidate: CandidateId, row: CandidateRow) -> CandidateRow:
    """What is known of a candidate after an event."""
    if event.entry is not None and event.entry.candidate == candidate and event.entry.mode in DELTA_MODES:
        return replace(row, attempts=row.attempts + 1)
    return replace(row, dead=True) if event.dead == candidate else row


def candidate_of(event: Event) -> CandidateId | None:
    """The candidate whose row an event changes."""
    if event.entry is not None and event.entry.mode in DELTA_MODES:
        return event.entry.candidate
    return event.dead


def encode(value: Any) -> bytes:
    """The stored form, JSON; the same value gives the same bytes."""
    return msgspec.json.encode(value)


def decode(content: bytes, kind: type[T], where: str) -> T:
    """Read a stored value. Raises: OperatorNeeded when it is damaged or something else."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = f"{where} is no part of a commit record that this package reads ({error})"
        raise OperatorNeeded(reason, "name another prefix in the URL, or restore it from a backup") from error


def headless(where: str, first: str) -> OperatorNeeded:
    """The error for a record whose head is gone: a new head would give attempt ids out a second time."""
    reason = f"the commit record {where} has no head, but holds {first}"
    return OperatorNeeded(reason, "restore all of it from one moment, or name another prefix for a new record")


def of_this_format(head: Head, where: str) -> Head:
    """The head. Raises: OperatorNeeded when another version of this package wrote it in a format of its own."""
    if head.format != FORMAT:
        reason = f"{where} has format {head.format}, this package reads format {FORMAT}"
        raise OperatorNeeded(reason, "run the package version that wrote it, or start a new commit record")
    return head
