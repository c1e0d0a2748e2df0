"""A control-plane step as one compare-and-set of a head that lies in another host's store.

Read the head, ask the rule, replace the head if it is still the one that was read; a lost race begins anew. A write
without an answer is sent again as it was: only one copy can find the head that it compares with. When a copy is
refused, the nonce tells whether an earlier one had landed. Nothing is sent again after the deadline of a commit.

Every step writes the head, a read too. So a write that is still under way when a later read has answered can never
land: that read settles the outcome for good, whatever the clocks of the hosts say (D14, D15).
Not handled: the requests themselves (etcd, s3).

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
Proofs: joint_commit_binds   Conditions: SC3, SC7
"""

from __future__ import annotations

import random
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nemo_dcr.control.head import CandidateRow, Event, Head, advance, facts_of
from nemo_dcr.control.steps import SteppedControl
from nemo_dcr.errors import ControlPlaneUnavailable, OperatorNeeded
from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId, CandidateId
from nemo_dcr.record import Decision, Facts

T = TypeVar("T")

_LONGEST_PAUSE_S = 0.5


class NoAnswer(Exception):
    """A request got no clear answer: it may have taken effect, or may still. Says where and why."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one step read."""

    head: Head
    candidate: CandidateId
    row: CandidateRow
    token: Any
    """What the back end compares with; None when there is no head yet."""


class ComparedControl(SteppedControl):
    """A `ControlPlane` over a store that can replace one thing if it is still what was read.

    Every method raises ControlPlaneUnavailable when the store gives no clear answer within `timeout_s`, and
    OperatorNeeded when the store refuses for good, or the record is damaged or was removed.
    """

    poll_s = 0.25

    def __init__(self, now: Callable[[], float], *, where: str, timeout_s: float) -> None:
        super().__init__(now)
        self._where = where
        self._timeout_s = timeout_s
        self._identity: str | None = None

    @property
    def identity(self) -> str | None:
        """Random name of this commit record; None before its first step. Attempt ids are unique within it."""
        self._look(NO_CANDIDATE)
        return self._identity

    @abstractmethod
    def _load(self, candidate: CandidateId) -> Seen:
        """The head and what is known of a candidate, as one consistent read. Raises: NoAnswer."""

    @abstractmethod
    def _swap(self, seen: Seen, after: Head, event: Event | None, not_after: float | None) -> bool:
        """Replace the head that was seen and log the event, in one atomic durable action.

        False: refused, because the head is another one, or `not_after` (seconds of the control plane's clock) passed.
        Raises: NoAnswer when neither is known.
        """

    @abstractmethod
    def _landed(self, seen: Seen, after: Head, event: Event | None) -> bool:
        """Whether that very step took effect, asked after it can not do so any more. Raises: NoAnswer.

        Of a step without an event it may say no although it did: such a step is simply made again.
        """

    def _step(
        self, operation: str, attempt: AttemptId, candidate: CandidateId, decide: Callable[[Facts], Decision[T]]
    ) -> T:
        until, races = time.monotonic() + self._timeout_s, 0
        while True:
            seen = self._see(operation, candidate, until)
            decision = decide(facts_of(seen.head, attempt, seen.row))
            if self._write(operation, seen, decision, until):
                self._identity = seen.head.identity
                return decision.reply
            races += 1
            if time.monotonic() >= until:
                detail = f"{self._where}: other writers won {races} races in {self._timeout_s:g} s"
                raise ControlPlaneUnavailable(operation, detail)
            _pause(races)

    def _look(self, candidate: CandidateId) -> Facts:
        seen = self._see("look", candidate, time.monotonic() + self._timeout_s)
        return facts_of(seen.head, NO_ATTEMPT, seen.row)

    def _see(self, operation: str, candidate: CandidateId, until: float) -> Seen:
        seen = self._asked(operation, until, lambda: self._load(candidate))
        found = None if seen.token is None else seen.head.identity
        if self._identity is None:
            self._identity = found
        elif found != self._identity:
            reason = f"the commit record {self._where} was removed or replaced while it was in use"
            raise OperatorNeeded(reason, "restore it, or start all parts anew on the new record")
        return seen

    def _write(self, operation: str, seen: Seen, decision: Decision[Any], until: float) -> bool:
        """Whether the decision took effect. Raises: ControlPlaneUnavailable when that is not known in time."""
        after, event = advance(seen.head, decision, secrets.token_hex(8))
        doubtful, tries = False, 0
        while True:
            try:
                if self._swap(seen, after, event, decision.not_after):
                    return True
                return doubtful and self._asked(operation, until, lambda: self._landed(seen, after, event))
            except NoAnswer as problem:
                doubtful, tries = True, tries + 1
                late = decision.not_after is not None and self._now() > decision.not_after
                if late or time.monotonic() >= until:
                    raise ControlPlaneUnavailable(operation, f"{self._where}: {problem}") from problem
            _pause(tries)

    def _answer(self, operation: str, ask: Callable[[], T]) -> T:
        """The answer to a question that changes nothing. Raises: ControlPlaneUnavailable."""
        return self._asked(operation, time.monotonic() + self._timeout_s, ask)

    def _asked(self, operation: str, until: float, ask: Callable[[], T]) -> T:
        """Repeat a question that changes nothing until it is answered."""
        tries = 0
        while True:
            try:
                return ask()
            except NoAnswer as problem:
                tries += 1
                if time.monotonic() >= until:
                    raise ControlPlaneUnavailable(operation, f"{self._where}: {problem}") from problem
            _pause(tries)


def _pause(tries: int) -> None:
    """Wait a random time that grows with the tries: writers that lost one race should not all meet in the next."""
    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.002 * 2**tries)))
