"""A specification of one screen with its table of runs, for tests of the runner: a counter that a reset takes back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

COUNTER = """---- MODULE Counter ----
EXTENDS Naturals
CONSTANTS Limit
VARIABLES x, y
vars == <<x, y>>
Init == x = 0 /\\ y = 0
CanUp == x < Limit
CanReset(k) == x > k   \\* only from above
Up == CanUp /\\ x' = x + 1 /\\ UNCHANGED y
Reset(k) == CanReset(k) /\\ x' = 0 /\\ UNCHANGED y
Swap == x = 1 /\\ y' = 1 - y /\\ UNCHANGED x
Next == Up \\/ (\\E k \\in 1..1 : Reset(k)) \\/ Swap
Spec == Init /\\ [][Next]_vars
Bound == x <= Limit
Flag == y \\in {0, 1}
FromAbove == [][x' < x => x > 1]_x
TopUnreachable == x < 2
========================
"""
MUTANTS = """---- MODULE Mutants ----
EXTENDS Counter
MutNoLimit == x < Limit + 1
MutResetAnywhere(k) == x >= k
========================
"""
BASE = "SPECIFICATION Spec\nCONSTANTS Limit = 2\nINVARIANTS Bound Flag\nPROPERTY FromAbove\n"
ROWS: dict[str, dict[str, Any]] = {
    "Counter": {
        "cfg": "Counter.cfg", "kind": "mc", "expect": "ok", "distinct": 6, "depth": 5, "coverage": True
    },
    "NoLimit": {
        "module": "Mutants", "cfg": "Mutants_NoLimit.cfg", "kind": "mutant", "base": "Counter.cfg",
        "override": {"CanUp": "MutNoLimit"}, "expect": "invariant", "violates": "Bound", "depth": 4
    },
    "ResetAnywhere": {
        "module": "Mutants", "cfg": "Mutants_ResetAnywhere.cfg", "kind": "mutant", "base": "Counter.cfg",
        "override": {"CanReset": "MutResetAnywhere"}, "expect": "property", "violates": "FromAbove"
    },
    "Top": {
        "cfg": "Sanity_Top.cfg", "kind": "sanity", "base": "Counter.cfg",
        "expect": "invariant", "violates": "TopUnreachable"
    },
}  # fmt: skip
NO_MUTANT = {"Flag": "nothing writes anything else"}


@dataclass(frozen=True)
class Lab:
    """A folder with a specification, and the runner on it."""

    path: Path

    def command(self, *arguments: str) -> list[str]:
        """A command line of the runner."""
        root = Path(__file__).resolve().parents[2]
        return [sys.executable, str(root / "spec/tlc.py"), "--spec", str(self.path), *arguments]

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a piece of a file that must hold it once."""
        text = (self.path / name).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{name} holds {old!r} {text.count(old)} times")
        (self.path / name).write_text(text.replace(old, new), encoding="utf-8")

    def change_row(self, called: str, **values: Any) -> None:
        """Set keys of one row of the table; None takes a key away."""
        table = json.loads((self.path / "models.json").read_text(encoding="utf-8"))
        for row in table["rows"]:
            if row["name"] == called:
                row.update(values)
                for key in [key for key, value in row.items() if value is None]:
                    del row[key]
        (self.path / "models.json").write_text(json.dumps(table), encoding="utf-8")


def build(path: Path, rows: dict[str, dict[str, Any]], files: dict[str, str]) -> Lab:
    """A specification folder with a table; generated configurations are not written."""
    for name, text in {"Counter.tla": COUNTER, "Mutants.tla": MUTANTS, "Counter.cfg": BASE, **files}.items():
        (path / name).write_text(text, encoding="utf-8")
    full = [{"name": name, "module": "Counter", "seconds": 30, "why": f"{name}.", **row} for name, row in rows.items()]
    (path / "models.json").write_text(json.dumps({"no_mutant": NO_MUTANT, "rows": full}), encoding="utf-8")
    return Lab(path)


@pytest.fixture(scope="session")
def build_lab() -> Callable[[Path, dict[str, dict[str, Any]], dict[str, str]], Lab]:
    return build


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A folder in which everything is as the table says."""
    import tlc_audit
    import tlc_modules
    import tlc_rows

    made = build(tmp_path, ROWS, {})
    tlc_audit.write_generated(tlc_rows.read_table(tmp_path / "models.json"), tlc_modules.read_folder(tmp_path))
    return made
