"""How fast the relay is beside a plain pyzmq loop, both without encryption and with CURVE, in one run.

    python -m nemo_dcr.testing.relay_speed [--mib 256] [--rounds 3]

A sender in this process and a receiver in another move payloads of 32 MiB in frames of 1 MiB with a window of 16. The
plain loop sends frames, returns credits and does nothing else; a relay node keeps every frame, and its sender digests
each payload and waits for its acknowledgement. Ways take turns, and the best round of each counts. CPU is user and
system time of both processes together. The last row is a root with two children, four processes in all.
Not handled: other machines' loads; compare the rows of one run.

Paper: Section 7 (relay tree)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport.relay.keys import KeyPair, Security
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.settings import FRAME_BYTES, RelayConfig
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import TreeNode, balanced_tree

PAYLOAD_FRAMES = 32
WINDOW = RelayConfig().window_frames
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Speed:
    """One round: MiB a second, and CPU milliseconds for a MiB."""

    mib_s: float
    cpu_ms: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _pair() -> KeyPair:
    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    return KeyPair(public, secret)


@contextmanager
def _receiver(what: str, name: str, secret: str, public: str, client: str) -> Iterator[tuple[int, TreeNode]]:
    command = [sys.executable, "-m", __spec__.name, "--as", what, name, secret, public, client]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # closing its standard input ends it
        line = process.stdout.readline() if process.stdout is not None else ""
        yield process.pid, TreeNode(name, line.strip(), public)


def _timed(pids: list[int], mib: int, move: Callable[[], None]) -> Speed:
    move()  # connects, and warms up
    cpu, began = sum(map(cpu_seconds, pids)), time.monotonic()
    for _ in range(mib // PAYLOAD_FRAMES):
        move()
    seconds, spent = time.monotonic() - began, sum(map(cpu_seconds, pids)) - cpu
    return Speed(mib / seconds, spent / mib * 1000)


def plain_loop(mib: int, *, curve: bool) -> Speed:
    """A DEALER that sends frames as credits come back."""
    server, client = _pair(), _pair()
    with ExitStack() as stack:
        pid, node = stack.enter_context(
            _receiver("loop", "loop", server.secret if curve else "", server.public if curve else "", client.public)
        )
        context = stack.enter_context(zmq.Context())
        socket: zmq.Socket[Any] = stack.enter_context(context.socket(zmq.DEALER))
        if curve:
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, server.public)
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, client.public)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, client.secret)
        socket.connect(node.address)
        payload = memoryview(os.urandom(PAYLOAD_FRAMES * FRAME_BYTES))

        def move() -> None:
            open_frames = 0
            for offset in range(0, len(payload), FRAME_BYTES):
                socket.send(payload[offset : offset + FRAME_BYTES])
                open_frames += 1
                if open_frames == WINDOW:
                    socket.recv()
                    open_frames -= 1
            for _ in range(open_frames):
                socket.recv()

        return _timed([os.getpid(), pid], mib, move)


def over_relay(mib: int, *, curve: bool, children: int = 0) -> Speed:
    """An owner that publishes to a root, with children or without."""
    client = _pair()
    keys = [_pair() if curve else KeyPair("", "") for _ in range(children + 1)]
    allowed = ",".join([client.public, *(each.public for each in keys if each.public)])
    with ExitStack() as stack:
        started = [
            stack.enter_context(_receiver("node", f"n{at}", each.secret, each.public, allowed))
            for at, each in enumerate(keys)
        ]
        tree = balanced_tree([replace(node, receivers=0) for _, node in started])
        transport = RelayTransport(tree, security=Security(keys=client if curve else None))
        stack.callback(transport.close)
        payload = os.urandom(PAYLOAD_FRAMES * FRAME_BYTES)
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        publisher = transport.publisher(AttemptId(1), OwnerId(0))
        numbers = iter(range(1 << 30))

        def move() -> None:
            publisher.publish(PayloadKey(AttemptId(1), OwnerId(0), next(numbers)), payload, digest)

        return _timed([os.getpid(), *(pid for pid, _ in started)], mib, move)


def _serve_loop(secret: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        if secret:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, secret)
        socket.bind("tcp://127.0.0.1:*")
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)  # noqa: T201
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while sys.stdin.fileno() not in (ready := dict(poller.poll())):
            if socket in ready:
                peer, *_ = socket.recv_multipart(copy=False)
                socket.send_multipart([peer, b"c"])


def _serve_node(name: str, secret: str, public: str, client: str) -> None:
    security = Security(keys=KeyPair(public, secret), allowed=frozenset(client.split(","))) if secret else Security()
    node = RelayNode(name, security=security)
    print(node.address, flush=True)  # noqa: T201
    sys.stdin.read()
    node.close()


WAYS: dict[str, Callable[[int], Speed]] = {
    "pyzmq loop, plain": lambda mib: plain_loop(mib, curve=False),
    "relay, plain": lambda mib: over_relay(mib, curve=False),
    "pyzmq loop, CURVE": lambda mib: plain_loop(mib, curve=True),
    "relay, CURVE": lambda mib: over_relay(mib, curve=True),
    "relay, plain, root and 2 children": lambda mib: over_relay(mib, curve=False, children=2),
}


def measure(mib: int, rounds: int) -> dict[str, Speed]:
    """The best round of each way."""
    found: dict[str, Speed] = {}
    for _ in range(rounds):
        for name, run in WAYS.items():
            speed = run(mib)
            best = found.setdefault(name, speed)
            found[name] = Speed(max(best.mib_s, speed.mib_s), min(best.cpu_ms, speed.cpu_ms))
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as", dest="role", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case ["loop", _, secret, _, _]:
            _serve_loop(secret)
        case ["node", name, secret, public, client]:
            _serve_node(name, secret, public, client)
        case _:
            print("| way | MiB/s | CPU ms/MiB |\n|---|---|---|")  # noqa: T201
            for name, speed in measure(options.mib, options.rounds).items():
                print(f"| {name} | {speed.mib_s:.0f} | {speed.cpu_ms:.2f} |")  # noqa: T201


if __name__ == "__main__":
    main()
