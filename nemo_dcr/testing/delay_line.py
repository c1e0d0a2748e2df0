"""The slow boundary between emulated regions: packets wait in this process, and every one of them is counted.

The kernel at hand need not have netem: each region ends in a TUN interface, and this process carries IPv4 packets from
one to the other, by destination, after a fixed delay. It counts TCP data bytes (retransmissions included) and all
bytes, by direction and by service port. A packet of any other port or protocol is counted under port 0. On HTTP ports
it tells segments that carry objects from the rest: a message is an object from its first segment on when it is a PUT
request, or an answer that is not XML, as listings and errors are; it ends where the next message of its flow begins.
Of such a message the head (request or status line and header fields) is told from the body, which is the object.
Standard input is the leash: `read` asks for the counters, and the end of it, also by the death of whoever holds it,
removes the namespaces.
Not handled: rates (token buckets of the regions do that), loss, IPv6 (dropped).

    python -m nemo_dcr.testing.delay_line LINE.json

Paper: Section 7 (bytes that cross the cluster boundary); Section 8.1 (testbed)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

NAMESPACES = Path("/run/netns")
INTERFACE = "wan"
"""Name of the TUN interface at the end of every region."""
OTHER_PORT = 0
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_BATCH = 64
_PRIORITY = -15
_LARGEST = 65536
_TCP = 6
_HEAD_ENDS = b"\r\n\r\n"
_REQUESTS = (b"PUT ", b"GET ", b"HEAD ", b"POST ", b"DELETE ")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineEnd:
    """One region as the line sees it."""

    region: str
    namespace: str
    prefix: tuple[int, int, int]
    """First three bytes of all addresses of the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What the process is told."""

    ends: tuple[LineEnd, ...]
    delay_s: float
    """One way."""
    ports: tuple[int, ...]
    """Service ports that are counted apart."""
    http_ports: tuple[int, ...] = ()
    """Those of them that speak HTTP without encryption."""
    namespaces: tuple[str, ...]
    """Removed at the end."""


@dataclass(slots=True)
class Crossing:
    """What crossed from one region to another on one service port."""

    source: str
    target: str
    port: int
    """Of the side that listens; 0 for everything else."""
    packets: int = 0
    data_bytes: int = 0
    """Bytes inside TCP segments, each as often as it was sent."""
    object_bytes: int = 0
    """Those of them that are bytes of objects; all of them where the port does not speak HTTP."""
    head_bytes: int = 0
    """Those of them that are HTTP heads of objects."""
    all_bytes: int = 0
    """IPv4 packets with their headers."""


class _Counters:
    def __init__(self, ports: tuple[int, ...], http_ports: tuple[int, ...]) -> None:
        self._ports = frozenset(ports)
        self._http_ports = frozenset(http_ports)
        self._carries: dict[bytes, bool] = {}
        """By flow: whether its present message is an object."""
        self._in_head: set[bytes] = set()
        """Flows whose present message has not reached the end of its head."""
        self._crossings: dict[tuple[str, str, int], Crossing] = {}

    def count(self, source: str, target: str, packet: bytes) -> None:
        port, data, heads, objects = OTHER_PORT, 0, 0, 0
        header = (packet[0] & 15) * 4
        # A later fragment has no TCP header; none is made here, because TCP sends no packet above the MTU.
        if packet[9] == _TCP and len(packet) >= header + 20:
            origin, destination = struct.unpack_from("!HH", packet, header)
            port = next((known for known in (destination, origin) if known in self._ports), OTHER_PORT)
            begin = header + (packet[header + 12] >> 4) * 4
            data = len(packet) - begin
            flow = packet[12:20] + packet[header : header + 4]
            heads, objects = self._split(flow, packet[begin:]) if port in self._http_ports else (0, data)
        key = (source, target, port)
        found = self._crossings.get(key)
        if found is None:
            found = self._crossings[key] = Crossing(source, target, port)
        found.packets += 1
        found.data_bytes += data
        found.object_bytes += objects
        found.head_bytes += heads
        found.all_bytes += len(packet)

    def _split(self, flow: bytes, segment: bytes) -> tuple[int, int]:
        """Bytes of the head and of the body of an object in this segment; none of any other message."""
        if segment.startswith(b"HTTP/1."):
            head = segment.partition(_HEAD_ENDS)[0].lower()
            self._carries[flow] = b"content-type: application/xml" not in head
            self._in_head.add(flow)
        elif segment.startswith(_REQUESTS):
            self._carries[flow] = segment.startswith(b"PUT ")
            self._in_head.add(flow)
        head_bytes = 0
        if flow in self._in_head:
            end = segment.find(_HEAD_ENDS)
            head_bytes = len(segment) if end < 0 else end + len(_HEAD_ENDS)
            if end >= 0:
                self._in_head.discard(flow)
        return (head_bytes, len(segment) - head_bytes) if self._carries.get(flow, False) else (0, 0)

    def read(self) -> bytes:
        return msgspec.json.encode(list(self._crossings.values())) + b"\n"


def enter_namespace(namespace: str | Path) -> None:
    """Move this thread into a namespace; `os.setns` is newer than the oldest Python that is supported.

    Raises: OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(namespace).open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def _tun(namespace: str) -> int:
    """Make the TUN interface of a region and return its descriptor."""
    enter_namespace(NAMESPACES / namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22s", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI, b"")
    fcntl.ioctl(tun, _TUNSETIFF, request)
    return tun


class DelayLine:
    """Carries packets until its standard input ends."""

    def __init__(self, line: Line) -> None:
        with Path("/proc/self/ns/net").open("rb") as home:
            self._regions = {_tun(end.namespace): end.region for end in line.ends}
            enter_namespace(Path("/proc/self/fd") / str(home.fileno()))
        descriptors = {region: tun for tun, region in self._regions.items()}
        self._ends = {bytes(end.prefix): (descriptors[end.region], end.region) for end in line.ends}
        self._delay_s = line.delay_s
        self._counters = _Counters(line.ports, line.http_ports)
        self._waiting: deque[tuple[float, int, bytes]] = deque()
        """Due time, descriptor, packet; one delay for all, so the first is due first."""

    def run(self) -> None:
        """Carry packets, answer `read`, return when standard input ends."""
        poll = select.poll()
        for descriptor in (0, *self._regions):
            poll.register(descriptor, select.POLLIN)
        while True:
            due = self._waiting[0][0] - time.monotonic() if self._waiting else 1.0
            for descriptor, _ in poll.poll(max(0.0, due * 1000)):
                if descriptor != 0:
                    self._take(descriptor)
                elif not self._command():
                    return
            self._deliver()

    def _command(self) -> bool:
        if not os.read(0, 4096):
            return False
        os.write(1, self._counters.read())
        return True

    def _take(self, tun: int) -> None:
        source = self._regions[tun]
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                packet = os.read(tun, _LARGEST)
                if packet[0] >> 4 != 4:
                    continue
                end = self._ends.get(packet[16:19])
                if end is not None:
                    self._counters.count(source, end[1], packet)
                    self._waiting.append((time.monotonic() + self._delay_s, end[0], packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, tun, packet = self._waiting.popleft()
            with contextlib.suppress(OSError):  # an interface that is down loses packets, as a network does
                os.write(tun, packet)


def remove_namespaces(names: tuple[str, ...] | list[str]) -> None:
    """Delete namespaces that are there; interfaces in them go with them."""
    for name in names:
        if (NAMESPACES / name).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def main(line: Line) -> None:
    """Make the interfaces, say `up`, carry packets, remove everything."""
    # Ctrl-C and a terminal's end go to the whole group; the namespaces are removed when the leash ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A network is not slower because hosts are busy; on a shared machine this process would be.
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    try:
        carrier = DelayLine(line)
        os.write(1, b"up\n")
        carrier.run()
    finally:
        remove_namespaces(line.namespaces)


if __name__ == "__main__":
    main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Line))
