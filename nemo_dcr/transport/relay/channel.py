"""The connecting side of one connection to a relay node: greeting, heartbeats, reconnection, and the verdict "lost".

A connection is up once the node has answered the greeting with the expected name. When it breaks, it is opened anew on
a fresh socket, so nothing that was queued for the old one arrives later; whoever uses it says again what is open. It is
lost when it stays broken for `patience_s`, was not up within `connect_s`, the node refuses the key or the run, or the
node was restarted and so has lost what it held. A lost channel stays lost.
Not handled: a node whose process lives and whose loop hangs; deadlines of the attempt are for that.

Paper: Section 7 (relay tree); Table B.2 (failures)   Spec: Channel
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from nemo_dcr.errors import EndpointLost, TransportFailed
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.keys import Security, secure_client
from nemo_dcr.transport.relay.loop import has_message
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.tree import TreeNode

logger = logging.getLogger(__name__)

RECONNECT_MS = 100
MESSAGES_A_TURN = 256
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MONITORS = itertools.count()
# A name that no monitor of this process had before: a closed one's name stays bound for a while.


class ChannelUser(Protocol):
    """Who speaks over a channel; called on the loop's thread."""

    def on_up(self) -> None:
        """The connection is up, for the first time or again: say what is open."""
        ...

    def on_message(self, message: wire.FromNode, body: zmq.Frame | None) -> None:
        """A message came."""
        ...

    def on_lost(self, error: EndpointLost) -> None:
        """The node is lost; the channel has closed itself."""
        ...


class Channel:
    """One connection to one node, served by a loop."""

    def __init__(
        self,
        context: zmq.Context[Any],
        node: TreeNode,
        user: ChannelUser,
        *,
        run: str,
        security: Security,
        config: RelayConfig,
        now: float,
    ) -> None:
        """Begin to connect. Raises: InvalidConfig when `security` forbids it; TransportFailed for no address."""
        security.check_connect(node)
        self.node = node
        self.up = False
        self.lost: EndpointLost | None = None
        self._context = context
        self._user = user
        self._run = run
        self._security = security
        self._config = config
        self._incarnation: int | None = None
        self._since = now
        self._trouble = "it does not answer"
        self._closed = False
        self._open()

    def _open(self) -> None:
        config = self._config
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor = self._context.socket(zmq.PAIR)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # credits and windows bound what is queued
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, wire.MAX_PART_BYTES),
            (zmq.HEARTBEAT_IVL, config.heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, config.heartbeat_timeout_ms),
            (zmq.HANDSHAKE_IVL, config.handshake_ms),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
        ):
            self._socket.setsockopt(option, value)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        watched = f"inproc://relay-monitor-{next(_MONITORS)}"
        self._socket.monitor(watched, _EVENTS)
        self._monitor.connect(watched)
        try:
            secure_client(self._socket, self._security, self.node)
            self._socket.connect(self.node.address)
        except zmq.ZMQError as problem:
            self.close()
            detail = f"cannot connect to {self.node.address!r} of node {self.node.name!r}: {problem}"
            raise TransportFailed("relay", detail) from problem

    def sockets(self) -> Iterable[zmq.Socket[Any]]:
        """As `Watched.sockets`."""
        return () if self._closed else (self._socket, self._monitor)

    def send(self, message: wire.ToNode, body: Any = None) -> None:
        """Send if the connection is up; otherwise nothing: `on_up` says everything again. Copies `body`, but frames."""
        if not self.up:
            return
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK | (zmq.SNDMORE if body is not None else 0))
            if body is not None:
                self._socket.send(body, zmq.NOBLOCK, copy=not isinstance(body, zmq.Frame))
        except zmq.Again:
            # The pipe is gone and its end was not reported yet; the monitor tells in this or the next turn.
            logger.debug("relay: %s takes no messages", self.node.name)

    def turn(self, now: float) -> None:
        """As `Watched.turn`."""
        self._receive()
        while not self._closed and has_message(self._monitor):
            self._observe(recv_monitor_message(self._monitor), now)
        limit = self._config.patience_s if self._incarnation is not None else self._config.connect_s
        if not self._closed and not self.up and now - self._since > limit:
            self._lose(f"{self.node.address}: no connection within {limit:g} s; {self._trouble}")

    def close(self) -> None:
        """Say goodbye and release the sockets. Idempotent."""
        if not self._closed:
            self.send(wire.Bye())
            self._closed = True
            self.up = False
            self._release(linger_ms=200)

    def _release(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=linger_ms)

    def _observe(self, event: dict[str, Any], now: float) -> None:
        match event["event"]:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._socket.send(wire.encode(wire.Hello(wire.RELAY_VERSION, self._run)))
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._lose(f"{self.node.address} does not admit this key; add the public key to its list")
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._lose(f"{self.node.address} speaks another security: CURVE on one side, plaintext on the other")
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._trouble = "the handshake failed: it may have another key than the tree names"
            case zmq.EVENT_DISCONNECTED if self.up:
                self._receive()
                self.up = False
                self._since = now
                self._trouble = "the connection broke"
                if not self._closed:
                    self._release(linger_ms=0)
                    self._open()

    def _receive(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            if self._closed or not has_message(self._socket):
                return
            parts = self._socket.recv_multipart(copy=False)
            try:
                message = wire.decode_from_node(parts[0].buffer)
            except TransportFailed as problem:
                self._lose(str(problem))
                return
            self._take(message, parts[1] if len(parts) == 2 else None)

    def _take(self, message: wire.FromNode, body: zmq.Frame | None) -> None:
        match message:
            case wire.Welcome(node=name, incarnation=incarnation):
                if name != self.node.name:
                    return self._lose(f"{self.node.address} is node {name!r}; correct the tree")
                if self._incarnation not in (None, incarnation):
                    return self._lose("it was restarted and holds nothing of this attempt any more")
                self._incarnation = incarnation
                self.up = True
                self._user.on_up()
            case wire.Rejected(fault=fault):
                if not self.up:
                    return self._lose(fault.detail)
                logger.warning("relay: %s did not take a message: %s", self.node.name, fault.detail)
            case _ if self.up:
                self._user.on_message(message, body)
        return None

    def _lose(self, reason: str) -> None:
        self.lost = EndpointLost(f"relay node {self.node.name}", reason)
        self.up = False
        self._closed = True
        self._release(linger_ms=0)
        self._user.on_lost(self.lost)
