"""Seeded faults of the in-memory transport: which deliveries are lost, repeated, held back or altered.

The fate of a delivery is a function of the seed, the subscription's place in the attempt and the payload key alone, not
of thread timing. Only reordering looks at the order of arrival.

Paper: Table B.2 (lost messages)   Spec: Channel
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import AttemptId, PayloadKey


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Probabilities of delivery faults, each drawn for one subscription and one announcement or manifest."""

    seed: int = 0
    lose: float = 0.0
    """Not delivered until a poll has waited in vain; drawn again each time."""
    repeat: float = 0.0
    """Delivered once more."""
    reorder: float = 0.0
    """Delivered after up to `reorder_by` later ones."""
    reorder_by: int = 8
    late: float = 0.0
    """Held back until a poll has waited in vain, so possibly after the manifest."""
    stale: float = 0.0
    """Accompanied by an announcement of an older attempt that is still stored."""
    lose_for_good: float = 0.0
    """Never delivered."""
    forget: float = 0.0
    """The payload cannot be fetched."""
    alter: float = 0.0
    """The payload is fetched with one bit altered."""
    harm_through: AttemptId | None = None
    """`lose_for_good`, `forget` and `alter` strike attempts up to this one only; None means all."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not 0 <= value <= 1:
                raise InvalidConfig(f"faults.{field.name}", f"must be a probability, got {value}")
        if self.lose >= 1:
            raise InvalidConfig("faults.lose", "must be below 1; use lose_for_good")
        if self.reorder_by < 1:
            raise InvalidConfig("faults.reorder_by", f"must be at least 1, got {self.reorder_by}")

    def draw(self, fault: str, subscription: int, key: PayloadKey, round_: int = 0) -> float:
        """A number in [0, 1) that depends on the seed and the arguments only."""
        return Random(f"{self.seed} {fault} {subscription} {key} {round_}").random()

    def strikes(self, fault: str, subscription: int, key: PayloadKey, round_: int = 0) -> bool:
        """Whether `fault`, the name of one of the probabilities above, happens to this delivery."""
        harmful = fault in ("lose_for_good", "forget", "alter")
        if harmful and self.harm_through is not None and key.attempt > self.harm_through:
            return False
        probability: float = getattr(self, fault)
        return probability > 0 and self.draw(fault, subscription, key, round_) < probability
