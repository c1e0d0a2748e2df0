"""Fill the disk under a command at every step: `python -m tests.unit.checkpoint.filling MODE WHAT OLD NEW DELTA`.

The command works on a small file system of its own: a tmpfs in a private mount namespace. Before one of its changes to
the file system, each of them in turn, all space (WHAT is `bytes`) or all room for new files (`files`) is taken away, as
another writer would. Then the room comes back and the same command runs again to its end.
Where mounting is not allowed, files of the command can no longer grow from that step on (a resource limit).
Prints one JSON object: the means, the number of steps, and what was found after the failed runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_dcr.checkpoint.apply import apply
from nemo_dcr.checkpoint.diff import diff
from nemo_dcr.checkpoint.in_place import apply_in_place
from nemo_dcr.errors import OperatorNeeded
from tests.unit.checkpoint.checkpoints import content
from tests.unit.checkpoint.killing import CHANGES, base_state, out_state

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
PRIVATE = 0x4000 | 0x40000
OPTIONS = "size=8m,nr_inodes=100"
FULL = 3
"""Exit status of a command that said that no space is left."""


def mounted(place: Path) -> bool:
    """Put a small file system at `place`, for this process and its children; False where that is not allowed."""
    libc = ctypes.CDLL(None)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS):
        if libc.unshare(NEW_USERS | NEW_MOUNTS):
            return False
        # In a user namespace of its own a process may mount once its user is known there.
        for name, line in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(line)
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None):
        return False
    return not libc.mount(b"none", bytes(place), b"tmpfs", ctypes.c_ulong(0), OPTIONS.encode())


def take_bytes(hog: Path) -> None:
    """Write until the file system takes no byte more."""
    hog.mkdir()
    with (hog / "bytes").open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError:
            return


def take_files(hog: Path) -> None:
    """Make files until no more can be made."""
    hog.mkdir()
    try:
        for number in range(1000):
            (hog / str(number)).touch()
    except OSError:
        return
    raise SystemExit("there is room for a thousand files")


def take_growth(hog: Path) -> None:
    """Let no file of this process grow."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def fill_before_change(number: int, take: Callable[[], None]) -> list[str]:
    """Take the room away just before this process's change `number`; that change, once it is reached."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            seen.append(event)
            if len(seen) == number + 1:
                take()
                reached.append(event)

    reached: list[str] = []
    sys.addaudithook(hook)
    return reached


def run(command: Callable[[], None], number: int, take: Callable[[], None]) -> int:
    """Run the command in a fork under that step; its exit status: 0, or `FULL`, or 1 when it made fewer changes."""
    child = os.fork()
    if child == 0:
        reached = fill_before_change(number, take)
        try:
            command()
        except OperatorNeeded as stop:
            os._exit(FULL if "space" in stop.reason and stop.action == "make room and run the command again" else 2)
        os._exit(0 if reached else 1)
    _, status = os.waitpid(child, 0)
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) not in (0, 1, FULL):
        raise SystemExit(f"step {number}: the command ended with {status} and not with one clear line")
    return os.WEXITSTATUS(status)


def main(mode: str, what: str, old: Path, new: Path, delta: Path) -> None:
    """Run every step and print what was found."""
    before, after = content(old), content(new)
    wanted = after if mode == "out" else content(delta)
    disk = old.parent / f"disk {mode} {what}"
    disk.mkdir()
    means = "tmpfs" if mounted(disk) else "limit"
    place, hog = disk / "place", disk / "hog"
    takers = {"bytes": take_bytes, "files": take_files}
    take = partial(takers[what] if means == "tmpfs" else take_growth, hog)
    commands: dict[str, Callable[[], object]] = {
        "in-place": lambda: apply_in_place(place, [delta]),
        "out": lambda: apply(old, [delta], place, sync=False),
        "diff": lambda: diff(old, new, place, sync=False),
    }
    command = commands[mode]
    found: Counter[str] = Counter()
    steps = 0
    while True:
        shutil.rmtree(place, ignore_errors=True)
        if mode == "in-place":
            shutil.copytree(old, place)
        status = run(command, steps, take)
        if status == 1:
            break
        steps += 1
        shutil.rmtree(hog, ignore_errors=True)
        state = base_state(place, before, after) if mode == "in-place" else out_state(place, wanted)
        found[f"{'full' if status == FULL else 'done'}, {state}"] += 1
        if status == FULL:
            command()
        done = content(place)
        if done != (after if mode == "in-place" else wanted) or list(disk.iterdir()) != [place]:
            raise SystemExit(f"step {steps}: the run with room left {sorted(content(disk))}")
    print(json.dumps({"means": means, "steps": steps, "states": found}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(Path, sys.argv[3:]))
