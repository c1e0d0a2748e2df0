"""How a node takes payloads from above and passes them on: credits, cut-through, acknowledgement, failure.

A payload that was admitted is offered to every child, and its frames are granted. A frame is kept for local receivers
and goes on at once to each child that granted it; the sender is granted more once every child was sent what is here, so
a slow child slows everyone above it. A payload is acknowledged when it is complete here and acknowledged by every
child. The same payload again is acknowledged without its bytes; other bytes under its number are a conflict. An END is
confirmed when the set is exactly what it says, here and below. A child that is lost fails the attempt, is named, and
everyone above and below is told.
Not handled: an owner that lies about its own payloads; receivers check every digest.

Paper: Section 7 (relay tree); Appendix B (transports); Table B.2   Spec: Channel   Decisions: D24, D31
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from nemo_dcr.errors import AttemptFailed, AttemptStopped, InvalidConfig, PayloadConflict, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.admission import Admission
from nemo_dcr.transport.relay.attempts import Attempt, AttemptTable, Entry, OwnerSet
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.hop import Header, Hop, Offer
from nemo_dcr.transport.relay.listener import Peer
from nemo_dcr.transport.relay.settings import FRAME_BYTES, INLINE_BYTES, RelayConfig
from nemo_dcr.transport.relay.store import Body, Store
from nemo_dcr.transport.relay.tree import RelayTree, TreeNode

logger = logging.getLogger(__name__)

_GRANT_S = 0.1
"""Steps are saved up for at most so long."""

Send = Callable[..., bool]


class Relaying:
    """The upstream half of one node; used by its loop's thread alone."""

    def __init__(
        self,
        name: str,
        *,
        table: AttemptTable,
        store: Store,
        counters: NodeCounters,
        config: RelayConfig,
        known: RelayTree | None,
        send: Send,
        hop_to: Callable[[TreeNode], Hop],
        published: Callable[[Attempt], None],
    ) -> None:
        """`known` lists the nodes that a tree may name, with address and key; None takes any.

        `published` is called when the log of an attempt has grown, or the attempt failed.
        """
        self._name = name
        self._table = table
        self._counters = counters
        self._config = config
        self._known = known
        self._send = send
        self._hop_to = hop_to
        self._published = published
        self._admission = Admission(
            name,
            table=table,
            store=store,
            counters=counters,
            max_payload_bytes=config.max_payload_bytes,
            start=self._start,
            fail=self.fail,
        )

    # ------------------------------------------------------------------------------------------------- the stream

    def open(self, peer: Peer, message: wire.Open) -> None:
        """An owner's stream begins; the first one of an attempt brings its tree. What it raises goes to the peer."""
        try:
            attempt = self._table.enter(message.attempt)
            if attempt.tree is None:
                self._shape(attempt, message.tree)
            elif attempt.tree != message.tree:
                raise TransportFailed("relay", f"attempt {attempt.number} runs over another tree already")
        except AttemptFailed as problem:
            self._send(peer, wire.Failed(message.attempt, wire.fault_of(problem)))
            return
        attempt.upstream[peer] = None
        owner = OwnerId(message.owner)
        attempt.sets.setdefault(owner, OwnerSet())
        if attempt.failure is not None:
            self._send(peer, wire.Failed(attempt.number, wire.fault_of(attempt.failure)))
            return
        for hop in attempt.hops:
            tree = message.tree.subtree(hop.channel.node.name)
            hop.open(attempt.number, owner, tree, self._table.cleaned, self)

    def _shape(self, attempt: Attempt, tree: RelayTree) -> None:
        if tree.root != self._name:
            raise TransportFailed("relay", f"this is node {self._name!r}, not {tree.root!r}; correct the tree")
        strangers = [node.name for node in tree.nodes if self._known is not None and not _is_known(self._known, node)]
        if strangers:
            raise TransportFailed(
                "relay", f"node {self._name!r} does not know {', '.join(strangers)}; correct its tree"
            )
        try:
            hops = tuple(self._hop_to(node) for node in tree.below(self._name))
        except InvalidConfig as problem:
            raise TransportFailed("relay", str(problem)) from None
        attempt.tree, attempt.hops = tree, hops

    def put(self, peer: Peer, message: wire.Put, frame: zmq.Frame | None) -> None:
        """A payload is offered; `frame` holds all its bytes if it is short."""
        try:
            self._take(peer, message, frame)
        except AttemptFailed as problem:
            self._send(peer, wire.Refused(message.upload, wire.fault_of(problem)))

    def _take(self, peer: Peer, message: wire.Put, frame: zmq.Frame | None) -> None:
        attempt, owned = self._find(message)
        if frame is not None and not len(frame.buffer) == message.nbytes <= INLINE_BYTES:
            raise TransportFailed("relay", f"an offer of {message.nbytes} bytes came with {len(frame.buffer)} bytes")
        key = (AttemptId(message.attempt), OwnerId(message.owner), message.payload)
        header = Header(*key, message.nbytes, message.digest, message.checksum)
        entry = owned.entries.get(header.payload)
        if entry is not None:
            if entry.header != header:
                raise PayloadConflict(str(header), f"relay node {self._name} already holds other bytes")
            entry.peer, entry.upload = peer, message.upload
            if entry.complete:
                self._counters.of(header.owner).received_again += len(frame.buffer) if frame is not None else 0
            if entry.acked:
                self._send(peer, wire.Acked(entry.upload))
            elif not entry.complete:
                entry.granted, entry.inline = 0, frame
                if entry.body is not None:
                    self._begin(attempt, entry)
            return
        if owned.end is not None:
            raise PayloadConflict(str(header), "the set is closed without it")
        self._admission.require_size(header)
        entry = owned.entries[header.payload] = Entry(header, peer, message.upload, inline=frame)
        self._admission.join(attempt, entry)

    def _find(self, message: wire.Put | wire.Data | wire.End) -> tuple[Attempt, OwnerSet]:
        """The set that a message is about. Raises: AttemptFailed of any kind when it takes nothing."""
        if message.attempt <= self._table.cleaned:
            raise AttemptStopped(message.attempt, "it was cleaned up")
        attempt = self._table.find(message.attempt)
        owned = attempt.sets.get(OwnerId(message.owner)) if attempt is not None else None
        if attempt is None or owned is None:
            raise TransportFailed("relay", f"no stream of owner {message.owner} is open in attempt {message.attempt}")
        if attempt.failure is not None:
            raise wire.error_of(wire.fault_of(attempt.failure))
        return attempt, owned

    def _start(self, attempt: Attempt, entry: Entry) -> None:
        """A payload has room: offer it to every child and let its frames come."""
        body = entry.body
        if body is not None:
            entry.offers = [Offer(entry.header, body, self) for _ in attempt.hops]
        for hop, offer in zip(attempt.hops, entry.offers, strict=True):
            if attempt.failure is None:  # a lost child says so at once
                hop.offer(offer)
        if attempt.failure is None:
            self._begin(attempt, entry)

    def _begin(self, attempt: Attempt, entry: Entry) -> None:
        """Take the bytes that came with the offer, or grant the first ones."""
        frame, entry.inline = entry.inline, None
        if frame is not None and entry.body is not None and entry.body.available == 0:
            self._append(attempt, entry, entry.body, frame)
        else:
            self._grant(entry)
            self._advance(attempt, entry)

    def _append(self, attempt: Attempt, entry: Entry, body: Body, frame: zmq.Frame) -> None:
        try:
            body.append(frame)
        except TransportFailed as problem:
            self.fail(attempt, problem)
        else:
            self._counters.of(entry.header.owner).received += len(frame.buffer)
            self._advance(attempt, entry)

    def data(self, peer: Peer, message: wire.Data, frame: zmq.Frame | None) -> None:
        """A frame came. Raises: TransportFailed when it is out of place; nothing of it is kept."""
        traffic, nbytes = self._counters.of(message.owner), len(frame.buffer) if frame is not None else 0
        over = self._table.find(message.attempt)
        if message.attempt <= self._table.cleaned or (over is not None and over.failure is not None):
            traffic.received_again += nbytes  # under way when the attempt ended
            return
        attempt, owned = self._find(message)
        entry = owned.entries.get(message.payload)
        if entry is None or (entry.peer, entry.upload) != (peer, message.upload) or entry.complete:
            traffic.received_again += nbytes  # of an earlier connection, or withdrawn
            return
        here = entry.body.available if entry.body is not None else 0
        wanted = min(FRAME_BYTES, entry.header.nbytes - here)
        if frame is None or (message.offset, nbytes) != (here, wanted) or here + nbytes > entry.granted:
            place = f"{nbytes} bytes at {message.offset} where {wanted} at {here} were granted up to {entry.granted}"
            raise TransportFailed("relay", f"payload {entry.header}: {place}")
        if entry.body is not None:
            self._append(attempt, entry, entry.body, frame)

    def withdraw(self, peer: Peer, message: wire.Withdraw) -> None:
        """Its publisher was stopped: what is not complete here is dropped, here and below."""
        attempt = self._table.find(message.attempt)
        owned = attempt.sets.get(OwnerId(message.owner)) if attempt is not None else None
        entry = owned.entries.get(message.payload) if owned is not None else None
        if attempt is None or owned is None or entry is None or entry.complete:
            return
        if (entry.peer, entry.upload) == (peer, message.upload):
            del owned.entries[message.payload]
            for hop, offer in zip(attempt.hops, entry.offers, strict=False):
                hop.withdraw(offer)
            self._table.let_go(entry)
            self._admission.leave(lambda _, other: other is entry)

    def end(self, peer: Peer, message: wire.End) -> None:
        """An owner's END: how many payloads, and the digest of their list."""
        try:
            attempt, owned = self._find(message)
            self._close(attempt, owned, message)
        except AttemptFailed as problem:
            self._send(peer, wire.Refused(message.call, wire.fault_of(problem)))
            return
        owned.waiting.append((peer, message.call))
        self._confirm(owned)

    def _close(self, attempt: Attempt, owned: OwnerSet, message: wire.End) -> None:
        owner, end = OwnerId(message.owner), (message.count, message.digest)
        name = f"{attempt.number}/{owner}"
        if owned.end is None:
            held = owned.manifest(attempt.number, owner)
            if len(owned.entries) != message.count or len(held.payloads) != message.count:
                detail = f"its END counts {message.count} payloads and {len(owned.entries)} are here"
                raise PayloadConflict(name, f"{detail}; an earlier start of this owner may have left some")
            if held.digest != message.digest:
                raise PayloadConflict(name, "its END lists other payloads than are here")
            owned.end, owned.open_below = end, len(attempt.hops)
            attempt.log.append(wire.Closed(owner, *end))
            for hop in attempt.hops:
                hop.end(attempt.number, owner, *end, lambda answer: self._ended(attempt, owned, answer))
            self._published(attempt)
        elif owned.end != end:
            raise PayloadConflict(name, "another END already closed this set")

    def _ended(self, attempt: Attempt, owned: OwnerSet, answer: AttemptFailed | wire.FromNode) -> None:
        if isinstance(answer, AttemptFailed):
            self.fail(attempt, answer)
        else:
            owned.open_below -= 1
            self._confirm(owned)

    def _confirm(self, owned: OwnerSet) -> None:
        if owned.open_below == 0:
            waiting, owned.waiting = owned.waiting, []
            for peer, call in waiting:
                self._send(peer, wire.Ended(call))

    # ----------------------------------------------------------------------------------------- credits and passing on

    def _advance(self, attempt: Attempt, entry: Entry) -> None:
        """Pass on what is here, note that it is complete, and grant more."""
        for hop, offer in zip(attempt.hops, entry.offers, strict=True):
            if not offer.acked:
                hop.advance(offer)
        body = entry.body
        if body is None:
            return
        if body.available == body.nbytes and not entry.complete:
            entry.complete = True
            header = entry.header
            attempt.log.append(wire.Told(header.owner, header.payload, header.digest, header.nbytes))
            self._published(attempt)
            self._acknowledge(attempt, entry)
        elif not entry.complete:
            self._grant(entry)

    def _grant(self, entry: Entry) -> None:
        """Allow a window beyond what every child was sent; small steps are saved up, but not for long.

        On a slow link each frame is answered, so that its sender hears something between heartbeats.
        """
        here = entry.body.available if entry.body is not None else 0
        passed_on = min([here, *((offer.sent or 0) for offer in entry.offers if not offer.acked)])
        upto = min(entry.header.nbytes, passed_on + self._config.window_bytes)
        step, now = min(self._config.window_bytes // 4, entry.header.nbytes - entry.granted), time.monotonic()
        if now - entry.granted_at > _GRANT_S:
            step = 1
        if upto - entry.granted >= max(step, 1) and not entry.complete:
            entry.granted, entry.granted_at = upto, now
            self._send(entry.peer, wire.Grant(entry.upload, here, upto))

    def _acknowledge(self, attempt: Attempt, entry: Entry) -> None:
        if entry.complete and not entry.acked and all(offer.acked for offer in entry.offers):
            entry.acked = True
            self._send(entry.peer, wire.Acked(entry.upload))
            self.let_go_if_read(attempt, entry)

    def let_go_if_read(self, attempt: Attempt, entry: Entry) -> None:
        """Free a payload that every child has and every local receiver has fetched."""
        if entry.acked and 0 < attempt.receivers <= len(entry.fetched):
            self._table.let_go(entry)
            self._admission.admit()

    def _entry_of(self, offer: Offer) -> tuple[Attempt, Entry] | None:
        attempt = self._table.find(offer.header.attempt)
        owned = attempt.sets.get(offer.header.owner) if attempt is not None else None
        entry = owned.entries.get(offer.header.payload) if owned is not None else None
        return None if attempt is None or entry is None or offer not in entry.offers else (attempt, entry)

    def on_sent(self, offer: Offer) -> None:
        """As `OfferUser.on_sent`: the sender above may be granted more."""
        if (found := self._entry_of(offer)) is not None and not found[1].complete:
            self._grant(found[1])

    def on_acked(self, offer: Offer) -> None:
        """As `OfferUser.on_acked`."""
        if (found := self._entry_of(offer)) is not None:
            self._acknowledge(*found)

    def on_refused(self, offer: Offer, error: AttemptFailed) -> None:
        """As `OfferUser.on_refused`: a child that does not take a payload fails the attempt."""
        if (attempt := self._table.find(offer.header.attempt)) is not None:
            self.fail(attempt, error)

    # -------------------------------------------------------------------------------------------------- the end of it

    def on_failed(self, attempt: AttemptId, error: AttemptFailed) -> None:
        """As `AttemptUser.on_failed`: a child failed, or is lost."""
        if (found := self._table.find(attempt)) is not None:
            self.fail(found, error)

    def fail(self, attempt: Attempt, error: AttemptFailed) -> None:
        """Nothing of this attempt can be delivered any more; everyone above and below is told. Once."""
        if attempt.failure is not None:
            return
        logger.warning("relay node %s: attempt %d failed: %s", self._name, attempt.number, error)
        attempt.failure = error
        for peer in tuple(attempt.upstream):
            self._send(peer, wire.Failed(attempt.number, wire.fault_of(error)))
        for hop in attempt.hops:
            hop.abandon(attempt.number, error)
        self._table.free(attempt)
        self._published(attempt)
        self._admission.leave(lambda other, _: other is attempt)

    def abandon(self, message: wire.Abandon) -> None:
        """The attempt failed above."""
        if message.attempt > self._table.cleaned:
            self.fail(self._table.enter(message.attempt), wire.error_of(message.fault))

    def drop_through(self, through: int) -> list[Attempt]:
        """Free everything of the attempts up to `through`; whoever still streams in them is told. Returns them."""
        dropped = self._table.drop_through(through)
        for attempt in dropped:
            stopped = wire.fault_of(AttemptStopped(attempt.number, "it was cleaned up"))
            for peer in tuple(attempt.upstream):
                self._send(peer, wire.Failed(attempt.number, stopped))
            for hop in attempt.hops:
                hop.forget(attempt.number)
        self._admission.leave(lambda other, _: other.number <= through)
        return dropped


def _is_known(known: RelayTree, node: TreeNode) -> bool:
    return any((each.name, each.address, each.key) == (node.name, node.address, node.key) for each in known.nodes)
