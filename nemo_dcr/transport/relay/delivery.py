"""How a node serves its local receivers: what was published, from any place of the log on, and the bytes by frames.

A subscription asks for what comes after a place and is answered once there is something, so one that comes late, or
comes back after a break, sees everything. Bytes are sent as far as they were asked for. The node itself decides nothing
about a payload but whether it still holds it.
Not handled: digests (the receiver checks them).

Paper: Section 7 (relay tree)   Spec: Channel
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_dcr.errors import AttemptFailed, TransportFailed
from nemo_dcr.ids import OwnerId
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.attempts import Attempt, AttemptTable, Entry, Waiting
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.listener import Peer
from nemo_dcr.transport.relay.settings import FRAME_BYTES

MAX_SESSIONS = 1024
"""Subscriptions of one attempt that may wait at one node."""

Send = Callable[..., bool]


class Delivery:
    """The downstream half of one node; used by its loop's thread alone."""

    def __init__(
        self,
        *,
        table: AttemptTable,
        counters: NodeCounters,
        send: Send,
        read: Callable[[Attempt, Entry], None],
    ) -> None:
        """`read` is called when one more subscription has fetched a payload."""
        self._table = table
        self._counters = counters
        self._send = send
        self._read = read

    def next(self, peer: Peer, message: wire.Next) -> None:
        """Answer with what is new, or keep the question. Raises: TransportFailed past the limits."""
        if message.attempt <= self._table.cleaned:
            self._send(peer, wire.Gone(message.attempt, message.session))
            return
        attempt = self._table.enter(message.attempt)
        if len(attempt.waiting) >= MAX_SESSIONS and message.session not in attempt.waiting:
            raise TransportFailed("relay", f"more than {MAX_SESSIONS} subscriptions of attempt {attempt.number}")
        attempt.waiting[message.session] = Waiting(peer, frozenset(message.owners), message.index)
        self._answer(attempt, message.session, at_once=not message.wait)

    def published(self, attempt: Attempt) -> None:
        """The log has grown, or the attempt failed: answer who waits."""
        for session in tuple(attempt.waiting):
            self._answer(attempt, session)

    def dropped(self, attempt: Attempt) -> None:
        """The attempt was cleaned up."""
        for session, waiting in attempt.waiting.items():
            self._send(waiting.peer, wire.Gone(attempt.number, session))

    def _answer(self, attempt: Attempt, session: int, *, at_once: bool = False) -> None:
        waiting = attempt.waiting[session]
        if attempt.failure is not None:
            del attempt.waiting[session]
            self._send(waiting.peer, wire.Failed(attempt.number, wire.fault_of(attempt.failure)))
            return
        found: list[wire.Told | wire.Closed] = []
        while waiting.index < len(attempt.log) and len(found) < wire.MAX_ENTRIES:
            entry = attempt.log[waiting.index]
            waiting.index += 1
            if entry.owner in waiting.owners:
                found.append(entry)
        if found or at_once:
            del attempt.waiting[session]
            self._send(waiting.peer, wire.Entries(attempt.number, session, waiting.index, tuple(found)))

    def fetch(self, peer: Peer, message: wire.Fetch) -> None:
        """Send the frames that were asked for, or say that they are not here.

        Raises: TransportFailed for an offset inside a frame.
        """
        attempt = self._table.find(message.attempt)
        entry = self._find(attempt, message)
        if attempt is None or entry is None or entry.body is None or not entry.complete:
            detail = "this node does not hold it: never published, cleaned up, or let go after every receiver had it"
            if attempt is not None and attempt.failure is not None:
                detail = f"the attempt failed: {attempt.failure}"
            self._send(peer, wire.Missing(message.fetch, detail[:2000]))
            return
        header = entry.header
        if (header.nbytes, header.digest) != (message.nbytes, message.digest):
            self._send(peer, wire.Missing(message.fetch, "this node holds another size or digest under that number"))
            return
        if message.offset % FRAME_BYTES:
            raise TransportFailed("relay", f"fetch of {header}: {message.offset} is not where a frame begins")
        offset, traffic = message.offset, self._counters.of(header.owner)
        try:
            while offset < min(message.upto, header.nbytes):
                chunk = entry.body.chunk(offset)
                nbytes = len(chunk if isinstance(chunk, bytes) else chunk.buffer)
                if not self._send(peer, wire.Piece(message.fetch, offset), chunk):
                    return
                traffic.delivered += nbytes
                offset += nbytes
        except AttemptFailed as problem:  # the spill file cannot be read
            self._send(peer, wire.Missing(message.fetch, str(problem)[:2000]))

    def fetched(self, message: wire.Fetched) -> None:
        """One subscription has all bytes of a payload."""
        attempt = self._table.find(message.attempt)
        entry = self._find(attempt, message)
        if attempt is not None and entry is not None and entry.complete and len(entry.fetched) < MAX_SESSIONS:
            entry.fetched.add(message.session)
            self._read(attempt, entry)

    def _find(self, attempt: Attempt | None, message: wire.Fetch | wire.Fetched) -> Entry | None:
        owned = attempt.sets.get(OwnerId(message.owner)) if attempt is not None else None
        return owned.entries.get(message.payload) if owned is not None else None
