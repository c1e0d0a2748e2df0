"""Where the processes of one run listen: one small file for each process life in a run directory.

A process writes its address once it answers; the file is complete or absent. A restarted process replaces the file
under the same name with another incarnation, which is how its restart shows.
Not handled: hosts that share no file system; there the addresses and keys come from the deployment.

Paper: Appendix B (endpoints)   Decisions: D5
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nemo_dcr.errors import EndpointLost, OperatorNeeded
from nemo_dcr.ids import Incarnation


@dataclass(frozen=True, slots=True)
class Address:
    """One process life: where it answers and who it is."""

    name: str
    address: str
    incarnation: Incarnation
    pid: int
    key: str = ""
    """Its public CURVE key in Z85; empty where it answers in plaintext."""


def new_incarnation(directory: Path, name: str) -> Incarnation:
    """An incarnation for a new life of `name`: later than the published one, also when the clock went back.

    Peers tell a restart from a late message by the larger number (D5).
    """
    target = _file(directory, name)
    earlier = msgspec.json.decode(target.read_bytes(), type=Address).incarnation if target.exists() else 0
    return Incarnation(max(time.time_ns(), earlier + 1))


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name.replace('/', '-')}.json"


def publish_address(directory: Path, entry: Address) -> None:
    """Write the address file of `entry`, replacing that of an earlier life."""
    directory.mkdir(parents=True, exist_ok=True)
    target = _file(directory, entry.name)
    temporary = target.with_suffix(f".{entry.incarnation}.tmp")
    temporary.write_bytes(msgspec.json.encode(entry))
    os.replace(temporary, target)


def read_addresses(directory: Path) -> tuple[Address, ...]:
    """The present life of every process that ever answered here, sorted by name."""
    files = directory.glob("*.json") if directory.is_dir() else ()
    return tuple(sorted((read_address(file) for file in files), key=lambda entry: entry.name))


def read_address(file: Path) -> Address:
    """One address file. Raises: OperatorNeeded for a file that is none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Address)
    except msgspec.DecodeError as problem:
        raise OperatorNeeded(f"{file} is not an address file: {problem}", "name a directory of its own") from problem


def wait_for_address(
    directory: Path,
    name: str,
    timeout_s: float,
    *,
    other_than: Incarnation | None = None,
    require_alive: Callable[[], None] = lambda: None,
) -> Address:
    """The address of `name`, once it is there with an incarnation other than `other_than`.

    Raises: EndpointLost when the time passes; whatever `require_alive` raises when the process has ended.
    """
    target = _file(directory, name)
    deadline = time.monotonic() + timeout_s
    while True:
        if target.exists():
            entry = msgspec.json.decode(target.read_bytes(), type=Address)
            if entry.incarnation != other_than:
                return entry
        require_alive()
        if time.monotonic() > deadline:
            raise EndpointLost(name, f"no address within {timeout_s:g} s")
        time.sleep(0.02)
