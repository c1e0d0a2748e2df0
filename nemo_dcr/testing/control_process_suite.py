"""The conformance suites of control planes that processes share, and of those that a server of its own keeps.

Eight processes add versions as fast as they can and log every acknowledgement; half of them are killed, or the server
is, several times. Every logged commit is in the history, and the history holds at most one commit more for each kill or
outcome that stayed unknown.

Paper: Section 6.3; Table B.2 (crashes)   Spec: Commit
"""

# ruff: noqa: D102
from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

import pytest

from nemo_dcr.control import open_control
from nemo_dcr.errors import ControlPlaneUnavailable
from nemo_dcr.ids import Epoch
from nemo_dcr.record import Committed, ControlPlane, Prepared
from nemo_dcr.testing.control_calls import bootstrap, check_chain, check_journal, commit, prepare
from nemo_dcr.testing.control_clock_suite import ControlClockSuite

WORKERS = 8
PATIENCE_S = 120.0
LONGEST_PAUSE_S = 3.0
UNKNOWN = 0
"""What a process logs instead of an attempt when a call gave no answer."""


def commit_until_stopped(url: str, acknowledged: str, stop: str, keys: tuple[str, ...]) -> None:
    """Add versions until the file `stop` exists; append the attempt of each acknowledged commit to `acknowledged`.

    Between two turns it waits a random time in proportion to the last one: whoever begins in another's turn ends it.
    """
    control = open_control(url, session=_session(keys))
    pause = random.Random(acknowledged)
    descriptor = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    epoch: Epoch | None = None
    while not os.path.exists(stop):
        begin = time.monotonic()
        try:
            epoch = control.acquire_epoch().epoch if epoch is None else epoch
            written = _add_version(control, epoch)
        except ControlPlaneUnavailable:
            written = UNKNOWN
        if written is not None:
            os.write(descriptor, f"{written}\n".encode())
        if not written:
            epoch = None
        time.sleep(pause.uniform(0, min(LONGEST_PAUSE_S, 2 * WORKERS * (time.monotonic() - begin))))


def _add_version(control: ControlPlane, epoch: Epoch) -> int | None:
    """The attempt that was committed, None when this process was refused."""
    record = control.read().record
    assert record is not None
    candidate = f"c{record.version + 1}-{epoch}"
    prepared = prepare(control, epoch, record, candidate)
    if isinstance(prepared, Prepared):
        reply = commit(control, epoch, record, prepared.attempt, candidate)
        if isinstance(reply, Committed):
            return reply.record.attempt
    return None


class ControlProcessSuite(ControlClockSuite):
    """Tests for back ends that have a URL."""

    enough = 5
    """Acknowledgements of each process before half of them are killed; a back end that takes turns slowly waits for
    fewer."""

    @abstractmethod
    def url(self, place: Path) -> str:
        """The address of the commit record that `open(place, ...)` opens."""

    def keys(self) -> tuple[str, ...]:
        """Access key and secret key that a process needs to open an S3 URL."""
        return ()

    @pytest.mark.slow
    def test_killed_processes_lose_no_acknowledged_commit(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", time.time)
        bootstrap(control)
        with _writers(self.url(tmp_path / "k"), tmp_path, self.keys()) as writers:
            writers.wait_for_each(self.enough)
            writers.wait_for_more(WORKERS // 2)
            writers.kill(WORKERS // 2)
            writers.wait_for_more((self.enough + 1) * WORKERS // 2)
        writers.check(control, killed=WORKERS // 2)


class ServerThatRestarts(Protocol):
    """A server of a test's own."""

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""

    def restart(self) -> None:
        """Start again on the same data and address, and wait until it answers."""


class ControlServerSuite(ControlProcessSuite):
    """Tests for back ends behind a server that keeps its data over a kill."""

    @abstractmethod
    def own_server(self, directory: Path) -> contextlib.AbstractContextManager[tuple[ServerThatRestarts, str]]:
        """A server that nothing else uses, and the URL of a commit record in it that does not exist yet."""

    @pytest.mark.slow
    def test_a_killed_server_loses_no_acknowledged_commit(self, tmp_path: Path) -> None:
        with self.own_server(tmp_path / "server") as (server, url):
            control = open_control(url, session=_session(self.keys()))
            bootstrap(control)
            with _writers(url, tmp_path, self.keys()) as writers:
                for _ in range(2):
                    writers.wait_for_more(self.enough + 1)
                    server.kill()
                    server.restart()
                writers.wait_for_more(WORKERS)
            writers.check(control, killed=0)


class _Writers:
    """Processes that contend for one commit record."""

    def __init__(self, url: str, directory: Path, keys: tuple[str, ...]) -> None:
        # Forked from a server that has the imports: eight of them would cost more than the test.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "boto3", "etcd3gw.client"])
        self.stop = directory / "stop"
        self._logs = [directory / f"acknowledged-{number}" for number in range(WORKERS)]
        self._killed = 0
        self.processes: list[ForkServerProcess] = [
            context.Process(target=commit_until_stopped, args=(url, str(log), str(self.stop), keys))
            for log in self._logs
        ]

    def counts(self) -> list[int]:
        """Acknowledged commits of each process."""
        return [sum(attempt != UNKNOWN for attempt in _read(log)) for log in self._logs]

    def wait_for_each(self, wanted: int) -> None:
        """Wait until each process has so many acknowledgements."""
        self._wait(lambda: min(self.counts()) >= wanted)

    def wait_for_more(self, wanted: int) -> None:
        """Wait until all together have so many acknowledgements more than now."""
        begin = sum(self.counts())
        self._wait(lambda: sum(self.counts()) >= begin + wanted)

    def kill(self, count: int) -> None:
        """SIGKILL the first `count` processes."""
        self._killed = count
        for process in self.processes[:count]:
            process.kill()

    def join(self) -> None:
        """Let the others come to their end."""
        self.stop.touch()
        for process in self.processes:
            process.join(PATIENCE_S)

    def check(self, control: ControlPlane, *, killed: int) -> None:
        """No acknowledged commit is lost, no version was written twice, nothing is there that nobody wrote."""
        ends = [process.exitcode for process in self.processes]
        assert ends == [-signal.SIGKILL] * killed + [0] * (WORKERS - killed)
        written = {record.attempt for record in check_chain(control)[1:]}
        logged = [attempt for log in self._logs for attempt in _read(log)]
        acknowledged = [attempt for attempt in logged if attempt != UNKNOWN]
        assert len(acknowledged) == len(set(acknowledged))
        assert written >= set(acknowledged)
        assert len(written) <= len(logged) + killed
        check_journal(control)

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, self.counts()
            dead = [process.exitcode for process in self.processes[self._killed :] if process.exitcode is not None]
            assert not dead, dead
            time.sleep(0.02)


@contextlib.contextmanager
def _writers(url: str, directory: Path, keys: tuple[str, ...]) -> Iterator[_Writers]:
    """Eight writers that run; in the end they are stopped."""
    writers = _Writers(url, directory, keys)
    try:
        for process in writers.processes:
            process.start()
        yield writers
        writers.join()
    finally:
        for process in writers.processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _session(keys: tuple[str, ...]) -> Any:
    if not keys:
        return None
    import boto3  # processes of other back ends do without it

    return boto3.session.Session(*keys)


def _read(log: Path) -> list[int]:
    """Whole lines only: a killed process may have written part of one."""
    text = log.read_text() if log.exists() else ""
    return [int(line) for line in text[: text.rfind("\n") + 1].split()]
