"""Of which kind a failure of an attempt is: one of a few words, for counting.

The reason of a failed attempt is a sentence for people, with names and numbers in it. Counters need few and fixed
labels; a kind is read off the form of the sentence: as the attempt machine writes it, and where an endpoint failed by
an error of this package, as that error writes it.
Not handled: which endpoint it was (the sentence says so).

Paper: Table B.2 (failures)
"""

from __future__ import annotations

import re
from enum import StrEnum


class FailureKind(StrEnum):
    """Why an attempt failed."""

    RECEIVER_LOST = "receiver_lost"
    OWNER_LOST = "owner_lost"
    RECEIVER_RESTARTED = "receiver_restarted"
    OWNER_RESTARTED = "owner_restarted"
    REFUSED = "refused"
    """An endpoint refused to take part."""
    REPLACED = "replaced"
    """An endpoint was prepared for a later attempt, or stopped by another coordinator."""
    DEADLINE = "deadline"
    ABORTED = "aborted"
    CORRUPT = "corrupt"
    """A payload, a manifest or an acknowledged set is not what was sent."""
    MISSING = "missing"
    """A payload was announced and is not there."""
    TRANSPORT = "transport"
    """The payload store or the relays failed."""
    CONDITION = "condition"
    """A condition of a loader or a source does not hold."""
    ENGINE = "engine"
    """An engine's own API refused or failed."""
    CHECK = "check"
    """Storage is not what was written."""
    RECEIVER = "receiver"
    """Something else at a receiver."""
    OWNER = "owner"
    """Something else at an owner."""
    OTHER = "other"


_ENDPOINT = r"(?:receiver|owner) \S+"
_ERROR = rf"{_ENDPOINT}: (?:\w+: )?"
"""How an error at an endpoint is told: with its class in front or without."""
_FORMS = (
    (r"receiver \S+ is lost", FailureKind.RECEIVER_LOST),
    (r"owner \S+ is lost", FailureKind.OWNER_LOST),
    (r"receiver \S+ restarted", FailureKind.RECEIVER_RESTARTED),
    (r"owner \S+ restarted", FailureKind.OWNER_RESTARTED),
    (rf"{_ENDPOINT} refused", FailureKind.REFUSED),
    (rf"{_ENDPOINT} was prepared for attempt", FailureKind.REPLACED),
    (rf"{_ENDPOINT}: was stopped", FailureKind.REPLACED),
    (rf"{_ERROR}attempt \d+ has ended", FailureKind.REPLACED),
    (rf"{_ERROR}payload .+ (?:is not valid|conflicts with what is stored)", FailureKind.CORRUPT),
    (rf"{_ERROR}payload .+ is missing", FailureKind.MISSING),
    (rf"{_ERROR}(?:transport .+ failed|endpoint .+ is lost)", FailureKind.TRANSPORT),
    (rf"{_ERROR}condition \S+ broken", FailureKind.CONDITION),
    (rf"{_ERROR}engine .+ did not", FailureKind.ENGINE),
    (rf"{_ERROR}tensor .+ written elements do not read back", FailureKind.CHECK),
    (r"receiver \S+ acknowledged other payloads", FailureKind.CORRUPT),
    (r"deadline passed", FailureKind.DEADLINE),
    (r"abort was requested", FailureKind.ABORTED),
    (r"receiver \S+:", FailureKind.RECEIVER),
    (r"owner \S+:", FailureKind.OWNER),
)
_KINDS = tuple((re.compile(form), kind) for form, kind in _FORMS)


def kind_of_failure(reason: str) -> FailureKind:
    """The kind of a reason, as `AttemptEnded` tells it."""
    return next((kind for form, kind in _KINDS if form.match(reason)), FailureKind.OTHER)
