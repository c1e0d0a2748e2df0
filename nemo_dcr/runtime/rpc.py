"""Control calls over pyzmq: one request, one reply, replies are values and never exceptions.

A call names a method; its argument and its reply are frozen dataclasses in schema-checked MessagePack, followed by raw
frames for bulk bytes. Every call and reply carries the sender's Lamport clock. A server answers on its own thread, so a
node that applies weights still reports. A caller asks many peers at once and gets, for each, a reply or the reason why
there is none: a broken connection shows at once, a stopped process after the time limit.
Loopback addresses may be called in plaintext, all others need CURVE keys (see control_keys).
Not handled: what an admitted peer may ask for.

Paper: Appendix B (control calls carry the attempt identifier; channels are trusted or encrypted)   Decisions: D5, D6
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from nemo_dcr.errors import EndpointLost, InvalidConfig, NemoDcrError
from nemo_dcr.runtime.control_keys import HANDSHAKE_MS, REFUSALS, ZAP_DOMAIN, AdmissionDesk
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import Security, secure_client, secure_listener
from nemo_dcr.transport.relay.tree import TreeNode

logger = logging.getLogger(__name__)

RPC_VERSION = 1
RECONNECT_MS = 100
"""How often a broken connection is tried again, which tells that it is broken."""
MAX_FRAME_BYTES = 4 << 30
"""A larger frame closes the connection."""
_MONITORS = itertools.count()
_REFUSED = sum(REFUSALS)


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    call: int
    method: str
    clock: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Method:
    """One control call: its name on the wire and the types of its argument and reply."""

    name: str
    argument: type
    reply: type


@dataclass(frozen=True, slots=True)
class NoReply:
    """Why a peer gave no answer; a value, so that the state machines decide what it means."""

    reason: str
    disconnected: bool = False
    """True when the connection broke or the peer is gone, False when the time limit passed."""


@dataclass(frozen=True, slots=True)
class Bulk:
    """Raw bytes that travel beside a reply, for example a dump of stored words."""

    frames: tuple[bytes, ...]


Respond = Callable[..., None]
"""`respond(reply, bulk=Bulk(()))`: answer one call, once, from any thread."""
Handler = Callable[[Any, Respond], None]


LOOPBACK = "tcp://127.0.0.1:*"
"""Listen on this machine only, on a free port."""
PLAINTEXT = Security()
"""Without keys, on loopback addresses only."""


class Server:
    """Answers control calls on a thread of its own until `close`; an answer may also be given later, by any thread."""

    def __init__(
        self,
        name: str,
        clock: LamportClock,
        address: str = LOOPBACK,
        *,
        security: Security = PLAINTEXT,
        on_fault: Callable[[BaseException], None] = lambda fault: None,
    ) -> None:
        """Bind `address`; `on_fault` is told when a handler's fault of our own ended the thread.

        Raises: InvalidConfig for an address that `security` does not allow, or that is taken.
        """
        security.check_listen(address)
        self.name = name
        self._clock = clock
        self._on_fault = on_fault
        self._methods: dict[str, tuple[Method, Handler]] = {}
        self._context = zmq.Context()
        self._desk = AdmissionDesk(self._context, security) if security.keys is not None else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        secure_listener(self._socket, security, ZAP_DOMAIN)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as problem:
            self._release()
            raise InvalidConfig("rpc.address", f"cannot bind {address!r}: {problem}") from problem
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._answers: deque[list[bytes]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"rpc-{name}", daemon=True)

    def register(self, method: Method, handler: Handler) -> None:
        """Answer `method` by `handler(argument, respond)`. A NemoDcrError that it raises is sent as the answer."""
        self._methods[method.name] = (method, handler)

    def answer(self, method: Method, function: Callable[[Any], Any]) -> None:
        """Answer `method` at once with `function(argument)`."""
        self.register(method, lambda argument, respond: respond(function(argument)))

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and release the sockets. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._wake()
            if self._thread.is_alive():
                self._thread.join(5.0)
            self._release()
            self._wake_read.close()
            self._wake_write.close()

    def _release(self) -> None:
        self._socket.close()
        if self._desk is not None:
            self._desk.close()
        self._context.term()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"x")  # a full or closed pair means that the thread is awake or gone

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as fault:
            logger.critical("%s: the control thread ended", self.name, exc_info=True)
            self._on_fault(fault)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        if self._desk is not None:
            poller.register(self._desk.socket, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(500))
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(4096)
            if self._desk is not None and self._desk.socket in ready:
                self._desk.answer()
            while self._answers:
                self._socket.send_multipart(self._answers.popleft())
            if self._socket in ready:
                self._take(self._socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            logger.warning("%s: dropped a message of %d frames", self.name, len(frames))
            return None
        peer, raw_header, body = frames
        try:
            header = msgspec.msgpack.decode(raw_header, type=_Header)
        except msgspec.DecodeError:
            logger.warning("%s: dropped a message with an unreadable header", self.name)
            return None
        self._clock.merge(header.clock)

        def finish(error: str, parts: list[bytes]) -> None:
            answered = _Header(RPC_VERSION, header.call, header.method, self._clock.tick(), error)
            self._answers.append([peer, msgspec.msgpack.encode(answered), *parts])
            self._wake()

        def respond(reply: Any, bulk: Bulk = Bulk(())) -> None:
            finish("", [msgspec.msgpack.encode(reply), *bulk.frames])

        if header.version != RPC_VERSION:
            return finish(f"this peer speaks control version {RPC_VERSION}, not {header.version}; upgrade one side", [])
        if header.method not in self._methods:
            return finish(f"unknown control call {header.method!r}", [])
        method, handler = self._methods[header.method]
        try:
            argument: Any = msgspec.msgpack.decode(body, type=method.argument)
        except (msgspec.DecodeError, msgspec.ValidationError) as problem:
            return finish(f"argument of {header.method} is not valid: {problem}", [])
        try:
            handler(argument, respond)
        except NemoDcrError as problem:
            finish(f"{type(problem).__name__}: {problem}", [])
        return None


class Peer:
    """A connection to one server; used by one thread."""

    def __init__(
        self,
        name: str,
        address: str,
        clock: LamportClock,
        context: zmq.Context[Any],
        *,
        security: Security = PLAINTEXT,
        key: str = "",
    ) -> None:
        """Connect to `address`, to whoever holds the public `key` (Z85; empty for plaintext).

        Raises: InvalidConfig for what is not an address, or one that `security` does not allow.
        """
        self._target = TreeNode(name, address, key)
        security.check_connect(self._target)
        self._security = security
        self.name = name
        self.address = address
        self._clock = clock
        self._calls = itertools.count(1)
        self._waiting: int | None = None
        self.disconnected = False
        self.trouble = "the connection broke"
        """Why it is disconnected."""
        self.socket = context.socket(zmq.DEALER)
        self._monitor = context.socket(zmq.PAIR)
        try:
            self._connect()
        except zmq.ZMQError as problem:
            self.close()  # an open socket would keep the end of the context waiting for ever
            raise InvalidConfig("rpc.address", f"cannot connect to {address!r}: {problem}") from problem

    def _connect(self) -> None:
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 1000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        # A dead peer makes events for ever. Where nobody reads them a full queue would stop the context's I/O thread,
        # and with it every peer of the context and `close`; so the queue has no limit.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        # A name that no peer of this process had before: a closed peer's name stays bound until ZeroMQ's own thread
        # has let go of it, so an address in memory, which the next peer may get again, is not one.
        watched = f"inproc://monitor-{next(_MONITORS)}"
        self.socket.monitor(watched, zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _REFUSED)
        self._monitor.connect(watched)
        secure_client(self.socket, self._security, self._target)
        self.socket.connect(self.address)

    def send(self, method: Method, argument: Any) -> None:
        """Send one call; its reply is taken by `receive`. An earlier call that is still open is abandoned."""
        self._waiting = next(self._calls)
        header = _Header(RPC_VERSION, self._waiting, method.name, self._clock.tick())
        self.socket.send_multipart([msgspec.msgpack.encode(header), msgspec.msgpack.encode(argument)])

    def receive(self, method: Method) -> tuple[Any, Bulk] | NoReply | None:
        """Take the reply of the open call if it is here; None when it is not."""
        while self.socket.poll(0):
            raw_header, *parts = self.socket.recv_multipart()
            header = msgspec.msgpack.decode(raw_header, type=_Header)
            self._clock.merge(header.clock)
            if header.call != self._waiting:
                continue  # the late reply of an abandoned call
            self._waiting = None
            if header.error:
                return NoReply(header.error)
            return msgspec.msgpack.decode(parts[0], type=method.reply), Bulk(tuple(parts[1:]))
        self.check_connection()
        return self.lost if self.disconnected else None

    def check_connection(self) -> None:
        """Note a broken connection. A restarted process has another address, so a broken one stays broken."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self.trouble = REFUSALS.get(event, self.trouble)
            self.disconnected = True

    @property
    def lost(self) -> NoReply:
        """What a call to a disconnected peer answers."""
        return NoReply(self.trouble, disconnected=True)

    def close(self) -> None:
        """Release the sockets."""
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()


def exchange(calls: Mapping[str, tuple[Peer, Method, Any]], timeout_s: float) -> dict[str, tuple[Any, Bulk] | NoReply]:
    """Call many peers at once and wait for all answers, at most `timeout_s` seconds.

    Returns, for each key, (reply, bulk frames) or `NoReply`; never raises for a peer's fault.
    """
    deadline = time.monotonic() + timeout_s
    results: dict[str, tuple[Any, Bulk] | NoReply] = {}
    poller = zmq.Poller()
    for key, (peer, method, argument) in calls.items():
        peer.check_connection()
        if peer.disconnected:
            results[key] = peer.lost
            continue
        try:
            peer.send(method, argument)
        except zmq.Again:
            results[key] = NoReply("the connection accepts no more calls", disconnected=True)
            continue
        poller.register(peer.socket, zmq.POLLIN)
    while len(results) < len(calls):
        remaining = deadline - time.monotonic()
        for key, (peer, method, _) in calls.items():
            if key not in results:
                answer = peer.receive(method)
                if answer is None and remaining <= 0:
                    answer = NoReply(f"no reply within {timeout_s:g} s")
                if answer is not None:
                    results[key] = answer
                    poller.unregister(peer.socket)
        if len(results) < len(calls):
            # Short waits, because a broken connection shows on the monitor and not on the polled sockets.
            poller.poll(int(max(0.0, min(20.0, remaining * 1000))))
    return results


def call(peer: Peer, method: Method, argument: Any, timeout_s: float) -> tuple[Any, Bulk] | NoReply:
    """Call one peer and wait for its answer."""
    return exchange({peer.name: (peer, method, argument)}, timeout_s)[peer.name]


def require(answers: Mapping[str, tuple[Any, Bulk] | NoReply]) -> dict[str, tuple[Any, Bulk]]:
    """The answers of peers that must all have answered.

    Raises: EndpointLost naming the first that did not.
    """
    found: dict[str, tuple[Any, Bulk]] = {}
    for name, answer in answers.items():
        if isinstance(answer, NoReply):
            raise EndpointLost(name, answer.reason)
        found[name] = answer
    return found
