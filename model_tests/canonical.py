"""One text for one state, whichever side it comes from: the model, or a dump of TLC.

Sets and functions are sorted, intervals are sets, strings and model values are both plain words, records are functions
of their fields.
Not handled: TLA+ values that no variable of the specification has, such as functions on 1 .. n that are no sequences.

Spec: VARIABLES of DeltaRefit
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model_tests.model_state import VARIABLES, Map, State

_TOKEN = re.compile(r'"[^"]*"|-?\d+\.\.-?\d+|<<|>>|\|->|:>|@@|[\[\](){},]|-?\w+|\S')
_NODE = re.compile(r'^(-?\d+) \[label="(.*?)"(?:,style = filled)?\];?$')
_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="(\w+)"')
_CLOSING = {"{": "}", "<<": ">>", "(": ")", "[": "]"}


class UnreadableDump(Exception):
    """A dump of TLC does not look as expected; this reader has to learn it."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A state graph in canonical text."""

    states: frozenset[str]
    edges: frozenset[tuple[str, str, str]]
    """From, action, to. TLC may write one edge several times, for example once for each true half of a disjunction."""


def state_text(state: State) -> str:
    """Canonical text of a state of the model, a line for each variable."""
    return "\n".join(f"{name} = {value_text(getattr(state, name))}" for name in sorted(VARIABLES))


def value_text(value: Any) -> str:
    """Canonical text of a value of the model."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | str):
        return str(value)
    if isinstance(value, frozenset):
        return _whole("{", sorted(map(value_text, value)))
    if isinstance(value, Map):
        return _whole("(", sorted(f"{value_text(key)} -> {value_text(one)}" for key, one in value.items()))
    if fields := getattr(value, "_fields", None):
        return _whole("(", sorted(f"{name} -> {value_text(getattr(value, name))}" for name in fields))
    return _whole("<<", [value_text(one) for one in value])


def tlc_value_text(text: str) -> str:
    """Canonical text of a value as TLC prints it."""
    tokens = _TOKEN.findall(text)
    value, place = _value(tokens, 0)
    if place != len(tokens):
        raise UnreadableDump(f"{' '.join(tokens[place:])!r} follows {value!r}")
    return value


def read_dot(dot: str) -> Graph:
    """The graph in a dump of TLC with states and action labels.

    Raises: UnreadableDump.
    """
    states: dict[str, str] = {}
    edges: list[tuple[str, str, str]] = []
    known: dict[str, str] = {}
    lines = [line.strip() for line in dot.splitlines()]
    for line in lines:
        if found := _NODE.match(line):
            states[found[1]] = "\n".join(sorted(_conjuncts(found[2], known)))
    for line in lines:
        if found := _EDGE.match(line):
            edges.append((states[found[1]], found[3].removeprefix("Bounded"), states[found[2]]))
    if len(states) + len(edges) != sum('label="' in line for line in lines):
        raise UnreadableDump("a line with a label is neither a state nor an edge")
    return Graph(frozenset(states.values()), frozenset(edges))


def _conjuncts(label: str, known: dict[str, str]) -> Iterator[str]:
    """The variables of a state; `known` spares reading a value again that another state has too."""
    for conjunct in label.removeprefix("/\\\\ ").split("\\n/\\\\ "):
        if conjunct not in known:
            name, value = conjunct.split(" = ", 1)
            known[conjunct] = f"{name} = {tlc_value_text(value.replace(chr(92) + 'n', ' ').replace(chr(92), ''))}"
        yield known[conjunct]


def _whole(opening: str, parts: list[str]) -> str:
    return f"{opening}{', '.join(parts)}{_CLOSING[opening]}"


def _value(tokens: list[str], place: int) -> tuple[str, int]:
    """The canonical text of the value that starts at a token, and the place after it."""
    if place >= len(tokens):
        raise UnreadableDump("a value ends too early")
    opening = tokens[place]
    if ".." in opening:
        first, last = opening.split("..")
        return _whole("{", sorted(str(number) for number in range(int(first), int(last) + 1))), place + 1
    if opening not in _CLOSING:
        return opening.strip('"'), place + 1
    parts, place = [], place + 1
    while tokens[place] != _CLOSING[opening]:
        part, place = _value(tokens, place)
        if opening in "([":
            if tokens[place] not in (":>", "|->"):
                raise UnreadableDump(f"{part!r} has no value, but {tokens[place]!r}")
            value, place = _value(tokens, place + 1)
            part = f"{part} -> {value}"
        parts.append(part)
        if tokens[place] in (",", "@@"):
            place += 1
    return _whole("(" if opening == "[" else opening, parts if opening == "<<" else sorted(parts)), place + 1
