"""Several runs of TLC at once, on as many cores as were asked for, with a live line on a terminal.

A run takes as many places as it has workers. Runs that take all places go first, each alone; the others follow with the
largest budgets first, so that the end of the queue is short runs.
Not handled: what a run must show (tlc_report).

Spec: models.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from tlc_cfg import read_cfg
from tlc_java import Run, Workshop
from tlc_output import read_outcome
from tlc_report import Verdict, judge
from tlc_rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of the machine the runs may take."""

    jobs: int
    """Places; a run with one worker takes one."""
    workers: int | None
    """Workers for every run, in place of those of its row."""
    patience: float
    """Factor on every time budget, for machines that are slower than the one of the budgets."""

    def workers_of(self, row: Row) -> int:
        """Workers that a row runs with."""
        return self.workers or row.workers

    def places_of(self, row: Row) -> int:
        """Places that a row takes."""
        return min(self.workers_of(row), self.jobs)


class LiveLine:
    """One line on a terminal that says what runs, rewritten in place; silent elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._shown = 0.0

    def show(self, text: str) -> None:
        """Rewrite the line, at most once a second."""
        if self._stream is not None and time.monotonic() - self._shown >= 1:
            self._shown = time.monotonic()
            print(f"\r\x1b[K{text[:110]}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Take the line away before something else is printed."""
        if self._stream is not None:
            self._shown = 0.0
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def run_all(
    rows: Sequence[Row], workshop: Workshop, effort: Effort, finished: Callable[[Verdict], None]
) -> list[Verdict]:
    """Run every row and judge it; `finished` sees each verdict as it comes. The result is in the order of the rows.

    Raises: KeyboardInterrupt when somebody asked for the end.
    """
    queue = sorted(rows, key=lambda row: (-effort.places_of(row), -row.seconds))
    running: list[Run] = []
    verdicts: dict[str, Verdict] = {}
    live = LiveLine(sys.stderr)
    while queue or running:
        taken = sum(effort.places_of(run.row) for run in running)
        while queue and taken + effort.places_of(queue[0]) <= effort.jobs:
            row = queue.pop(0)
            taken += effort.places_of(row)
            running.append(workshop.start(row, effort.workers_of(row)))
        live.show(
            f"{len(verdicts)}/{len(rows)} done; " + ", ".join(f"{run.row.name} {run.seconds:.0f} s" for run in running)
        )
        workshop.pause()
        for run in [run for run in running if _over(run, workshop, effort)]:
            running.remove(run)
            verdict = _verdict(run, workshop, effort)
            verdicts[run.row.name] = verdict
            live.clear()
            finished(verdict)
    return [verdicts[row.name] for row in rows]


def _over(run: Run, workshop: Workshop, effort: Effort) -> bool:
    """Whether a run has ended or has used up its budget."""
    return workshop.ended(run) or run.seconds > run.row.seconds * effort.patience


def _verdict(run: Run, workshop: Workshop, effort: Effort) -> Verdict:
    """Judge a run that is over, and let go of its files."""
    code = run.process.returncode if workshop.ended(run) else None
    seconds = run.seconds
    cfg = read_cfg(workshop.spec / run.row.cfg)
    outcome = read_outcome(code, run.output(), seconds, cfg, simulates=run.row.simulates)
    workshop.stop(run)
    return judge(run.row, outcome, effort.workers_of(run.row))
