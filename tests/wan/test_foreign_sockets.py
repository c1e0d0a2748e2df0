"""The look at socket tables finds what may not cross: a planted connection on both sides, an allowed one on none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nemo_dcr.cli.wan_run import foreign_sockets
from nemo_dcr.cli.wan_site import CONTROL_PORT
from nemo_dcr.testing.regions import Boundary, Host, Regions

pytestmark = pytest.mark.wan
GROUP_PORT = 29500
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
held = server.accept()
print("open", flush=True)
sys.stdin.read()
"""
CONNECT = """
import socket, sys
held = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sys.stdin.read()
"""


@pytest.fixture
def regions() -> Iterator[Regions]:
    with Regions(Boundary(rate_mbit=50, rtt_ms=10, ports=(CONTROL_PORT,)), rollout_hosts=1) as made:
        yield made


@contextmanager
def connection(source: Host, target: Host, port: int) -> Iterator[None]:
    """An open connection between two processes of their own."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    listener = subprocess.Popen(target.command([sys.executable, "-c", LISTEN, target.address, str(port)]), **pipes)
    assert listener.stdout is not None
    assert listener.stdout.readline() == "ready\n"
    peer = subprocess.Popen(source.command([sys.executable, "-c", CONNECT, target.address, str(port)]), **pipes)
    try:
        assert listener.stdout.readline() == "open\n"
        yield
    finally:
        peer.communicate()
        listener.communicate()


def test_a_process_group_with_members_on_both_sides_shows_on_both_sides(regions: Regions) -> None:
    trainer, node = regions.training[0], regions.rollout[0]
    assert foreign_sockets(regions, {CONTROL_PORT}, "before") == []
    with connection(trainer, node, GROUP_PORT):
        found = foreign_sockets(regions, {CONTROL_PORT}, "during")
    assert [line.split()[1] for line in found] == [trainer.name, node.name]
    assert all(str(GROUP_PORT) in line for line in found)


def test_control_calls_across_the_boundary_and_a_process_group_within_a_region_are_allowed(regions: Regions) -> None:
    trainer, other = regions.training
    with connection(trainer, regions.rollout[0], CONTROL_PORT), connection(trainer, other, GROUP_PORT):
        assert foreign_sockets(regions, {CONTROL_PORT}, "during") == []
