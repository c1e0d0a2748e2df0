"""Kill a command again and again: `python -m tests.unit.checkpoint.killing MODE OLD NEW DELTA`.

Every run is a fork of this process, which has one thread. A run is killed by SIGKILL either before one of its changes
to the file system, each of them in turn, or after a random time. Then the same command runs again to its end.
Prints one JSON object: how many runs were killed and what was found.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_dcr.checkpoint.apply import apply
from nemo_dcr.checkpoint.diff import diff
from nemo_dcr.checkpoint.directory import JOURNAL, WORK_DIRECTORY, open_checkpoint
from nemo_dcr.checkpoint.in_place import apply_in_place
from nemo_dcr.errors import CheckpointInvalid, InvalidConfig
from tests.unit.checkpoint.checkpoints import content

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
RANDOM_KILLS = 25


def die_before_change(number: int) -> None:
    """Make this process kill itself just before its change `number` to the file system."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)


def run(command: Callable[[], None], prepare: Callable[[], None], delay: float | None = None) -> bool:
    """Run the command in a fork, killed after `delay` seconds if it is given; True iff it was killed."""
    child = os.fork()
    if child == 0:
        prepare()
        command()
        os._exit(0)
    if delay is not None:
        signal.sigtimedwait({signal.SIGCHLD}, delay)  # returns earlier when the child has ended by itself
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"the command failed by itself: {status}")
    return os.WIFSIGNALED(status)


def base_state(base: Path, old: dict[str, bytes], new: dict[str, bytes]) -> str:
    """What a killed in-place application left: the old checkpoint, the new one, or a mixture with a journal."""
    held = {path: data for path, data in content(base).items() if not path.startswith(WORK_DIRECTORY)}
    if (base / WORK_DIRECTORY / JOURNAL).exists():
        try:
            open_checkpoint(base)
        except CheckpointInvalid:
            pass
        else:
            raise SystemExit("a base with a journal was opened")
        if any(data not in (old.get(path), new.get(path)) for path, data in held.items()):
            raise SystemExit("a file of the base is neither old nor new")
        return "journal"
    if held == old:
        return "old"
    if held == new:
        return "new"
    raise SystemExit(f"the base is torn: {sorted(held)}")


def out_state(out: Path, wanted: dict[str, bytes]) -> str:
    """What a killed command left under its output name: nothing, or all of it."""
    if not out.exists():
        return "nothing"
    if content(out) != wanted:
        raise SystemExit("the output is torn")
    return "all"


def main(mode: str, old: Path, new: Path, delta: Path) -> None:
    """Run every kill and print what was found."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    before, after = content(old), content(new)
    place = old.parent / "killed" / "place"
    found: Counter[str] = Counter()

    def fresh() -> None:
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        if mode == "in-place":
            shutil.copytree(old, place)

    def command() -> None:
        if mode == "in-place":
            apply_in_place(place, [delta])
        elif mode == "out":
            apply(old, [delta], place, sync=False)
        else:
            diff(old, new, place, sync=False)

    def look() -> str:
        if mode == "in-place":
            return base_state(place, before, after)
        return out_state(place, after if mode == "out" else content(delta))

    def finish() -> None:
        state = look()
        found[state] += 1
        try:
            command()
        except InvalidConfig:
            if state != "all":
                raise
        if look() != ("new" if mode == "in-place" else "all") or list(place.parent.iterdir()) != [place]:
            raise SystemExit(f"the run after the kill left {sorted(content(place.parent))}")
        if mode == "in-place" and content(place) != after:
            raise SystemExit(f"the base is not the target: {sorted(content(place))}")

    steps = 0
    fresh()
    while run(command, partial(die_before_change, steps)):
        finish()
        steps += 1
        fresh()
    fresh()
    started = time.monotonic()
    run(command, lambda: None)
    whole = time.monotonic() - started
    chance = random.Random(5)
    killed = 0
    while killed < RANDOM_KILLS:
        fresh()
        killed += run(command, lambda: None, delay=chance.uniform(0, whole))
        finish()
    print(json.dumps({"steps": steps, "random": killed, "states": found}))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
