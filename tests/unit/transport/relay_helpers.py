"""Relay nodes on threads, a raw peer that sends what it likes, and a TCP link that can be cut."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.transport_suite import Consumer
from nemo_dcr.transport.base import Manifest, Subscription
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import RelayTree, balanced_tree

ONE, OWNER = AttemptId(1), OwnerId(0)
PATIENCE_S = 20.0
MIB = 1 << 20


def key(number: int, attempt: int = 1, owner: int = 0) -> PayloadKey:
    return PayloadKey(AttemptId(attempt), OwnerId(owner), number)


def wait_for(fact: Callable[[], object], what: str) -> None:
    """Wait until something holds. Raises: AssertionError after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def nodes_of(count: int, config: RelayConfig | None = None, **options: Any) -> Iterator[list[RelayNode]]:
    """Running nodes n0, n1, ..."""
    started = [RelayNode(f"n{number}", config=config, **options) for number in range(count)]
    try:
        yield started
    finally:
        for node in started:
            node.close()


def tree_over(nodes: Sequence[RelayNode], fan_out: int = 2) -> RelayTree:
    return balanced_tree([node.place for node in nodes], fan_out)


@contextlib.contextmanager
def transport_over(shape: Any, local: Any = None, **options: Any) -> Iterator[RelayTransport]:
    """A transport that is closed in the end."""
    transport = RelayTransport(shape, local=local, **options)
    try:
        yield transport
    finally:
        transport.close()


def bodies(subscription: Subscription, owners: Sequence[int] = (0,), attempt: int = 1) -> dict[PayloadKey, bytes]:
    """Everything that an honest receiver gets of an attempt."""
    named = [OwnerId(owner) for owner in owners]
    return Consumer(AttemptId(attempt), named).run(subscription).bodies(subscription)


def fetched_at_once(subscription: Subscription) -> dict[PayloadKey, bytes]:
    """What a receiver gets of one owner that fetches each payload when it is announced."""
    found: dict[PayloadKey, bytes] = {}
    deadline = time.monotonic() + PATIENCE_S
    while not isinstance(entry := subscription.poll(0.1), Manifest):
        assert time.monotonic() < deadline, f"incomplete: {len(found)}"
        if entry is not None:
            found[entry.key] = subscription.fetch(entry)
    return found


class RawPeer:
    """A connection that greets and then sends whatever a test wants."""

    def __init__(self, node: RelayNode, *, run: str = "", greet: bool = True) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(node.address)
        if greet:
            self.send(wire.Hello(wire.RELAY_VERSION, run))
            assert isinstance(self.receive(), wire.Welcome)

    def send(self, message: wire.ToNode, *body: bytes) -> None:
        self.socket.send_multipart([wire.encode(message), *body])

    def receive(self) -> wire.FromNode:
        assert self.socket.poll(int(PATIENCE_S * 1000)), "no answer"
        return wire.decode_from_node(self.socket.recv_multipart()[0])

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class CuttableLink:
    """A TCP relay in front of an address; `cut` breaks every connection, and new ones go through."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.passed = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                self.passed += len(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for pair in self._pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for pair in self._pairs:
            for each in pair:
                each.close()


class FarLink(CuttableLink):
    """The same with a delay: what comes in goes out `delay_s` later, however much is on its way."""

    def __init__(self, address: str, delay_s: float) -> None:
        self._delay_s = delay_s
        super().__init__(address)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        deliver = threading.Thread(target=self._deliver, args=(waiting, sink), daemon=True)
        self._threads.append(deliver)
        deliver.start()
        data = b" "
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._delay_s, data))

    def _deliver(self, waiting: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get(timeout=PATIENCE_S)
                while (left_s := due - time.monotonic()) > 0:
                    time.sleep(left_s)
                if not data:
                    break
                sink.sendall(data)
                self.passed += len(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
