"""How long a call takes: the best processor time of this thread over some repeats.

Processor time of one thread is not touched by what other processes do to the clock on the wall. They still take memory
bandwidth and cache, which the best of several repeats keeps small; so only ratios within one run mean anything.

Paper: Section 8
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.rows import Settings


def best_seconds(call: Callable[[], object], settings: Settings) -> float:
    """Seconds of the fastest call; one call before them is not timed."""
    call()
    best, spent = float("inf"), 0.0
    for repeat in range(settings.repeats * 4):
        begin = time.thread_time()
        call()
        took = time.thread_time() - begin
        best, spent = min(best, took), spent + took
        if repeat + 1 >= settings.repeats and spent >= settings.seconds:
            break
    return best


def best_together(calls: dict[str, Callable[[], object]], settings: Settings) -> dict[str, float]:
    """Seconds of the fastest call of each method; the methods take turns, so that all see the same machine."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    spent = 0.0
    for repeat in range(settings.repeats * 4):
        for name, call in calls.items():
            begin = time.thread_time()
            call()
            took = time.thread_time() - begin
            best[name], spent = min(best[name], took), spent + took
        if repeat + 1 >= settings.repeats and spent >= settings.seconds * len(calls):
            break
    return best
