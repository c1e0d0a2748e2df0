"""Chaos: real processes, sockets and commit records under faults at every point of the protocol.

Several systems run at once. The last line sums everything up; the exit code is 1 on any breach, and each breach names
the run that shows it again.

    python -m nemo_dcr.cli.chaos --transitions 160 --seeds 11,12,13,14
    python -m nemo_dcr.cli.chaos --seed 12 --only 3 --keep DIRECTORY
    python -m nemo_dcr.cli.chaos --transitions 10000 --results FILE --minutes 60      (again, until no run is left)
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.testing import chaos_world
from nemo_dcr.testing.chaos_plans import all_cases
from nemo_dcr.testing.chaos_results import Results, summary, table_of
from nemo_dcr.testing.chaos_run import TRANSITIONS, RunResult, numbered, run
from nemo_dcr.testing.chaos_source import RecordPlace
from nemo_dcr.testing.chaos_system import fork_server
from nemo_dcr.testing.etcd_server import etcd_binary
from nemo_dcr.testing.seaweedfs import seaweedfs_binary

EXIT_BREACH = 1
MIXED_EACH = 4
TOLD_EACH = 50
"""One line of progress for so many runs."""
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
    results: Annotated[
        Path | None, typer.Option(help="Keep what each run found in this file, and leave out the runs that it holds.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no more runs after so long; go on later with --results.")
    ] = None,
) -> None:
    """Run chaos and print one summary line last.

    Raises: typer.Exit with code 1 on a breach; typer.BadParameter.
    """
    if only is not None and seed is None:
        raise typer.BadParameter("--only needs the --seed of the run")
    given = [seed] if seed is not None else [int(each) for each in seeds.split(",") if each]
    try:
        found = Results(results, given)
    except InvalidConfig as problem:
        raise typer.BadParameter(str(problem)) from problem
    chosen = found.seeds
    numbers = [(chosen[0], only)] if only is not None else numbered(chosen, transitions)
    world = chaos_world.enter()
    left_out = "" if world else "; full disks, cuts and splits are left out, which need root"
    servers = installed_servers() if record is Records.MIXED else []
    for place in (RecordPlace.ETCD, RecordPlace.S3):
        if record is Records.MIXED and place not in servers:
            left_out += f"; records in {place.value} are left out, which need its server"
    records = record.places((number for _, number in numbers), servers)
    runs = [
        _Run(place, *each, lies, payloads.has_relays(each[1]))
        for place, (each, lies) in enumerate(zip(numbers, records, strict=True))
    ]
    known = all_cases(
        world=world, server=any(lies.is_server for lies in records), relays=payloads is not PayloadWay.FILES
    )
    if payloads is PayloadWay.MIXED:
        known = list(dict.fromkeys([*all_cases(world=world), *known]))
    typer.echo(f"chaos: seeds {','.join(map(str, chosen))}, {len(runs)} runs of {TRANSITIONS} transitions{left_out}")
    directory = keep or Path(tempfile.mkdtemp(prefix="nemo-dcr-chaos-"))
    begin = time.monotonic()
    until = float("inf") if minutes is None else begin + 60.0 * minutes
    _run_all(runs, found, directory, systems, until, keeps=keep is not None, validator=validator, world=world)
    if table is not None:
        table.write_text(table_of(found.runs, known), encoding="utf-8")
    failed = any(result.breaches for result in found.runs)
    if failed:
        typer.echo(f"chaos: what the runs with a breach left is in {directory}")
    elif keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    if left := len(found.missing(numbers)):
        typer.echo(f"chaos: {left} runs are left; {'the same command goes on' if results else '--results keeps them'}")
    typer.echo(summary(found.runs, len(known), time.monotonic() - begin))
    if failed:
        raise typer.Exit(EXIT_BREACH)


@dataclass(frozen=True)
class _Run:
    place: int
    """Its number in a world of its own."""
    seed: int
    number: int
    record: RecordPlace
    relays: bool


def _run_all(
    runs: list[_Run],
    found: Results,
    directory: Path,
    systems: int,
    until: float,
    *,
    keeps: bool,
    validator: str,
    world: bool,
) -> None:
    """Carry out the runs that `found` lacks, several at once; none begins after the time `until`."""
    context = fork_server({each.record for each in runs if each.record.is_server})
    validation = threading.Semaphore(1)

    def one(each: _Run) -> RunResult | None:
        if time.monotonic() >= until:
            return None
        place = each.place if world else None
        name = f"{each.seed}-{each.number}"
        result = run(each.seed, each.number, directory / name, context, place, record=each.record, relays=each.relays)
        if validator and each.place % VALIDATED_EACH == 0:
            with validation:
                result.breaches += _validate(validator, result)
        return result

    missing = set(found.missing([(each.seed, each.number) for each in runs]))
    with ThreadPoolExecutor(systems) as pool:
        jobs = [pool.submit(one, each) for each in runs if (each.seed, each.number) in missing]
        for job in as_completed(jobs):
            result = job.result()
            if result is None:
                continue
            found.add(result)
            for breach in result.breaches:
                typer.echo(f"chaos: BREACH in {result.name}: {breach}")
            if not keeps and not result.breaches:
                shutil.rmtree(result.directory, ignore_errors=True)
            if len(found.runs) % TOLD_EACH == 0:
                typer.echo(f"chaos: {len(found.runs)} of {len(runs)} runs ended")


def _validate(module: str, result: RunResult) -> list[str]:
    command = [sys.executable, "-m", module, "validate", str(result.directory / "traces")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VALIDATION_S)
    except subprocess.TimeoutExpired:
        return [f"traces: {module} did not end within {VALIDATION_S:g} s"]
    result.validated = True
    return [] if done.returncode == 0 else [f"traces: {(done.stdout + done.stderr).strip()[-1500:]}"]


if __name__ == "__main__":
    typer.run(main)
