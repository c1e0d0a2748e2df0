"""The receiver's side of one attempt at its local relay node.

Announcements are asked for ahead, up to a bound; bytes only when they are fetched. An owner's manifest is built from
its announcements and must agree with the count and digest of its END. When the local node is lost, or the attempt
failed anywhere in the tree, a subscription that is not complete says so; one that is complete has nothing to lose.
Not handled: digests of payloads (the caller checks them).

Paper: Section 7 (relay tree); Figure B.2   Spec: Channel   Decisions: D24
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

from nemo_dcr.errors import AttemptFailed, AttemptStopped, PayloadCorrupt, PayloadMissing
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport.base import Announcement, Manifest
from nemo_dcr.transport.objects import manifest_of
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.client import RelayClient
from nemo_dcr.transport.relay.line import Fetching, Line
from nemo_dcr.transport.relay.publisher import WAKE_S
from nemo_dcr.transport.relay.tree import TreeNode

AHEAD = 1024
"""Announcements that may wait in a subscription before it asks for no more."""


class RelaySubscription:
    """As `Subscription`. One thread polls; any thread may fetch or stop."""

    def __init__(self, client: RelayClient, attempt: AttemptId, owners: Sequence[OwnerId], node: TreeNode) -> None:
        """Begin to read at `node`. Raises: InvalidConfig when it may not be spoken to."""
        client.security.check_connect(node)
        self.attempt = attempt
        self.owners = tuple(sorted(set(owners)))
        self._client = client
        self._node = node
        self._number = secrets.randbits(63)
        self._changed = threading.Condition()
        self._queue: deque[Announcement | Manifest] = deque()
        self._announced: dict[int, dict[int, Announcement]] = {owner: {} for owner in self.owners}
        self._closed: set[int] = set()
        self._failure: AttemptFailed | None = None
        self._stopped = False
        self._answered = False
        """The node has said what there is, or that there is no node."""
        self._answer_by = time.monotonic() + client.config.connect_s
        self._hungry = False
        """It asked for no more because its queue was long."""
        self._line: Line | None = None
        client.post(self._open)

    def poll(self, timeout_s: float) -> Announcement | Manifest | None:
        """The next announcement or manifest; an owner's manifest comes after all its announcements.

        The first polls wait, whatever `timeout_s` says, until the node has answered, at most `connect_s`: None means
        that there was nothing.

        Raises: EndpointLost naming a node that is lost, or what else failed the attempt in the tree, unless everything
        was delivered; PayloadCorrupt when an END does not agree with what came.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (self._queue or self._stopped):
                if self._failure is not None and len(self._closed) < len(self.owners):
                    raise wire.error_of(wire.fault_of(self._failure))
                left_s = (deadline if self._answered else max(deadline, self._answer_by)) - time.monotonic()
                if left_s <= 0 or self._client.fault is not None:
                    return None
                self._changed.wait(min(left_s, WAKE_S))
            if self._stopped:
                return None
            found = self._queue.popleft()
            if self._hungry and len(self._queue) < AHEAD // 2:
                self._hungry = False
                self._client.post(self._ask)
            return found

    def fetch(self, announcement: Announcement) -> bytes:
        """The payload's bytes as stored at the local node.

        Raises: PayloadMissing when the node does not hold it or the subscription is stopped; EndpointLost when the node
        is lost.
        """
        key = announcement.key
        if announcement.nbytes > self._client.config.max_payload_bytes:
            raise PayloadMissing(str(key), f"{announcement.nbytes} bytes are more than max_payload_bytes")
        if (known := self._announced.get(key.owner, {}).get(key.payload)) != announcement:
            raise PayloadMissing(str(key), f"it was not announced so; known: {known}")
        fetching = Fetching(announcement, lambda _: self._notify())
        numbers: list[int] = []
        self._client.post(lambda: self._fetch(fetching, numbers))
        with self._changed:
            while not (fetching.ended or self._stopped):
                self._changed.wait(WAKE_S)
                if self._client.fault is not None:
                    raise PayloadMissing(str(key), f"the client's thread ended: {self._client.fault!r}")
        if not fetching.ended:
            self._client.post(lambda: self._give_up(numbers))
            raise PayloadMissing(str(key), "the subscription was stopped")
        if fetching.error is not None:
            raise fetching.error
        self._client.post(lambda: self._fetched(announcement))
        return fetching.value()

    def stop(self) -> None:
        """Stop delivery; a blocked poll or fetch returns promptly."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._client.fault is None:
            self._client.post(self._leave)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------- the loop's thread

    def _open(self) -> None:
        try:
            self._line = self._client.line(self._node)
        except AttemptFailed as problem:
            self.fail(problem)
        else:
            self._line.subscribe(self, self._number)

    def _ask(self) -> None:
        if self._line is not None:
            self._line.ask(self._number)

    def _leave(self) -> None:
        if self._line is not None:
            self._line.leave(self._number)

    def _fetch(self, fetching: Fetching, numbers: list[int]) -> None:
        if self._line is not None:
            numbers.append(self._line.fetch(fetching))
        else:
            fetching.end(self._failure or PayloadMissing(str(fetching.announcement.key), "no connection"))

    def _give_up(self, numbers: list[int]) -> None:
        for number in numbers:
            if self._line is not None:
                self._line.give_up(number)

    def _fetched(self, announcement: Announcement) -> None:
        if self._line is not None:
            self._line.fetched(announcement, self._number)

    def take(self, entries: tuple[wire.Told | wire.Closed, ...]) -> bool:
        """As `Session.take`."""
        with self._changed:
            self._answered = True
            for entry in entries:
                if entry.owner in self._announced and entry.owner not in self._closed:
                    self._take(entry)
            complete = len(self._closed) == len(self.owners)
            self._hungry = not complete and len(self._queue) >= AHEAD
            self._changed.notify_all()
            return not (complete or self._hungry or self._stopped or self._failure)

    def _take(self, entry: wire.Told | wire.Closed) -> None:
        owner = OwnerId(entry.owner)
        announced = self._announced[owner]
        match entry:
            case wire.Told(payload=number, digest=digest, nbytes=nbytes):
                announcement = Announcement(PayloadKey(self.attempt, owner, number), digest, nbytes)
                if announced.setdefault(number, announcement) is announcement:
                    self._queue.append(announcement)
            case wire.Closed(count=count, digest=digest):
                manifest = manifest_of(self.attempt, owner, announced.values())
                if (len(manifest.payloads), manifest.digest) == (count, digest):
                    self._closed.add(owner)
                    self._queue.append(manifest)
                else:
                    name = f"{self.attempt}/{owner}/END"
                    detail = f"it counts {count} payloads, {len(manifest.payloads)} came, or their digests differ"
                    self._failure = PayloadCorrupt(name, detail)

    def fail(self, error: AttemptFailed) -> None:
        """As `Session.fail`. An attempt that was cleaned up is over and no failure."""
        with self._changed:
            self._answered = True
            if not isinstance(error, AttemptStopped):
                self._failure = self._failure or error
            self._changed.notify_all()
