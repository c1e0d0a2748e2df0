"""The modules of the specification as text: what they define and extend, and the actions of Next.

TLC lists only actions that its constants give an instance, so the actions that have to be taken are read from the text
of Next: every operator that it names outside of the sets that its quantifiers range over.
Not handled: TLA+ beyond definitions that start a line; TLC itself parses the modules.

Spec: every module of this folder
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_COMMENT = re.compile(r"\\\*[^\n]*|\(\*.*?\*\)", re.DOTALL)
_DEFINITION = re.compile(r"^(?:LOCAL\s+)?(\w+)(\([^=\n]*\))?[ \t]*==", re.MULTILINE)
_RANGE = re.compile(r"\\in\s+[^,:]+")
_END = re.compile(r"^(?:={4,}|-{4,}|(?:VARIABLES?|CONSTANTS?|ASSUME|THEOREM|LOCAL|RECURSIVE|INSTANCE)\b)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Definition:
    """One operator as its module spells it."""

    parameters: str
    """With the brackets, without spaces; empty for none."""
    body: str
    """Right side, with every run of white space as one space."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What the folder of the specification holds."""

    path: Path
    modules: dict[str, dict[str, Definition]]
    """Module to its definitions."""
    extends: dict[str, tuple[str, ...]]
    """Module to the modules that it extends, standard ones too."""
    cfgs: tuple[str, ...]
    """Names of the configuration files."""


def read_folder(path: Path) -> Folder:
    """Read the definitions of every module and list the configurations."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(path.glob("*.tla"))}
    return Folder(
        path,
        {name: definitions(text) for name, text in texts.items()},
        {name: _extended(text) for name, text in texts.items()},
        tuple(file.name for file in sorted(path.glob("*.cfg"))),
    )


def definitions(text: str) -> dict[str, Definition]:
    """Operators defined at the start of a line, by name."""
    text = _COMMENT.sub("", text)
    starts = list(_DEFINITION.finditer(text))
    found = {}
    for place, start in enumerate(starts):
        end = starts[place + 1].start() if place + 1 < len(starts) else len(text)
        body = _END.split(text[start.end() : end])[0]
        found[start[1]] = Definition("".join((start[2] or "").split()), " ".join(body.split()))
    return found


def actions_of_next(folder: Folder, module: str) -> frozenset[str]:
    """Operators that Next names, for the Next that a root module defines or extends; empty without one."""
    seen: list[str] = [module]
    for name in seen:
        seen += [other for other in folder.extends.get(name, ()) if other not in seen]
    known = {name for reached in seen for name in folder.modules.get(reached, {})}
    bodies = [folder.modules[name]["Next"].body for name in seen if "Next" in folder.modules.get(name, {})]
    if not bodies:
        return frozenset()
    return frozenset(re.findall(r"\w+", _RANGE.sub(" ", bodies[0]))) & known


def _extended(text: str) -> tuple[str, ...]:
    found = re.search(r"^EXTENDS\s+(\w+(?:\s*,\s*\w+)*)", _COMMENT.sub("", text), re.MULTILINE)
    return tuple(re.findall(r"\w+", found[1])) if found else ()
