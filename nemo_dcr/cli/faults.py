"""The fault that the demo injects: a link that stalls after some payloads of one attempt.

It stands between an owner and its transport. While it holds, receivers have applied a part of the attempt and wait for
the rest, which is when the demo kills an engine. Stopping the attempt releases the owner.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from nemo_dcr.errors import AttemptStopped
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport.base import Announcement, Buffer, Manifest, Publisher, Subscription, Transport


class StallingTransport:
    """A transport whose next publisher stalls after `payloads` payloads, once it was armed."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._armed: int | None = None

    def arm(self, payloads: int) -> None:
        """Stall the next attempt of this owner after so many payloads."""
        self._armed = payloads

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        """Open the owner's side; only one attempt is stalled for each call of `arm`."""
        inner = self._inner.publisher(attempt, owner)
        armed, self._armed = self._armed, None
        return inner if armed is None else _StallingPublisher(inner, armed, attempt)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> Subscription:
        """The receiver's side is not touched."""
        return self._inner.subscribe(attempt, owners)

    def cleanup(self, through: AttemptId) -> None:
        """As the inner transport."""
        self._inner.cleanup(through)

    def close(self) -> None:
        """As the inner transport."""
        self._inner.close()


class _StallingPublisher:
    def __init__(self, inner: Publisher, payloads: int, attempt: AttemptId) -> None:
        self._inner = inner
        self._left = payloads
        self._attempt = attempt
        self._turn = threading.Lock()
        self._stopped = threading.Event()

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        with self._turn:  # several payloads come at once
            self._stall_at_zero()
            self._left -= 1
        return self._inner.publish(key, data, digest)

    def close_set(self) -> Manifest:
        self._stall_at_zero()
        return self._inner.close_set()

    def stop(self) -> None:
        self._stopped.set()
        self._inner.stop()

    def _stall_at_zero(self) -> None:
        if self._left <= 0:
            self._stopped.wait()
        if self._stopped.is_set():
            raise AttemptStopped(self._attempt, "the stalled link was given up")
