"""Stage clocks: sums by attempt, first marks kept on request, old attempts forgotten."""

from __future__ import annotations

import pytest

from nemo_dcr.ids import AttemptId
from nemo_dcr.runtime.timings import StageClock, Timings, TimingsOf


def test_stages_counts_and_marks_add_up_by_attempt() -> None:
    clock = StageClock("e0/0")
    one, two = AttemptId(1), AttemptId(2)
    for seconds in (1.5, 2.0, -0.5):
        clock.add(one, "apply", seconds)
    clock.count(one, "items", 3)
    clock.count(one, "items", 4)
    clock.count(two, "items", 1)
    found = clock.of(TimingsOf(one))
    assert (found.node, found.seconds, found.counts) == ("e0/0", {"apply": 3.0}, {"items": 7})
    assert clock.of(TimingsOf(AttemptId(9))) == Timings("e0/0", {}, {}, {})


def test_a_stage_is_timed_also_when_its_block_fails() -> None:
    clock = StageClock("e0/0")
    with pytest.raises(ValueError, match="inside"), clock.stage(AttemptId(1), "decode"):
        raise ValueError("inside")
    assert clock.of(TimingsOf(AttemptId(1))).seconds["decode"] >= 0.0


def test_blocks_of_a_stage_that_overlap_count_once_and_keep_their_intervals() -> None:
    clock, one = StageClock("owner-0"), AttemptId(1)
    with clock.stage(one, "publish", "0"), clock.stage(one, "publish", "1"), clock.stage(one, "publish", "2"):
        pass
    with clock.stage(one, "publish", "3"):
        pass
    found = clock.of(TimingsOf(one))
    first = max(found.spans[:3], key=lambda span: span.end - span.begin)
    last = found.spans[3]
    assert [span.detail for span in found.spans] == ["2", "1", "0", "3"]
    assert found.seconds["publish"] == (first.end - first.begin) + (last.end - last.begin)


def test_a_first_mark_stays_and_others_move() -> None:
    clock = StageClock("e0/0")
    clock.mark(AttemptId(1), "began", first=True)
    clock.mark(AttemptId(1), "flushed")
    earlier = clock.of(TimingsOf(AttemptId(1))).marks
    clock.mark(AttemptId(1), "began", first=True)
    clock.mark(AttemptId(1), "flushed")
    later = clock.of(TimingsOf(AttemptId(1))).marks
    assert later["began"] == earlier["began"]
    assert later["flushed"] > earlier["flushed"]


def test_only_the_latest_attempts_are_kept() -> None:
    clock = StageClock("e0/0", keep=3)
    for attempt in range(1, 11):
        clock.add(AttemptId(attempt), "apply", 1.0)
        clock.count(AttemptId(attempt), "items", 1)
        clock.mark(AttemptId(attempt), "flushed")
    kept = [attempt for attempt in range(1, 11) if clock.of(TimingsOf(AttemptId(attempt))).seconds]
    assert kept == [8, 9, 10]
