"""Every failure test fails when its guard is taken out, and every known failure has a test and a guard."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests.failures.engine_guards import ENGINE_GUARDS
from tests.failures.guards import GUARDS as GUARDS_A_TO_D
from tests.failures.guards import Guard

GUARDS = (*GUARDS_A_TO_D, *ENGINE_GUARDS)
ROOT = Path(__file__).parents[2]
README = Path(__file__).with_name("README.md")
ENTRIES = (
    *("A1", "A2", "A3", "A4", "A5", "A6", "A8", "A10", "A11", "A13", "A15"),
    *("B1", "B2", "B3", "B4", "B6", "B7", "B8", "B9", "B10", "B11", "B13", "B14", "B15", "B17"),
    *("C1", "C2", "C3", "C4", "C5", "C7", "C8", "C10", "C11", "C12", "C14", "C15"),
    *("D1", "D3", "D4", "D5", "D7", "D8", "D9", "D10"),
    *("E1", "E2", "E4", "E5", "E6", "E8"),
)
"""Entries of the catalogue."""
ROW = re.compile(r"^\| ([A-E]\d+) \|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
TEST = re.compile(r"`([\w/.]+\.py)::(\w+)`")
FUNCTION = re.compile(r"`([\w.]+)`")


def rows() -> dict[str, tuple[str, set[str], set[str]]]:
    """Entry to (what it is, tests, guards) of the README's table; tests below tests/ are written without it."""
    found = {}
    for entry, what, tests, guards in ROW.findall(README.read_text(encoding="utf-8")):
        named = {f"tests/{file}::{test}" for file, test in TEST.findall(tests)}
        found[entry] = what.strip(), named, set(FUNCTION.findall(guards))
    return found


def function_of(test: str) -> Any:
    """The plain function behind `tests/x/test_y.py::test_z`."""
    file, name = test.split("::")
    return getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)


def arguments_of(guard: Guard, tmp_path: Path) -> dict[str, Any]:
    """The case of a guard; text stands for the member of an enum parameter, and `tmp_path` is given where asked for."""
    function = function_of(guard.test)
    hints = get_type_hints(function)
    case = dict(guard.case)
    for name, value in case.items():
        kind = hints.get(name)
        if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Enum):
            case[name] = kind(value)
    if "tmp_path" in inspect.signature(function).parameters:
        case["tmp_path"] = tmp_path
    return case


def test_every_entry_has_a_row_and_a_guard() -> None:
    assert list(rows()) == list(ENTRIES)
    assert {guard.entry for guard in GUARDS} == set(ENTRIES)
    assert all(what and tests for what, tests, _ in rows().values())


def test_the_table_names_the_guards_and_tests_that_are_run_here() -> None:
    wanted: dict[str, tuple[set[str], set[str]]] = {entry: (set(), set()) for entry in ENTRIES}
    for guard in GUARDS:
        wanted[guard.entry][0].add(guard.test)
        wanted[guard.entry][1].add(guard.removes)
    assert {entry: guards for entry, (_, _, guards) in rows().items()} == {e: g for e, (_, g) in wanted.items()}
    missing = {entry: wanted[entry][0] - tests for entry, (_, tests, _) in rows().items()}
    assert {entry: tests for entry, tests in missing.items() if tests} == {}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_named_test_exists(entry: str) -> None:
    for test in rows()[entry][1]:
        file, name = test.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.entry}-{guard.take_out.__name__}")
def test_the_named_guard_exists(guard: Guard) -> None:
    *module, name = guard.removes.split(".")
    found: Any = None
    for cut in range(len(module), -1, -1):
        try:
            found = importlib.import_module(".".join(["nemo_dcr", *module[:cut]]))
        except ModuleNotFoundError:
            continue
        for part in [*module[cut:], name]:
            found = getattr(found, part)
        break
    assert callable(found)


CASES = [
    pytest.param(
        guard,
        id=f"{guard.entry}-{guard.take_out.__name__}",
        marks=[pytest.mark.vllm] if guard.case.get("driver") == "AsyncLLM" else [],
    )
    for guard in GUARDS
]
"""Each guard with its case; an `AsyncLLM` is driven with types of vLLM."""


@pytest.mark.parametrize("guard", CASES)
def test_a_failure_test_fails_without_its_guard(guard: Guard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = arguments_of(guard, tmp_path)
    with monkeypatch.context() as patch:
        guard.take_out(patch)
        with pytest.raises(guard.fails_with):
            function_of(guard.test)(**arguments)


@pytest.mark.parametrize("guard", CASES)
def test_the_same_case_holds_with_its_guard(guard: Guard, tmp_path: Path) -> None:
    function_of(guard.test)(**arguments_of(guard, tmp_path))
