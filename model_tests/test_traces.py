"""Traces of real runs are behaviours of the specification; doctored ones and those of broken code are rejected in
place.

Every line of every run goes through the follower. Runs that are behaviours step by step also go through TLC, which
reads the specification itself.

Spec: Next, TraceDeltaRefit
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tlc_java import find_tools
from tlc_trace import follow

from model_tests import model, proved_lines
from model_tests.conftest import Tally
from model_tests.trace_export import Changes, LineRejected, Validated, validate
from model_tests.trace_files import Line, TraceIncomplete, read_directory
from model_tests.trace_logs import HARMLESS, log_of
from model_tests.trace_runs import Run, local, processes, rejected_payload, simulated, steady

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

WALKS, LOCALS, LOGS = 60, 8, 4
SPEC = Path(__file__).parents[1] / "spec"


def accepted_by_both(lines: Sequence[Line], changes: Changes | None = None, *, every: bool = True) -> Validated:
    """What the model made of a run that the proved model takes as well."""
    proved_lines.validate(lines, changes)
    return validate(lines, changes, every=every)


@pytest.fixture(scope="module")
def walked() -> list[Validated]:
    """Random walks of a simulated cluster with faults; every property after every line of the first ones."""
    runs = [simulated(seed) for seed in range(WALKS)]
    return [accepted_by_both(run.lines, run.changes, every=number < 10) for number, run in enumerate(runs)]


@pytest.fixture(scope="module")
def still() -> Run:
    """One run without faults."""
    return steady(1, owners=2)


@pytest.fixture(scope="module")
def quiet(still: Run) -> Validated:
    """The same, accepted."""
    return accepted_by_both(still.lines, still.changes)


def test_walks_with_faults_are_behaviours_of_the_specification(walked: list[Validated], tally: Tally) -> None:
    assert len(walked) == WALKS
    assert sum(len(run.lines) for run in walked) > 100 * WALKS
    assert set().union(*(run.excuses for run in walked)) <= {"told", "seen", *(f"DV{n}" for n in range(1, 24))}
    tally.add("traces", len(walked))


def test_runs_without_faults_need_no_divergence(quiet: Validated) -> None:
    assert quiet.excuses == Counter()
    assert all(
        steps for steps, line in zip(quiet.steps, quiet.lines, strict=True) if not line.action.startswith("Start")
    )


@pytest.mark.parametrize("seed", range(LOCALS))
def test_runs_of_real_nodes_with_tensors_and_loaders_are_behaviours(seed: int, tally: Tally) -> None:
    run = local(seed)
    # The shortest: an owner dies before the first record, and nobody can be restored any more.
    assert len(accepted_by_both(run.lines).lines) > 60
    tally.add("traces")


def test_a_run_of_processes_with_a_kill_is_a_behaviour(tmp_path: Path, tally: Tally) -> None:
    traces, run = processes(tmp_path)
    accepted = accepted_by_both(run.lines, run.changes)
    assert {"FailAttempt", "StartReceiver", "StartRestore"} <= accepted.actions
    told = Counter(line.action for line in run.lines if "stored" in line.emitted.post)
    assert {"StartReceiver", "StartApply", "ApplyItem", "Flush"} <= set(told)
    place, unwritten = _unwritten(run.lines)
    for reader in (validate, proved_lines.validate):
        with pytest.raises(LineRejected, match="is the word of") as rejected:
            reader(unwritten, run.changes)
        assert rejected.value.number == place
    (traces / "killed.ndjson").unlink()
    with pytest.raises(TraceIncomplete, match="there is no end, and nobody killed e"):
        read_directory(traces)
    tally.add("traces")


def _unwritten(lines: Sequence[Line]) -> tuple[int, list[Line]]:
    """The run where the first applied item shows the words from before it, and the number of its line."""
    place = next(place for place, line in enumerate(lines) if line.action == "ApplyItem")
    node, emitted = lines[place].node, lines[place].emitted
    before = next(line for line in reversed(lines[:place]) if line.node == node and "stored" in line.emitted.post)
    post = {**emitted.post, "stored": before.emitted.post["stored"]}
    assert post != emitted.post
    return place + 1, [
        *lines[:place],
        replace(lines[place], emitted=replace(emitted, post=post)),
        *lines[place + 1 :],
    ]


def test_accepted_traces_show_every_action(walked: list[Validated], quiet: Validated) -> None:
    rejected = rejected_payload()
    failing = accepted_by_both(rejected.lines, rejected.changes)
    assert set(model.ACTIONS) == failing.actions.union(quiet.actions, *(run.actions for run in walked))


# ------------------------------------------------------------------------------------------------------------------ TLC


def logs(runs: list[Run], directory: Path) -> list[Path]:
    """Those of the runs that are behaviours step by step, as logs."""
    files = []
    for run in runs:
        accepted = validate(run.lines, run.changes, every=False)
        if not set(accepted.excuses) - HARMLESS:
            files.append(directory / f"{run.name.replace(' ', '-')}.json")
            files[-1].write_text(json.dumps(log_of(accepted)))
    return files


@pytest.fixture(scope="module")
def sync_logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return logs([steady(seed) for seed in range(LOGS)], tmp_path_factory.mktemp("logs"))


def test_tlc_accepts_the_traces_too_and_rejects_doctored_ones_at_the_line(
    sync_logs: list[Path], tmp_path: Path, tally: Tally
) -> None:
    assert len(sync_logs) == LOGS
    doctored = dict(DOCTORED)
    files, expected = [*sync_logs], dict[Path, int]()
    for name, doctor in doctored.items():
        log = json.loads(sync_logs[0].read_text())
        place = doctor(log["steps"])
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(log))
        expected[files[-1]] = place
    found = follow(files, find_tools(), SPEC)
    assert [(one.file, one.told) for one in found[:LOGS] if not one.accepted] == []
    assert {one.file: one.steps for one in found[LOGS:] if not one.accepted} == expected
    tally.add("traces", LOGS)


def _first(steps: list[dict[str, Any]], action: str) -> int:
    return next(place for place, step in enumerate(steps) if step["a"] == action)


def _tag_not_lowered(steps: list[dict[str, Any]]) -> int:
    place = _first(steps, "StartApply")
    steps[place]["o"]["tag"] = {"kind": "clean", "ver": 0, "cand": {"cand": 0}, "att": 0}
    return place


def _gate_open(steps: list[dict[str, Any]]) -> int:
    place = next(p for p, step in enumerate(steps) if step["a"] == "EndpointPrepare")
    steps[place]["o"]["gate"] = True
    return place


def _old_words(steps: list[dict[str, Any]]) -> int:
    """An item that was written is told to be the old one still."""
    place = next(
        p
        for p, step in enumerate(steps)
        if step["a"] == "ApplyItem" and any(_is_new(each) for each in step["o"]["stored"]["set"])
    )
    next(each for each in steps[place]["o"]["stored"]["set"] if _is_new(each))["c"] = {"set": [{"cand": 0}]}
    return place


def _is_new(item: dict[str, Any]) -> bool:
    return item["c"] == {"set": [{"cand": 1}]}


def _swapped(steps: list[dict[str, Any]]) -> int:
    place = _first(steps, "StartAttempt")
    steps[place - 1], steps[place] = steps[place], steps[place - 1]
    return place - 1


DOCTORED: dict[str, Callable[[list[dict[str, Any]]], int]] = {
    "tag": _tag_not_lowered,
    "gate": _gate_open,
    "stored": _old_words,
    "swap": _swapped,
}
