"""Two regions in network namespaces: asked rate and delay, an untouched LAN, exact counters, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.testing import regions as regions_module
from nemo_dcr.testing.delay_line import NAMESPACES, OTHER_PORT, Crossing, _Counters
from nemo_dcr.testing.regions import ROLLOUT, TRAINING, Boundary, Connection, Host, Regions, require_namespaces, sweep

RATE_MBIT, RTT_MS, PORT, UNCOUNTED = 40.0, 40.0, 7400, 7999
HEADER_SHARE = 1448 / 1500
"""TCP data in a full packet of the boundary."""
SINK = """
import json, socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
peer, _ = server.accept()
taken, begin = len(peer.recv(1 << 20)), time.monotonic()
while data := peer.recv(1 << 20):
    taken += len(data)
print(json.dumps([taken, time.monotonic() - begin]), flush=True)
"""
SOURCE = """
import socket, sys, time
def refused():
    begin = time.monotonic()
    try:
        socket.create_connection((sys.argv[1], 9), timeout=10)
    except ConnectionRefusedError:
        return time.monotonic() - begin
print(min(refused() for _ in range(5)), flush=True)
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
peer.sendall(bytes(int(sys.argv[3])))
"""
"""Prints the shortest round trip of five refused connections, then sends."""
HOLDER = """
import signal, sys
from nemo_dcr.testing.regions import Boundary, Regions
with Regions(Boundary(rate_mbit=10, rtt_ms=10), training_hosts=1, rollout_hosts=1) as regions:
    print(regions._line.pid, regions.store.namespace.rpartition("-")[0], flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def regions() -> Iterator[Regions]:
    with Regions(Boundary(rate_mbit=RATE_MBIT, rtt_ms=RTT_MS, ports=(PORT,))) as made:
        yield made


def send(source: Host, target: Host, nbytes: int, port: int = PORT) -> tuple[float, float]:
    """Send bytes from host to host; returns seconds of a round trip and bits per second after the first bytes."""
    with subprocess.Popen(
        target.command([sys.executable, "-c", SINK, target.address, str(port)]), stdout=subprocess.PIPE, text=True
    ) as sink:
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
        arguments = [sys.executable, "-c", SOURCE, target.address, str(port), str(nbytes)]
        sent = subprocess.run(source.command(arguments), capture_output=True, text=True, check=True, timeout=120)
        taken, seconds = (float(word) for word in sink.stdout.readline().strip("[]\n").split(","))
    assert taken == nbytes
    return float(sent.stdout), nbytes * 8 / seconds


def crossed(regions: Regions, source: str, target: str, port: int = PORT) -> tuple[int, int]:
    """TCP data and all bytes from region to region."""
    rows = [c for c in regions.crossings() if (c.source, c.target, c.port) == (source, target, port)]
    return sum(row.data_bytes for row in rows), sum(row.all_bytes for row in rows)


def settled(regions: Regions) -> list[Crossing]:
    """The counters once nothing is under way any more: a connection that was closed still says goodbye."""
    found: list[Crossing] = []
    deadline = time.monotonic() + 30
    while (now := regions.crossings()) != found:
        assert time.monotonic() < deadline, "packets cross all the time"
        found = now
        time.sleep(3 * RTT_MS / 1000)
    return found


def left() -> set[str]:
    return {entry.name for entry in NAMESPACES.glob("ndcr-*")}


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def gone(prefix: str) -> bool:
    return not any(name.startswith(prefix) for name in left())


def hold() -> tuple[subprocess.Popen[str], int, str]:
    """A process that holds regions; returns it, the pid of its delay line and the prefix of its namespaces."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    line, prefix = holder.stdout.readline().split()
    assert not gone(prefix)
    return holder, int(line), prefix


def reap(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


@pytest.mark.wan
@pytest.mark.parametrize(
    ("source", "target"),
    [("t1", "r1"), ("r2", "t2"), ("t1", "store"), ("store", "r4")],
)
def test_the_boundary_has_the_rate_and_at_least_the_delay_that_was_asked_for(
    regions: Regions, source: str, target: str
) -> None:
    hosts = {host.name: host for host in regions.hosts}
    shares: list[float] = []
    while len(shares) < 3 and max(shares, default=0.0) <= 0.85:  # hosts of a busy machine may be slower than the link
        round_trip_s, rate = send(hosts[source], hosts[target], 8_000_000)
        assert RTT_MS / 1000 <= round_trip_s < 1.5 * RTT_MS / 1000
        shares.append(rate / HEADER_SHARE / (RATE_MBIT * 1e6))
    assert 0.85 < max(shares) < 1.10


@pytest.mark.wan
def test_hosts_of_one_region_do_not_feel_the_boundary(regions: Regions) -> None:
    before = settled(regions)
    for source, target in (regions.training, regions.rollout[2:4]):
        round_trip_s, rate = send(source, target, 50_000_000)
        assert round_trip_s < RTT_MS / 2000
        assert rate > 5 * RATE_MBIT * 1e6
    assert settled(regions) == before


@pytest.mark.wan
def test_every_host_has_a_link_of_its_own(regions: Regions) -> None:
    sinks, rates = [], []
    for source, target in zip(regions.training, regions.rollout[:2], strict=True):
        command = [sys.executable, "-c", SINK, target.address, str(PORT)]
        sink = subprocess.Popen(target.command(command), stdout=subprocess.PIPE, text=True)
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
        arguments = [sys.executable, "-c", SOURCE, target.address, str(PORT), "5000000"]
        sinks.append((sink, subprocess.Popen(source.command(arguments), stdout=subprocess.DEVNULL)))
    for sink, sender in sinks:
        told, _ = sink.communicate(timeout=60)
        assert sender.wait(10) == 0
        taken, seconds = (float(word) for word in told.strip("[]\n").split(","))
        rates.append(taken * 8 / seconds)
    assert min(rates) / HEADER_SHARE > 0.75 * RATE_MBIT * 1e6


@pytest.mark.wan
def test_data_bytes_are_counted_by_direction_and_port_and_everything_else_apart(regions: Regions) -> None:
    there, back = (TRAINING, ROLLOUT), (ROLLOUT, TRAINING)
    counted = [crossed(regions, *way, port=port) for way in (there, back) for port in (PORT, OTHER_PORT)]
    send(regions.training[0], regions.rollout[0], 1_000_000)
    send(regions.training[1], regions.rollout[3], 500_000, UNCOUNTED)
    after = [crossed(regions, *way, port=port) for way in (there, back) for port in (PORT, OTHER_PORT)]
    data = [now[0] - then[0] for then, now in zip(counted, after, strict=True)]
    every = [now[1] - then[1] for then, now in zip(counted, after, strict=True)]
    assert 1_000_000 <= data[0] < 1_020_000  # more than was sent is retransmission
    assert 500_000 <= data[1] < 510_000
    assert data[2:] == [0, 0]
    assert data[0] + 40 * 500 < every[0] < 1.08 * data[0]
    assert 0 < every[2] < every[0] // 10  # acknowledgements
    assert len({(c.source, c.target, c.port) for c in regions.crossings()}) == len(regions.crossings())


def test_on_http_ports_objects_are_told_from_their_heads_and_from_listings_errors_and_questions() -> None:
    counters = _Counters((8333, 7500), (8333,))

    def segment(data: bytes, *, to_server: bool, port: int = 8333) -> bytes:
        ports = (40000, port) if to_server else (port, 40000)
        tcp = struct.pack("!HHIIBBHHH", *ports, 0, 0, 5 << 4, 0, 0, 0, 0)
        addresses = bytes((198, 18, 1, 10)), bytes((198, 18, 3, 10))
        source, target = addresses if to_server else addresses[::-1]
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40 + len(data), 0, 0, 64, 6, 0, source, target)
        return head + tcp + data

    def told() -> tuple[int, int]:
        rows = msgspec.json.decode(counters.read(), type=list[Crossing])
        return sum(row.head_bytes for row in rows), sum(row.object_bytes for row in rows)

    put, listing = b"PUT /bucket/0 HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: binary/octet-stream\r\n\r\n"
    for data, to_server, heads, objects in (
        (put, True, len(put), 0),
        (b"more of the object", True, 0, 18),
        (put + b"1234", True, len(put), 4),
        (put + b"1234", True, len(put), 4),  # sent again
        (put[:9], True, 9, 0),  # a head in two segments
        (put[9:] + b"1234", True, len(put) - 9, 4),
        (b"GET /bucket?list HTTP/1.1\r\n\r\n", True, 0, 0),
        (listing + b"<List>", False, 0, 0),
        (b"<more of the listing>", False, 0, 0),
        (b"GET /bucket/0 HTTP/1.1\r\n\r\n", True, 0, 0),
        (answer + b"1234", False, len(answer), 4),
        (b"more\r\n\r\nof the object", False, 0, 21),
    ):
        before = told()
        counters.count("a", "b", segment(data, to_server=to_server))
        after = told()
        assert (after[0] - before[0], after[1] - before[1]) == (heads, objects), data
    before = told()
    counters.count("a", "b", segment(b"GET what looks like HTTP", to_server=True, port=7500))
    assert told() == (before[0], before[1] + 24)


@pytest.mark.wan
def test_socket_tables_name_both_ends_of_an_open_connection(regions: Regions) -> None:
    source, target = regions.training[0], regions.rollout[1]
    with subprocess.Popen(
        target.command([sys.executable, "-c", SINK, target.address, str(PORT)]), stdout=subprocess.PIPE, text=True
    ) as sink:
        assert sink.stdout is not None
        sink.stdout.readline()
        script = (
            "import socket, sys\n"
            "peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
            "print('open', flush=True)\nsys.stdin.read()"
        )
        command = source.command([sys.executable, "-c", script, target.address, str(PORT)])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdout is not None
            assert peer.stdout.readline() == "open\n"
            # Whoever connects knows it half a round trip before the other side.
            deadline = time.monotonic() + 10
            here: list[Connection] = []
            while not here and time.monotonic() < deadline:
                here = [c for c in regions.connections(target) if c.state == "ESTAB"]
            there = [c for c in regions.connections(source) if c.state == "ESTAB"]
            peer.communicate()
    assert [(c.remote, c.remote_port) for c in there] == [(target.address, PORT)]
    assert [(c.local, c.local_port, c.remote) for c in here] == [(target.address, PORT, source.address)]
    assert regions.region_of(there[0].remote) == ROLLOUT
    assert regions.region_of("192.0.2.1") is None


@pytest.mark.wan
def test_nothing_is_left_after_the_block_and_after_an_error_in_it() -> None:
    outside, before = interfaces(), left()
    made = Regions(Boundary(rate_mbit=10, rtt_ms=10), rollout_hosts=1)

    def fail_inside() -> None:
        with made:
            assert len(left()) == len(before) + 6
            assert interfaces() == outside
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    made.close()
    assert (left(), interfaces()) == (before, outside)
    with pytest.raises(OperatorNeeded, match="not up"):
        made.crossings()


@pytest.mark.wan
def test_nothing_is_left_when_a_tool_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    before = left()
    boundary = Boundary(rate_mbit=10, rtt_ms=10)
    monkeypatch.setattr(regions_module, "_LAN_MTU", -5)
    with pytest.raises(OperatorNeeded, match="ip"), Regions(boundary, rollout_hosts=1):
        pass
    assert left() == before


@pytest.mark.wan
def test_the_delay_line_removes_everything_when_its_owner_is_killed() -> None:
    holder, _, prefix = hold()
    reap(holder)
    deadline = time.monotonic() + 10
    while not gone(prefix) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(prefix)


@pytest.mark.wan
def test_the_next_run_removes_what_a_killed_run_left_and_nothing_of_a_living_one(regions: Regions) -> None:
    holder, line, prefix = hold()
    os.kill(line, signal.SIGKILL)
    reap(holder)
    assert not gone(prefix)
    assert all(name.startswith(prefix) for name in sweep())
    assert gone(prefix)
    assert {host.namespace for host in regions.hosts} <= left()


@pytest.mark.wan
def test_a_dead_delay_line_is_told_and_not_waited_for() -> None:
    with Regions(Boundary(rate_mbit=10, rtt_ms=10), training_hosts=1, rollout_hosts=1) as made:
        assert made._line is not None
        os.kill(made._line.pid, signal.SIGKILL)
        made._line.wait(10)
        with pytest.raises(OperatorNeeded, match="delay line has ended"):
            made.crossings()


def test_a_user_without_rights_and_a_machine_without_the_device_are_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(OperatorNeeded, match="run it as root"):
        require_namespaces()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(regions_module, "_TUN_DEVICE", tmp_path / "tun")
    with pytest.raises(OperatorNeeded, match="load the tun module"):
        require_namespaces()


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("rate_mbit", {"rate_mbit": 0, "rtt_ms": 40}),
        ("rtt_ms", {"rate_mbit": 10, "rtt_ms": -1}),
        ("mtu", {"rate_mbit": 10, "rtt_ms": 40, "mtu": 100}),
    ],
)
def test_a_boundary_that_cannot_be_is_refused(field: str, settings: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig, match=field):
        Boundary(**settings)  # type: ignore[arg-type]
