"""Chaos: real processes, sockets and commit records under faults at every point of the protocol.

Several systems run at once. The last line sums everything up; the exit code is 1 on any breach, and each breach names
the run that shows it again.

    python -m nemo_dcr.cli.chaos --transitions 160 --seeds 11,12,13,14
    python -m nemo_dcr.cli.chaos --seed 12 --only 3 --keep DIRECTORY
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.testing import chaos_world
from nemo_dcr.testing.chaos_plans import Case, all_cases
from nemo_dcr.testing.chaos_run import TRANSITIONS, Outcome, RunResult, numbered, run
from nemo_dcr.testing.chaos_source import RecordPlace
from nemo_dcr.testing.chaos_system import fork_server
from nemo_dcr.testing.etcd_server import etcd_binary
from nemo_dcr.testing.seaweedfs import seaweedfs_binary

EXIT_BREACH = 1
NAMED = {"kill": "death", "cut": "cut off", "full": "full disk", "split": "split"}
OF_NO_ROLE = ("full", "split")
MIXED_EACH = 4
VALIDATED_EACH = 10
"""Traces of one run in so many are validated against the specification."""
VALIDATION_S = 600.0
"""Some seconds when nothing else runs."""


class Records(StrEnum):
    """Where the commit records of the runs lie."""

    SQLITE = "sqlite"
    ETCD = "etcd"
    S3 = "s3"
    MIXED = "mixed"

    def places(self, numbers: Iterable[int], servers: Sequence[RecordPlace]) -> list[RecordPlace]:
        """The place of each of the runs with these numbers; mixed: every fourth run has one of the servers in turn."""
        if self is not Records.MIXED:
            return [RecordPlace(self.value) for _ in numbers]
        turns = itertools.cycle(servers or [RecordPlace.SQLITE])
        return [next(turns) if number % MIXED_EACH == MIXED_EACH - 1 else RecordPlace.SQLITE for number in numbers]


def installed_servers() -> list[RecordPlace]:
    """The places whose server this machine can start."""
    found = []
    for place, binary in ((RecordPlace.ETCD, etcd_binary), (RecordPlace.S3, seaweedfs_binary)):
        with contextlib.suppress(OperatorNeeded):
            binary()
            found.append(place)
    return found


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
        Records,
        typer.Option(help="Where records lie; mixed: in one run of four in a server, etcd and S3 in turn."),
    ] = Records.MIXED,
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
    servers = installed_servers() if record is Records.MIXED else []
    for place in (RecordPlace.ETCD, RecordPlace.S3):
        if record is Records.MIXED and place not in servers:
            left_out += f"; records in {place.value} are left out, which need its server"
    places = record.places((number for _, number in runs), servers)
    known = all_cases(
        world=world, server=any(place.is_server for place in places), relays=payloads is not PayloadWay.FILES
    )
    if payloads is PayloadWay.MIXED:
        known = list(dict.fromkeys([*all_cases(world=world), *known]))
    typer.echo(f"chaos: seeds {','.join(map(str, chosen))}, {len(runs)} runs of {TRANSITIONS} transitions{left_out}")
    directory = keep or Path(tempfile.mkdtemp(prefix="nemo-dcr-chaos-"))
    begin = time.monotonic()
    results = _run_all(runs, places, directory, systems, keep is not None, validator, world, payloads)
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
    records: list[RecordPlace],
    directory: Path,
    systems: int,
    keeps: bool,
    validator: str,
    world: bool,
    payloads: PayloadWay,
) -> list[RunResult]:
    context, results = fork_server({place for place in records if place.is_server}), []
    validation = threading.Semaphore(1)

    def one(place: int, seed: int, number: int) -> RunResult:
        result = run(
            seed,
            number,
            directory / f"{seed}-{number}",
            context,
            place if world else None,
            record=records[place],
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
