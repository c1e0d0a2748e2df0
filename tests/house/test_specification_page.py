"""The page of the specification says what the specification, the table of runs and the code say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from tlc_cfg import read_cfg
from tlc_modules import Folder, actions_of_next, read_folder
from tlc_rows import Row, read_table

QUOTED = re.compile(r"`([^`]+)`")
FOLDED = re.compile(r"tlc\.py graph (\S+) --show ([\w ]+) -o (\S+)$", re.MULTILINE)
NONE = "-"

Cells = tuple[str, ...]
Functions = Mapping[str, ast.AST]


def rows_under(page: str, heading: str) -> list[Cells]:
    """Cells of the table that stands below a heading, without its two head lines."""
    (section,) = re.findall(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines[2:]]


def told(rows: Iterable[Cells], *columns: int) -> list[Cells]:
    """The chosen columns, sorted, without back quotes."""
    return sorted(tuple(row[column].strip("`") for column in columns) for row in rows)


def wrong_runs(page: str, rows: Iterable[Row]) -> list[Cells]:
    """Runs that the page or the table of runs has alone: name and distinct states, by the set they belong to."""
    rows = [row for row in rows if row.kind == "mc"]
    faults: set[Cells] = set()
    for heading, suite in (("Results", "ci"), ("Deep runs", "deep")):
        known = {(row.name, f"{row.distinct:,}" if row.distinct else NONE) for row in rows if row.suite == suite}
        faults |= known ^ set(told(rows_under(page, heading), 0, 2))
    return sorted(faults)


def wrong_mutants(page: str, rows: Iterable[Row]) -> list[Cells]:
    """Mutants that the page or the table of runs has alone: name, guard, and what falls."""
    known = {(row.name, *row.override, row.violates or "") for row in rows if row.kind == "mutant"}
    return sorted(known ^ set(told(rows_under(page, "Mutants"), 0, 1, 2)))


def wrong_claims(page: str, rows: Iterable[Row]) -> list[Cells]:
    """Sanity claims that the page or the table of runs has alone."""
    known = {(row.name, row.why) for row in rows if row.kind == "sanity"}
    return sorted(known ^ set(told(rows_under(page, "Sanity"), 0, 1)))


def wrong_actions(page: str, actions: Iterable[str], members: Mapping[str, str], functions: Functions) -> list[str]:
    """Actions without a row, rows without an action, and functions that do not emit what their row says."""
    rows = rows_under(page, "Actions")
    faults = sorted({row[0] for row in rows} ^ set(actions))
    for action, named, _ in rows:
        for name in QUOTED.findall(named):
            emitted = f"Action.{members.get(action, '?')}"
            if name not in functions or emitted not in map(ast.unparse, ast.walk(functions[name])):
                faults.append(f"{name} does not emit {action}")
    return faults


def wrong_properties(page: str, checked: Iterable[str]) -> list[str]:
    """Properties that the page or the configurations have alone."""
    return sorted({row[0] for row in rows_under(page, "Properties")} ^ set(checked))


def wrong_divergences(page: str) -> list[str]:
    """Numbers that are not DV1, DV2 and so on, and sides that nobody knows."""
    rows = rows_under(page, "Divergences between code and specification")
    numbers = [row[0] for row in rows if row[0] != f"DV{rows.index(row) + 1}"]
    return numbers + [
        row[2] for row in rows if not re.match(r"(code|spec) (finer|coarser|freer|stricter)|names|order", row[2])
    ]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "spec/README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(root: Path) -> Folder:
    return read_folder(root / "spec")


@pytest.fixture(scope="module")
def runs(root: Path) -> tuple[Row, ...]:
    return read_table(root / "spec/models.json").rows


@pytest.fixture(scope="module")
def members(package) -> dict[str, str]:
    """Spelling of an action to its member of the enum."""
    (trace,) = (module.tree for module in package if module.name == "nemo_dcr.trace")
    (enum,) = (node for node in trace.body if isinstance(node, ast.ClassDef) and node.name == "Action")
    assigned = [node for node in enum.body if isinstance(node, ast.Assign)]
    return {ast.literal_eval(node.value): ast.unparse(node.targets[0]) for node in assigned}


@pytest.fixture(scope="module")
def functions(package) -> dict[str, ast.AST]:
    """Functions of modules, named from below nemo_dcr."""
    return {
        f"{module.name.removeprefix('nemo_dcr.')}.{node.name}": node
        for module in package
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_run_stands_on_the_page_with_its_states(page, runs):
    assert wrong_runs(page, runs) == []


def test_every_mutant_stands_on_the_page_with_its_guard_and_what_falls(page, runs):
    assert wrong_mutants(page, runs) == []


def test_every_sanity_claim_stands_on_the_page(page, runs):
    assert wrong_claims(page, runs) == []


def test_every_action_of_next_stands_on_the_page_with_the_functions_that_emit_it(page, folder, members, functions):
    assert wrong_actions(page, actions_of_next(folder, "DeltaRefit"), members, functions) == []
    assert f"{len(members)} actions" in " ".join(page.split())


def test_every_property_that_a_run_checks_stands_on_the_page(page, runs, root):
    read = [read_cfg(root / "spec" / row.cfg) for row in runs if row.kind == "mc"]
    assert wrong_properties(page, {name for cfg in read for name in (*cfg.invariants, *cfg.properties)}) == []


def test_divergences_are_numbered_and_dated_and_name_a_side(page):
    assert wrong_divergences(page) == []
    assert re.search(r"^Known on \d{4}-\d\d-\d\d\. ", page, re.MULTILINE)


def test_every_module_stands_on_the_page(page, folder):
    assert [name for name in folder.modules if f"[{name}.tla]({name}.tla)" not in page] == []


def test_every_figure_is_shown_and_says_how_it_is_drawn(page, folder, runs, root):
    drawn = {path: (name, variables.split()) for name, variables, path in FOLDED.findall(page)}
    files = {path.relative_to(root).as_posix() for path in (root / "spec/figures").iterdir()}
    shown = {f"spec/{path}" for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)}
    assert (files, len(files) > 0) == (set(drawn), True)
    assert shown == files
    for path, (name, variables) in drawn.items():
        picture = (root / path).read_text(encoding="utf-8")
        assert name in {row.name for row in runs}
        assert [each for each in variables if f"{each} = " not in picture] == []
        assert actions_of_next(folder, "DeltaRefit") & set(re.findall(r"\b(?:Bounded)?([A-Z]\w+)", picture))


def test_a_page_that_says_something_else_is_refused(page, folder, runs, members, functions):
    actions = actions_of_next(folder, "DeltaRefit")

    def changed(old: str, new: str) -> str:
        assert old in page
        return page.replace(old, new)

    first = next(row for row in runs if row.kind == "mc" and row.suite == "ci" and row.distinct)
    assert wrong_runs(changed(f"| {first.distinct:,} |", "| 7 |"), runs) != []
    assert wrong_runs(changed(f"| `{first.name}` |", "| `Other` |"), runs) != []
    assert wrong_mutants(changed("| NoDedup | `NotDuplicate` |", "| NoDedup | `IsDrained` |"), runs) != []
    assert wrong_mutants(page, [row for row in runs if row.name != "NoDedup"]) != []
    assert wrong_claims(changed("| SanityTwoCommits |", "| SanityThreeCommits |"), runs) != []
    assert wrong_actions(changed("| Flush |", "| Flash |"), actions, members, functions) != []
    emitter = changed("`protocol.endpoint_intake.flushed`", "`protocol.endpoint_intake.applied`")
    assert wrong_actions(emitter, actions, members, functions) != []
    missing = changed("`control_rules.decide_commit`", "`control_rules.commit`")
    assert wrong_actions(missing, actions, members, functions) != []
    assert wrong_properties(page, {"CommitExact"}) != []
    assert wrong_divergences(changed("| DV3 |", "| DV4 |")) != []
