"""What a relay node and a publisher count: payload bytes by owner, first transmissions and repeats apart.

A byte counts as a repeat when the same byte of the same payload went over that connection's hop before, or came for a
payload that was there already. Headers and ZeroMQ's own bytes are not counted.
Not handled: interface bytes; the operating system counts those.

Paper: Section 7 (each payload crosses once); Appendix D (V_cross)   Spec: Channel
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Payload bytes of one owner at one place."""

    received: int = 0
    received_again: int = 0
    sent: int = 0
    """To all children together."""
    sent_again: int = 0
    delivered: int = 0
    """To local subscriptions."""


@dataclass(slots=True)
class NodeCounters:
    """One relay node as it stands."""

    node: str
    owners: dict[int, Traffic] = field(default_factory=dict)
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    spilled_bytes: int = 0
    spilled_peak_bytes: int = 0
    waiting: int = 0
    """Payloads that are offered and wait for room."""
    attempts: int = 0
    """Attempts that it holds state of."""
    peers: int = 0
    refused: int = 0
    """Messages that were not taken: unreadable, without a greeting, of a foreign attempt, out of place."""

    def of(self, owner: int) -> Traffic:
        """The traffic of one owner."""
        return self.owners.setdefault(owner, Traffic())
