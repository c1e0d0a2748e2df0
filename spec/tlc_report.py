"""Verdicts on runs: what differs from the row, the lines and the table that say so, the report as data.

A run is red when its outcome, the name that fell, the exact count or the depth differs, when TLC warned (its warnings
mean that something is not checked as it reads), or when it went over its budget. All runs with coverage together must
take every action.
Not handled: deciding whether a new count is right; a person explains it, then records it with --update.

Spec: models.json
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tlc_output import Outcome
from tlc_rows import Row

HEADINGS = ("name", "kind", "expected", "got", "distinct", "depth", "seconds", "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row, what its run showed, and what is wrong with it."""

    row: Row
    outcome: Outcome
    faults: tuple[str, ...]
    recount: str | None
    """The fault that --update would take away: a count that differs while all else is as expected."""

    @property
    def green(self) -> bool:
        """Whether the run showed what the row says."""
        return not self.faults and self.recount is None


def judge(row: Row, outcome: Outcome, workers: int) -> Verdict:
    """Compare one run with its row. `workers` is what it ran with: the depth is exact with one only."""
    faults = []
    if outcome.result == "broken":
        faults.append(f"TLC gave no verdict, {outcome.error}; look closer: python spec/tlc.py run {row.name}")
    elif outcome.result == "time":
        faults.append(f"stopped after {outcome.seconds:.0f} s; its budget is {row.seconds} s")
    elif outcome.result != row.expect:
        faults.append(_surprise(row, outcome))
    elif row.violates is not None and outcome.violated != row.violates:
        faults.append(f"{outcome.violated or 'an unnamed property'} fell, expected was {row.violates}")
    if row.kind == "control" and outcome.result not in ("ok", "broken", "time"):
        faults = [f"{outcome.violated or outcome.result} falls without the mutant, by the bounds alone: {row.why}"]
    faults += [f"TLC warns: {warning}" for warning in outcome.warnings]
    recount = None if faults else _recount(row, outcome, workers)
    return Verdict(row, outcome, tuple(faults), recount)


def never_taken(verdicts: Sequence[Verdict], actions: Iterable[str]) -> list[str]:
    """Those of the actions that no run with coverage took."""
    taken = {name for verdict in verdicts for name, steps in verdict.outcome.actions.items() if steps > 0}
    return sorted(set(actions) - taken)


def line(verdict: Verdict) -> str:
    """One finished run, and why it is red."""
    states = "" if verdict.outcome.distinct is None else f"{verdict.outcome.distinct:,} states, "
    head = f"{_mark(verdict):4} {verdict.row.name}: {_said(verdict.outcome)}, {states}{verdict.outcome.seconds:.1f} s"
    return "\n".join([head, *(f"       {fault}" for fault in _complaints(verdict))])


def table(verdicts: Sequence[Verdict]) -> str:
    """All runs, one a line, in columns."""
    rows = [HEADINGS, *(_cells(verdict) for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    right = {"distinct", "depth", "seconds"}
    lines = []
    for row in rows:
        cells = zip(HEADINGS, row, widths, strict=True)
        padded = [text.rjust(width) if heading in right else text.ljust(width) for heading, text, width in cells]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def as_data(verdict: Verdict) -> dict[str, Any]:
    """One run for --json."""
    outcome = verdict.outcome
    return {
        "name": verdict.row.name,
        "kind": verdict.row.kind,
        "set": verdict.row.suite,
        "expected": _wanted(verdict.row),
        "got": _said(outcome),
        "distinct": outcome.distinct,
        "generated": outcome.generated,
        "depth": outcome.depth,
        "seconds": round(outcome.seconds, 1),
        "actions": outcome.actions,
        "green": verdict.green,
        "faults": _complaints(verdict),
    }


def _surprise(row: Row, outcome: Outcome) -> str:
    """The outcome differs; what that means for the kind of row."""
    if outcome.result == "ok" and row.kind == "mutant":
        ((guard, mutant),) = row.override.items()
        return f"the mutant survives: with {mutant} in place of {guard}, {row.violates or 'no deadlock'} still holds"
    if outcome.result == "ok" and row.kind == "sanity":
        return f"not reachable any more: {row.violates} holds, and it should be violated"
    return f"{_said(outcome)}, expected was {_wanted(row)}; see the trace: python spec/tlc.py run {row.name}"


def _recount(row: Row, outcome: Outcome, workers: int) -> str | None:
    if row.expect == "ok" and not row.simulates and row.kind != "control":
        if row.distinct is None:
            return f"no count is recorded; found {outcome.distinct:,}, record it with --update"
        if row.distinct != outcome.distinct:
            return (
                f"distinct states were {row.distinct:,} and are {outcome.distinct:,}: explain the difference; "
                "do not update silently (then: --update)"
            )
    if row.depth is not None and workers == 1 and row.depth != outcome.depth:
        return f"depth was {row.depth} and is {outcome.depth}: explain the difference; do not update silently"
    return None


def _mark(verdict: Verdict) -> str:
    return "ok" if verdict.green else "RED"


def _complaints(verdict: Verdict) -> list[str]:
    return [*verdict.faults, *([verdict.recount] if verdict.recount else [])]


def _wanted(row: Row) -> str:
    return f"{row.expect} {row.violates}" if row.violates else row.expect


def _said(outcome: Outcome) -> str:
    return f"{outcome.result} {outcome.violated}" if outcome.violated else outcome.result


def _cells(verdict: Verdict) -> tuple[str, ...]:
    outcome = verdict.outcome
    numbers = ("" if number is None else f"{number:,}" for number in (outcome.distinct, outcome.depth))
    seconds = f"{outcome.seconds:.1f}"
    row = verdict.row
    return (row.name, row.kind, _wanted(row), _said(outcome), *numbers, seconds, "" if verdict.green else "RED")
