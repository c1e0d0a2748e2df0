"""Configuration files of TLC: read, and written for the rows that are generated from a base.

A generated configuration is the base with some bounds replaced, at most one operator replaced, and one check in place
of all checks of the base. It can be read alone, and it is committed; `tlc.py` refuses one that differs from its row.
Not handled: assignments to operators of instances (`<- [Module]`), which no configuration here needs.

Spec: *.cfg
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from tlc_rows import Row

_COMMENT = re.compile(r"\\\*[^\n]*|\(\*.*?\*\)", re.DOTALL)
_TOKEN = re.compile(r'"[^"]*"|<-|[=,{}]|-?[\w!]+|\S')
_KEYWORDS = {
    "CONSTANT": "CONSTANTS",
    "INVARIANT": "INVARIANT",
    "PROPERTY": "PROPERTY",
    "PROPERTIES": "PROPERTY",
    "CONSTRAINT": "CONSTRAINT",
    "ACTION_CONSTRAINT": "ACTION_CONSTRAINT",
    "SPECIFICATION": "SPECIFICATION",
    "INIT": "INIT",
    "NEXT": "NEXT",
    "SYMMETRY": "SYMMETRY",
    "VIEW": "VIEW",
}


class CfgError(Exception):
    """A configuration file that cannot be read. The message names the file and the place."""


@dataclass(frozen=True, slots=True)
class Cfg:
    """One configuration file, comments left out."""

    constants: dict[str, str]
    """Name to the text after it: "= {r1, r2}" or "<- Operator"."""
    settings: tuple[tuple[str, str], ...]
    """Every other line as (keyword, name), checks left out, in order."""
    invariants: tuple[str, ...]
    properties: tuple[str, ...]


def read_cfg(path: Path) -> Cfg:
    """Read a configuration.

    Raises: CfgError when the file is missing or is not the syntax of TLC.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CfgError(f"{path.name} is missing; write it, or generate it with: python spec/tlc.py write") from None
    return parse_cfg(path.name, text)


def parse_cfg(name: str, text: str) -> Cfg:
    """Parse the text of a configuration; `name` is for messages.

    Raises: CfgError when it is not the syntax of TLC.
    """
    tokens = _TOKEN.findall(_COMMENT.sub(" ", text))
    constants: dict[str, str] = {}
    lines: list[tuple[str, str]] = []
    keyword, place = "", 0
    while place < len(tokens):
        token = tokens[place]
        if token in _KEYWORDS or token.rstrip("S") in _KEYWORDS:
            keyword, place = _KEYWORDS.get(token) or _KEYWORDS[token.rstrip("S")], place + 1
        elif keyword == "CONSTANTS":
            value, after = _value(name, tokens, place + 1)
            if token in constants:
                raise CfgError(f"{name}: {token} is assigned twice")
            constants[token], place = value, after
        elif keyword:
            lines.append((keyword, token))
            place += 1
        else:
            raise CfgError(f"{name}: {token!r} stands before any keyword such as CONSTANTS or INVARIANT")
    checks = ("INVARIANT", "PROPERTY")
    return Cfg(
        constants,
        tuple(line for line in lines if line[0] not in checks),
        tuple(value for word, value in lines if word == "INVARIANT"),
        tuple(value for word, value in lines if word == "PROPERTY"),
    )


def generated_cfg(row: Row, base: Cfg) -> str:
    """Text of the configuration of a row with a base.

    Raises: CfgError when the row replaces a bound that the base does not have.
    """
    constants = dict(base.constants)
    for name, value in row.constants.items():
        if name not in constants:
            raise CfgError(f"{row.cfg}: {row.base} has no constant {name} to replace")
        constants[name] = value if value.startswith(("=", "<-")) else f"= {value}"
    constants.update({name: f"<- {value}" for name, value in row.override.items()})
    if row.violates is None:
        checks = [*(("INVARIANT", name) for name in base.invariants), *(("PROPERTY", name) for name in base.properties)]
    else:
        checks = [("INVARIANT" if row.expect == "invariant" else "PROPERTY", row.violates)]
    values = [f"{name} {value}" for name, value in constants.items() if value == f"= {name}"]
    bounds = [f"{name} {value}" for name, value in constants.items() if value != f"= {name}"]
    lines = [
        f"\\* {row.why}",
        f"\\* Generated from {row.base} and models.json by: python spec/tlc.py write",
        *(f"{keyword} {value}" for keyword, value in base.settings),
        *(["CONSTANTS"] if constants else []),
        *([f"  {'  '.join(values)}"] if values else []),
        *(f"  {bound}" for bound in bounds),
        *(f"{keyword} {name}" for keyword, name in checks),
    ]
    return "\n".join(lines) + "\n"


def control_of(row: Row, folder: Path, target: Path) -> Row:
    """The row that shows that a mutant with bounds of its own falls by its guard: the same run without the mutant.

    Writes the configuration into `target`.
    Raises: CfgError when the base is missing or lacks a bound.
    """
    path = target / f"control_{row.cfg}"
    path.write_text(generated_cfg(replace(row, override={}), read_cfg(folder / str(row.base))), encoding="utf-8")
    return replace(
        row,
        name=f"{row.name} (control)",
        kind="control",
        cfg=str(path),
        override={},
        expect="ok",
        violates=None,
        depth=None,
    )


def _value(name: str, tokens: list[str], place: int) -> tuple[str, int]:
    """The text of one assignment that starts at its sign, and the place after it."""
    sign = tokens[place] if place < len(tokens) else ""
    if sign not in ("=", "<-"):
        raise CfgError(f"{name}: {tokens[place - 1]!r} in CONSTANTS must be followed by = or <-")
    place += 1
    if place >= len(tokens):
        raise CfgError(f"{name}: {tokens[place - 2]!r} has no value")
    if tokens[place] != "{":
        return f"{sign} {tokens[place]}", place + 1
    depth, end = 0, place
    while end < len(tokens):
        depth += {"{": 1, "}": -1}.get(tokens[end], 0)
        end += 1
        if depth == 0:
            text = " ".join(tokens[place:end]).replace(" ,", ",").replace("{ ", "{").replace(" }", "}")
            return f"{sign} {text}", end
    raise CfgError(f"{name}: a set is not closed")
