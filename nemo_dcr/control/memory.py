"""The control plane in memory: the plainest back end, and the one that the others are compared with.

It keeps the rows as Python objects and applies `control_rules` under a lock.
Not handled: durability and other processes; it serves tests and single-process trials.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from nemo_dcr.control.steps import SteppedControl
from nemo_dcr.ids import NO_ATTEMPT, AttemptId, CandidateId, Epoch
from nemo_dcr.record import DELTA_MODES, AttemptEntry, Decision, Facts, JournalEntry, Record

T = TypeVar("T")


class MemoryControl(SteppedControl):
    """A `ControlPlane` between the threads of one process."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        """Start without a record; `now` is the control plane's clock in seconds."""
        super().__init__(now)
        self._lock = threading.Lock()
        self._epoch = Epoch(0)
        self._clock = 0
        self._attempts: list[AttemptEntry] = []
        self._records: list[Record] = []
        self._dead: set[CandidateId] = set()
        self._journal: list[JournalEntry] = []

    def history(self) -> tuple[Record, ...]:
        """See `ControlPlane.history`."""
        with self._lock:
            return tuple(self._records)

    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """See `ControlPlane.journal`."""
        with self._lock:
            return tuple(self._journal[start:])

    def _step(
        self, operation: str, attempt: AttemptId, candidate: CandidateId, decide: Callable[[Facts], Decision[T]]
    ) -> T:
        with self._lock:
            decision = decide(self._facts(attempt, candidate))
            self._clock = decision.clock
            if decision.epoch is not None:
                self._epoch = decision.epoch
            if decision.entry is not None:
                self._attempts.append(decision.entry)
            if decision.record is not None:
                self._records.append(decision.record)
            if decision.dead is not None:
                self._dead.add(decision.dead)
            if decision.journal is not None:
                self._journal.append(decision.journal)
            return decision.reply

    def _look(self, candidate: CandidateId) -> Facts:
        with self._lock:
            return self._facts(NO_ATTEMPT, candidate)

    def _facts(self, attempt: AttemptId, candidate: CandidateId) -> Facts:
        entries = [entry for entry in self._attempts if entry.attempt == attempt]
        of_candidate = [e for e in self._attempts if e.candidate == candidate and e.mode in DELTA_MODES]
        return Facts(
            record=self._records[-1] if self._records else None,
            epoch=self._epoch,
            last=self._attempts[-1].attempt if self._attempts else NO_ATTEMPT,
            entry=entries[0] if entries else None,
            candidate_attempts=len(of_candidate),
            candidate_dead=candidate in self._dead,
            clock=self._clock,
            journal_seq=len(self._journal),
        )
