"""The line of a receiving process to its local node: questions that wait, and fetches frame by frame within a window.

A session is one subscription; it has one open question, or none while its queue is long. Its first question is answered
at once, so that it knows where it stands. A fetch asks for a window and
for more as frames arrive. After a break of the connection, questions and fetches go on from where they stand.
Not handled: what an announcement means; see subscription.

Paper: Section 7 (relay tree)   Spec: Channel
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Protocol

import zmq

from nemo_dcr.errors import AttemptFailed, EndpointLost, PayloadMissing
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.transport.base import Announcement
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.channel import Channel
from nemo_dcr.transport.relay.settings import FRAME_BYTES, RelayConfig


class Session(Protocol):
    """One subscription as its line sees it; called on the loop's thread."""

    attempt: AttemptId
    owners: tuple[OwnerId, ...]

    def take(self, entries: tuple[wire.Told | wire.Closed, ...]) -> bool:
        """Entries of the log came; True when more are wanted now."""
        ...

    def fail(self, error: AttemptFailed) -> None:
        """Nothing more will come, because of this; or, by AttemptStopped, because the attempt was cleaned up."""
        ...


class Fetching:
    """One payload on its way to a receiver."""

    def __init__(self, announcement: Announcement, done: Callable[[Fetching], None]) -> None:
        self.announcement = announcement
        self.error: AttemptFailed | None = None
        self.ended = False
        self.received = 0
        self.asked = 0
        self._done = done
        # BytesIO hands its buffer out as bytes without a copy once it has exactly that size: a payload is held once.
        self._buffer = io.BytesIO()
        if announcement.nbytes:
            self._buffer.seek(announcement.nbytes - 1)
            self._buffer.write(b"\0")
            self._buffer.seek(0)

    def append(self, body: memoryview) -> None:
        """Take the next frame."""
        self._buffer.write(body)
        self.received += len(body)

    def end(self, error: AttemptFailed | None = None) -> None:
        """All bytes are here, or never will be. The first call counts."""
        if not self.ended:
            self.error, self.ended = error, True
            self._done(self)

    def value(self) -> bytes:
        """The bytes."""
        return self._buffer.getvalue()


class Line:
    """One connection to the local node, shared by the subscriptions of a process."""

    def __init__(self, config: RelayConfig, open_channel: Callable[[Line], Channel]) -> None:
        """Connect. Raises: as `Channel`."""
        self._config = config
        self._numbers = itertools.count(1)
        self._sessions: dict[int, tuple[Session, int]] = {}
        """By number: the subscription and its place in the log."""
        self._asking: set[int] = set()
        self._answered: set[int] = set()
        """Sessions that were answered: their questions may wait."""
        self._fetches: dict[int, Fetching] = {}
        self.channel = open_channel(self)

    def subscribe(self, session: Session, number: int) -> None:
        """Begin to ask for what was published. `number` names the subscription for ever."""
        if self.channel.lost is not None:
            session.fail(self.channel.lost)
            return
        self._sessions[number] = session, 0
        self.ask(number)

    def ask(self, number: int) -> None:
        """Ask for more, unless a question is open."""
        if number in self._sessions and number not in self._asking:
            self._asking.add(number)
            self._send_next(number)

    def leave(self, number: int) -> None:
        """The subscription has ended."""
        self._sessions.pop(number, None)
        self._asking.discard(number)
        self._answered.discard(number)

    def fetch(self, fetching: Fetching) -> int:
        """Begin to fetch; returns the number of the fetch."""
        number = next(self._numbers)
        if self.channel.lost is not None:
            fetching.end(self.channel.lost)
        elif fetching.announcement.nbytes == 0:
            fetching.end()
        else:
            self._fetches[number] = fetching
            self._send_fetch(number, fetching)
        return number

    def give_up(self, number: int) -> None:
        """A fetch is wanted no more."""
        self._fetches.pop(number, None)

    def fetched(self, announcement: Announcement, number: int) -> None:
        """Tell the node that a subscription has all bytes of a payload."""
        key = announcement.key
        self.channel.send(wire.Fetched(key.attempt, key.owner, key.payload, number))

    # ------------------------------------------------------------------------------------------------ the connection

    def on_up(self) -> None:
        """As `ChannelUser.on_up`."""
        for number in tuple(self._asking):
            self._send_next(number)
        for number, fetching in tuple(self._fetches.items()):
            self._send_fetch(number, fetching)

    def on_message(self, message: wire.FromNode, body: zmq.Frame | None) -> None:
        """As `ChannelUser.on_message`."""
        match message:
            case wire.Entries(session=number, index=index, entries=entries) if number in self._asking:
                session, _ = self._sessions[number]
                self._sessions[number] = session, index
                self._asking.discard(number)
                self._answered.add(number)
                if session.take(entries):
                    self.ask(number)
            case wire.Gone(attempt=attempt, session=number) if number in self._sessions:
                session, _ = self._sessions[number]
                self.leave(number)
                session.fail(wire.error_of(wire.Fault("AttemptStopped", str(attempt), "it was cleaned up")))
            case wire.Failed(attempt=attempt, fault=fault):
                for number, (session, _) in tuple(self._sessions.items()):
                    if session.attempt == attempt:
                        self.leave(number)
                        session.fail(wire.error_of(fault))
            case wire.Piece(fetch=number, offset=offset) if number in self._fetches and body is not None:
                self._piece(number, self._fetches[number], offset, body.buffer)
            case wire.Missing(fetch=number, detail=detail) if number in self._fetches:
                fetching = self._fetches.pop(number)
                fetching.end(PayloadMissing(str(fetching.announcement.key), detail))

    def on_lost(self, error: EndpointLost) -> None:
        """As `ChannelUser.on_lost`."""
        sessions, self._sessions = tuple(self._sessions.values()), {}
        self._asking.clear()
        self._answered.clear()
        for session, _ in sessions:
            session.fail(error)
        fetches, self._fetches = tuple(self._fetches.values()), {}
        for fetching in fetches:
            fetching.end(error)

    def _piece(self, number: int, fetching: Fetching, offset: int, body: memoryview) -> None:
        nbytes = fetching.announcement.nbytes
        if offset < fetching.received:
            return  # asked for twice around a break
        if offset > fetching.received or len(body) != min(FRAME_BYTES, nbytes - offset):
            del self._fetches[number]
            detail = f"the local node sent {len(body)} bytes at {offset} where those at {fetching.received} were due"
            fetching.end(PayloadMissing(str(fetching.announcement.key), detail))
            return
        fetching.append(body)
        if fetching.received == nbytes:
            del self._fetches[number]
            fetching.end()
        elif fetching.asked < nbytes and fetching.asked - fetching.received <= self._config.window_bytes // 2:
            self._send_fetch(number, fetching, begin=fetching.asked)

    def _send_next(self, number: int) -> None:
        session, index = self._sessions[number]
        self.channel.send(wire.Next(session.attempt, number, session.owners, index, number in self._answered))

    def _send_fetch(self, number: int, fetching: Fetching, begin: int | None = None) -> None:
        announcement = fetching.announcement
        begin = fetching.received if begin is None else begin
        fetching.asked = min(announcement.nbytes, fetching.received + self._config.window_bytes)
        key = announcement.key
        message = wire.Fetch(
            key.attempt,
            key.owner,
            key.payload,
            number,
            announcement.nbytes,
            announcement.digest,
            begin,
            fetching.asked,
        )
        self.channel.send(message)
