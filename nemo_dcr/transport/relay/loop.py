"""One thread that owns sockets: it waits for any of them, runs what others posted, and lets each owner take its turn.

All state of a relay node, or of a client, is touched by its loop's thread alone; other threads post actions and wait
for what these set. A turn never blocks.
Not handled: a turn that takes long; everything else of this loop then waits.

Paper: Section 7 (relay tree)   Spec: Channel
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import zmq

logger = logging.getLogger(__name__)

TICK_MS = 50
"""Time limits are looked at so often."""


def has_message(socket: zmq.Socket[Any]) -> bool:
    """Whether something can be received now; cheaper than a poll or a failed receive."""
    events: Any = socket.getsockopt(zmq.EVENTS)
    return bool(events & zmq.POLLIN)


class Watched(Protocol):
    """What a loop serves."""

    def sockets(self) -> Iterable[zmq.Socket[Any]]:
        """The sockets to wait for; asked again before each wait."""
        ...

    def turn(self, now: float) -> None:
        """Take what is there without blocking. `now` is `time.monotonic()`."""
        ...


class Loop:
    """A thread, a ZeroMQ context and a list of what it serves."""

    def __init__(self, name: str, on_fault: Callable[[BaseException], None] = lambda fault: None) -> None:
        """`on_fault` is told when a fault of our own ended the thread."""
        self.context = zmq.Context()
        self.watched: list[Watched] = []
        """Changed by the loop's thread, or before `start`."""
        self._name = name
        self._on_fault = on_fault
        self._actions: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._poller = zmq.Poller()
        self._polled: list[zmq.Socket[Any]] | None = None
        """The sockets that the poller knows."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread, soon; after `close` it is dropped."""
        self._actions.append(action)
        self._wake()

    def close(self, finish: Callable[[], None]) -> None:
        """End the thread, let `finish` close the sockets, and release the context. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._wake()
            if self._thread.is_alive():
                self._thread.join(10.0)
            finish()
            self.context.term()
            self._wake_read.close()
            self._wake_write.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"x")  # a full or closed pair means that the thread is awake or gone

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._round()
        except BaseException as fault:
            logger.critical("%s: the relay thread ended", self._name, exc_info=True)
            self._on_fault(fault)

    def _round(self) -> None:
        sockets = [each for watched in self.watched for each in watched.sockets()]
        if sockets != self._polled:
            self._poller, self._polled = zmq.Poller(), sockets
            self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
            for each in sockets:
                self._poller.register(each, zmq.POLLIN)
        self._poller.poll(0 if self._actions else TICK_MS)
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        while self._actions:
            self._actions.popleft()()
        now = time.monotonic()
        for watched in tuple(self.watched):
            watched.turn(now)
