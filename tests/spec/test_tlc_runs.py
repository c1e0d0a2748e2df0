"""Every way in which a run of TLC can differ from its row is red, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tlc

pytestmark = pytest.mark.spec

EXTRA = """---- MODULE Extra ----
EXTENDS Counter
Abstract == INSTANCE Above WITH z <- x
StartsAtOne == Abstract!Spec
Live == Init /\\ [][Next]_vars /\\ WF_vars(Up)
OnlyUp == Init /\\ [][Up]_vars
Loose == Init /\\ [][Up]_x
Nowhere == x = 0 /\\ x = 1 /\\ y = 0 /\\ [][Next]_vars
Finally == <>[](x = Limit)
Typo == x.field = 1
=======================
"""
ABOVE = "---- MODULE Above ----\nEXTENDS Naturals\nVARIABLE z\nSpec == z = 1 /\\ [][z' >= 0]_z\n====\n"
HARMLESS = (
    "---- MODULE Mutants ----\nEXTENDS Extra\nMutHarmless == x + 1 <= Limit\nMutResetAnywhere(k) == x >= k\n====\n"
)
BROKEN = "---- MODULE Broken ----\nEXTENDS Counter\nWrong == (x\n====\n"


def cfg(checks: str, spec: str = "Spec", limit: int = 2) -> str:
    return f"SPECIFICATION {spec}\nCONSTANTS Limit = {limit}\n{checks}\n"


def row(expect: str, violates: str | None = None, *, module: str = "Extra", **keys) -> dict:
    return {"module": module, "kind": "mc", "expect": expect, "violates": violates, **keys}


BOUND, BOTH = "INVARIANT Bound", "INVARIANTS Bound TopUnreachable"
MUTANT = {"module": "Mutants", "kind": "mutant", "base": "Counter.cfg"}
GREEN = {
    "Clean": (cfg(BOUND), row("ok", distinct=6, depth=5, coverage=True)),
    "Deadlock": (cfg(BOUND, "OnlyUp"), row("deadlock", depth=3)),
    "Liveness": (cfg("PROPERTY Finally", "Live"), row("property", "Finally", flags=["-lncheck final"])),
    "FirstState": (cfg("PROPERTY StartsAtOne"), row("property", "StartsAtOne")),
    "Simulation": (cfg(BOUND), row("ok", flags=["-simulate num=20", "-depth 10", "-seed 1"])),
    "Invariant": (cfg(BOTH), row("invariant", "TopUnreachable", depth=3)),
    "StepProperty": (None, {**MUTANT, "override": {"CanReset": "MutResetAnywhere"}, "expect": "property",
                            "violates": "FromAbove", "constants": {"Limit": "1"}}),
    "Reached": (None, {"kind": "sanity", "base": "Counter.cfg", "expect": "invariant", "violates": "TopUnreachable"}),
}  # fmt: skip
RED = {
    "OtherCount": (cfg(BOUND), row("ok", distinct=7), "distinct states were 7 and are 6: explain the difference"),
    "NoCount": (cfg(BOUND), row("ok"), "no count is recorded; found 6"),
    "OtherDepth": (cfg(BOUND), row("ok", distinct=6, depth=4), "depth was 4 and is 5: explain the difference"),
    "OtherName": (cfg(BOTH, limit=3), row("invariant", "Bound"), "TopUnreachable fell, expected was Bound"),
    "OtherOutcome": (cfg(BOUND, "OnlyUp"), row("ok", distinct=3), "deadlock, expected was ok; see the trace"),
    "Warned": (cfg(BOUND, "Loose"), row("ok", distinct=3, flags=["-deadlock"]), "TLC warns: The subscript"),
    "Unparsed": (cfg(BOUND), row("ok", module="Broken", distinct=6), "TLC gave no verdict, exit code 150: "),
    "Untyped": (cfg("INVARIANT Typo"), row("invariant", "Typo"), "TLC gave no verdict, exit code 75: "),
    "Undefined": (cfg("INVARIANT Nope"), row("invariant", "Nope"), "TLC gave no verdict, exit code 151: "),
    "NoState": (cfg(BOUND, "Nowhere"), row("ok", distinct=1), "no state satisfies Init"),
    "OverBudget": (cfg(BOUND, limit=10**7), row("ok", distinct=6, seconds=2), "its budget is 2 s"),
    "Survivor": (None, {**MUTANT, "override": {"CanUp": "MutHarmless"}, "expect": "invariant", "violates": "Bound"},
                 "the mutant survives: with MutHarmless in place of CanUp, Bound still holds"),
    "Unreachable": (None, {"kind": "sanity", "base": "Counter.cfg", "expect": "invariant", "violates": "Flag"},
                    "not reachable any more: Flag holds"),
}  # fmt: skip


def lay_out(build_lab, path: Path, cases: dict):
    """A folder with one row for each case, beside the base that the generated ones need."""
    rows = {"Counter": {"cfg": "Counter.cfg", "kind": "mc", "expect": "ok", "distinct": 6, "coverage": True}}
    files = {"Extra.tla": EXTRA, "Above.tla": ABOVE, "Broken.tla": BROKEN, "Mutants.tla": HARMLESS}
    for name, (text, keys, *_) in cases.items():
        rows[name] = {"cfg": f"{name}.cfg", **{key: value for key, value in keys.items() if value is not None}}
        files |= {f"{name}.cfg": text} if text is not None else {}
    made = build_lab(path, rows, files)
    assert tlc.main(["--spec", str(path), "write"]) == 0
    return made


def run(lab, *arguments: str, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run(lab.command(*arguments), capture_output=True, text=True, check=False, **how)


def reports(lab, path: Path, cases: dict) -> dict:
    """Run all cases at once; each report by name."""
    names = ["--only", "Counter", *cases]
    done = run(lab, "all", *names, "--jobs", "2", "--json", str(path))
    assert done.stderr == "", done.stderr
    return {entry["name"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))["runs"]}


def test_runs_that_show_what_their_rows_say_are_green(build_lab, tmp_path):
    lab = lay_out(build_lab, tmp_path, GREEN)
    found = reports(lab, tmp_path / "report", GREEN)
    assert {name: entry["faults"] for name, entry in found.items() if not entry["green"]} == {}
    assert found["Clean"]["actions"].keys() == {"Init", "Up", "Reset", "Swap"}
    assert found["Simulation"]["distinct"] is None
    assert found["Simulation"]["generated"] > 20


def test_every_difference_between_run_and_row_is_red_and_named(build_lab, tmp_path):
    lab = lay_out(build_lab, tmp_path, RED)
    found = reports(lab, tmp_path / "report", RED)
    assert {name for name, entry in found.items() if entry["green"]} == {"Counter"}
    told = {name: " / ".join(found[name]["faults"]) for name in RED}
    assert {name: told[name] for name, (_, _, said) in RED.items() if said not in told[name]} == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [("Swap == x = 1", "Swap == x = 9"), ("\\/ Swap", "\\/ (\\E k \\in {} : Swap)")],
    ids=["guard", "instance"],
)
def test_an_action_that_is_never_taken_is_red(lab, old, new):
    lab.edit("Counter.tla", old, new)
    lab.change_row("Counter", distinct=3, depth=3)
    done = run(lab, "mc")
    assert "RED  action Swap is never taken" in done.stdout
    assert (done.returncode, done.stdout.splitlines()[-1].split(": ", 1)[1]) == (1, "RED: Swap")


@pytest.mark.parametrize(
    ("name", "old", "new", "rows", "said"),
    [
        ("Counter.tla", "Up == CanUp /\\ x'", "Up == x'", ["Counter"], "invariant Bound, expected was ok"),
        ("Counter.tla", "Bound == x <= Limit", "Bound == TRUE", ["NoLimit"], "the mutant survives: with MutNoLimit"),
        ("Counter.tla", "CanUp == x < Limit", "CanUp == x < 1", ["Top"], "not reachable any more: TopUnreachable"),
        ("Mutants_NoLimit.cfg", "MutNoLimit", "CanUp", ["NoLimit"], "does not replace CanUp by MutNoLimit"),
    ],
)
def test_a_weakened_specification_is_red(lab, name, old, new, rows, said):
    """A guard taken out, an invariant that says TRUE, a claim out of reach, a mutant that is the original."""
    lab.edit(name, old, new)
    done = run(lab, "all", "--only", *rows)
    assert done.returncode == 1
    assert said in done.stdout


def test_everything_as_the_table_says_ends_with_a_table_and_zero(lab):
    lab.change_row("NoLimit", constants={"Limit": "1"}, depth=3)
    assert tlc.main(["--spec", str(lab.path), "write"]) == 0
    done = run(lab, "all", "--deep")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("all as the table says")
    assert "ok   3 of 3 actions of Next are taken" in done.stdout
    listed = {line.split("  ")[0] for line in done.stdout.split("---\n")[1].splitlines()}
    assert {"Counter", "NoLimit", "ResetAnywhere", "Top", "NoLimit (control)"} <= listed


def test_a_mutant_that_falls_by_its_bounds_alone_is_red(lab):
    lab.edit("Counter.tla", "Bound == x <= Limit", "Bound == x <= Limit /\\ Limit # 1")
    lab.change_row("NoLimit", constants={"Limit": "1"}, depth=None)
    assert tlc.main(["--spec", str(lab.path), "write"]) == 0
    done = run(lab, "mutants", "--deep", "--only", "NoLimit")
    assert done.returncode == 1
    assert "Bound falls without the mutant" in done.stdout


def test_new_counts_are_recorded_only_on_demand(lab):
    lab.change_row("Counter", distinct=7, depth=4)
    before = (lab.path / "models.json").read_text(encoding="utf-8")
    assert run(lab, "mc").returncode == 1
    assert (lab.path / "models.json").read_text(encoding="utf-8") == before
    done = run(lab, "mc", "--update")
    assert "recorded Counter: distinct 7 -> 6, depth 4 -> 5" in done.stdout
    assert done.returncode == 0
    assert '"distinct": 6, "depth": 5' in (lab.path / "models.json").read_text(encoding="utf-8")


def test_one_run_shows_what_tlc_says_and_ends_with_its_code(lab):
    done = run(lab, "run", "NoLimit", "--", "-difftrace")
    assert "Error: Invariant Bound is violated." in done.stdout
    assert done.returncode == 12
    missing = run(lab, "run", "Nothing")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


def test_states_and_graph_of_a_small_run_are_written(lab):
    states, figure = lab.path / "states.txt", lab.path / "figure.dot"
    assert run(lab, "states", "Counter", "-o", str(states)).returncode == 0
    assert states.read_text(encoding="utf-8").count("State ") == 6
    assert run(lab, "graph", "Counter", "-o", str(figure), "--show", "x").returncode == 0
    assert figure.read_text(encoding="utf-8").count("->") == 3
    failed = run(lab, "graph", "NoLimit", "-o", str(figure))
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_runner_leaves_neither_processes_nor_files(lab, number):
    lab.change_row("Counter", distinct=None, depth=None)
    lab.edit("Counter.cfg", "Limit = 2", f"Limit = {10**7}")
    scratch = lab.path / "scratch"
    scratch.mkdir()
    outside = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(lab.command("mc", "--only", "Counter"), env=outside, stderr=subprocess.PIPE) as runner:
        while not (found := children(runner.pid)):
            time.sleep(0.05)
        runner.send_signal(number)
        said = runner.communicate()[1].decode()
    assert runner.returncode == 130
    assert said == "spec/tlc.py: interrupted; every run was stopped\n"
    assert [child for child in found if Path(f"/proc/{child}/cmdline").exists()] == []
    assert list(scratch.iterdir()) == []


def children(pid: int) -> list[int]:
    """Processes that a process started and that check a model; asking for the version of Java is over soon."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"tlc2.TLC" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found
