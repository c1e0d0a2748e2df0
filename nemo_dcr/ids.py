"""The identifiers that every layer shares.

Integers come from the control plane (attempt, epoch, version) or from the process that names itself (incarnation).
A *receiver* is one rank of one engine *instance*; the instance is the unit of restart and gate, the *node* of delivery.

Paper: Section 6.3; Appendix D (attempt, owner and payload identifiers)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

Version = NewType("Version", int)
"""Committed policy version; the first record has version 0."""
AttemptId = NewType("AttemptId", int)
"""Given by the control plane's prepare, strictly increasing over all coordinators and transitions (D1); 0 is none."""
Epoch = NewType("Epoch", int)
"""Identity of one run of one coordinator (D2)."""
Incarnation = NewType("Incarnation", int)
"""New on every start of a process, so that a restarted receiver is never taken for its predecessor (D5)."""
OwnerId = NewType("OwnerId", int)
"""Rank of the trainer process that owns conversion tasks."""
InstanceId = NewType("InstanceId", str)
ReceiverId = NewType("ReceiverId", str)
"""`instance/rank`, see `receiver_id`."""
CandidateId = NewType("CandidateId", str)
"""Name of the frozen weights of one transition; the empty string means no transition is open."""

NO_ATTEMPT = AttemptId(0)
NO_CANDIDATE = CandidateId("")


def receiver_id(instance: InstanceId, rank: int) -> ReceiverId:
    """Name the receiver that is rank `rank` of `instance`."""
    return ReceiverId(f"{instance}/{rank}")


def instance_of(receiver: ReceiverId) -> InstanceId:
    """The instance that `receiver` is a rank of."""
    return InstanceId(receiver.rsplit("/", 1)[0])


@dataclass(frozen=True, order=True, slots=True)
class Member:
    """A receiver of a required set, bound to one incarnation (D5)."""

    receiver: ReceiverId
    incarnation: Incarnation


@dataclass(frozen=True, order=True, slots=True)
class PayloadKey:
    """Identity of a payload and the deduplication key (D23, D31)."""

    attempt: AttemptId
    owner: OwnerId
    payload: int
    """Counts from 0 for each (attempt, owner)."""

    def __str__(self) -> str:
        return f"{self.attempt}/{self.owner}/{self.payload}"
