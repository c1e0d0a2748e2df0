"""Faults of the machine around the processes: a full disk, a process that nobody reaches, groups that are cut apart.

All need namespaces of their own, and root to make them; what happens in there ends with the processes that live in it.
The payloads of a system lie on a file system of a fixed size, which a filler takes all of. Every process lives in a
network namespace of its own, behind a router in which the deployment lives. It has two addresses: it listens on one and
calls others from the other one. A cut takes away the first alone: nobody reaches the process, and what it asks of
others still gets through, which is the harder way round, since a coordinator that its standby cannot reach goes on
coordinating. A split loses every packet between two groups, both ways, and no other one. Packets vanish: connections
stay open on both sides and time out. The deployment itself is never cut off, so that it can look.
Not handled: the commit record on SQLite and payloads in files, which no packet carries.

Paper: Section 6.3; Appendix B (failures)
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from nemo_dcr.errors import OperatorNeeded

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
STORE_BYTES = 256 << 10
"""Room for a few attempts of small tensors."""
FILLER = ".filler"
NAMESPACES = Path("/run/netns")
ROUTER = "10.63.0.1"
"""The deployment's own address."""
EVERYBODY = "10.64.0.0/10"
"""Every process of every system."""


def enter() -> bool:
    """Move this process into namespaces of its own, before it starts others; False without the right to.

    Raises: OperatorNeeded when the kernel or the tools refuse.
    """
    if os.geteuid() != 0:
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET) != 0:
        return False
    _run("mount", "--make-rprivate", "/")
    NAMESPACES.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "tmpfs", str(NAMESPACES))
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
    _ip("", "link set lo up", f"address add {ROUTER}/32 dev lo")
    return True


def host(system: int, process: int) -> str:
    """The address on which one process of one system listens; the one after it is where it calls from."""
    return f"10.{77 + system // 250}.{system % 250}.{2 * process + 2}"


def settle(addresses: Iterable[str]) -> None:
    """Make the network namespaces of these processes, and connect each with the router."""
    for address in addresses:
        device = _device(address)
        _ip(
            "",
            f"netns add {address}",
            f"link add {device} type veth peer name eth0 netns {address}",
            f"link set {device} up",
            f"route add {address}/31 dev {device} src {ROUTER}",
        )
        _ip(
            address,
            "link set lo up",
            "link set eth0 up",
            f"address add {address}/32 dev eth0",
            f"address add {_caller(address)}/32 dev eth0",
            f"route add {ROUTER} dev eth0 src {_caller(address)}",
            f"route add default via {ROUTER} src {_caller(address)}",
        )


def leave(addresses: Iterable[str]) -> None:
    """Give the namespaces back, once nobody lives in them."""
    _ip("", *(f"netns delete {address}" for address in addresses))


def live_in(address: str) -> None:
    """Move this process into the namespace of its address, while it has one thread. Raises: OperatorNeeded."""
    with (NAMESPACES / address).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OperatorNeeded(f"setns({address}) failed: {os.strerror(ctypes.get_errno())}", "run chaos as root")


def join(address: str) -> None:
    """Packets reach who listens on the address again."""
    _ip("", f"rule delete pref 1 from {EVERYBODY} to {address}/32 blackhole")


def cut(address: str) -> None:
    """No packet of another process reaches who listens on the address."""
    _ip("", f"rule add pref 1 from {EVERYBODY} to {address}/32 blackhole")


def split(some: Iterable[str], others: Iterable[str]) -> None:
    """No packet passes between these two groups of addresses, whoever called whom."""
    _ip("", *(f"rule add {each}" for each in _between(some, others)))


def heal(some: Iterable[str], others: Iterable[str]) -> None:
    """Packets pass again between two groups that were split."""
    _ip("", *(f"rule delete {each}" for each in _between(some, others)))


def _between(some: Iterable[str], others: Iterable[str]) -> list[str]:
    pairs = [(one, other) for one, other in product(some, others) if one != other]
    both = [*pairs, *((other, one) for one, other in pairs)]
    return [f"pref 1 from {source}/31 to {target}/31 blackhole" for source, target in both]


def _caller(address: str) -> str:
    network, _, last = address.rpartition(".")
    return f"{network}.{int(last) + 1}"


def _device(address: str) -> str:
    return "v" + address.removeprefix("10.")


def small_store(directory: Path) -> None:
    """Payloads in `directory` have STORE_BYTES bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "tmpfs", str(directory))


def remove_store(directory: Path) -> None:
    """Give its memory back."""
    subprocess.run(["umount", "-l", str(directory)], capture_output=True)


def fill(directory: Path) -> None:
    """Take all the room that is left in the store."""
    with (directory / FILLER).open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return  # it is full, which was the point


def free(directory: Path) -> None:
    """Give the room back."""
    (directory / FILLER).unlink(missing_ok=True)


def _ip(namespace: str, *lines: str) -> None:
    """Carry out lines of `ip` in a namespace; empty: in that of this process."""
    place = ("-n", namespace) if namespace else ()
    _run("ip", *place, "-batch", "-", stdin="\n".join(lines) + "\n")


def _run(*command: str, stdin: str = "") -> None:
    done = subprocess.run(command, capture_output=True, text=True, input=stdin)
    if done.returncode != 0:
        reason = f"{' '.join(command)} failed: {done.stderr.strip()} {stdin}"
        raise OperatorNeeded(reason, "run chaos without root, which leaves full disks, cuts and splits out")
