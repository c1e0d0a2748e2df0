"""Chaos: real processes, sockets and commit records under faults at every point of the protocol.

Several systems run at once. The last line sums everything up; the exit code is 1 on any breach, and each breach names
the run that shows it again.

    python -m nemo_dcr.cli.chaos --transitions 160 --seeds 11,12,13,14
    python -m nemo_dcr.cli.chaos --seed 12 --only 3 --keep DIRECTORY
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nemo_dcr.testing import chaos_world
from nemo_dcr.testing.chaos_plans import Case, all_cases
from nemo_dcr.testing.chaos_run import TRANSITIONS, Outcome, RunResult, numbered, run
from nemo_dcr.testing.chaos_system import fork_server

EXIT_BREACH = 1
NAMED = {"kill": "death", "cut": "cut off", "full": "full disk", "split": "split"}
OF_NO_ROLE = ("full", "split")
MIXED_EACH = 4
VALIDATED_EACH = 10
"""Traces of one run in so many are validated against the specification."""
VALIDATION_S = 600.0
"""Some seconds when nothing else runs."""


class RecordPlace(StrEnum):
    """Where the commit records of the runs lie."""

    SQLITE = "sqlite"
    ETCD = "etcd"
    MIXED = "mixed"

    def is_etcd(self, number: int) -> bool:
        """The record of the run with this number lies in an etcd server."""
        return self is RecordPlace.ETCD or (self is RecordPlace.MIXED and number % MIXED_EACH == MIXED_EACH - 1)


class PayloadWay(StrEnum):
    """How the payloads of the runs travel."""

    FILES = "files"
    RELAYS = "relays"
    MIXED = "mixed"

    def has_relays(self, number: int) -> bool:
        """The payloads of the run with this number travel through relay nodes."""
        return self is PayloadWay.RELAYS or (self is PayloadWay.MIXED and number % MIXED_EACH == 1)


def main(
    transitions: Annotated[int, typer.Option(min=1, help="Transitions under faults, over all seeds.")] = 168,
    seeds: Annotated[str, typer.Option(help="Seeds with commas between; empty: four new ones.")] = "",
    seed: Annotated[int | None, typer.Option(help="One seed.")] = None,
    only: Annotated[int | None, typer.Option(help="With --seed: this run of it alone.")] = None,
    systems: Annotated[int, typer.Option(min=1, help="Systems at once.")] = 7,
    validator: Annotated[
        str, typer.Option(help="Module that validates directories of traces; empty: none is validated.")
    ] = "",
    record: Annotated[
        RecordPlace,
        typer.Option(help="Where records lie; mixed: in one run of four in an etcd server, if there is one."),
    ] = RecordPlace.MIXED,
    payloads: Annotated[
        PayloadWay, typer.Option(help="How payloads travel; mixed: in one run of four through relay nodes.")
    ] = PayloadWay.MIXED,
    keep: Annotated[Path | None, typer.Option(help="Keep logs, traces and records here.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write the table of points to this file.")] = None,
) -> None:
    """Run chaos and print one summary line last.

    Raises: typer.Exit with code 1 on a breach; typer.BadParameter.
    """
    if only is not None and seed is None:
        raise typer.BadParameter("--only needs the --seed of the run")
    chosen = [seed] if seed is not None else [int(each) for each in seeds.split(",") if each]
    chosen = chosen or [random.SystemRandom().randrange(1 << 31) for _ in range(4)]
    runs = [(chosen[0], only)] if only is not None else numbered(chosen, transitions)
    world = chaos_world.enter()
    left_out = "" if world else "; full disks, cuts and splits are left out, which need root"
    if record is RecordPlace.MIXED and shutil.which("etcd") is None:
        record, left_out = RecordPlace.SQLITE, f"{left_out}; records in etcd are left out, which need its server"
    known = all_cases(world=world, etcd=record is not RecordPlace.SQLITE, relays=payloads is not PayloadWay.FILES)
    if payloads is PayloadWay.MIXED:
        known = list(dict.fromkeys([*all_cases(world=world), *known]))
    typer.echo(f"chaos: seeds {','.join(map(str, chosen))}, {len(runs)} runs of {TRANSITIONS} transitions{left_out}")
    directory = keep or Path(tempfile.mkdtemp(prefix="nemo-dcr-chaos-"))
    begin = time.monotonic()
    results = _run_all(runs, directory, systems, keep is not None, validator, world, record, payloads)
    if table is not None:
        table.write_text(_table(results, known), encoding="utf-8")
    failed = any(result.breaches for result in results)
    if failed:
        typer.echo(f"chaos: what the runs with a breach left is in {directory}")
    elif keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    typer.echo(summary(results, len(known), time.monotonic() - begin))
    if failed:
        raise typer.Exit(EXIT_BREACH)


def _run_all(
    runs: list[tuple[int, int]],
    directory: Path,
    systems: int,
    keeps: bool,
    validator: str,
    world: bool,
    record: RecordPlace,
    payloads: PayloadWay,
) -> list[RunResult]:
    context, results = fork_server(etcd=record is not RecordPlace.SQLITE), []
    validation = threading.Semaphore(1)

    def one(place: int, seed: int, number: int) -> RunResult:
        result = run(
            seed,
            number,
            directory / f"{seed}-{number}",
            context,
            place if world else None,
            etcd=record.is_etcd(number),
            relays=payloads.has_relays(number),
        )
        if validator and place % VALIDATED_EACH == 0:
            with validation:
                result.breaches += _validate(validator, result)
        return result

    with ThreadPoolExecutor(systems) as pool:
        jobs = [pool.submit(one, place, *each) for place, each in enumerate(runs)]
        for job in as_completed(jobs):
            result = job.result()
            results.append(result)
            for breach in result.breaches:
                typer.echo(f"chaos: BREACH in {result.name}: {breach}")
            if not keeps and not result.breaches:
                shutil.rmtree(result.directory, ignore_errors=True)
    return results


def _validate(module: str, result: RunResult) -> list[str]:
    command = [sys.executable, "-m", module, "validate", str(result.directory / "traces")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VALIDATION_S)
    except subprocess.TimeoutExpired:
        return [f"traces: {module} did not end within {VALIDATION_S:g} s"]
    result.validated = True
    return [] if done.returncode == 0 else [f"traces: {(done.stdout + done.stderr).strip()[-1500:]}"]


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
        f"{sum(result.etcd for result in results)} runs with etcd",
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


def _table(results: list[RunResult], cases: list[Case]) -> str:
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


if __name__ == "__main__":
    typer.run(main)
