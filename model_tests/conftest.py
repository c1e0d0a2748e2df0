"""One summary line for the model tests: what was explored, stepped, replayed, validated and killed.

Tests add to the tally what they really did; the line stands at the end of the run, so a run that did nothing says so.

Spec: DeltaRefit
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

KINDS = ("states", "examples", "steps", "schedules", "traces", "mutants")
"""What is counted: states equal to TLC's; examples of the state machines and their steps; schedules replayed; traces
accepted; mutants killed."""


class Tally:
    """Counts by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, count: int = 1) -> None:
        """Count `count` more of `kind`.

        Raises: KeyError when the summary has no such kind.
        """
        if kind not in KINDS:
            raise KeyError(f"{kind} is none of {', '.join(KINDS)}")
        self.counts[kind] += count

    def line(self) -> str:
        """The summary line."""
        return "model: " + ", ".join(f"{self.counts[kind]:,} {kind}" for kind in KINDS)


_TALLY = Tally()


@pytest.fixture(scope="session")
def tally() -> Tally:
    """The counts of this run."""
    return _TALLY


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its counts to the process that started it."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tally"] = dict(_TALLY.counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add the counts of a worker that ended."""
    for kind, count in getattr(node, "workeroutput", {}).get("tally", {}).items():
        _TALLY.add(kind, count)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the line when anything was counted."""
    if _TALLY.counts:
        terminalreporter.write_line(_TALLY.line())
