"""Results of chaos are kept run by run, so that hours of it may be had in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.testing.chaos_plans import Case
from nemo_dcr.testing.chaos_results import Results, summary, table_of
from nemo_dcr.testing.chaos_run import Outcome, RunResult
from nemo_dcr.testing.chaos_source import RecordPlace

CASE, OTHER = Case("owner", "any time", "at", "kill"), Case("receiver", "Flush", "before", "stop")


def result(seed: int, number: int, *breaches: str) -> RunResult:
    outcome = Outcome(
        case=CASE,
        struck=("kill of owner-0 from outside",),
        reached=True,
        committed=True,
        attempts=2,
        seconds=3.0,
        recovered_s=1.5,
        double=False,
    )
    found = RunResult(seed, number, Path("somewhere"), record=RecordPlace.S3, relays=True, requests=7)
    found.outcomes.append(outcome)
    found.breaches += breaches
    return found


def test_runs_that_ended_are_left_out_when_it_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "results.ndjson"
    first = Results(file, [3, 4])
    for each in (result(3, 0), result(4, 0, "a wrong bit")):
        first.add(each)
    second = Results(file)
    assert second.seeds == [3, 4]
    assert second.runs == first.runs
    assert second.missing([(3, 0), (4, 0), (3, 1)]) == [(3, 1)]
    assert summary(second.runs, 2, 60.0).startswith(
        "chaos: FAILED: 2 faulted transitions of 2, 1 of 2 points and kinds"
    )
    assert table_of(second.runs, [CASE, OTHER]).splitlines()[2:] == [
        "| owner: at any time, kill | 2 | 2 | 2 | 0 | 4 |",
        "| receiver: before Flush, stop | 0 | 0 | 0 | 0 | 0 |",
    ]


def test_the_line_that_a_killed_process_was_writing_is_a_run_that_did_not_end(tmp_path: Path) -> None:
    file = tmp_path / "results.ndjson"
    results = Results(file, [3])
    results.add(result(3, 0))
    results.add(result(3, 1))
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    again = Results(file)
    assert again.missing([(3, 0), (3, 1)]) == [(3, 1)]
    again.add(result(3, 1))
    assert Results(file).missing([(3, 0), (3, 1)]) == []


def test_a_file_of_other_seeds_or_of_something_else_is_refused(tmp_path: Path) -> None:
    Results(tmp_path / "results", [3])
    with pytest.raises(InvalidConfig, match=r"is of the seeds \[3\]"):
        Results(tmp_path / "results", [4])
    (tmp_path / "other").write_text("somebody's own text")
    with pytest.raises(InvalidConfig, match="holds no results of chaos"):
        Results(tmp_path / "other")
    assert (tmp_path / "other").read_text() == "somebody's own text"
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidConfig, match="holds no results of chaos"):
        Results(tmp_path / "empty")
