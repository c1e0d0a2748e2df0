"""Frozen configuration with the defaults of Appendix C.

Sizes are bytes, times are seconds. Each class validates itself, so a bad value fails where it is written.

Paper: Appendix C (chunk, bucket and queue sizes); Appendix B (deadlines, retries)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_dcr.errors import InvalidConfig

MIB = 1 << 20

OBJECT_STORAGE_CHUNK_BYTES = 64 * MIB
RELAY_TREE_CHUNK_BYTES = 256 * MIB


class GateMode(StrEnum):
    """When the request gate closes (Section 7)."""

    SYNC = "sync"
    """At the first prepare of the transition; payloads are applied as they arrive."""
    ASYNC = "async"
    """After the last payload is staged on every required receiver; serving goes on until then."""


def _positive(owner: str, **values: float) -> None:
    for field, value in values.items():
        if not value > 0:
            raise InvalidConfig(f"{owner}.{field}", f"must be positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How records are grouped and compressed, and what a decoder accepts."""

    chunk_target_bytes: int = OBJECT_STORAGE_CHUNK_BYTES
    """Input bytes compared at a time: 64 MiB for object storage, 256 MiB for the relay tree."""
    bucket_target_bytes: int = 512 * MIB
    """Input bytes of the chunks behind one payload: 512 MiB. Whole tensors are never split."""
    zstd_level: int = 1
    """Level 1: higher levels are slower and larger on value planes."""
    max_payload_bytes: int = 8 * 1024 * MIB
    """A decoder refuses a payload that declares a larger body, before it allocates."""
    max_metadata_bytes: int = 64 * MIB
    """A decoder refuses more item metadata; about 100 bytes an item."""
    max_tensor_elements: int = 1 << 48
    """A decoder refuses a shape with more elements."""

    def __post_init__(self) -> None:
        _positive(
            "codec",
            chunk_target_bytes=self.chunk_target_bytes,
            bucket_target_bytes=self.bucket_target_bytes,
            zstd_level=self.zstd_level,
            max_payload_bytes=self.max_payload_bytes,
            max_metadata_bytes=self.max_metadata_bytes,
            max_tensor_elements=self.max_tensor_elements,
        )
        if self.zstd_level > 22:
            raise InvalidConfig("codec.zstd_level", f"must be 1 to 22, got {self.zstd_level}")


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """Bounds of the queues between the stages of an owner and of a receiver."""

    buckets_ahead: int = 1
    """Buckets that an owner has built and not begun to encode."""
    payloads_ahead: int = 2
    """Payloads that an owner has encoded and not begun to publish."""
    payloads_in_flight: int = 4
    """Payloads of an owner that are sent and not acknowledged: a link stands still where they carry fewer bytes than
    its bandwidth times the time to an acknowledgement."""
    in_flight_bytes: int = 256 * MIB
    """Their bytes; a larger payload goes alone."""
    resident_groups: int = 32
    """Groups of decoded payloads that may wait for application: 32."""
    group_payloads: int = 8
    """Decoded payloads of one group, applied by one loader call: at most 8. One more group is under assembly."""
    staging_bytes: int = 4096 * MIB
    """Host memory for compressed payloads that wait for decoding. A gate that holds the whole delta spills more to
    disk; otherwise intake waits."""
    spill_directory: str = ""
    """Where spill files are made, without a name; empty: the system's directory for temporary files."""

    def __post_init__(self) -> None:
        _positive(
            "queue",
            buckets_ahead=self.buckets_ahead,
            payloads_ahead=self.payloads_ahead,
            payloads_in_flight=self.payloads_in_flight,
            in_flight_bytes=self.in_flight_bytes,
            resident_groups=self.resident_groups,
            group_payloads=self.group_payloads,
            staging_bytes=self.staging_bytes,
        )

    @property
    def payload_slots(self) -> int:
        """Decoded payloads held at most: 264 with the defaults."""
        return (self.resident_groups + 1) * self.group_payloads


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Where owners keep the committed baseline."""

    dir: str = ""
    """A directory of this host for mapped files that outlive the trainer process; empty: in memory. A restarted owner
    takes them over only where the commit record and a digest of every word say that they are the committed version."""


@dataclass(frozen=True, kw_only=True)
class RefitConfig:
    """Deadlines, retries and gate of a transition."""

    gate: GateMode = GateMode.SYNC
    attempt_deadline_s: float = 600.0
    """An attempt without all acknowledgements by then has failed."""
    call_timeout_s: float = 5.0
    """A control call without a reply by then is repeated or counts as a lost endpoint."""
    heartbeat_s: float = 0.2
    """How often endpoints are asked for their status."""
    lost_after_s: float = 2.5
    """An endpoint that is silent for so long is lost and named."""
    commit_deadline_s: float = 10.0
    """The control plane refuses a commit that arrives later than this after its request."""
    clock_skew_s: float = 1.0
    """Bound on the clock difference between coordinator and control plane; costs time, never safety (D15)."""
    max_attempts: int = 5
    """After so many failed attempts the transition is aborted and an operator is needed (D26)."""
    post_apply_check: bool = False
    """Read every written bit back before the acknowledgement."""
    prewarm_copy: bool = True
    """Keep the rank's resident bytes on the host while prewarm runs, so that a loader's foreign writes can be undone;
    without it they are noticed by checksums, and that engine has to be started again."""

    def __post_init__(self) -> None:
        _positive(
            "refit",
            attempt_deadline_s=self.attempt_deadline_s,
            call_timeout_s=self.call_timeout_s,
            heartbeat_s=self.heartbeat_s,
            lost_after_s=self.lost_after_s,
            commit_deadline_s=self.commit_deadline_s,
            max_attempts=self.max_attempts,
        )
        if self.clock_skew_s < 0:
            raise InvalidConfig("refit.clock_skew_s", f"must not be negative, got {self.clock_skew_s}")
