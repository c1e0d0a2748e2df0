"""The namespaces of chaos: what a cut and a split let through, by connections between real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.wan

WORLD = """
import os, socket, sys
from nemo_dcr.testing import chaos_world

assert chaos_world.enter()
hosts = [chaos_world.host(249, process) for process in range(3)]
chaos_world.settle(hosts)

def in_namespace(address, work):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        chaos_world.live_in(address)
        work(write)
        os._exit(0)
    os.close(write)
    return pid, os.fdopen(read)

def serve(write):
    server = socket.create_server((hosts[0], 5000))
    os.write(write, b"ready\\n")
    while True:
        held, (caller, _) = server.accept()
        held.sendall(caller.encode())
        held.close()

server, ready = in_namespace(hosts[0], serve)
assert ready.readline() == "ready\\n"

def ask(limit_s):
    try:
        with socket.create_connection((hosts[0], 5000), timeout=limit_s) as held:
            return held.recv(100).decode()
    except TimeoutError:
        return "nothing"

def told(address, limit_s):
    pid, answer = in_namespace(address, lambda write: os.write(write, ask(limit_s).encode()))
    os.waitpid(pid, 0)
    return answer.read()

def everybody(*limits):
    return [told(hosts[1], limits[0]), told(hosts[2], limits[1]), ask(limits[2])]

LONG, SHORT = 30.0, 0.5
print(*everybody(LONG, LONG, LONG))
chaos_world.cut(hosts[0])
print(*everybody(SHORT, SHORT, LONG))
chaos_world.join(hosts[0])
chaos_world.cut(hosts[1])
print(*everybody(LONG, LONG, LONG))
chaos_world.join(hosts[1])
chaos_world.split(hosts[:1], hosts[1:2])
print(*everybody(SHORT, LONG, LONG))
chaos_world.heal(hosts[:1], hosts[1:2])
chaos_world.split(hosts[2:], hosts)
print(*everybody(LONG, SHORT, LONG))
chaos_world.heal(hosts[2:], hosts)
print(*everybody(LONG, LONG, LONG))
os.kill(server, 9)
chaos_world.leave(hosts)
"""


def test_a_cut_hides_who_listens_and_a_split_keeps_two_groups_apart_and_nobody_else() -> None:
    """The one that is cut off still calls others; the deployment reaches everybody all the time."""
    done = subprocess.run([sys.executable, "-c", WORLD], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, other, router = "10.77.249.5", "10.77.249.7", "10.63.0.1"
    assert [line.split() for line in done.stdout.splitlines()] == [
        [one, other, router],
        ["nothing", "nothing", router],
        [one, other, router],
        ["nothing", other, router],
        [one, "nothing", router],
        [one, other, router],
    ]
