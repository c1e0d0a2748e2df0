"""The tutorial, as a reader does it: its two programs from `docs/tutorial.md`, a kill, and what it looks at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_dcr.cli.main import app
from tests.documents.blocks import ROOT, Block, blocks_of

PAGE = "docs/tutorial.md"
TITLE = re.compile(r'^```python title="([\w.]+)"$', re.MULTILINE)
LIMIT_S = 200.0
INTERRUPTED = "KeyboardInterrupt"


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(text: str) -> list[Block]:
    return blocks_of(PAGE, text)


def started(place: Path, program: str, log: str) -> subprocess.Popen[bytes]:
    """As in a terminal: what a shell runs in the background ignores Ctrl-C, and so would its children."""
    with (place / log).open("wb") as output:
        return subprocess.Popen(
            [sys.executable, program], cwd=place, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_hear_interrupts
        )


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(holds: Callable[[], bool], logs: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, logs()
        time.sleep(0.05)


def test_the_commands_of_the_tutorial_are_the_ones_that_are_tried_here(blocks):
    commands = [command for block in blocks if block.language == "sh" for command in block.commands]
    assert commands[2:] == [
        "make setup",
        "source .venv/bin/activate",
        "mkdir -p ../my-refit",
        "cd ../my-refit",
        "python engine.py",
        "python trainer.py",
        "nemo-dcr status run/addresses",
        "nemo-dcr record history sqlite:///$PWD/run/record.sqlite",
        "nemo-dcr stats run",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bits_that_serve_are_those_of_the_trainer_also_after_a_kill(text, blocks, tmp_path, monkeypatch):
    programs = [block for block in blocks if block.language == "python"]
    for name, block in zip(TITLE.findall(text), programs, strict=True):
        (tmp_path / name).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def log(name: str) -> str:
        file = tmp_path / name
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def logs() -> str:
        return "\n".join(f"{name}:\n{log(name)}" for name in ("engine", "trainer", "again"))

    def digests(name: str) -> list[str]:
        return re.findall(r"(?:lower half|that serve are) ([0-9a-f]{8})$", log(name), re.MULTILINE)

    running = [started(tmp_path, "engine.py", "engine")]
    try:
        until(lambda: "engine: waits for a trainer" in log("engine"), logs)
        running.append(started(tmp_path, "trainer.py", "trainer"))
        until(lambda: len(digests("engine")) >= 2, logs)
        shown = CliRunner().invoke(app, ["status", "run/addresses"])
        assert shown.exit_code == 0, shown.output
        assert "coordinator-trainer" in shown.output
        os.kill(running[0].pid, signal.SIGKILL)
        until(lambda: "waits: no complete engine instance answers; start one" in log("trainer"), logs)
        running.append(started(tmp_path, "engine.py", "again"))
        assert running[1].wait(LIMIT_S) == 0, logs()
        until(lambda: digests("again")[-1:] == digests("trainer")[-1:], logs)
        os.kill(running[2].pid, signal.SIGINT)
        assert running[2].wait(LIMIT_S) != 0
        assert log("again").rstrip().endswith(INTERRUPTED)
    finally:
        for process in running:
            process.kill()
            process.wait()
    committed = digests("trainer")
    assert len(committed) == 8
    assert set(digests("engine")[1:]) <= set(committed), logs()  # the first may be version 0
    assert set(digests("again")) <= set(committed), logs()
    history = CliRunner().invoke(app, ["record", "history", f"sqlite:///{tmp_path}/run/record.sqlite"])
    assert history.exit_code == 0
    assert re.findall(r"^\s+(\d+)\s+\d{4}-", history.output, re.MULTILINE) == [str(each) for each in range(9)]
    stats = CliRunner().invoke(app, ["stats", "run"])
    assert stats.exit_code == 0, stats.output
