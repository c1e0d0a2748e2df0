"""The story of a run: transitions with their attempts and timings, gates, rates; of a long run the latest."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.report.refit_timeline import LONGEST, MARKS, merged, rows
from nemo_dcr.report.run_story import read_run
from nemo_dcr.report.served_versions import served_by
from nemo_dcr.runtime.timings import Span
from tests.unit.report.run_directory import BEGIN, write_run

ONE = {"versions": 1, "failing": frozenset()}


def test_a_transition_has_its_failed_attempt_and_the_one_that_was_committed(tmp_path: Path) -> None:
    story = read_run(write_run(tmp_path), last=10)
    assert [each.name for each in story.transitions] == ["version 1", "version 2", "version 3"]
    second = story.transitions[1]
    assert [(a.began.attempt, a.began.mode, bool(a.failed)) for a in second.attempts] == [
        (2, "xor", True),
        (3, "overwrite", False),
    ]
    assert second.committed is second.attempts[1]
    assert second.seconds == 4.0
    assert second.attempts[1].count("payload_bytes") == 2 * 3000
    assert second.attempts[1].count("overwrite_items", senders=False) == 2 * 7
    assert second.attempts[0].slowest("apply") == 0.5
    assert story.conflicts == 0
    assert story.rates is not None
    assert [row.changed_elements for row in story.rates.versions] == [2, 4, 6]
    assert [entry.epoch for _, entry in story.takeovers] == [1]


def test_only_the_latest_transitions_of_a_long_run_are_told(tmp_path: Path) -> None:
    story = read_run(write_run(tmp_path, versions=9), last=4)
    assert [each.name for each in story.transitions] == [f"version {version}" for version in (6, 7, 8, 9)]
    assert story.left_out == 5
    assert all(len(attempt.nodes) == 4 for each in story.transitions for attempt in each.attempts)


def test_the_directory_that_a_demo_was_given_holds_the_run_in_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert len(read_run(tmp_path, last=9).transitions) == 3


def test_a_directory_without_a_chronicle_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="holds a chronicle; name the directory"):
        read_run(tmp_path, last=9)


def test_a_damaged_chronicle_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "chronicle" / "owner-9-1.ndjson").write_bytes(b"{}\n")
    with pytest.raises(OperatorNeeded, match=r"owner-9-1\.ndjson: line 1 is damaged"):
        read_run(tmp_path, last=9)


def test_a_run_that_is_cut_off_in_an_attempt_is_told_up_to_there(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = next((tmp_path / "chronicle").glob("coordinator-*"))
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b"AttemptBegan" in line)
    path.write_bytes(b"".join(lines[: last + 1]))
    third = read_run(tmp_path, last=9).transitions[2]
    assert (third.name, third.durable, third.seconds) == ("candidate step-3", None, None)
    assert third.attempts[0].failed == "its coordinator told no end"


def test_a_receiver_serves_a_version_from_the_opening_of_its_gate_to_the_next_move(tmp_path: Path) -> None:
    story = read_run(write_run(tmp_path), last=9)
    served = served_by("e0/0", story.gates["e0/0"], BEGIN + 40)
    assert [(begin - BEGIN, end - BEGIN, version) for begin, end, version in served.strips][:3] == [
        (0.0, 10.0, 0),
        (12.0, 20.0, 1),
        (24.0, 30.0, 2),
    ]
    assert served.last == 3
    assert served.closed_s == 2 + 4 + 2


def test_intervals_that_would_touch_are_one_with_their_number_and_their_seconds() -> None:
    spans = [Span("encode", begin, begin + 1.0, str(begin)) for begin in (0.0, 1.5, 10.0)]
    found = [(span.begin, span.end, number, seconds) for span, number, seconds in merged(spans, gap=1.0)]
    assert found == [(0.0, 2.5, 2, 2.0), (10.0, 11.0, 1, 1.0)]
    inside = [Span("encode", 0.0, 9.0), Span("encode", 1.0, 2.0), Span("encode", 9.5, 10.0)]
    assert [(number, seconds) for _, number, seconds in merged(inside, gap=1.0)] == [(3, 9.5)]
    even = [Span("encode", float(begin), begin + 0.5) for begin in range(25)]
    assert [number for _, number, _ in merged(even, gap=1.0)] == [LONGEST, LONGEST, 1]


def test_a_timeline_has_a_bounded_number_of_marks_and_says_which_nodes_are_missing(tmp_path: Path) -> None:
    names = tuple(f"e{number}/0" for number in range(20))
    few, many = (
        rows(
            read_run(write_run(tmp_path / f"{n}", receivers=names, owners=9, payloads=n, **ONE), last=1).transitions[0]
        )
        for n in (10, 400)
    )
    assert few[1] == many[1] == 20 - 8 + 9 - 6
    assert sum(len(row.bars) for row in few[0][2:]) == (8 + 6) * 3 * 10
    assert MARKS / 4 < sum(len(row.bars) for row in many[0][2:]) <= MARKS
    made = many[0]
    assert [row.stage for row in made][:5] == ["attempts", "finalization", "construct", "encode", "publish"]
