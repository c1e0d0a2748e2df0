"""A refit as a timeline: intervals of all nodes on one axis, their lower bounds, and the same as Chrome trace JSON.

Axis: seconds since the epoch. t0 is the first `construct_began` of an owner, t1 its last `baseline_updated`; intervals
are clipped to [t0, t1]. A lower bound is the time that the intervals of some stages cover on the busiest owner,
overlaps counted once: construct and encode for construction, publish for transport. Finalization runs from the end of
the last application to t1. The trace has one process for each node and one for the refits, and one row for each stage,
more where its intervals overlap; it opens in Perfetto (ui.perfetto.dev) and in chrome://tracing.
Not handled: attempts without a baseline update, such as a restore or a failed one: they have no window.

Paper: Appendix C (timed window, lower bounds, finalization), Figure C.5; Section 8.7, Figure 11
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nemo_dcr.runtime.timings import Span, Timings

CONSTRUCTION = ("construct", "encode")
TRANSPORT = ("publish",)
_ROWS = ("construct", "encode", "publish", "download", "fetch", "verify", "decode", "apply", "baseline")
"""Rows of a node from top to bottom; stages that are not named here come after them."""
_MICROSECONDS = 1e6
_LANES = 64
"""Rows that overlapping intervals of one stage may take; further ones share the last."""


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that the union of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True, slots=True)
class RefitTimeline:
    """The committed attempt of one transition, as its owners and receivers measured it."""

    name: str
    """What the refit is called in the trace."""
    owners: tuple[Timings, ...]
    receivers: tuple[Timings, ...]

    @property
    def t0(self) -> float:
        """The first owner begins delta construction, seconds since the epoch."""
        return min(timings.marks["construct_began"] for timings in self.owners)

    @property
    def t1(self) -> float:
        """The last owner has updated its baseline, seconds since the epoch."""
        return max(timings.marks["baseline_updated"] for timings in self.owners)

    @property
    def check_s(self) -> float:
        """Post-apply checks on the receiver that took longest, in seconds; refit latency leaves them out."""
        return max((timings.seconds.get("check", 0.0) for timings in self.receivers), default=0.0)

    @property
    def latency_s(self) -> float:
        """t1 - t0 minus the post-apply checks, in seconds."""
        return self.t1 - self.t0 - self.check_s

    @property
    def applied(self) -> float:
        """End of the last application, seconds since the epoch; t0 when nothing was applied."""
        return max((timings.marks.get("apply_ended", self.t0) for timings in self.receivers), default=self.t0)

    @property
    def finalization_s(self) -> float:
        """From the end of the last application to t1, in seconds."""
        return self.t1 - self.applied

    def bound_s(self, stages: Sequence[str]) -> float:
        """Seconds that intervals of these stages cover on the busiest owner, clipped to the timed window."""
        t0, t1 = self.t0, self.t1
        return max(
            covered(
                (max(span.begin, t0), min(span.end, t1))
                for span in owner.spans
                if span.stage in stages and span.end > t0 and span.begin < t1
            )
            for owner in self.owners
        )


def chrome_trace(refits: Sequence[RefitTimeline]) -> bytes:
    """All refits in one trace, as JSON."""
    nodes = sorted({timings.node for refit in refits for timings in (*refit.owners, *refit.receivers)})
    processes = {node: number for number, node in enumerate(nodes, 1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, 0, "refits"), _named("thread_name", 0, 0, "timed window")]
    events.append(_named("thread_name", 0, 1, "finalization"))
    for node, process in processes.items():
        events.append(_named("process_name", process, 0, node))
    for refit in refits:
        window = {"construction bound s": refit.bound_s(CONSTRUCTION), "transport bound s": refit.bound_s(TRANSPORT)}
        window["post-apply checks s"] = refit.check_s
        events.append(_slice(Span(refit.name, refit.t0, refit.t1), 0, 0, window))
        events.append(_slice(Span("finalization", refit.applied, refit.t1, refit.name), 0, 1))
        for timings in (*refit.owners, *refit.receivers):
            events += _node(timings, processes[timings.node])
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _node(timings: Timings, process: int) -> list[dict[str, Any]]:
    others = sorted({span.stage for span in timings.spans} - set(_ROWS))
    rows = {stage: row for row, stage in enumerate((*_ROWS, *others))}
    ends: dict[str, list[float]] = {}
    slices = []
    for span in sorted(timings.spans, key=lambda span: span.begin):
        lanes = ends.setdefault(span.stage, [])
        lane = next((number for number, end in enumerate(lanes) if end <= span.begin), len(lanes))
        lane = min(lane, _LANES - 1)
        lanes[lane : lane + 1] = [span.end]
        slices.append(_slice(span, process, rows[span.stage] * _LANES + lane))
    events = [
        _named("thread_name", process, rows[stage] * _LANES + lane, stage)
        for stage in sorted(ends, key=rows.__getitem__)
        for lane in range(len(ends[stage]))
    ]
    events += slices
    for name, instant in timings.marks.items():
        at = {"ph": "i", "s": "p", "name": name, "pid": process, "tid": 0, "ts": instant * _MICROSECONDS}
        events.append(at)
    return events


def _slice(span: Span, process: int, row: int, more: dict[str, float] | None = None) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(more or {})
    if span.detail:
        arguments["detail"] = span.detail
    return {
        "ph": "X",
        "name": span.stage,
        "pid": process,
        "tid": row,
        "ts": span.begin * _MICROSECONDS,
        "dur": max(0.0, span.end - span.begin) * _MICROSECONDS,
        "args": arguments,
    }


def _named(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}
