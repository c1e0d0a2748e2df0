"""The in-memory reference transport, with seeded faults.

It keeps the stored bytes of every payload until cleanup and gives every subscription its own queue. Faults act on
deliveries only: an announcement is lost, repeated, held back behind later ones, held back until a poll has waited in
vain, or accompanied by one of an older attempt; a payload is forgotten or comes back with one bit altered. A lost
announcement is announced again once a poll has waited in vain; what is lost for good never arrives. So a fault costs
time or fails the attempt with a typed error, and never changes what an honest receiver accepts.
Not handled: more than one process.

Paper: Section 7; Table B.2 (lost messages)   Spec: Channel
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence

from nemo_dcr.errors import AttemptStopped, InvalidConfig, PayloadConflict, PayloadMissing, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Buffer, Manifest
from nemo_dcr.transport.faults import FaultPlan


class _Set:
    """What one owner published in one attempt."""

    def __init__(self) -> None:
        self.announcements: dict[int, Announcement] = {}
        self.bodies: dict[int, bytes] = {}
        self.manifest: Manifest | None = None

    def log(self) -> list[Announcement | Manifest]:
        """Everything in the order of publication."""
        return [*self.announcements.values(), *([] if self.manifest is None else [self.manifest])]


class MemoryTransport:
    """A transport between the threads of one process."""

    def __init__(self, faults: FaultPlan | None = None, *, window: int = 264, capacity_bytes: int = 4 << 30) -> None:
        """Start empty.

        Args:
            faults: what goes wrong; nothing by default.
            window: announcements that may wait in one subscription before its publishers block.
            capacity_bytes: payload bytes stored at most; cleanup frees them.
        """
        if window < 1 or capacity_bytes < 1:
            raise InvalidConfig("memory.window and memory.capacity_bytes", "must be positive")
        self._faults = faults or FaultPlan()
        self._window = window
        self._capacity_bytes = capacity_bytes
        self._stored_bytes = 0
        self._changed = threading.Condition()
        self._sets: dict[AttemptId, dict[OwnerId, _Set]] = {}
        self._subscriptions: dict[AttemptId, list[MemorySubscription]] = {}

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> MemoryPublisher:
        """Open the owner's side of an attempt."""
        with self._changed:
            self._sets.setdefault(attempt, {}).setdefault(owner, _Set())
        return MemoryPublisher(self, attempt, owner)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> MemorySubscription:
        """Open the receiver's side of an attempt; sees everything published before and after."""
        with self._changed:
            others = self._subscriptions.setdefault(attempt, [])
            subscription = MemorySubscription(self, attempt, owners, len(others))
            others.append(subscription)
            for owner, published in sorted(self._sets.get(attempt, {}).items(), key=lambda item: item[0]):
                for entry in published.log() if owner in owners else ():
                    subscription.deliver(entry)
        return subscription

    def cleanup(self, through: AttemptId) -> None:
        """Delete every attempt up to and including `through`. Idempotent."""
        with self._changed:
            for attempt in [attempt for attempt in self._sets if attempt <= through]:
                for published in self._sets.pop(attempt).values():
                    self._stored_bytes -= sum(map(len, published.bodies.values()))
            for attempt in [attempt for attempt in self._subscriptions if attempt <= through]:
                del self._subscriptions[attempt]
            self._changed.notify_all()

    # Called by publishers and subscriptions, which share the condition.

    def _set(self, attempt: AttemptId, owner: OwnerId) -> _Set:
        try:
            return self._sets[attempt][owner]
        except KeyError:
            raise AttemptStopped(attempt, "it was cleaned up") from None

    def _older(self, attempt: AttemptId) -> list[Announcement]:
        return [
            announcement
            for older in sorted(a for a in self._sets if a < attempt)
            for _, published in sorted(self._sets[older].items(), key=lambda item: item[0])
            for announcement in published.announcements.values()
        ]

    def close(self) -> None:
        """There is nothing to let go of: what is stored goes with the object."""

    def _full(self, attempt: AttemptId, owner: OwnerId) -> bool:
        return any(s.waiting(owner) >= self._window for s in self._subscriptions.get(attempt, ()))

    def _announce(self, attempt: AttemptId, owner: OwnerId, entry: Announcement | Manifest) -> None:
        for subscription in self._subscriptions.get(attempt, ()):
            if owner in subscription.owners:
                subscription.deliver(entry)
        self._changed.notify_all()


class MemoryPublisher:
    """Owner side of one attempt in a `MemoryTransport`; its methods may be called from several threads."""

    def __init__(self, transport: MemoryTransport, attempt: AttemptId, owner: OwnerId) -> None:
        self._transport = transport
        self._attempt = attempt
        self._owner = owner
        self._published: dict[int, Announcement] = {}
        self._stopped = False

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        """Copy and announce one payload; see `Publisher.publish`. Blocks while a subscription is `window` behind."""
        objects.check_publish(self._attempt, self._owner, key, digest)
        body = bytes(memoryview(data))
        announcement = Announcement(key, bytes(digest), len(body))
        transport = self._transport
        with transport._changed:
            while self._running() and transport._full(self._attempt, self._owner):
                transport._changed.wait()
            published = transport._set(self._attempt, self._owner)
            present = published.announcements.get(key.payload)
            if present is None:
                if published.manifest is not None:
                    raise PayloadConflict(str(key), "the set is closed without it")
                if transport._stored_bytes + announcement.nbytes > transport._capacity_bytes:
                    detail = f"payload {key} of {announcement.nbytes} bytes passes {transport._capacity_bytes} bytes"
                    raise TransportFailed("memory", f"{detail} in all; clean up or raise capacity_bytes")
                published.announcements[key.payload] = announcement
                published.bodies[key.payload] = body
                transport._stored_bytes += announcement.nbytes
                transport._announce(self._attempt, self._owner, announcement)
            elif present != announcement or published.bodies[key.payload] != body:
                raise PayloadConflict(str(key), "the transport already holds other bytes")
            self._published[key.payload] = announcement
        return announcement

    def close_set(self) -> Manifest:
        """Announce the manifest; see `Publisher.close_set`. A second call returns the same manifest."""
        with self._transport._changed:
            self._running()
            published = self._transport._set(self._attempt, self._owner)
            name = f"{self._attempt}/{self._owner}"
            if others := sorted(published.bodies.keys() - self._published.keys()):
                detail = f"an earlier start of this owner left it, and {len(others) - 1} more"
                raise PayloadConflict(f"{name}/{others[0]}", detail)
            manifest = objects.manifest_of(self._attempt, self._owner, self._published.values())
            if published.manifest is None:
                published.manifest = manifest
                self._transport._announce(self._attempt, self._owner, manifest)
        return manifest

    def stop(self) -> None:
        """End this attempt: a blocked publish raises, and nothing more is announced."""
        with self._transport._changed:
            self._stopped = True
            self._transport._changed.notify_all()

    def _running(self) -> bool:
        if self._stopped:
            raise AttemptStopped(self._attempt, "its publisher was stopped")
        return True


class MemorySubscription:
    """Receiver side of one attempt in a `MemoryTransport`; its methods may be called from several threads."""

    def __init__(self, transport: MemoryTransport, attempt: AttemptId, owners: Sequence[OwnerId], number: int) -> None:
        self.owners = frozenset(owners)
        self._transport = transport
        self._attempt = attempt
        self._number = number
        self._arrivals = 0
        self._queue: list[tuple[int, int, Announcement | Manifest]] = []
        """Heap of (rank, arrival, entry); the rank is the arrival plus what reordering adds."""
        self._held: list[tuple[int, bool, Announcement | Manifest]] = []
        """(losses so far, lost, entry): what waits for a poll that waits in vain."""
        self._stopped = False

    def poll(self, timeout_s: float) -> Announcement | Manifest | None:
        """The next announcement or manifest; None after `timeout_s` seconds, and what was held back then comes due."""
        with self._transport._changed:
            self._transport._changed.wait_for(lambda: self._stopped or bool(self._queue), timeout_s)
            if self._stopped:
                return None
            if not self._queue:
                self._release()
                return None
            entry = heapq.heappop(self._queue)[2]
            self._transport._changed.notify_all()
            return entry

    def fetch(self, announcement: Announcement) -> bytes:
        """The payload's bytes as stored, or with one bit altered by the fault plan.

        Raises: PayloadMissing when it was cleaned up, was never published or was forgotten by the fault plan.
        """
        key = announcement.key
        faults = self._transport._faults
        with self._transport._changed:
            published = self._transport._sets.get(key.attempt, {}).get(key.owner)
            if published is None or published.announcements.get(key.payload) != announcement:
                raise PayloadMissing(str(key), "it was cleaned up or never published")
            body = published.bodies[key.payload]
        if faults.strikes("forget", self._number, key):
            raise PayloadMissing(str(key), "the fault plan forgot it")
        if body and faults.strikes("alter", self._number, key):
            altered = bytearray(body)
            bit = int(faults.draw("altered bit", self._number, key) * 8 * len(body))
            altered[bit // 8] ^= 1 << (bit % 8)
            return bytes(altered)
        return body

    def stop(self) -> None:
        """Stop delivery; a blocked poll returns None, and no publisher waits for this subscription."""
        with self._transport._changed:
            self._stopped = True
            self._queue.clear()
            self._held.clear()
            self._transport._changed.notify_all()

    def waiting(self, owner: OwnerId) -> int:
        """Announcements of `owner` that are queued here."""
        return sum(1 for _, _, entry in self._queue if isinstance(entry, Announcement) and entry.key.owner == owner)

    def deliver(self, entry: Announcement | Manifest, losses: int = 0) -> None:
        """Queue one announcement or manifest, as the fault plan has it. The transport's lock is held."""
        faults, number, key = self._transport._faults, self._number, _key_of(entry)
        if self._stopped or faults.strikes("lose_for_good", number, key):
            return
        if faults.strikes("lose", number, key, losses):
            self._held.append((losses + 1, True, entry))
        elif losses == 0 and faults.strikes("late", number, key):
            self._held.append((0, False, entry))
        else:
            self._push(entry)
        if losses == 0 and faults.strikes("repeat", number, key):
            self._push(entry)
        if losses == 0 and faults.strikes("stale", number, key) and (older := self._transport._older(key.attempt)):
            self._push(older[int(faults.draw("stale choice", number, key) * len(older))])

    def _push(self, entry: Announcement | Manifest) -> None:
        faults, key = self._transport._faults, _key_of(entry)
        rank = self._arrivals
        if faults.strikes("reorder", self._number, key, self._arrivals):
            rank += 1 + int(faults.draw("reorder by", self._number, key, self._arrivals) * faults.reorder_by)
        heapq.heappush(self._queue, (rank, self._arrivals, entry))
        self._arrivals += 1

    def _release(self) -> None:
        held, self._held = self._held, []
        for losses, lost, entry in held:
            if lost:
                self.deliver(entry, losses)
            else:
                self._push(entry)


def _key_of(entry: Announcement | Manifest) -> PayloadKey:
    return entry.key if isinstance(entry, Announcement) else objects.manifest_key(entry.attempt, entry.owner)
