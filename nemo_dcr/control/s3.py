"""The commit record in S3 object storage: for sites that have a bucket and neither a shared host nor etcd.

S3 changes one object at a time, so one object is the head, with the latest events as its tail. Replacing it, if it is
still the one that was read, is the whole step. A tail that is full is copied to objects that never change before the
next step cuts it off. Every writer copies the same bytes to the same names: a copy may be made twice, by several
writers, or be left half made. S3 cannot refuse a late upload by the clock, so prepare fences: it replaces the head, as
every step does, and an upload that compares with an older head is refused for ever.

    PREFIX/head                                          what every step compares
    PREFIX/log/<20 digits>                               events from that number on
    PREFIX/candidates/NAME/<20 digits>-ATTEMPTS-DEAD     what the part of the log from that number says of a candidate
    PREFIX/condition-probe                               see s3_objects

Not handled: servers that ignore conditions (refused, see s3_objects); versions and locks of objects.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
Proofs: joint_commit_binds   Conditions: SC3, SC7
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nemo_dcr.control.compare_and_set import ComparedControl, Seen
from nemo_dcr.control.head import (
    CandidateRow,
    Event,
    Head,
    candidate_of,
    decode,
    encode,
    first_head,
    headless,
    of_this_format,
    touched,
)
from nemo_dcr.control.s3_objects import S3Objects, S3RecordConfig
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import NO_CANDIDATE, CandidateId
from nemo_dcr.record import JournalEntry, Record

TAIL_EVENTS = 32
TAIL_BYTES = 256 << 10
"""A tail of so many events or bytes is full."""

_HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadObject:
    """What the one object holds that is ever replaced."""

    head: Head
    begin: int
    """Number of the first event of the tail; all before it lie in the log."""
    tail: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class _Token:
    """The head as it was read."""

    etag: str
    object: HeadObject


class S3Control(ComparedControl):
    """A `ControlPlane` below one prefix of a bucket; raises as `ComparedControl`."""

    def __init__(
        self,
        config: S3RecordConfig,
        session: Any = None,
        *,
        now: Callable[[], float] = time.time,
        reads_only: bool = False,
    ) -> None:
        """Find out whether the server keeps to conditions.

        Args:
            config: where the record lies.
            session: a `boto3.session.Session`; None for boto3's standard chain.
            now: the clock that deadlines are written in, in seconds.
            reads_only: put that off to the first step; `peek`, `watch`, `history` and `journal` write nothing.

        Raises: OperatorNeeded for a server that ignores conditions or refuses access; ControlPlaneUnavailable.
        """
        super().__init__(now, where=config.where, timeout_s=config.timeout_s)
        self._objects = S3Objects(config, session)
        self._proved = False
        if not reads_only:
            self._prove()

    def history(self) -> tuple[Record, ...]:
        """See `ControlPlane.history`."""
        return self._answer(
            "history", lambda: tuple(event.record for event in self._events(0) if event.record is not None)
        )

    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """See `ControlPlane.journal`."""
        return self._answer(
            "journal", lambda: tuple(event.line for event in self._events(start) if event.line.seq >= start)
        )

    def _prove(self) -> None:
        if not self._proved:
            self._answer("open", self._objects.prove_conditions)
            self._proved = True

    def _load(self, candidate: CandidateId) -> Seen:
        found = self._head()
        if found is None:
            if self._objects.get(_part(0)) is not None:
                if self._head() is not None:  # written, and full once, since it was looked for
                    return self._load(candidate)
                raise headless(self._where, _part(0))
            return Seen(first_head(), candidate, CandidateRow(), None)
        row = self._row(candidate, found.object) if candidate != NO_CANDIDATE else CandidateRow()
        return Seen(found.object.head, candidate, row, found)

    def _swap(self, seen: Seen, after: Head, event: Event | None, not_after: float | None) -> bool:
        self._prove()
        found: _Token | None = seen.token
        before = HeadObject(head=seen.head, begin=0, tail=()) if found is None else found.object
        if _is_full(before):
            self._copy_to_log(before)
            before = replace(before, begin=before.begin + len(before.tail), tail=())
        content = encode(replace(before, head=after, tail=(*before.tail, *([event] if event else []))))
        if found is None:
            return self._objects.create(_HEAD, content)
        return self._objects.replace(_HEAD, content, found.etag)

    def _landed(self, seen: Seen, after: Head, event: Event | None) -> bool:
        found = self._head()
        if found is None:
            return False
        if event is None or found.object.head.nonce == after.nonce:
            return found.object.head.nonce == after.nonce
        return any(each.nonce == after.nonce for each in self._events(event.line.seq))

    def _head(self) -> _Token | None:
        found = self._objects.get(_HEAD)
        if found is None:
            return None
        content, etag = found
        held = decode(content, HeadObject, f"{self._where}/{_HEAD}")
        of_this_format(held.head, self._where)
        return _Token(etag, held)

    def _row(self, candidate: CandidateId, at: HeadObject) -> CandidateRow:
        """What log and tail say of a candidate. Parts from `begin` on are copies of this tail, made but not cut off."""
        row = CandidateRow()
        for name in self._objects.names_below(_candidate_directory(candidate)) if at.begin else ():
            begin, attempts, dead = (int(number) for number in name.rsplit("/", 1)[1].split("-"))
            if begin < at.begin:
                row = CandidateRow(row.attempts + attempts, row.dead or bool(dead))
        for event in at.tail:
            row = touched(event, candidate, row)
        return row

    def _events(self, start: int) -> Iterator[Event]:
        """Every event from a part of the log that holds number `start`, in order."""
        found = self._head()
        if found is None:
            return
        names = [name for name in self._objects.names_below("log") if _begin_of(name) < found.object.begin]
        later = [name for name in names if _begin_of(name) > start]
        for name in names[max(0, len(names) - len(later) - 1) :]:
            content = self._objects.get(name)
            if content is None:
                raise OperatorNeeded(f"{self._where}/{name} was removed", "restore it; the log is part of the record")
            yield from decode(content[0], tuple[Event, ...], f"{self._where}/{name}")
        yield from found.object.tail

    def _copy_to_log(self, full: HeadObject) -> None:
        for candidate in sorted({each for event in full.tail if (each := candidate_of(event)) is not None}):
            row = CandidateRow()
            for event in full.tail:
                row = touched(event, candidate, row)
            name = f"{full.begin:020d}-{row.attempts}-{int(row.dead)}"
            self._objects.create(f"{_candidate_directory(candidate)}/{name}", candidate.encode())
        name, content = _part(full.begin), encode(full.tail)
        if not self._objects.create(name, content):
            kept = self._objects.get(name)
            if kept is not None and kept[0] != content:
                reason = f"{self._where}/{name} holds other events than the head"
                raise OperatorNeeded(reason, "an old head was put back; restore head and log from the same moment")


def _is_full(at: HeadObject) -> bool:
    return len(at.tail) >= TAIL_EVENTS or len(encode(at.tail)) >= TAIL_BYTES


def _part(begin: int) -> str:
    return f"log/{begin:020d}"


def _begin_of(name: str) -> int:
    return int(name.rsplit("/", 1)[1])


def _candidate_directory(candidate: CandidateId) -> str:
    return f"candidates/{hashlib.blake2b(candidate.encode(), digest_size=16).hexdigest()}"
