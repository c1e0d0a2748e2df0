"""Who may come in next at a relay node: room for a whole payload is reserved, strictly in the order of arrival.

Frames are granted only after that, so payloads that arrive at once never hold each other's room, and every node of a
tree admits in the order of its root. While there is no room, an older attempt gives way to a newer one; an attempt
whose receivers let payloads go waits for them; one that keeps everything until clean-up fails and says which limit to
raise.
Not handled: what is done with an admitted payload; see relaying.

Paper: Section 7 (relay tree); Appendix C (queues)   Spec: Channel
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nemo_dcr.errors import AttemptFailed, AttemptStopped, TransportFailed
from nemo_dcr.transport.relay.attempts import Attempt, AttemptTable, Entry
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.hop import Header
from nemo_dcr.transport.relay.store import Store


class Admission:
    """The queue of one node; used by its loop's thread alone."""

    def __init__(
        self,
        name: str,
        *,
        table: AttemptTable,
        store: Store,
        counters: NodeCounters,
        max_payload_bytes: int,
        start: Callable[[Attempt, Entry], None],
        fail: Callable[[Attempt, AttemptFailed], None],
    ) -> None:
        """`start` is told of a payload that has room, `fail` of an attempt that cannot go on; it calls `leave`."""
        self._name = name
        self._table = table
        self._store = store
        self._counters = counters
        self._max_payload_bytes = max_payload_bytes
        self._start = start
        self._fail = fail
        self._queue: deque[tuple[Attempt, Entry]] = deque()

    def require_size(self, header: Header) -> None:
        """Refuse a payload that can never be held, before anything is allocated for it. Raises: TransportFailed."""
        limit = min(self._max_payload_bytes, self._store.capacity)
        if header.nbytes > limit:
            detail = f"payload {header} of {header.nbytes} bytes is larger than {limit} bytes, which node {self._name}"
            raise TransportFailed("relay", f"{detail} can hold; raise its memory, spill or payload limit")

    def join(self, attempt: Attempt, entry: Entry) -> None:
        """A payload wants to come in."""
        self._queue.append((attempt, entry))
        self.admit()

    def leave(self, goes: Callable[[Attempt, Entry], bool]) -> None:
        """Those that wait and go, for whatever reason, wait no more."""
        self._queue = deque(waits for waits in self._queue if not goes(*waits))
        self.admit()

    def admit(self) -> None:
        """Reserve room for the payloads that wait, oldest first."""
        while self._queue:
            attempt, entry = self._queue[0]
            try:
                entry.body = self._store.reserve(entry.header.nbytes)
            except TransportFailed as problem:
                self._fail(attempt, problem)
                continue
            if entry.body is None:
                self._make_room(attempt)
                if self._queue and self._queue[0][1] is entry:
                    break
                continue
            self._queue.popleft()
            self._start(attempt, entry)
        self._counters.waiting = len(self._queue)

    def _make_room(self, attempt: Attempt) -> None:
        older = [each for each in self._table if each.number < attempt.number and any(e.body for e in each.entries())]
        if older:
            self._fail(older[0], AttemptStopped(older[0].number, f"attempt {attempt.number} needs its room"))
        elif attempt.receivers == 0:
            detail = f"node {self._name} is full and keeps payloads until clean-up; raise its memory or spill budget"
            self._fail(
                attempt, TransportFailed("relay", f"{detail}, or let the tree say how many receivers read there")
            )
