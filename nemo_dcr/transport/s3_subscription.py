"""Receiver side of one attempt in an S3 object store: what is new is listed, announced, and read ahead.

A poll looks at the owners whose set is open, each with one listing that begins behind the objects known so far, and so
does a fetch while little is announced. A look does not wait for the objects that it finds: they are read beside it, and
the next look comes when few of them are left to read, so the link carries objects while listings travel. When a look
finds nothing, looks become rarer, down to one in `look_most_s`. Once a fetch shows that somebody reads, the next
announced payloads are downloaded beside it, in order, within `read_ahead_bytes` and the requests of one process, and
small objects that a look finds are read whole instead of their frames first, because a request costs more than their
bytes.
Requests run on threads of the bucket, so a stop ends a poll or a fetch at once, whatever the server does.
Receivers of one node share downloads where they are given a `NodeShare`; then frames alone are read when found.

Paper: Section 7 (object storage: receivers fetch every listed payload)   Spec: Channel
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from nemo_dcr.errors import AttemptStopped, PayloadCorrupt, PayloadMissing
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Manifest
from nemo_dcr.transport.node_share import NodeShare
from nemo_dcr.transport.s3_bucket import S3Bucket, await_answer
from nemo_dcr.transport.s3_object import (
    MANIFEST_NAME,
    StoredObject,
    read_announcement,
    read_object,
    set_name,
    stored_manifest,
)

_LOOK_FIRST_S = 0.01
_LOOK_ENDS_S = 5.0
"""A poll waits so much longer than asked for a look that runs, so that every poll may find what is there."""
_RETRY_FIRST_S, _RETRY_MOST_S = 0.02, 0.5
SMALL_BYTES = 256 << 10
"""Objects up to this size are read whole when they are found."""


@dataclass(slots=True)
class _Set:
    """What is known of one owner's set while it is open."""

    owner: OwnerId
    name: str
    announced: dict[int, Announcement] = field(default_factory=dict)
    found: dict[int, Future[bytes] | None] = field(default_factory=dict)
    """Numbers that a look found and that are not announced; with a future where the whole object is being read."""
    next: int = 0
    """The first payload number that no look found."""

    def advance(self) -> None:
        """Skip what was found."""
        while self.next in self.announced or self.next in self.found:
            self.next += 1


@dataclass(frozen=True, slots=True)
class _Find:
    """An object that a look found and that is not read yet."""

    known: _Set
    number: int
    nbytes: int


class S3Subscription:
    """Receiver side of one attempt in an `S3ObjectStore`; its methods may be called from several threads."""

    def __init__(
        self, bucket: S3Bucket, attempt: AttemptId, owners: Sequence[OwnerId], share: NodeShare | None = None
    ) -> None:
        self._bucket = bucket
        self._share = share if share is not None and share.begin(attempt) else None
        self._attempt = attempt
        self._owners = frozenset(owners)
        self._open = {owner: _Set(owner, set_name(attempt, owner)) for owner in owners}
        self._changed = threading.Condition()
        self._ready: deque[Announcement | Manifest] = deque()
        self._problem: Exception | None = None
        self._looking = 0
        """Sets that are being looked at."""
        self._new = False
        """Whether this look found anything."""
        self._look_due = 0.0
        self._look_pause_s = _LOOK_FIRST_S
        self._unread: dict[PayloadKey, Announcement] = {}
        """Announced and not asked for, in order."""
        self._ahead: dict[PayloadKey, tuple[Announcement, Future[bytes]]] = {}
        self._downloading = 0
        """Announced payloads that are being downloaded, asked for or ahead."""
        self._is_read = False
        """Somebody fetches what is announced."""
        self._finds: deque[_Find] = deque()
        self._reading: dict[tuple[OwnerId, int], int] = {}
        """Finds that are being read: bytes of those that are read whole, 0 for the others."""
        self._downloads: deque[tuple[PayloadKey, float, float]] = deque()
        self._stopped = threading.Event()

    def poll(self, timeout_s: float) -> Announcement | Manifest | None:
        """The next announcement or manifest; an owner's manifest comes after all its announcements.

        Raises: PayloadCorrupt when a manifest is damaged; TransportFailed when the store cannot be read.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._stopped.is_set():
                if self._ready:
                    return self._ready.popleft()
                if self._problem is not None:
                    raise self._problem
                self._look_when_due()
                now = time.monotonic()
                end = deadline + _LOOK_ENDS_S if self._looking or self._reading else deadline
                if now >= end:
                    return None
                next_look = self._look_due if self._may_look() else end
                self._changed.wait(min(end, next_look) - now)
        return None

    def fetch(self, announcement: Announcement) -> bytes:
        """The payload's bytes as stored; waits up to `missing_after_s` for an object that is absent or not whole.

        Raises: PayloadMissing when it stays so, when the subscription is stopped, or when the stored object has another
        size or digest than the announcement; PayloadCorrupt when it is announced larger than `max_payload_bytes`;
        TransportFailed when the store cannot be read.
        """
        key = announcement.key
        if key.attempt != self._attempt or key.owner not in self._owners:
            raise PayloadMissing(str(key), f"this subscription reads attempt {self._attempt} of other owners")
        self._check_size(announcement)  # before a request of any kind
        with self._changed:
            self._check_running(key)
            self._is_read = True
            self._unread.pop(key, None)
            ahead = self._ahead.pop(key, None)
            wanted = ahead[1] if ahead is not None and ahead[0] == announcement else self._start(announcement)
            self._read_ahead()
        return await_answer(wanted, lambda: self._while_fetching(key))

    def take_downloads(self) -> list[tuple[PayloadKey, float, float]]:
        """See `Downloading`; the frames that are read alone do not count."""
        taken = []
        while self._downloads:
            taken.append(self._downloads.popleft())
        return taken

    def stop(self) -> None:
        """Stop delivery; a blocked poll or fetch returns promptly. Downloads end at their next block."""
        with self._changed:
            self._stopped.set()
            for _, future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
            self._unread.clear()
            self._finds.clear()
            self._ready.clear()
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- looking

    def _while_fetching(self, key: PayloadKey) -> None:
        """Called before and while a download is waited for."""
        self._check_running(key)
        with self._changed:
            self._look_when_due()

    def _may_look(self) -> bool:
        """Whether another look is of use; the lock is held."""
        left = len(self._reading) + len(self._finds) + self._downloading
        few = left < self._bucket.config.parallel
        return bool(self._open) and not self._looking and not self._stopped.is_set() and few

    def _look_when_due(self) -> None:
        """Begin a look unless it is of no use or too early; the lock is held."""
        if self._may_look() and time.monotonic() >= self._look_due:
            self._looking, self._new = len(self._open), False
            for known in self._open.values():
                self._bucket.lookers.submit(self._look, known)

    def _look(self, known: _Set) -> None:
        """Look at one open set; runs beside the polls and delivers what it finds. The last one ends the look."""
        found = False
        try:
            self._check_look()
            found = self._look_at(known)
        except AttemptStopped:
            pass  # by `stop`; nobody waits any more
        except Exception as problem:
            self._problem = problem
        with self._changed:
            self._new = self._new or found
            self._looking -= 1
            if not self._looking:
                most_s = self._bucket.config.look_most_s
                self._look_pause_s = _LOOK_FIRST_S if self._new else min(2 * self._look_pause_s, most_s)
                self._look_due = time.monotonic() + self._look_pause_s
            self._changed.notify_all()

    def _look_at(self, known: _Set) -> bool:
        """List what is new in one set; True when there was anything. Its manifest tells of all its payloads at once."""
        after = f"{known.name}/{objects.payload_name(known.next - 1)}" if known.next else ""
        sizes = {
            each.name.rpartition("/")[2]: each.nbytes for each in self._bucket.listing(f"{known.name}/", after=after)
        }
        if MANIFEST_NAME in sizes:
            manifest = stored_manifest(self._bucket, self._attempt, known.owner, self._check_look)
            if manifest is not None:
                self._deliver(known, [*manifest.payloads, manifest])
                return True
        numbers = {number: nbytes for name, nbytes in sizes.items() if (number := objects.payload_of(name)) is not None}
        with self._changed:
            new = sorted(numbers.keys() - known.announced - known.found.keys())
            known.found.update(dict.fromkeys(new))
            known.advance()
            self._finds += [_Find(known, number, numbers[number]) for number in new]
            self._read_finds()
        return bool(new)

    def _read_finds(self) -> None:
        """Begin to read what was found, in order; the lock is held."""
        while self._finds and len(self._reading) < self._bucket.config.parallel and not self._stopped.is_set():
            find = self._finds.popleft()
            if find.number in find.known.announced:  # its manifest came first
                continue
            held = sum(announcement.nbytes for announcement, _ in self._ahead.values()) + sum(self._reading.values())
            alone = self._is_read and self._share is None
            fits = held + find.nbytes <= self._bucket.config.read_ahead_bytes
            whole = alone and fits and find.nbytes <= SMALL_BYTES
            self._reading[find.known.owner, find.number] = find.nbytes if whole else 0
            reading = self._bucket.pool.submit(self._read_find, find, whole)
            find.known.found[find.number] = reading if whole else None

    def _read_find(self, find: _Find, whole: bool) -> bytes:
        """Read the frame of a find, or all of it, and announce it; returns the body of what was read whole."""
        known, key = find.known, PayloadKey(self._attempt, find.known.owner, find.number)
        found: StoredObject | None = None
        begin = time.monotonic()
        try:
            self._check_look()
            if whole:
                found = read_object(self._bucket, key, self._name(key), self._check_look, limit=SMALL_BYTES)
                self._downloads.append((key, begin, time.monotonic()))
            else:
                found = read_announcement(self._bucket, key, self._name(key), self._check_look)
        except AttemptStopped:
            raise
        except Exception as problem:
            self._problem = problem
            raise
        finally:
            with self._changed:
                del self._reading[key.owner, key.payload]
                self._settle(known, key, found)
                self._read_finds()
                self._changed.notify_all()
        announced = known.announced.get(key.payload)
        if not whole or announced is None:
            return b""
        # A manifest may have announced another object than the one that was read.
        return found.body if found is not None and found.announcement == announced else self._download(announced)

    def _settle(self, known: _Set, key: PayloadKey, found: StoredObject | None) -> None:
        """Announce a find that was read, unless its manifest did; the lock is held."""
        if found is not None and found.announcement is not None and not self._stopped.is_set():
            self._announce(known, found.announcement)
        if key.payload in known.found:  # not whole, or gone again: a later look finds it anew
            del known.found[key.payload]
            known.next = min(known.next, key.payload)

    def _deliver(self, known: _Set, entries: Sequence[Announcement | Manifest]) -> None:
        """Hand the payloads of a manifest on to polls, and the manifest after them."""
        with self._changed:
            self._check_look()
            for entry in entries:
                if isinstance(entry, Manifest):
                    del self._open[known.owner]
                    self._ready.append(entry)
                else:
                    self._announce(known, entry)
            self._changed.notify_all()

    def _announce(self, known: _Set, payload: Announcement) -> None:
        """Hand a payload on to polls, once; the lock is held."""
        number = payload.key.payload
        if number in known.announced:
            return
        known.announced[number] = payload
        reading = known.found.pop(number, None)
        if reading is None:
            self._unread[payload.key] = payload
        else:
            self._ahead[payload.key] = payload, reading
        known.advance()
        self._ready.append(payload)

    def _check_look(self) -> None:
        if self._stopped.is_set():
            raise AttemptStopped(self._attempt, "its subscription was stopped")

    # ------------------------------------------------------------------------------------------------------ fetching

    def _start(self, announcement: Announcement) -> Future[bytes]:
        """Begin a download; the lock is held."""
        self._downloading += 1
        return self._bucket.pool.submit(self._obtain, announcement)

    def _obtain(self, announcement: Announcement) -> bytes:
        try:
            if self._share is None:
                return self._download(announcement)
            check = partial(self._check_running, announcement.key)
            return self._share.take(announcement, partial(self._download, announcement), check)
        finally:
            with self._changed:
                self._downloading -= 1
                self._read_ahead()
                self._changed.notify_all()

    def _read_ahead(self) -> None:
        """Start the next downloads once somebody reads; the lock is held."""
        held = sum(announcement.nbytes for announcement, _ in self._ahead.values())
        for key, announcement in list(self._unread.items() if self._is_read else ()):
            held += announcement.nbytes
            if held > self._bucket.config.read_ahead_bytes or self._downloading >= self._bucket.config.parallel:
                return
            del self._unread[key]
            self._ahead[key] = announcement, self._start(announcement)

    def _check_size(self, announcement: Announcement) -> None:
        most = self._bucket.config.max_payload_bytes
        if announcement.nbytes > most:
            reason = f"it is announced with {announcement.nbytes} bytes, more than the limit of {most}"
            raise PayloadCorrupt(str(announcement.key), reason)

    def _download(self, announcement: Announcement) -> bytes:
        key, config = announcement.key, self._bucket.config
        self._check_size(announcement)
        deadline = time.monotonic() + config.missing_after_s
        pause_s = _RETRY_FIRST_S
        while True:
            begin = time.monotonic()
            found = read_object(
                self._bucket,
                key,
                self._name(key),
                lambda: self._check_running(key),
                limit=config.max_payload_bytes,
                wanted=announcement,
            )
            if found is not None and found.announcement == announcement:
                self._downloads.append((key, begin, time.monotonic()))
                return found.body
            self._check_running(key)
            if time.monotonic() >= deadline:
                raise PayloadMissing(str(key), f"{self._bucket.key(self._name(key))} {_what(found)}")
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MOST_S)

    def _name(self, key: PayloadKey) -> str:
        return f"{set_name(self._attempt, key.owner)}/{objects.payload_name(key.payload)}"

    def _check_running(self, key: PayloadKey) -> None:
        if self._stopped.is_set():
            raise PayloadMissing(str(key), "the subscription was stopped")


def _what(found: StoredObject | None) -> str:
    if found is None:
        return "is absent"
    return "is truncated or foreign" if found.announcement is None else "has another size or digest"
