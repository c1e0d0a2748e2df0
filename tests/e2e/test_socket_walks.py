"""Walks with real processes, sockets, files and SQLite: a peer that is killed or stopped is named within seconds."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_dcr.ids import InstanceId, ReceiverId
from nemo_dcr.protocol.coordinator_events import AttemptEnded, Ready, TransitionEnded
from nemo_dcr.trace import Action
from tests.e2e.socket_cluster import REFIT, SocketCluster

E0 = InstanceId("e0")
VICTIM = ReceiverId("e0/0")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[SocketCluster]:
    """Two engine processes with one rank each, and one instance of two ranks."""
    cluster = SocketCluster(tmp_path, {"e0": 1, "e1": 2}, processes=True)
    try:
        yield cluster
    finally:
        cluster.close()


def failed_modes(cluster: SocketCluster) -> tuple[list[str], list[str]]:
    """Reasons of failed attempts, and the modes of those that could commit."""
    reasons = [effect.reason for effect in cluster.outcomes if isinstance(effect, AttemptEnded) and effect.reason]
    journal = [entry for entry in cluster.control.journal() if entry.action == Action.PREPARE]
    return reasons, [entry.args["mode"] for entry in journal if entry.args["candidate"]]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_stops_during_a_stream_is_named_in_time(processes: SocketCluster, sent: int) -> None:
    """C4, C11: the attempt fails with that receiver named; the retry without it commits; it is restored when back."""
    cluster = processes
    cluster.store.hold_after = 2
    cluster.train()
    struck: list[float] = []

    def strike() -> None:
        held = [report.payloads for report in cluster.coordinator.owner_reports()]
        if not struck and held == [2]:
            struck.append(time.monotonic())
            os.kill(cluster.children[VICTIM].pid, sent)

    failed = cluster.until(AttemptEnded, strike)
    assert isinstance(failed, AttemptEnded)
    assert failed.reason.startswith("receiver e0/0 is lost")
    assert time.monotonic() - struck[0] < 3 * REFIT.lost_after_s
    cluster.until(TransitionEnded)
    cluster.until(Ready)
    assert failed_modes(cluster)[1] == ["xor", "overwrite"]
    if sent == signal.SIGSTOP:
        os.kill(cluster.children[VICTIM].pid, signal.SIGCONT)
    else:
        cluster.children[VICTIM].wait()
        cluster.start_instance(E0)
        cluster.prewarm([VICTIM])
    cluster.coordinator.look()
    cluster.until(Ready)
    assert cluster.stored() == cluster.expected()
    cluster.train()
    cluster.until(TransitionEnded)
    assert cluster.stored() == cluster.expected()
    record = cluster.control.history()[-1]
    assert record.version == 2
    assert VICTIM in {member.receiver for member in record.required}


@pytest.mark.slow
def test_many_refits_do_not_grow_memory_threads_files_or_descriptors(tmp_path: Path) -> None:
    """D4: nothing of a finished transition stays behind but its row in the commit record."""
    cluster = SocketCluster(tmp_path, {"e0": 1, "e1": 1}, processes=False)
    try:

        def refits(count: int) -> dict[str, int]:
            for _ in range(count):
                candidate = cluster.train()
                cluster.until(TransitionEnded)
                cluster.until(Ready)
                for old in [old for old in cluster.source.weights if old not in ("", candidate)]:
                    del cluster.source.weights[old]
                cluster.outcomes.clear()
            gc.collect()
            return {
                "threads": threading.active_count(),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "stored files": sum(len(names) for _, _, names in os.walk(tmp_path / "store")),
            }

        refits(15)
        tracemalloc.start()
        before, objects, held = refits(15), len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
        after, grown = refits(70), tracemalloc.get_traced_memory()[0] - held
        tracemalloc.stop()
        assert after == before
        assert len(gc.get_objects()) - objects < 280  # 4 a refit; weak references come and go
        assert grown < 70 * 2048  # 2 KiB a refit; freed small objects stay in the interpreter's lists
        assert cluster.stored() == cluster.expected()
        assert cluster.control.history()[-1].version == 100
    finally:
        cluster.close()
