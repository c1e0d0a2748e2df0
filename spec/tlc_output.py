"""What one run of TLC 2.15 said: outcome, the name that fell, counts, warnings, actions taken.

Exit codes: 0 clean, 11 deadlock, 12 invariant, 13 property; any other is a broken harness, and so is a code that the
text does not confirm. TLC names a property that falls in one step by its place in a module, so the name comes from the
configuration, which then has one property.
Not handled: the states of a trace; `tlc.py run NAME` shows them.

Spec: every configuration of this folder
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tlc_cfg import Cfg

OUTCOMES = {0: "ok", 11: "deadlock", 12: "invariant", 13: "property"}
_COUNTS = re.compile(r"^([\d,]+) states generated, ([\d,]+) distinct states found, ([\d,]+) states left", re.MULTILINE)
_SIMULATED = re.compile(r"^Progress: ([\d,]+) states checked", re.MULTILINE)
_DEPTH = re.compile(r"^The depth of the complete state graph search is (\d+)", re.MULTILINE)
_STATE = re.compile(r"^(?:State (\d+):|Back to state \d+:)", re.MULTILINE)
_INVARIANT = re.compile(r"^Error: Invariant (\w+) is violated", re.MULTILINE)
_PROPERTY = re.compile(
    r"^Error: (?:Action property .* is violated|Property .* is violated by the initial state|"
    r"Temporal properties were violated)",
    re.MULTILINE,
)
_ACTION = re.compile(r"^<(\w+) line \d+, col \d+ to [^>]*>: \d+:(\d+)$", re.MULTILINE)
_STATISTICS = "The coverage statistics at"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, as far as it is judged."""

    result: str
    """ok, invariant, property, deadlock, broken (no verdict on the model) or time (stopped over its budget)."""
    violated: str | None
    """Name of what fell, as the configuration spells it; None when nothing fell or TLC does not tell."""
    distinct: int | None
    generated: int | None
    depth: int | None
    """Depth of the whole graph; length of the trace when something fell."""
    seconds: float
    """Wall time, start of the JVM included."""
    warnings: tuple[str, ...]
    actions: dict[str, int]
    """Steps by operator of Next or Init, only with coverage; an action without an instance is absent."""
    error: str
    """First lines of TLC's complaint when the run is broken."""


def read_outcome(code: int | None, text: str, seconds: float, cfg: Cfg, *, simulates: bool = False) -> Outcome:
    """Read TLC's exit code and its standard output. `code` is None for a run that was stopped over its budget."""
    result = "time" if code is None else OUTCOMES.get(code, "broken")
    counts = _COUNTS.findall(text)
    generated, distinct, left = (_number(value) for value in counts[-1]) if counts else (None, None, None)
    if simulates:
        walked = _SIMULATED.findall(text)
        generated, distinct = (_number(walked[-1]) if walked else None), None
    elif result == "ok" and (left != 0 or "Model checking completed. No error has been found." not in text):
        result = "broken"
    if (result == "ok" and not generated) or (result == "deadlock" and "Error: Deadlock reached." not in text):
        result = "broken"
    violated = None
    if result == "invariant":
        names = _INVARIANT.findall(text)
        violated = names[0] if names else None
        result = result if names else "broken"
    elif result == "property":
        violated = cfg.properties[0] if len(cfg.properties) == 1 else None
        result = result if _PROPERTY.search(text) else "broken"
    return Outcome(
        result,
        violated,
        distinct,
        generated,
        _depth(text, result),
        seconds,
        tuple(line.removeprefix("Warning: ") for line in text.splitlines() if line.startswith("Warning:")),
        _actions(text, cfg),
        _complaint(text, code) if result == "broken" else "",
    )


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _depth(text: str, result: str) -> int | None:
    if result == "ok":
        return int(found[-1]) if (found := _DEPTH.findall(text)) else None
    states = [int(number) for number in _STATE.findall(text) if number]
    return max(states, default=None)


def _actions(text: str, cfg: Cfg) -> dict[str, int]:
    """Steps by operator in the last statistics; one that the configuration put in place of another counts as that."""
    if _STATISTICS not in text:
        return {}
    replaced = {value.removeprefix("<- "): name for name, value in cfg.constants.items() if value.startswith("<- ")}
    steps: dict[str, int] = {}
    for operator, taken in _ACTION.findall(text.rsplit(_STATISTICS, 1)[1]):
        name = replaced.get(operator, operator)
        steps[name] = steps.get(name, 0) + int(taken)
    return steps


def _complaint(text: str, code: int | None) -> str:
    """The lines that say what is wrong with the harness."""
    lines = text.splitlines()
    signs = ("Error:", "***", "Exception", "Fatal", "Semantic error", "Parse Error", "Could not", "java.")
    first = next((place for place, line in enumerate(lines) if line.startswith(signs)), None)
    said = [line.strip() for line in (lines[-6:] if first is None else lines[first : first + 6]) if line.strip()]
    if "Finished computing initial states: 0 distinct states" in text:
        said = ["no state satisfies Init, so nothing was checked"]
    return f"exit code {code}: " + " / ".join(said)
