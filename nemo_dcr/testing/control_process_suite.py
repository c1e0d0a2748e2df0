"""The conformance suite of control planes that processes share: kill -9 loses no acknowledged commit.

Four processes add versions as fast as they can and log every acknowledgement; half of them are killed. Every logged
commit is in the history, and the history holds at most one commit more for each killed process.

Paper: Section 6.3; Table B.2 (crashes)   Spec: Commit
"""

# ruff: noqa: D102
from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from abc import abstractmethod
from pathlib import Path

import pytest

from nemo_dcr.control import open_control
from nemo_dcr.ids import Epoch
from nemo_dcr.testing.control_calls import bootstrap, check_chain, check_journal, commit_once
from nemo_dcr.testing.control_suite import ControlSuite

WORKERS = 4
PATIENCE_S = 120.0
ENOUGH = 5
"""Acknowledgements of each process before half of them are killed, and after it from each survivor."""


def commit_until_stopped(url: str, acknowledged: str, stop: str) -> None:
    """Add versions until the file `stop` exists; append the attempt of each acknowledged commit to `acknowledged`."""
    control = open_control(url)
    pause = random.Random(acknowledged)
    descriptor = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    epoch: Epoch | None = None
    while not os.path.exists(stop):
        epoch, attempt = commit_once(control, epoch)
        if attempt is not None:
            os.write(descriptor, f"{attempt}\n".encode())
        time.sleep(pause.uniform(0, 0.01))


class ControlProcessSuite(ControlSuite):
    """Tests for back ends that have a URL."""

    @abstractmethod
    def url(self, place: Path) -> str:
        """The address of the commit record that `open(place, ...)` opens."""

    @pytest.mark.slow
    def test_killed_processes_lose_no_acknowledged_commit(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", time.time)
        bootstrap(control)
        logs = [tmp_path / f"acknowledged-{number}" for number in range(WORKERS)]
        spawn = multiprocessing.get_context("spawn")
        workers = [
            spawn.Process(
                target=commit_until_stopped, args=(self.url(tmp_path / "k"), str(log), str(tmp_path / "stop"))
            )
            for log in logs
        ]
        try:
            for worker in workers:
                worker.start()
            _wait_for(logs, [ENOUGH] * WORKERS)
            for worker in workers[: WORKERS // 2]:
                worker.kill()
            survivors = logs[WORKERS // 2 :]
            _wait_for(survivors, [len(_read(log)) + ENOUGH for log in survivors])
            (tmp_path / "stop").touch()
            for worker in workers:
                worker.join(PATIENCE_S)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        killed = [worker.exitcode for worker in workers]
        assert killed == [-signal.SIGKILL] * (WORKERS // 2) + [0] * (WORKERS // 2)
        written = {record.attempt for record in check_chain(control)[1:]}
        acknowledged = [attempt for log in logs for attempt in _read(log)]
        assert len(acknowledged) == len(set(acknowledged))
        assert written >= set(acknowledged)
        assert len(written) <= len(acknowledged) + WORKERS // 2
        check_journal(control)


def _read(log: Path) -> list[int]:
    """Whole lines only: a killed process may have written part of one."""
    text = log.read_text() if log.exists() else ""
    return [int(line) for line in text[: text.rfind("\n") + 1].split()]


def _wait_for(logs: list[Path], counts: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(len(_read(log)) < count for log, count in zip(logs, counts, strict=True)):
        assert time.monotonic() < deadline, [len(_read(log)) for log in logs]
        time.sleep(0.02)
