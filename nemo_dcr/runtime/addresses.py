"""Where the processes of one run listen: one small file for each process life in a run directory.

A process writes its address once it answers; the file is complete or absent. A restarted process replaces the file
under the same name with another incarnation, which is how its restart shows.
Not handled: several hosts; there the addresses come from the deployment.

Paper: Appendix B (endpoints)   Decisions: D5
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nemo_dcr.errors import EndpointLost
from nemo_dcr.ids import Incarnation


@dataclass(frozen=True, slots=True)
class Address:
    """One process life: where it answers and who it is."""

    name: str
    address: str
    incarnation: Incarnation
    pid: int


def new_incarnation() -> Incarnation:
    """A number that no earlier life of any process had: 62 random bits."""
    return Incarnation(secrets.randbits(62) | 1)


def publish_address(directory: Path, entry: Address) -> None:
    """Write the address file of `entry`, replacing that of an earlier life."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{entry.name.replace('/', '-')}.json"
    temporary = target.with_suffix(f".{entry.incarnation}.tmp")
    temporary.write_bytes(msgspec.json.encode(entry))
    os.replace(temporary, target)


def wait_for_address(
    directory: Path,
    name: str,
    timeout_s: float,
    *,
    other_than: Incarnation | None = None,
    alive: Callable[[], bool] = lambda: True,
) -> Address:
    """The address of `name`, once it is there with an incarnation other than `other_than`.

    Raises: EndpointLost when the time passes, or `alive` says that the process ended.
    """
    target = directory / f"{name.replace('/', '-')}.json"
    deadline = time.monotonic() + timeout_s
    while True:
        if target.exists():
            entry = msgspec.json.decode(target.read_bytes(), type=Address)
            if entry.incarnation != other_than:
                return entry
        if not alive():
            raise EndpointLost(name, "the process ended before it answered; its log says why")
        if time.monotonic() > deadline:
            raise EndpointLost(name, f"no address within {timeout_s:g} s")
        time.sleep(0.02)
