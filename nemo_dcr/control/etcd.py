"""The commit record in etcd: for coordinators on several hosts.

A step is two transactions. The first reads the head, and the row of a candidate, at one revision of the cluster. The
second compares the revisions that wrote them and writes head, event and rows, or nothing. A commit has its deadline in
that transaction: it compares that a key exists whose lease was granted for the time that is left, so etcd itself
refuses a commit that was under way for too long. Leases count whole seconds, two at least, and may live longer, never
shorter; what makes an outcome final is the next step, not the lease (see compare_and_set).

    PREFIX/head                     what every step compares
    PREFIX/journal/<20 digits>      one event of the log
    PREFIX/history/<20 digits>      the record of a version
    PREFIX/candidates/NAME          attempts of a candidate, and whether it is dead
    PREFIX/deadlines/<nonce>        lives as long as its commit may

Not handled: compaction and quota of etcd (an operator's, docs/control-plane.md). An epoch is a number in the head and
needs no lease: whoever acquires the next one replaces the one before, dead or not.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
Proofs: joint_commit_binds   Conditions: SC3, SC7
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from nemo_dcr.control.compare_and_set import ComparedControl, Seen
from nemo_dcr.control.etcd_client import EtcdClient, EtcdConfig, Operation
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
from nemo_dcr.ids import NO_CANDIDATE, CandidateId
from nemo_dcr.record import JournalEntry, Record

_HEAD, _JOURNAL, _HISTORY = "head", "journal", "history"
_LONGEST_LEASE_S = 10**9


@dataclass(frozen=True, slots=True)
class _Revisions:
    """The revisions that a step compares; 0 for a key that does not exist."""

    head: int
    candidate: int


class EtcdControl(ComparedControl):
    """A `ControlPlane` below one prefix of an etcd cluster; raises as `ComparedControl`."""

    def __init__(self, config: EtcdConfig, *, now: Callable[[], float] = time.time) -> None:
        """Ask nothing yet; `now` is the clock that deadlines are written in, in seconds."""
        super().__init__(now, where=config.where, timeout_s=config.timeout_s)
        self._client = EtcdClient(config)

    def history(self) -> tuple[Record, ...]:
        """See `ControlPlane.history`."""
        stored = self._answer("history", lambda: list(self._client.all_below(_HISTORY)))
        return tuple(decode(each.value, Record, f"{self._where}/{each.name}") for each in stored)

    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """See `ControlPlane.journal`."""
        stored = self._answer("journal", lambda: list(self._client.all_below(_JOURNAL, f"{start:020d}")))
        return tuple(decode(each.value, Event, f"{self._where}/{each.name}").line for each in stored)

    def _load(self, candidate: CandidateId) -> Seen:
        row_name = _row_name(candidate)
        found = self._client.get(_HEAD, *([row_name] if candidate != NO_CANDIDATE else []))
        row, head = CandidateRow(), first_head()
        if row_name in found:
            row = decode(found[row_name].value, CandidateRow, f"{self._where}/{row_name}")
        if _HEAD not in found:
            first = f"{_JOURNAL}/{0:020d}"
            again = self._client.get(_HEAD, first)  # at one revision: somebody may just have written the first step
            if _HEAD in again:
                return self._load(candidate)
            if first in again:
                raise headless(self._where, first)
            return Seen(head, candidate, row, None)
        head = of_this_format(decode(found[_HEAD].value, Head, f"{self._where}/{_HEAD}"), self._where)
        revisions = _Revisions(found[_HEAD].revision, found[row_name].revision if row_name in found else 0)
        return Seen(head, candidate, row, revisions)

    def _swap(self, seen: Seen, after: Head, event: Event | None, not_after: float | None) -> bool:
        client, revisions = self._client, seen.token or _Revisions(0, 0)
        compare = [client.unchanged(_HEAD, revisions.head)]
        write = [client.put(_HEAD, encode(after)), *self._event_rows(event)]
        if event is not None and (candidate := candidate_of(event)) is not None:
            compare.append(client.unchanged(_row_name(candidate), revisions.candidate))
            write.append(client.put(_row_name(candidate), encode(touched(event, candidate, seen.row))))
        if not_after is not None:
            deadline, left = f"deadlines/{after.nonce}", not_after - self._now()
            if left < 0 or not client.put_until(deadline, max(1, math.ceil(min(left, _LONGEST_LEASE_S)))):
                return False
            compare.append(client.exists(deadline))
            write.append(client.delete(deadline))
        succeeded, _ = client.transaction(compare, write, [])
        return succeeded

    def _landed(self, seen: Seen, after: Head, event: Event | None) -> bool:
        name = _HEAD if event is None else f"{_JOURNAL}/{event.line.seq:020d}"
        stored = self._client.get(name).get(name)
        if stored is None:
            return False
        kind: type[Head] | type[Event] = Head if event is None else Event
        return decode(stored.value, kind, f"{self._where}/{name}").nonce == after.nonce

    def _event_rows(self, event: Event | None) -> list[Operation]:
        if event is None:
            return []
        rows = [self._client.put(f"{_JOURNAL}/{event.line.seq:020d}", encode(event))]
        if event.record is not None:
            rows.append(self._client.put(f"{_HISTORY}/{event.record.version:020d}", encode(event.record)))
        return rows


def _row_name(candidate: CandidateId) -> str:
    return f"candidates/{quote(candidate, safe='')}"
