"""Windows, budgets and time limits of relay nodes and of those who talk to them.

Sizes are bytes, times are seconds unless the name says otherwise. A value that is out of range fails where it is
written.

Paper: Section 7 (relay tree); Appendix B (transports)   Spec: Channel
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nemo_dcr.config import MIB
from nemo_dcr.errors import InvalidConfig

FRAME_BYTES = MIB
"""Payload bytes of one message; only the last frame of a payload is shorter."""

INLINE_BYTES = 64 << 10
"""A payload of at most so many bytes travels with its offer, without being granted."""


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """Bounds of one relay node or client. Raises: InvalidConfig for a value that is not positive."""

    window_frames: int = 16
    """Frames that a sender may have under way for one payload: the bandwidth-delay product, in MiB."""
    memory_bytes: int = 4096 * MIB
    """Payload bytes that a node keeps in memory; what comes above goes to spill files."""
    spill_bytes: int = 65536 * MIB
    """Payload bytes in spill files. With both full, a node grants nothing until receivers have fetched."""
    max_payload_bytes: int = 8192 * MIB
    """A larger payload is refused before anything is allocated."""
    heartbeat_ms: int = 500
    heartbeat_timeout_ms: int = 2000
    """A peer that is not heard for so long counts as disconnected: a stopped process, a dead link. It must be longer
    than one frame takes on its connection: 2 s for a frame of 1 MiB is 4.2 Mbit/s."""
    handshake_ms: int = 2000
    patience_s: float = 1.0
    """A connection that stays broken for so long means that the node is lost; shorter breaks are resumed."""
    connect_s: float = 5.0
    """A first connection must be up by then."""
    call_s: float = 15.0
    """Clean-up and counters must be answered by then."""
    max_peers: int = 1024
    """Connections that a node remembers; past it, the one that was silent longest is forgotten."""
    max_attempts: int = 256
    """Attempts that a node holds state of; clean-up frees them."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise InvalidConfig(f"relay.{field.name}", f"must be positive, got {getattr(self, field.name)}")
        if self.heartbeat_timeout_ms < self.heartbeat_ms:
            raise InvalidConfig("relay.heartbeat_timeout_ms", "must not be below heartbeat_ms")

    @property
    def window_bytes(self) -> int:
        """Bytes that a sender may have under way for one payload."""
        return self.window_frames * FRAME_BYTES
