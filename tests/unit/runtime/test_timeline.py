"""Timelines: unions of intervals, the bounds and the finalization of the paper, and a trace that viewers accept."""

from __future__ import annotations

import json
import random

from nemo_dcr.runtime.timeline import CONSTRUCTION, TRANSPORT, RefitTimeline, chrome_trace, covered
from nemo_dcr.runtime.timings import Span, Timings


def timings(node: str, marks: dict[str, float], spans: list[tuple[str, float, float]], check: float = 0.0) -> Timings:
    return Timings(node, marks, {"check": check}, {}, spans=tuple(Span(*each) for each in spans))


def refit() -> RefitTimeline:
    """Two owners, the second busier on the link; 100 is the epoch's second at which the first begins."""
    return RefitTimeline(
        "refit 1",
        (
            timings(
                "owner-0",
                {"construct_began": 100.0, "baseline_updated": 109.5},
                [("construct", 100.0, 102.0), ("encode", 101.0, 103.0), ("publish", 103.0, 104.0)],
            ),
            timings(
                "owner-1",
                {"construct_began": 100.5, "baseline_updated": 110.0},
                [
                    ("publish", 99.0, 101.0),
                    ("publish", 102.0, 104.0),
                    ("publish", 103.0, 107.0),
                    ("publish", 111.0, 112.0),
                ],
            ),
        ),
        (
            timings("e0/0", {"apply_ended": 108.0}, [("apply", 105.0, 108.0), ("thaw", 1.0, 2.0)], check=0.5),
            timings("e1/0", {"apply_ended": 107.0}, [("apply", 106.0, 107.0)], check=0.25),
        ),
    )


def test_a_union_counts_overlaps_once() -> None:
    assert covered([]) == 0.0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4.0
    rng = random.Random(3)
    for _ in range(50):
        intervals = [(begin, begin + rng.randrange(9)) for begin in (rng.randrange(60) for _ in range(12))]
        seconds = {second for begin, end in intervals for second in range(begin, end)}
        assert covered(intervals) == len(seconds)


def test_the_window_the_bounds_and_the_finalization_are_those_of_the_paper() -> None:
    found = refit()
    assert (found.t0, found.t1, found.check_s, found.latency_s) == (100.0, 110.0, 0.5, 9.5)
    assert found.bound_s(CONSTRUCTION) == 3.0
    assert found.bound_s(TRANSPORT) == 6.0  # the busier owner, clipped to the window
    assert (found.applied, found.finalization_s) == (108.0, 2.0)


def test_a_refit_that_changed_nothing_has_a_finalization_and_no_transport() -> None:
    owner = timings("owner-0", {"construct_began": 1.0, "baseline_updated": 3.0}, [("construct", 1.0, 2.0)])
    found = RefitTimeline("refit 1", (owner,), (timings("e0/0", {}, []),))
    assert (found.bound_s(TRANSPORT), found.applied, found.finalization_s) == (0.0, 1.0, 2.0)


def test_the_trace_names_every_node_and_stage_and_keeps_every_interval() -> None:
    events = json.loads(chrome_trace([refit(), refit()]))["traceEvents"]
    assert all({"ph", "name", "pid", "tid"} <= event.keys() for event in events)
    named = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(named) == {"refits", "owner-0", "owner-1", "e0/0", "e1/0"}
    assert len(set(named.values())) == len(named)
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] > 0 and event["dur"] >= 0 for event in slices)
    assert all(rows[event["pid"], event["tid"]] == event["name"] for event in slices if event["pid"] != named["refits"])
    assert sum(event["name"] == "publish" for event in slices) == 10
    lanes: dict[tuple[int, int], float] = {}
    for event in sorted(slices[: len(slices) // 2], key=lambda event: event["ts"]):
        if event["name"] != "finalization":
            assert lanes.get((event["pid"], event["tid"]), 0.0) <= event["ts"], "intervals of one row overlap"
            lanes[event["pid"], event["tid"]] = event["ts"] + event["dur"]
    windows = [event for event in slices if event["name"] == "refit 1"]
    assert [(event["ts"], event["dur"]) for event in windows] == [(100.0e6, 10.0e6)] * 2
    assert windows[0]["args"]["transport bound s"] == 6.0
    assert {event["name"] for event in events if event["ph"] == "i"} == {
        "construct_began",
        "baseline_updated",
        "apply_ended",
    }
