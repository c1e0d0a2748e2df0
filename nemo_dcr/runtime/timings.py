"""Seconds and counts of one attempt on one node, by stage.

Times are wall-clock seconds since the epoch for the ends of the timed window and elapsed seconds for stages. Stages
of different threads overlap, so they do not add up to the window.

Paper: Appendix C (timed window t0 to t1; post-apply checks apart)
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_dcr.ids import AttemptId


@dataclass(frozen=True, slots=True)
class TimingsOf:
    """Ask a node for the timings of one attempt."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Timings:
    """What one node measured in one attempt."""

    node: str
    marks: dict[str, float]
    """Named instants, seconds since the epoch."""
    seconds: dict[str, float]
    counts: dict[str, int]


class StageClock:
    """Accumulates timings by attempt; keeps the latest `keep` attempts. Thread safe."""

    def __init__(self, node: str, keep: int = 8) -> None:
        self._node = node
        self._keep = keep
        self._lock = threading.Lock()
        self._marks: dict[AttemptId, dict[str, float]] = defaultdict(dict)
        self._seconds: dict[AttemptId, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._counts: dict[AttemptId, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def mark(self, attempt: AttemptId, name: str, *, first: bool = False) -> None:
        """Note the present instant; `first` keeps an earlier one."""
        with self._lock:
            if not (first and name in self._marks[attempt]):
                self._marks[attempt][name] = time.time()
            self._forget()

    @contextmanager
    def stage(self, attempt: AttemptId, name: str) -> Iterator[None]:
        """Add the elapsed seconds of the block to a stage."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(attempt, name, time.monotonic() - begin)

    def add(self, attempt: AttemptId, name: str, seconds: float) -> None:
        """Add elapsed seconds to a stage."""
        with self._lock:
            self._seconds[attempt][name] += seconds

    def count(self, attempt: AttemptId, name: str, number: int) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[attempt][name] += number

    def of(self, call: TimingsOf) -> Timings:
        """What was measured in an attempt; empty for an unknown one."""
        with self._lock:
            return Timings(
                self._node,
                dict(self._marks.get(call.attempt, {})),
                dict(self._seconds.get(call.attempt, {})),
                dict(self._counts.get(call.attempt, {})),
            )

    def _forget(self) -> None:
        for table in (self._marks, self._seconds, self._counts):
            for attempt in sorted(table)[: -self._keep]:
                del table[attempt]
