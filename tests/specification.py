"""The specification as the traceability test reads it: actions, guards, properties and every other name, from the text.

A guard is an operator of a section of DeltaRefit.tla whose title begins with "Guards of"; the operators that such a
section needs to write its guards stand there too.
Not handled: what the operators mean; model checking and mutants are the runner's (spec/tlc.py).

Spec: DeltaRefit, Properties
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlc_cfg import parse_cfg
from tlc_modules import Folder, actions_of_next, definitions

COMMENT = re.compile(r"\\\*[^\n]*|\(\*.*?\*\)", re.DOTALL)
SECTION = re.compile(r"^-{20,}\n\(\* (.*?)\*\)$(.*?)(?=^-{20,}\n|^={20,}|\Z)", re.MULTILINE | re.DOTALL)
DECLARED = re.compile(r"^(?:VARIABLES?|CONSTANTS?)\s+(\w+(?:\([_, ]*\))?(?:\s*,\s*\w+)*)", re.MULTILINE)
WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def snake(name: str) -> str:
    """`NotDuplicate` -> `not_duplicate`, the same words as in the code; a run of capitals is one word."""
    return WORD_START.sub("_", name).lower()


@dataclass(frozen=True)
class Specification:
    """Names of spec/*.tla and spec/*.cfg by what they are."""

    actions: frozenset[str]
    """Operators that Next of DeltaRefit names."""
    guards: frozenset[str]
    """Operators of the guard sections of DeltaRefit."""
    operators: frozenset[str]
    """Operators of DeltaRefit."""
    properties: frozenset[str]
    """Operators of Properties."""
    names: frozenset[str]
    """Modules, operators, variables and constants."""
    checked: frozenset[str]
    """What some configuration checks, mutants and sanity claims apart."""
    mutants: Mapping[str, frozenset[str]]
    """Weakening, without its Mut, to the properties that it makes fall; several runs may share one."""
    models: tuple[str, ...]
    """Names of the green runs of the CI set."""


def read(texts: Mapping[str, str]) -> Specification:
    """Read the files of the folder `spec`, file name to text."""
    modules = {name.removesuffix(".tla"): text for name, text in texts.items() if name.endswith(".tla")}
    operators = {name: definitions(text) for name, text in modules.items()}
    sections = SECTION.findall(modules["DeltaRefit"])
    cfgs = [parse_cfg(name, text) for name, text in texts.items() if re.match(r"MC.*\.cfg$", name)]
    checked = frozenset(check for cfg in cfgs for check in (*cfg.invariants, *cfg.properties))
    rows = json.loads(texts["models.json"])["rows"]
    return Specification(
        actions=actions_of_next(Folder(Path(), operators, {}, ()), "DeltaRefit"),
        guards=frozenset(
            name for title, body in sections if title.startswith("Guards of") for name in definitions(body)
        ),
        operators=frozenset(operators["DeltaRefit"]),
        properties=frozenset(operators["Properties"]),
        names=frozenset(modules).union(*operators.values(), *map(declared, modules.values())),
        checked=checked - frozenset(operators["Sanity"]),
        mutants=weakenings(row for row in rows if row["kind"] == "mutant"),
        models=tuple(row["name"] for row in rows if row["kind"] == "mc" and row.get("set", "ci") == "ci"),
    )


def weakenings(rows: Iterable[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Replacement of a guard, without its Mut, to the properties that fall."""
    found: dict[str, frozenset[str]] = {}
    for row in rows:
        (weaker,) = row["override"].values()
        name = weaker.removeprefix("Mut")
        found[name] = found.get(name, frozenset()) | {row["violates"]}
    return found


def declared(text: str) -> frozenset[str]:
    """Variables and constants of a module."""
    lists = DECLARED.findall(COMMENT.sub("", text))
    return frozenset(name for found in lists for name in re.findall(r"\w+", found))


def read_texts(folder: Path) -> dict[str, str]:
    """Modules, configurations and the table of runs, by file name."""
    files = [*folder.glob("*.tla"), *folder.glob("*.cfg"), folder / "models.json"]
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(files)}
