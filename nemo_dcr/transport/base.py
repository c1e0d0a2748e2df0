"""What every transport offers: announce payloads of an attempt, close the set, deliver at least once.

A transport carries opaque bytes. It may lose, repeat, reorder and delay: receivers validate and deduplicate, and the
set of an owner is complete only when its manifest says so. Nothing here knows tensors.

Paper: Section 7 (object storage, relay tree); Appendix D (identifiers, digest)   Spec: Channel
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes that a sender hands over."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One payload that exists: its identity, the digest in its trailer and its size in bytes."""

    key: PayloadKey
    digest: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """END of one owner's stream (D24): the complete, ordered list of its payloads; may be empty."""

    attempt: AttemptId
    owner: OwnerId
    payloads: tuple[Announcement, ...]

    @property
    def digest(self) -> bytes:
        """BLAKE2b-128 over the payload numbers and digests in order."""
        state = hashlib.blake2b(digest_size=16)
        for payload in self.payloads:
            state.update(payload.key.payload.to_bytes(8, "little"))
            state.update(payload.digest)
        return state.digest()


class Publisher(Protocol):
    """Owner side of one attempt."""

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        """Make one payload available and announce it; blocks while queues are full. The caller may reuse `data` after.

        The same key with the same bytes is accepted again, also from a restarted owner (D31).

        Raises: PayloadConflict when the key holds other bytes or the set is closed; AttemptStopped; TransportFailed.
        ValueError when `key` names another attempt or owner, or `digest` is not 1 to 32 bytes.
        """
        ...

    def close_set(self) -> Manifest:
        """Publish the manifest of everything published so far, by payload number. Nothing may be published after it.

        Raises: PayloadConflict when the store holds another manifest or payloads that this publisher did not send;
        AttemptStopped; TransportFailed.
        """
        ...

    def stop(self) -> None:
        """End this attempt: a blocked publish returns by raising AttemptFailed, later ones raise too."""
        ...


class Subscription(Protocol):
    """Receiver side of one attempt on one node."""

    def poll(self, timeout_s: float) -> Announcement | Manifest | None:
        """The next announcement or manifest, or None after `timeout_s` seconds. Repeats are allowed.

        A transport may deliver what belongs to an older attempt, under its own identifiers: the caller drops it.

        Raises: AttemptFailed when the set can no longer arrive, for example because its manifest is damaged.
        """
        ...

    def fetch(self, announcement: Announcement) -> bytes:
        """The payload's bytes as stored; the caller checks the digest.

        Raises: PayloadMissing when the transport does not hold it after its own retries.
        """
        ...

    def stop(self) -> None:
        """Stop delivery; a blocked poll returns None promptly."""
        ...


@runtime_checkable
class Downloading(Protocol):
    """A subscription that downloads beside its caller, and says when."""

    def take_downloads(self) -> list[tuple[PayloadKey, float, float]]:
        """Begin and end, by the monotonic clock, of every download that has ended and was not told before."""
        ...


class Transport(Protocol):
    """One delivery path, opened by a node."""

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        """Open the owner's side of an attempt."""
        ...

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> Subscription:
        """Open the receiver's side of an attempt; sees everything published before and after."""
        ...

    def cleanup(self, through: AttemptId) -> None:
        """Delete everything of attempts up to and including `through`. Idempotent."""
        ...

    def close(self) -> None:
        """Let go of threads and connections; end publishers and subscriptions before. Idempotent."""
        ...
