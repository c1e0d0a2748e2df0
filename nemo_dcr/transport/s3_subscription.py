"""Receiver side of one attempt in an S3 object store: what is new is listed, announced, and read ahead.

A poll looks at the owners whose set is open, each with one listing that begins behind the payloads known so far, and so
does a fetch while little is announced, so that downloads do not stand still for a listing. When a look finds nothing,
looks become rarer, down to one in `look_most_s`. Once a fetch shows that somebody reads, the next announced payloads
are downloaded beside it, in order, within `read_ahead_bytes` and the requests of one process, and small objects that a
look finds are read whole instead of their frames first, because a request costs more than their bytes.
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
from nemo_dcr.transport.s3_bucket import Listed, S3Bucket, await_answer
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
    announced: set[int] = field(default_factory=set)
    next: int = 0
    """The first payload number that was not announced."""


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
        self._looking = False
        self._look_due = 0.0
        self._look_pause_s = _LOOK_FIRST_S
        self._unread: dict[PayloadKey, Announcement] = {}
        """Announced and not asked for, in order."""
        self._ahead: dict[PayloadKey, tuple[Announcement, Future[bytes]]] = {}
        self._is_read = False
        """Somebody fetches what is announced."""
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
                end = deadline + _LOOK_ENDS_S if self._looking else deadline
                if now >= end:
                    return None
                next_look = self._look_due if self._open and not self._looking else end
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
            self._ready.clear()
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- looking

    def _while_fetching(self, key: PayloadKey) -> None:
        """Called before and while a download is waited for."""
        self._check_running(key)
        with self._changed:
            if len(self._ready) < self._bucket.config.parallel:
                self._look_when_due()

    def _look_when_due(self) -> None:
        """Begin a look unless one runs or it is too early; the lock is held."""
        if self._open and not self._looking and not self._stopped.is_set() and time.monotonic() >= self._look_due:
            self._looking = True
            self._bucket.lookers.submit(self._look, list(self._open.values()))

    def _look(self, sets: list[_Set]) -> None:
        """One look at every open set; runs beside the polls and delivers what it finds."""
        found = False
        try:
            for each, names in zip(sets, self._bucket.pool.map(self._list, sets), strict=True):
                found = self._take(each, names) or found
        except AttemptStopped:
            pass  # by `stop`; nobody waits any more
        except Exception as problem:
            self._problem = problem
        with self._changed:
            self._looking = False
            self._look_pause_s = (
                _LOOK_FIRST_S if found else min(2 * self._look_pause_s, self._bucket.config.look_most_s)
            )
            self._look_due = time.monotonic() + self._look_pause_s
            self._changed.notify_all()

    def _list(self, known: _Set) -> list[Listed]:
        after = f"{known.name}/{objects.payload_name(known.next - 1)}" if known.next else ""
        return list(self._bucket.listing(f"{known.name}/", after=after))

    def _take(self, known: _Set, listed: list[Listed]) -> bool:
        """Announce what a listing shows; True when that was anything new."""
        sizes = {each.name.rpartition("/")[2]: each.nbytes for each in listed}
        if MANIFEST_NAME in sizes:
            manifest = stored_manifest(self._bucket, self._attempt, known.owner, self._check_look)
            if manifest is not None:
                self._deliver(known, [*manifest.payloads, manifest])
                return True
        numbers = {number: nbytes for name, nbytes in sizes.items() if (number := objects.payload_of(name)) is not None}
        new, at_once = sorted(numbers.keys() - known.announced), self._bucket.config.parallel
        for begin in range(0, len(new), at_once):
            batch = new[begin : begin + at_once]
            keys = [PayloadKey(self._attempt, known.owner, number) for number in batch]
            whole = self._to_be_read_whole([numbers[number] for number in batch])
            for is_whole, found in zip(whole, self._bucket.pool.map(self._read_new, keys, whole), strict=True):
                if found is not None and found.announcement is not None:
                    self._deliver(known, [found.announcement], found.body if is_whole else None)
        return bool(new)

    def _to_be_read_whole(self, sizes: Sequence[int]) -> list[bool]:
        """Which of these objects are small enough, and fit into what may be read ahead."""
        with self._changed:
            held = sum(announcement.nbytes for announcement, _ in self._ahead.values())
        whole = []
        for nbytes in sizes:
            alone = self._is_read and self._share is None
            fits = alone and nbytes <= SMALL_BYTES and held + nbytes <= self._bucket.config.read_ahead_bytes
            held += nbytes if fits else 0
            whole.append(fits)
        return whole

    def _read_new(self, key: PayloadKey, whole: bool) -> StoredObject | None:
        name = self._name(key)
        if not whole:
            return read_announcement(self._bucket, key, name, self._check_look)
        begin = time.monotonic()
        found = read_object(self._bucket, key, name, self._check_look, limit=SMALL_BYTES)
        self._downloads.append((key, begin, time.monotonic()))
        return found

    def _deliver(self, known: _Set, entries: Sequence[Announcement | Manifest], body: bytes | None = None) -> None:
        """Hand entries on to polls; `body` is that of the only entry, where it was read with it."""
        with self._changed:
            self._check_look()
            for entry in entries:
                if isinstance(entry, Manifest):
                    del self._open[known.owner]
                    self._ready.append(entry)
                elif entry.key.payload not in known.announced:
                    known.announced.add(entry.key.payload)
                    if body is None:
                        self._unread[entry.key] = entry
                    else:
                        there: Future[bytes] = Future()
                        there.set_result(body)
                        self._ahead[entry.key] = entry, there
                    self._ready.append(entry)
            while known.next in known.announced:
                known.next += 1
            self._changed.notify_all()

    def _check_look(self) -> None:
        if self._stopped.is_set():
            raise AttemptStopped(self._attempt, "its subscription was stopped")

    # ------------------------------------------------------------------------------------------------------ fetching

    def _start(self, announcement: Announcement) -> Future[bytes]:
        return self._bucket.pool.submit(self._obtain, announcement)

    def _obtain(self, announcement: Announcement) -> bytes:
        if self._share is None:
            return self._download(announcement)
        check = partial(self._check_running, announcement.key)
        return self._share.take(announcement, partial(self._download, announcement), check)

    def _read_ahead(self) -> None:
        """Start the next downloads; the lock is held."""
        held = sum(announcement.nbytes for announcement, _ in self._ahead.values())
        running = sum(not future.done() for _, future in self._ahead.values())
        for key, announcement in list(self._unread.items()):
            held += announcement.nbytes
            running += 1
            if held > self._bucket.config.read_ahead_bytes or running >= self._bucket.config.parallel:
                return
            del self._unread[key]
            self._ahead[key] = announcement, self._start(announcement)

    def _download(self, announcement: Announcement) -> bytes:
        key, config = announcement.key, self._bucket.config
        if announcement.nbytes > config.max_payload_bytes:
            limit = f"more than the limit of {config.max_payload_bytes}"
            raise PayloadCorrupt(str(key), f"it is announced with {announcement.nbytes} bytes, {limit}")
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
