"""The operations of the control plane as steps: which facts each one looks at and which rule decides it.

A back end supplies `_step`: read the facts of one attempt and one candidate, call the rule, write its decision, all in
one atomic durable action. Nothing else differs between back ends.
Not handled: retries; a back end that cannot tell whether a step took effect raises ControlPlaneUnavailable.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
Proofs: joint_commit_binds   Conditions: SC3, SC7
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from nemo_dcr import control_rules
from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId, CandidateId, Epoch, Version
from nemo_dcr.record import (
    Acquired,
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
    Refused,
)

T = TypeVar("T")


class SteppedControl(ABC):
    """A `WatchedControlPlane` whose operations all pass through `_step`."""

    poll_s = 0.05
    """Seconds between two looks of `watch`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    @abstractmethod
    def _step(
        self, operation: str, attempt: AttemptId, candidate: CandidateId, decide: Callable[[Facts], Decision[T]]
    ) -> T:
        """Run one rule atomically and durably: what `decide` saw is unchanged when its decision is written."""

    @abstractmethod
    def _look(self, candidate: CandidateId) -> Facts:
        """The facts of a candidate at one moment; changes nothing."""

    @abstractmethod
    def history(self) -> tuple[Record, ...]:
        """See `ControlPlane.history`."""

    @abstractmethod
    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """See `ControlPlane.journal`."""

    def read(self, candidate: CandidateId = NO_CANDIDATE, *, clock: int = 0) -> ControlView:
        """See `ControlPlane.read`."""
        return self._step("read", NO_ATTEMPT, candidate, lambda facts: control_rules.decide_read(facts, clock))

    def peek(self, candidate: CandidateId = NO_CANDIDATE) -> ControlView:
        """See `WatchedControlPlane.peek`."""
        facts = self._look(candidate)
        return ControlView(
            record=facts.record,
            epoch=facts.epoch,
            last_attempt=facts.last,
            candidate_attempts=facts.candidate_attempts,
            candidate_dead=facts.candidate_dead,
            clock=facts.clock,
        )

    def watch(self, after: Version | None = None, *, timeout_s: float) -> Record | None:
        """See `WatchedControlPlane.watch`."""
        until = time.monotonic() + timeout_s
        while True:
            record = self._look(NO_CANDIDATE).record
            if record is not None and (after is None or record.version > after):
                return record
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(self.poll_s, left))

    def acquire_epoch(self, *, clock: int = 0) -> Acquired:
        """See `ControlPlane.acquire_epoch`."""
        return self._step(
            "acquire_epoch", NO_ATTEMPT, NO_CANDIDATE, lambda facts: control_rules.decide_acquire_epoch(facts, clock)
        )

    # The clock is read inside the rule: waiting for the lock may take longer than a deadline.

    def prepare(self, request: PrepareRequest, *, clock: int = 0) -> Prepared | Refused:
        """See `ControlPlane.prepare`."""
        return self._step(
            "prepare",
            NO_ATTEMPT,
            request.candidate,
            lambda facts: control_rules.decide_prepare(facts, request, self._now(), clock),
        )

    def commit(self, request: CommitRequest, *, clock: int = 0) -> Committed | Refused:
        """See `ControlPlane.commit`."""
        return self._step(
            "commit",
            request.attempt,
            request.new.candidate,
            lambda facts: control_rules.decide_commit(facts, request, self._now(), clock),
        )

    def kill(self, epoch: Epoch, candidate: CandidateId, *, clock: int = 0) -> Killed | Refused:
        """See `ControlPlane.kill`."""
        return self._step(
            "kill", NO_ATTEMPT, candidate, lambda facts: control_rules.decide_kill(facts, epoch, candidate, clock)
        )

    def bootstrap(self, epoch: Epoch, record: Record, *, clock: int = 0) -> Committed | Refused:
        """See `ControlPlane.bootstrap`."""
        return self._step(
            "bootstrap",
            record.attempt,
            record.candidate,
            lambda facts: control_rules.decide_bootstrap(facts, epoch, record, clock, self._now()),
        )
