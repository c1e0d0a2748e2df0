"""Conditions, decisions, trace actions and glossary: every code that is used is defined, every definition is used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

QUOTED = re.compile(r"`([^`]+)`")
CODE = re.compile(r"\b((?:SC|LC)\d+)\b")
TABLE_CODE = re.compile(r"^\| ((?:SC|LC|D)\d+) \|", re.MULTILINE)
DECISION = re.compile(r"(?<![\w.])D([1-9]\d?)(?![\w.]*\d|\w)")
# Actions that no code emits yet, with the reason.
UNEMITTED: dict[str, str] = {}


def actions(package) -> dict[str, str]:
    """Member name to spelling, read from the Action enum."""
    tree = next(module.tree for module in package if module.name == "nemo_dcr.trace")
    enum = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Action")
    assigned = [node for node in enum.body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}


@pytest.fixture(scope="session")
def proofs(root: Path) -> str:
    return (root / "PROOFS.md").read_text(encoding="utf-8")


def test_conditions_named_in_code_stand_in_the_tables(proofs, package, tests):
    listed = set(TABLE_CODE.findall(proofs))
    used = {(module.path, code) for module in (*package, *tests) for code in CODE.findall(module.text)}
    assert sorted((path, code) for path, code in used if code not in listed and "tests/house" not in path) == []


def test_each_loader_condition_has_one_class_that_is_checked_when_the_table_says(proofs, package):
    tree = next(module.tree for module in package if module.name == "nemo_dcr.receiver.conditions")
    rows = {}
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        fields = {node.targets[0].id: node.value for node in owner.body if isinstance(node, ast.Assign)}
        if "code" in fields:
            when = ast.unparse(fields["when"]).replace("When.", "").replace(" | ", " and ").replace("_", " ").lower()
            rows[ast.literal_eval(fields["code"])] = when
    table = dict(re.findall(r"^\| (LC\d+) \|.*\| ([^|]+) \|$", proofs, re.MULTILINE))
    assert (rows, len(rows)) == (table, 12)


def test_decisions_named_in_code_are_written_down(package, root):
    page = (root / "docs/decisions/0002-protocol-decisions.md").read_text(encoding="utf-8")
    listed = set(TABLE_CODE.findall(page))
    used = {(module.path, f"D{number}") for module in package for number in DECISION.findall(module.text)}
    assert sorted((path, code) for path, code in used if code not in listed) == []


def test_every_action_is_documented_and_emitted(package, root):
    page = (root / "docs/trace.md").read_text(encoding="utf-8")
    text = "\n".join(module.text for module in package if module.name != "nemo_dcr.trace")
    every = actions(package)
    assert [name for name in every.values() if f"`{name}`" not in page] == []
    silent = [member for member in every if not re.search(rf"\bAction\.{member}\b", text)]
    assert sorted(silent) == sorted(UNEMITTED)


def test_every_exit_code_is_documented(package, root):
    tree = next(module.tree for module in package if module.name == "nemo_dcr.cli.main")
    (codes,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and "EXIT_" in ast.unparse(n.targets[0]))
    page = (root / "docs/exit-codes.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert listed == {0, 130, *ast.literal_eval(codes)}


def test_glossary_names_modules_that_exist(root):
    rows = (root / "docs/glossary.md").read_text(encoding="utf-8")
    named = [name for name in QUOTED.findall(rows) if name.startswith("nemo_dcr")]
    files = [name for name in named if not (root / name).exists()]
    assert (files, len(named) > 20) == ([], True)


def test_code_patterns_find_what_they_name():
    assert DECISION.findall("see (D28), D3; not Appendix D.1, Figure D.3 or BD4") == ["28", "3"]
    assert CODE.findall("LC5, (SC1); not XLC3") == ["LC5", "SC1"]
    assert TABLE_CODE.findall("| LC1 | every write |\n| D2 | x |\ntext | SC1 |") == ["LC1", "D2"]
