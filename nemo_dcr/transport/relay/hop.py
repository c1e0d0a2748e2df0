"""The sending side of one hop: what one process offers to the node below it, frame by frame, until it is acknowledged.

An owner streams to the root over a hop, and a node to each of its children. A payload is offered, frames are sent as
the node grants them and as they are here themselves (cut-through), and the hop keeps it open until the node says that
it is queued there and at every node below. A short payload travels with its offer. After a break of the connection
everything open is said again; the node grants from where it stands, so only frames that were under way are sent twice,
and those are counted apart.
Not handled: what a lost node means; the listener of each attempt is told once.

Paper: Section 7 (relay tree); Appendix B (transports)   Spec: Channel
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import zmq

from nemo_dcr.errors import AttemptFailed, EndpointLost
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.channel import Channel
from nemo_dcr.transport.relay.counters import NodeCounters, Traffic
from nemo_dcr.transport.relay.settings import FRAME_BYTES, INLINE_BYTES
from nemo_dcr.transport.relay.tree import RelayTree


@dataclass(frozen=True, slots=True)
class Header:
    """What a payload says about itself on every hop."""

    attempt: AttemptId
    owner: OwnerId
    payload: int
    nbytes: int
    digest: bytes
    """As announced; opaque here."""
    checksum: bytes
    """BLAKE2b-128 of all its bytes."""

    def __str__(self) -> str:
        return f"{self.attempt}/{self.owner}/{self.payload}"


class Source(Protocol):
    """Where the bytes of an offered payload come from."""

    @property
    def available(self) -> int:
        """Bytes that are here by now: whole frames, or all."""
        ...

    def chunk(self, offset: int) -> Any:
        """The frame that begins at `offset`."""
        ...


class ViewSource:
    """Bytes that a caller lends while it publishes them."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.available = len(view)

    def chunk(self, offset: int) -> memoryview:
        """As `Source.chunk`."""
        return self._view[offset : offset + FRAME_BYTES]


class OfferUser(Protocol):
    """Who offered a payload; called on the loop's thread."""

    def on_sent(self, offer: Offer) -> None:
        """Frames went out."""
        ...

    def on_acked(self, offer: Offer) -> None:
        """It is queued at the node and at every node below."""
        ...

    def on_refused(self, offer: Offer, error: AttemptFailed) -> None:
        """The node does not take it."""
        ...


class Offer:
    """One payload on its way over one hop."""

    def __init__(self, header: Header, source: Source, user: OfferUser) -> None:
        self.header = header
        self.source = source
        self.user = user
        self.upload = 0
        self.sent: int | None = None
        """Bytes sent on this connection; None until the node granted any."""
        self.granted = 0
        self.reached = 0
        """Bytes ever sent over this hop; below it everything is a repeat."""
        self.acked = False
        self._reading = threading.Lock()
        self._withdrawn = False

    def read(self, send: Callable[[Any], None]) -> int:
        """Hand the next frame to `send`, unless it was withdrawn; returns its size."""
        with self._reading:
            if self._withdrawn or self.sent is None:
                return 0
            chunk = self.source.chunk(self.sent)
            send(chunk)
            return len(chunk.buffer if isinstance(chunk, zmq.Frame) else chunk)

    def withdraw(self) -> None:
        """Read the source no more; when this returns, its bytes may change. Any thread."""
        with self._reading:
            self._withdrawn = True


class AttemptUser(Protocol):
    """Who takes part in an attempt over a hop; called on the loop's thread."""

    def on_failed(self, attempt: AttemptId, error: AttemptFailed) -> None:
        """The attempt failed at the node or below it, or the node is lost."""
        ...


Answer = Callable[[AttemptFailed | wire.FromNode], None]


class Hop:
    """Everything that one process sends to one node, over a channel that it owns."""

    def __init__(self, counters: NodeCounters, open_channel: Callable[[Hop], Channel]) -> None:
        """`counters` count the bytes sent. Raises: as `Channel`."""
        self._counters = counters
        self._numbers = itertools.count(1)
        self._opened: dict[tuple[AttemptId, OwnerId], wire.Open] = {}
        self._users: dict[AttemptId, dict[int, AttemptUser]] = {}
        self._offers: dict[int, Offer] = {}
        self._calls: dict[int, tuple[wire.ToNode, Answer]] = {}
        self.channel = open_channel(self)

    @property
    def lost(self) -> EndpointLost | None:
        """Why the node is lost, or None."""
        return self.channel.lost

    @property
    def idle(self) -> bool:
        """No attempt and no call uses it."""
        return not self._users and not self._calls

    # ------------------------------------------------------------------------------------------------ what is sent

    def open(self, attempt: AttemptId, owner: OwnerId, tree: RelayTree, cleaned: int, user: AttemptUser) -> None:
        """Tell the node that `owner` streams in `attempt` over `tree`."""
        self._users.setdefault(attempt, {})[id(user)] = user
        message = self._opened.setdefault((attempt, owner), wire.Open(attempt, owner, tree, cleaned))
        self.channel.send(message)
        if self.lost is not None:
            user.on_failed(attempt, self.lost)

    def offer(self, offer: Offer) -> None:
        """Offer a payload of an opened attempt."""
        offer.upload = next(self._numbers)
        self._offers[offer.upload] = offer
        self._put(offer)
        if self.lost is not None:
            offer.user.on_refused(offer, self.lost)

    def advance(self, offer: Offer) -> None:
        """Send the frames that are granted and here."""
        began, header = offer.sent, offer.header
        try:
            while (
                self.channel.up and offer.sent is not None and offer.sent < min(offer.granted, offer.source.available)
            ):
                data = wire.Data(header.attempt, header.owner, header.payload, offer.upload, offer.sent)
                nbytes = offer.read(partial(self.channel.send, data))
                if not nbytes:
                    break
                self._count(self._counters.of(header.owner), offer, nbytes)
                offer.sent += nbytes
        except AttemptFailed as problem:  # its spill file cannot be read
            self._offers.pop(offer.upload, None)
            offer.user.on_refused(offer, problem)
            return
        if offer.sent != began:
            offer.user.on_sent(offer)

    def withdraw(self, offer: Offer) -> None:
        """Give an offer up unless it is acknowledged."""
        offer.withdraw()
        if self._offers.pop(offer.upload, None) is not None and not offer.acked:
            header = offer.header
            self.channel.send(wire.Withdraw(header.attempt, header.owner, header.payload, offer.upload))

    def end(self, attempt: AttemptId, owner: OwnerId, count: int, digest: bytes, answer: Answer) -> None:
        """Close the set of an owner; `answer` gets Ended or the error."""
        number = next(self._numbers)
        self._call(number, wire.End(attempt, owner, number, count, digest), answer)

    def clean(self, through: AttemptId, answer: Answer) -> None:
        """Clean up; `answer` gets Cleaned or the error."""
        number = next(self._numbers)
        self._call(number, wire.Clean(number, through), answer)

    def ask(self, answer: Answer) -> None:
        """Ask for the node's counters; `answer` gets Counted or the error."""
        number = next(self._numbers)
        self._call(number, wire.Ask(number), answer)

    def abandon(self, attempt: AttemptId, error: AttemptFailed) -> None:
        """Tell the node that the attempt failed above it, and forget the attempt."""
        self.channel.send(wire.Abandon(attempt, wire.fault_of(error)))
        self.forget(attempt)

    def forget(self, attempt: AttemptId, user: AttemptUser | None = None) -> None:
        """Nothing of an attempt is open any more, or nothing of one of its users."""
        users = self._users.get(attempt, {})
        if user is not None and users.pop(id(user), None) is None:
            return
        if user is None or not users:
            self._users.pop(attempt, None)
            self._opened = {key: message for key, message in self._opened.items() if key[0] != attempt}
            for upload, offer in tuple(self._offers.items()):
                if offer.header.attempt == attempt:
                    del self._offers[upload]
                    offer.withdraw()
            for number, (call, _) in tuple(self._calls.items()):
                if isinstance(call, wire.End) and call.attempt == attempt:
                    del self._calls[number]

    def _call(self, number: int, message: wire.ToNode, answer: Answer) -> None:
        if self.lost is not None:
            answer(self.lost)
            return
        self._calls[number] = message, answer
        self.channel.send(message)

    def _put(self, offer: Offer) -> None:
        header, nbytes = offer.header, offer.header.nbytes
        offer.sent, offer.granted = None, 0
        put = wire.Put(
            header.attempt,
            header.owner,
            header.payload,
            offer.upload,
            header.nbytes,
            header.digest,
            header.checksum,
        )
        if not 0 < nbytes <= INLINE_BYTES or offer.source.available < nbytes or not self.channel.up:
            self.channel.send(put)
            return
        offer.sent = 0
        if offer.read(partial(self.channel.send, put)) == nbytes:
            self._count(self._counters.of(header.owner), offer, nbytes)
            offer.sent = offer.granted = nbytes

    @staticmethod
    def _count(traffic: Traffic, offer: Offer, nbytes: int) -> None:
        end = (offer.sent or 0) + nbytes
        fresh = max(0, end - max(offer.reached, offer.sent or 0))
        offer.reached = max(offer.reached, end)
        traffic.sent += fresh
        traffic.sent_again += nbytes - fresh

    # ------------------------------------------------------------------------------------------------ what comes back

    def on_up(self) -> None:
        """As `ChannelUser.on_up`."""
        for message in tuple(self._opened.values()):
            self.channel.send(message)
        for offer in tuple(self._offers.values()):
            if not offer.acked:
                self._put(offer)
        for call, _ in tuple(self._calls.values()):
            self.channel.send(call)

    def on_message(self, message: wire.FromNode, body: zmq.Frame | None) -> None:
        """As `ChannelUser.on_message`."""
        match message:
            case wire.Grant(upload=upload, offset=offset, upto=upto) if upload in self._offers:
                offer = self._offers[upload]
                if offer.sent is None:
                    offer.sent = min(offset, offer.header.nbytes)
                offer.granted = max(offer.granted, min(upto, offer.header.nbytes))
                self.advance(offer)
            case wire.Acked(upload=upload) if upload in self._offers:
                offer = self._offers.pop(upload)
                offer.acked = True
                offer.user.on_acked(offer)
            case wire.Refused(number=number, fault=fault):
                if number in self._offers:
                    offer = self._offers.pop(number)
                    offer.user.on_refused(offer, wire.error_of(fault))
                elif number in self._calls:
                    self._calls.pop(number)[1](wire.error_of(fault))
            case wire.Failed(attempt=attempt, fault=fault):
                for user in tuple(self._users.get(AttemptId(attempt), {}).values()):
                    user.on_failed(AttemptId(attempt), wire.error_of(fault))
            case wire.Ended(call=call) | wire.Cleaned(call=call) | wire.Counted(call=call) if call in self._calls:
                self._calls.pop(call)[1](message)

    def on_lost(self, error: EndpointLost) -> None:
        """As `ChannelUser.on_lost`."""
        calls, self._calls = tuple(self._calls.values()), {}
        for _, answer in calls:
            answer(error)
        for attempt, users in tuple(self._users.items()):
            for user in tuple(users.values()):
                user.on_failed(attempt, error)
