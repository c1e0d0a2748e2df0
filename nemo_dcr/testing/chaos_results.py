"""What chaos runs found: kept line by line, so that hours of them may be had in pieces, and summed up.

A file of results begins with the seeds; each further line is one run that ended. Whoever goes on with the file takes
its seeds and leaves out the runs that it holds.

Paper: Section 6.3
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.testing.chaos_plans import Case
from nemo_dcr.testing.chaos_run import Outcome, RunResult
from nemo_dcr.testing.chaos_source import RecordPlace

NAMED = {"kill": "death", "cut": "cut off", "full": "full disk", "split": "split"}
OF_NO_ROLE = ("full", "split")
SEEDS = 4
"""How many seeds are drawn when none are given."""


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    seeds: list[int]


class Results:
    """The results of these seeds so far; each new one is written at once where there is a file."""

    def __init__(self, path: Path | None = None, seeds: Sequence[int] = ()) -> None:
        """Take up what the file holds; make it if it is absent.

        Args:
            path: of the file; None keeps nothing.
            seeds: empty: those of the file, else new ones.

        Raises: InvalidConfig when the file is of other seeds, or none of ours.
        """
        self._path = path
        self.runs: list[RunResult] = []
        self.seeds = list(seeds) or [random.SystemRandom().randrange(1 << 31) for _ in range(SEEDS)]
        if path is None:
            return
        if not path.exists():
            path.write_bytes(msgspec.json.encode(_Head(self.seeds)) + b"\n")
            return
        whole, _, cut = path.read_bytes().rpartition(b"\n")
        try:
            head, *lines = whole.splitlines()
            self.seeds = msgspec.json.decode(head, type=_Head).seeds
            self.runs = [_decode(line) for line in lines]
        except (ValueError, msgspec.DecodeError) as problem:
            raise InvalidConfig("results", f"{path} holds no results of chaos: {problem}") from problem
        if cut:  # what a process that died was just writing
            path.write_bytes(whole + b"\n")
        if seeds and list(seeds) != self.seeds:
            raise InvalidConfig("results", f"{path} is of the seeds {self.seeds}; give these or none, or another file")

    def missing(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of `runs`, by seed and number, that did not end yet."""
        known = {(each.seed, each.number) for each in self.runs}
        return [run for run in runs if run not in known]

    def add(self, result: RunResult) -> None:
        """One more run ended."""
        self.runs.append(result)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(result, enc_hook=str) + b"\n")


def _decode(line: bytes) -> RunResult:
    def path(kind: type, value: Any) -> Any:
        return kind(value)

    return msgspec.json.decode(line, type=RunResult, dec_hook=path)


def summary(results: list[RunResult], known: int, seconds: float) -> str:
    """Everything in one line."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    faulted = [outcome for outcome in outcomes if outcome.struck]
    cases = {str(outcome.case) for outcome in faulted if outcome.reached}
    breaches = sum(len(result.breaches) for result in results)
    parts = [
        f"{len(faulted)} faulted transitions of {len(outcomes)}",
        f"{len(cases)} of {known} points and kinds reached",
        f"{sum(outcome.double for outcome in faulted)} double faults",
        *(f"{sum(result.record is place for result in results)} with {place.value}" for place in RecordPlace),
        f"{sum(result.relays for result in results)} with relays",
        f"{sum(result.requests for result in results)} requests checked",
        f"{sum(result.validated for result in results)} traces validated",
        *(f"{name} recovered in {text}" for name, text in recovery(faulted).items()),
        f"{breaches} breaches",
        f"{seconds:.0f} s",
    ]
    return f"chaos: {'FAILED' if breaches else 'ok'}: " + ", ".join(parts)


def recovery(outcomes: list[Outcome]) -> dict[str, str]:
    """Median and longest time from a lone fault until everybody served the committed version, by role."""
    times: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.recovered_s is None or outcome.double:
            continue
        kind, role = outcome.struck[0].split()[0], outcome.case.role
        if kind in NAMED:
            times[NAMED[kind] if kind in OF_NO_ROLE else f"{role} {NAMED[kind]}"].append(outcome.recovered_s)
    return {
        role: f"{statistics.median(found):.1f} s (median) {max(found):.1f} s (longest)"
        for role, found in sorted(times.items())
    }


def table_of(results: list[RunResult], cases: list[Case]) -> str:
    """Runs and outcomes of every point and kind, as Markdown."""
    runs: dict[str, Counter[str]] = {str(case): Counter() for case in cases}
    for result in results:
        for outcome in result.outcomes:
            row = runs[str(outcome.case)]
            row["drawn"] += 1
            row["reached"] += outcome.reached
            row["committed"] += outcome.committed
            row["given up"] += not outcome.committed
            row["attempts"] += outcome.attempts
    columns = ("drawn", "reached", "committed", "given up", "attempts")
    lines = [f"| Point and kind | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {case} | {' | '.join(str(row[each]) for each in columns)} |" for case, row in runs.items()]
    return "\n".join(lines) + "\n"
