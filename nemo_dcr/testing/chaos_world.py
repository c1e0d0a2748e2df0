"""Faults of the machine around the processes: a full disk, and a process that nobody reaches.

Both need namespaces of their own, and root to make them; what happens in there ends with the processes that live in it.
The payloads of a system lie on a file system of a fixed size, which a filler takes all of. Every process listens on an
address of its own; while the address is gone, no packet reaches the process or comes from there, connections stay open
on both sides and time out, and what the process itself asks of others still gets through: a cut in one direction, which
is the harder one, since a coordinator that its standby cannot reach goes on coordinating.

Paper: Section 6.3; Appendix B (failures)
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from nemo_dcr.errors import OperatorNeeded

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
STORE_BYTES = 256 << 10
"""Room for a few attempts of small tensors."""
FILLER = ".filler"


def enter() -> bool:
    """Move this process into namespaces of its own, before it starts others; False without the right to.

    Raises: OperatorNeeded when the kernel or the tools refuse.
    """
    if os.geteuid() != 0:
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET) != 0:
        return False
    _run("mount", "--make-rprivate", "/")
    _run("ip", "link", "set", "lo", "up")
    return True


def host(system: int, process: int) -> str:
    """The address of one process of one system."""
    return f"10.{77 + system // 250}.{system % 250}.{process + 1}"


def join(address: str) -> None:
    """The address is there: packets reach who listens on it."""
    _run("ip", "address", "replace", f"{address}/32", "dev", "lo")


def cut(address: str) -> None:
    """The address is gone."""
    _run("ip", "address", "del", f"{address}/32", "dev", "lo")


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


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = f"{' '.join(command)} failed: {done.stderr.strip()}"
        raise OperatorNeeded(reason, "run chaos without root, which leaves full disks and cuts out")
