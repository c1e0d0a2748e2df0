"""What a relay node holds of each attempt: its tree, the payloads by owner, and the log that local receivers read.

The log lists, in the order in which they became complete here, every announcement and every owner's END. Attempts up to
the cleaned mark are gone for good. A failed attempt keeps its error and none of its bytes.
Not handled: sending; see relaying and delivery.

Paper: Section 7 (relay tree); Appendix B (transports)   Spec: Channel   Decisions: D23, D24
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from nemo_dcr.errors import AttemptFailed, AttemptStopped, TransportFailed
from nemo_dcr.ids import NO_ATTEMPT, AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport.base import Announcement, Manifest
from nemo_dcr.transport.objects import manifest_of
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.hop import Header, Hop, Offer
from nemo_dcr.transport.relay.listener import Peer
from nemo_dcr.transport.relay.store import Body, Store
from nemo_dcr.transport.relay.tree import RelayTree


@dataclass(slots=True, eq=False)
class Entry:
    """One payload at one node."""

    header: Header
    peer: Peer
    """Who sends it, and gets the acknowledgement."""
    upload: int
    body: Body | None = None
    """None while it waits for room, and after it was let go."""
    inline: zmq.Frame | None = None
    """All bytes of a short payload, while it waits for room."""
    granted: int = 0
    granted_at: float = 0.0
    """When, by `time.monotonic()`."""
    complete: bool = False
    acked: bool = False
    """Queued here and at every node below."""
    offers: list[Offer] = field(default_factory=list)
    fetched: set[int] = field(default_factory=set)
    """Sessions that have all its bytes."""

    @property
    def announcement(self) -> Announcement:
        """What receivers are told."""
        header = self.header
        key = PayloadKey(header.attempt, header.owner, header.payload)
        return Announcement(key, header.digest, header.nbytes)


@dataclass(slots=True, eq=False)
class OwnerSet:
    """What one owner published."""

    entries: dict[int, Entry] = field(default_factory=dict)
    end: tuple[int, bytes] | None = None
    """Count and digest of the manifest, once the set is closed here."""
    open_below: int = 0
    """Children that did not yet confirm the END."""
    waiting: list[tuple[Peer, int]] = field(default_factory=list)
    """(peer, call) that wait for that."""

    def manifest(self, attempt: AttemptId, owner: OwnerId) -> Manifest:
        """The manifest of everything that is complete here."""
        return manifest_of(attempt, owner, [each.announcement for each in self.entries.values() if each.complete])


@dataclass(slots=True, eq=False)
class Waiting:
    """A local subscription that has read everything so far."""

    peer: Peer
    owners: frozenset[int]
    index: int


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at one node."""

    number: AttemptId
    tree: RelayTree | None = None
    """None until an owner's stream opens it; subscriptions may come before."""
    hops: tuple[Hop, ...] = ()
    sets: dict[OwnerId, OwnerSet] = field(default_factory=dict)
    upstream: dict[Peer, None] = field(default_factory=dict)
    """Who opened it: they are told when it fails."""
    log: list[wire.Told | wire.Closed] = field(default_factory=list)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    """By session."""
    failure: AttemptFailed | None = None

    def entries(self) -> Iterator[Entry]:
        """Every payload."""
        return (entry for owned in self.sets.values() for entry in owned.entries.values())

    @property
    def receivers(self) -> int:
        """Local subscriptions that will read here; 0 when the tree does not say."""
        return self.tree.root_node.receivers if self.tree is not None else 0


class AttemptTable:
    """The attempts of one node, and the bytes that they hold."""

    def __init__(self, store: Store, counters: NodeCounters, max_attempts: int) -> None:
        self._attempts: dict[AttemptId, Attempt] = {}
        self._store = store
        self._counters = counters
        self._max_attempts = max_attempts
        self.cleaned = NO_ATTEMPT
        """Attempts up to this one are gone."""

    def __iter__(self) -> Iterator[Attempt]:
        return iter(tuple(self._attempts.values()))

    def find(self, number: int) -> Attempt | None:
        """The attempt, if something is held of it."""
        return self._attempts.get(AttemptId(number))

    def enter(self, number: int) -> Attempt:
        """The attempt, made if it is new.

        Raises: AttemptStopped when it was cleaned up; TransportFailed when the node holds too many.
        """
        attempt = AttemptId(number)
        if attempt <= self.cleaned:
            raise AttemptStopped(attempt, "it was cleaned up")
        if attempt not in self._attempts:
            if len(self._attempts) >= self._max_attempts:
                detail = f"the node holds {len(self._attempts)} attempts that nobody cleaned up; clean up or restart it"
                raise TransportFailed("relay", detail)
            self._attempts[attempt] = Attempt(attempt)
            self._counters.attempts = len(self._attempts)
        return self._attempts[attempt]

    def drop_through(self, through: int) -> list[Attempt]:
        """Forget every attempt up to `through` and free its bytes; returns them."""
        self.cleaned = max(self.cleaned, AttemptId(through))
        dropped = [self._attempts.pop(number) for number in sorted(self._attempts) if number <= self.cleaned]
        for attempt in dropped:
            self.free(attempt)
        self._counters.attempts = len(self._attempts)
        return dropped

    def free(self, attempt: Attempt) -> None:
        """Let all bytes of an attempt go."""
        for entry in attempt.entries():
            self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """Let the bytes of one payload go."""
        body, entry.body = entry.body, None
        if body is not None:
            self._store.release(body)
