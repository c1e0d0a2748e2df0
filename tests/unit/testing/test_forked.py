"""Ends of forked processes as several threads see them, while other threads start more."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

from nemo_dcr.testing.forked import Forked

REPLACED = 5


def end(code: int) -> None:
    sys.exit(code)


def stay() -> None:
    signal.pause()


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


@pytest.mark.slow
def test_an_end_is_read_once_also_while_another_thread_starts_a_process(
    context: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Forked(context, end, REPLACED)
    wait_until(lambda: is_gone(child.pid))
    read, both = forkserver.read_signed, threading.Barrier(2)

    def read_with_another(descriptor: int) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # whoever comes meanwhile finds the end unread
        return int(read(descriptor))

    monkeypatch.setattr(forkserver, "read_signed", read_with_another)

    def look() -> int | None:
        while (code := child.exitcode) is None:
            time.sleep(0.001)
        return code

    with ThreadPoolExecutor(2) as pool:
        looked = pool.submit(look)
        other = pool.submit(Forked, context, end, 0)
        assert looked.result() == REPLACED
        assert other.result().join(10.0) == 0
    assert child.exitcode == REPLACED


@pytest.mark.slow
def test_a_stopped_process_has_not_ended_and_goes_on_and_a_killed_one_has_ended(context: ForkServerContext) -> None:
    child = Forked(context, stay)
    child.signal(signal.SIGSTOP)
    assert child.join(0.2) is None
    wait_until(lambda: child.is_stopped)
    child.signal(signal.SIGCONT)
    wait_until(lambda: not child.is_stopped)
    child.signal(signal.SIGKILL)
    assert child.join(10.0) == -signal.SIGKILL
    child.signal(signal.SIGKILL)  # nobody is there any more, and nobody else is struck
    wait_until(lambda: not child.is_stopped)
    assert is_gone(child.pid)
