"""The census of threads, in a process of its own: where it fails, that process stands still."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from nemo_dcr.receiver.threads import ThreadCensus

LIMIT_S = 60.0
CENSUSES = 50
BUSY = """
import gc, sys, threading, time
from nemo_dcr.receiver.threads import ThreadCensus

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.001)  # lets go of the interpreter's lock within a collection
        Cycle()  # work for the next collection

def begin_and_end():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def new_frames(depth=3):
    while depth == 3:
        new_frames(depth - 1)
    time.sleep(0.001) if depth == 0 else new_frames(depth - 1)

for target in (begin_and_end,) * 4 + (new_frames,) * 4:
    threading.Thread(target=target, daemon=True).start()
Cycle()
gc.set_threshold(1)
for _ in range(int(sys.argv[1])):
    ThreadCensus()
    assert gc.isenabled()
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_census_among_destructors_and_threads_that_begin_and_end_comes_to_its_end() -> None:
    """Red before the collector was kept out: the first census or one of the next never returned."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY, str(CENSUSES)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout == "done\n", done.stderr


def test_a_census_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    on = [False]
    monkeypatch.setattr("gc.isenabled", lambda: on[0])
    monkeypatch.setattr("gc.disable", lambda: calls.append("off"))
    monkeypatch.setattr("gc.enable", lambda: calls.append("on"))
    ThreadCensus()
    assert calls == ["off"]
    on[0] = True
    ThreadCensus()
    assert calls == ["off", "off", "on"]


def test_a_thread_that_began_since_then_is_named_until_it_ends() -> None:
    census, stop = ThreadCensus(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="a loader's own")
    thread.start()
    try:
        assert census.outliving(grace_s=0.0) == ["a loader's own"]
    finally:
        stop.set()
        thread.join()
    assert census.outliving() == []
