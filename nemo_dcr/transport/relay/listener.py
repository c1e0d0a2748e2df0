"""The listening side of a relay node: one ROUTER socket, the allow-list of keys, greetings, and limits on messages.

ROUTER_MANDATORY makes a message to a peer that is gone an error instead of a silent loss; such a peer is forgotten. A
peer must greet first, with this version and run. What is unreadable or too large is refused and counted, and the node
lives on. Client keys are admitted by a ZAP handler on the node's own thread.
Not handled: floods by an admitted peer; it costs time, and memory only up to the socket's own queue.

Paper: Section 7 (relay tree)   Spec: Channel
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

import zmq

from nemo_dcr.errors import AttemptFailed, InvalidConfig, TransportFailed
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.channel import MESSAGES_A_TURN
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.keys import ZAP_ADDRESS, Security, admission, secure_listener
from nemo_dcr.transport.relay.loop import has_message
from nemo_dcr.transport.relay.settings import RelayConfig

logger = logging.getLogger(__name__)

ZAP_DOMAIN = "nemo-dcr-relay"
_RECEIVE_QUEUE = 32
"""Messages of one peer that wait in the socket before TCP holds the peer back."""
_SEND_QUEUE = 1000
"""Messages that wait for one peer; windows keep an honest peer far below."""

Peer = bytes
"""Routing identity of one connection."""


class ListenerUser(Protocol):
    """Who answers; called on the loop's thread."""

    def on_message(self, peer: Peer, message: wire.ToNode, body: zmq.Frame | None) -> None:
        """A message of a peer that has greeted. May raise AttemptFailed, which is sent back as `Rejected`."""
        ...

    def on_gone(self, peer: Peer) -> None:
        """The peer said goodbye or cannot be reached."""
        ...


class Listener:
    """The ROUTER socket of one node, served by a loop."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        user: ListenerUser,
        *,
        welcome: wire.Welcome,
        run: str,
        security: Security,
        config: RelayConfig,
        counters: NodeCounters,
    ) -> None:
        """Bind `address`. Raises: InvalidConfig when `security` forbids it or the address is taken."""
        security.check_listen(address)
        self._user = user
        self._welcome = welcome
        self._run = run
        self._security = security
        self._config = config
        self._counters = counters
        self._peers: OrderedDict[Peer, None] = OrderedDict()
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ADDRESS)
        self._socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, _SEND_QUEUE),
            (zmq.RCVHWM, _RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, wire.MAX_PART_BYTES),
            (zmq.HEARTBEAT_IVL, config.heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, config.heartbeat_timeout_ms),
            (zmq.HANDSHAKE_IVL, config.handshake_ms),
        ):
            self._socket.setsockopt(option, value)
        secure_listener(self._socket, security, ZAP_DOMAIN)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as problem:
            self.close()
            raise InvalidConfig("relay.listen", f"cannot listen on {address!r}: {problem}") from problem
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def sockets(self) -> Iterable[zmq.Socket[Any]]:
        """As `Watched.sockets`."""
        return (self._socket, self._zap)

    def turn(self, now: float) -> None:
        """As `Watched.turn`."""
        while has_message(self._zap):
            admitted, answer = admission(self._zap.recv_multipart(), self._security)
            self._counters.refused += not admitted
            self._zap.send_multipart(answer)
        for _ in range(MESSAGES_A_TURN):
            if not has_message(self._socket):
                return
            parts = self._socket.recv_multipart(copy=False)
            self._take(bytes(parts[0].buffer), parts[1:])

    def send(self, peer: Peer, message: wire.FromNode, body: Any = None) -> bool:
        """Send to a peer; False when it is gone or reads nothing, and then it is forgotten."""
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(wire.encode(message), zmq.NOBLOCK | (zmq.SNDMORE if body is not None else 0))
            if body is not None:
                self._socket.send(body, zmq.NOBLOCK, copy=not isinstance(body, zmq.Frame))
        except zmq.ZMQError as problem:
            logger.debug("relay: peer %s cannot be reached: %s", peer.hex(), problem)
            self._forget(peer)
            return False
        return True

    def close(self) -> None:
        """Release the sockets; what was sent just before still goes out."""
        self._socket.close(linger=200)
        self._zap.close()

    def _take(self, peer: Peer, parts: list[zmq.Frame]) -> None:
        try:
            if not 1 <= len(parts) <= 2:
                raise TransportFailed("relay", f"a message has a header and at most one body, not {len(parts)} parts")
            message = wire.decode_to_node(parts[0].buffer)
            if isinstance(message, wire.Hello):
                self._greet(peer, message)
                return
            if peer not in self._peers:
                raise TransportFailed("relay", "a connection begins with a greeting")
            if isinstance(message, wire.Bye):
                self._forget(peer)
                return
            self._peers.move_to_end(peer)
            self._user.on_message(peer, message, parts[1] if len(parts) == 2 else None)
        except AttemptFailed as problem:
            self._counters.refused += 1
            self.send(peer, wire.Rejected(wire.fault_of(problem)))

    def _greet(self, peer: Peer, hello: wire.Hello) -> None:
        if hello.version != wire.RELAY_VERSION:
            detail = f"this node speaks relay version {wire.RELAY_VERSION}, not {hello.version}; upgrade one side"
            raise TransportFailed("relay", detail)
        if hello.run != self._run:
            detail = f"node {self._welcome.node!r} belongs to run {self._run!r}, not to {hello.run!r}; correct the tree"
            raise TransportFailed("relay", detail)
        self._peers[peer] = None
        self._counters.peers = len(self._peers)
        if len(self._peers) > self._config.max_peers:
            self._forget(next(iter(self._peers)))
        self.send(peer, self._welcome)

    def _forget(self, peer: Peer) -> None:
        if peer in self._peers:
            del self._peers[peer]
            self._counters.peers = len(self._peers)
            self._user.on_gone(peer)
