"""Seconds, counts and intervals of one attempt on one node, by stage.

Every instant is read from the monotonic clock and told as seconds since the epoch, by one anchor that each process
takes once: intervals of a process never jump, and processes of one host agree as well as the wall clock is read.
Stages of different threads overlap, so their seconds do not add up to the window; what one stage does at once, such as
several payloads under way, counts once. A wait is the time that a stage
stood still because the queue behind it was full, or the one in front of it empty; it is counted apart from the stage.
Not handled: clocks of different hosts that differ (keep them synchronised, or compare intervals of one host only).

Paper: Appendix C (timed window t0 to t1; intervals of the lower bounds; post-apply checks apart)
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nemo_dcr.ids import AttemptId

EPOCH_AT_ZERO = time.time() - time.monotonic()
"""Seconds since the epoch when this process's monotonic clock showed 0: the one wall anchor of the process."""
SPANS_KEPT = 20_000
"""Intervals kept of one attempt on one node; later ones still count in the sums."""


def now() -> float:
    """Seconds since the epoch, by the monotonic clock and the anchor of this process."""
    return EPOCH_AT_ZERO + time.monotonic()


@dataclass(frozen=True, slots=True)
class TimingsOf:
    """Ask a node for the timings of one attempt."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of a stage."""

    stage: str
    begin: float
    """Seconds since the epoch, as the end."""
    end: float
    detail: str = ""
    """What was worked on, such as a payload's number."""


@dataclass(frozen=True, slots=True)
class Timings:
    """What one node measured in one attempt."""

    node: str
    marks: dict[str, float]
    """Named instants, seconds since the epoch."""
    seconds: dict[str, float]
    counts: dict[str, int]
    waits: dict[str, int] = field(default_factory=dict)
    """How often each stage waited for room in the queue behind it; `publish`, how often it had nothing to send."""
    wait_seconds: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    """Intervals in the order in which they ended; waits are not among them."""


class _Attempt:
    """What is known of one attempt."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.running: dict[str, tuple[int, float]] = {}
        """By stage: blocks that run now, and since when at least one has."""
        self.counts: dict[str, int] = defaultdict(int)
        self.waits: dict[str, int] = defaultdict(int)
        self.wait_seconds: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.told = 0
        """How many of the intervals `news` handed out."""

    def timings(self, node: str, spans: tuple[Span, ...]) -> Timings:
        """A copy that does not change any more."""
        copies = (dict(self.marks), dict(self.seconds), dict(self.counts), dict(self.waits), dict(self.wait_seconds))
        return Timings(node, *copies, spans)


class StageClock:
    """Accumulates timings by attempt; keeps the latest `keep` attempts. Thread safe."""

    def __init__(self, node: str, keep: int = 8) -> None:
        self._node = node
        self._keep = keep
        self._lock = threading.Lock()
        self._attempts: dict[AttemptId, _Attempt] = {}

    def mark(self, attempt: AttemptId, name: str, *, first: bool = False) -> None:
        """Note the present instant; `first` keeps an earlier one."""
        with self._lock:
            marks = self._of(attempt).marks
            if not (first and name in marks):
                marks[name] = now()

    @contextmanager
    def stage(self, attempt: AttemptId, name: str, detail: str = "") -> Iterator[None]:
        """Add the elapsed seconds of the block to a stage, those of blocks that overlap once, and keep the interval."""
        begin = now()
        with self._lock:
            running = self._of(attempt).running
            others, since = running.get(name, (0, begin))
            running[name] = others + 1, since
        try:
            yield
        finally:
            end = now()
            with self._lock:
                found = self._of(attempt)
                blocks, since = found.running.pop(name, (1, begin))  # the attempt may have been forgotten meanwhile
                if blocks > 1:
                    found.running[name] = blocks - 1, since
                else:
                    found.seconds[name] += end - since
                if len(found.spans) < SPANS_KEPT:
                    found.spans.append(Span(name, begin, end, detail))

    def span(self, attempt: AttemptId, name: str, detail: str, begin: float, end: float) -> None:
        """Keep an interval that somebody else measured by the monotonic clock; it adds nothing to the stage."""
        with self._lock:
            found = self._of(attempt)
            if len(found.spans) < SPANS_KEPT:
                found.spans.append(Span(name, EPOCH_AT_ZERO + begin, EPOCH_AT_ZERO + end, detail))

    def add(self, attempt: AttemptId, name: str, seconds: float) -> None:
        """Add elapsed seconds to a stage."""
        with self._lock:
            self._of(attempt).seconds[name] += seconds

    def count(self, attempt: AttemptId, name: str, number: int) -> None:
        """Add to a count."""
        with self._lock:
            self._of(attempt).counts[name] += number

    def waited(self, attempt: AttemptId, stage: str, seconds: float, *, times: int = 1) -> None:
        """A stage stood still for so long; `times` is 0 when that wait was counted before."""
        with self._lock:
            found = self._of(attempt)
            found.waits[stage] += times
            found.wait_seconds[stage] += seconds

    def of(self, call: TimingsOf) -> Timings:
        """What was measured in an attempt; empty for an unknown one."""
        with self._lock:
            found = self._attempts.get(call.attempt) or _Attempt()
            return found.timings(self._node, tuple(found.spans))

    def news(self, attempt: AttemptId) -> Timings:
        """The same sums, with only the intervals that no call before handed out."""
        with self._lock:
            found = self._attempts.get(attempt) or _Attempt()
            begin, found.told = found.told, len(found.spans)
            return found.timings(self._node, tuple(found.spans[begin:]))

    def _of(self, attempt: AttemptId) -> _Attempt:
        found = self._attempts.get(attempt)
        if found is None:
            found = self._attempts[attempt] = _Attempt()
            for old in sorted(self._attempts)[: -self._keep]:
                del self._attempts[old]
        return found
