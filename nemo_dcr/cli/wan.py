"""The proof on an emulated WAN: both transports, a real model, rates and delay of a slow boundary, and every demand.

The short form runs at one rate, with one timed refit of each case and a part of the full-checkpoint reference, scaled.
The full form runs ten timed refits after five warm-ups of each case at every rate, with the whole reference. Exit code
0 means that every demand was met, 1 that one was not, and what it was.

    python -m nemo_dcr.cli.wan [--full] [--json FILE] [--directory DIR]

Paper: Section 7; Sections 8.1 and 8.7; Appendix C
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from nemo_dcr.cli.places import RELAY, STORE
from nemo_dcr.cli.wan_row import WanRow, table
from nemo_dcr.cli.wan_run import Case, WanRun
from nemo_dcr.cli.wan_site import PORTS, STORE_PORT, WanSite
from nemo_dcr.errors import NemoDcrError, OperatorNeeded
from nemo_dcr.runtime.timeline import chrome_trace
from nemo_dcr.testing.checkpoint import SINGLE_FILE, smollm2_checkpoint
from nemo_dcr.testing.regions import Boundary, Host, Regions

CASES = (Case("optimizer step"), Case("3% injected", 0.03), Case("5% injected", 0.05))
TRANSPORTS = (RELAY, STORE)
RTT_MS = 40.0
LEAST_PAYLOADS = 15
SHORT_RATES, FULL_RATES = (20.0,), (10.0, 20.0, 50.0)
SHORT_SHARE = 8
"""The short form moves one part in so many of the checkpoint and scales the time."""


def measure_reference(regions: Regions, site: WanSite, share: int) -> float:
    """Seconds of the transport-only full-checkpoint reference: uploads of a half each, then downloads of all of it.

    Raises: OperatorNeeded when a copy fails.
    """
    file = Path(site.job.model) / SINGLE_FILE
    part = file.stat().st_size // len(regions.training)
    ranges = [(rank * part, rank * part + part // share) for rank in range(len(regions.training))]
    uploads = [(host, "put", [ranges[rank]]) for rank, host in enumerate(regions.training)]
    downloads = [(host, "get", ranges) for host in regions.rollout]
    return share * sum(_copy_at_once(site, file, group) for group in (uploads, downloads))


def _copy_at_once(site: WanSite, file: Path, work: list[tuple[Host, str, list[tuple[int, int]]]]) -> float:
    copies = []
    for host, action, ranges in work:
        numbers = [str(number) for pair in ranges for number in pair]
        module = [sys.executable, "-m", "nemo_dcr.cli.checkpoint_copy", action, site.store.url, str(file), *numbers]
        environment = [f"{name}={value}" for name, value in site.environment.items()]
        command = host.command(["env", *environment, *module])
        copies.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for copy in copies:
            if copy.stdout is None or copy.stdout.readline() != "ready\n":
                raise OperatorNeeded("a copy of the reference did not start", "read what it printed")
        for copy in copies:
            if copy.stdin is not None:
                copy.stdin.write("go\n")
                copy.stdin.flush()
        seconds = [copy.communicate()[0] for copy in copies]
        if any(copy.returncode != 0 for copy in copies):
            raise OperatorNeeded("a copy of the reference failed", "read what it printed")
        return max(float(each) for each in seconds)
    finally:
        for copy in copies:
            if copy.poll() is None:
                copy.kill()
                copy.communicate()


def run_boundary(boundary: Boundary, directory: Path, model: Path, *, full: bool) -> tuple[list[WanRow], list[str]]:
    """Every case over both transports at one boundary; returns the rows and the demands that were not met.

    This process moves onto the first training host and stays there.
    """
    rows: list[WanRow] = []
    with Regions(boundary) as regions:
        regions.training[0].enter()
        site = WanSite(regions, directory, model)
        try:
            _say(f"reference over object storage at {boundary.rate_mbit:g} Mbit/s")
            reference_s = measure_reference(regions, site, 1 if full else SHORT_SHARE)
            _say(f"reference: {reference_s:.1f} s; starting trainers and engines")
            run = WanRun(site)
            try:
                run.start()
                unmet = _refits(run, rows, reference_s, full=full)
            finally:
                run.close()
            (directory / "timeline.json").write_bytes(chrome_trace(run.timelines))
        finally:
            site.close()
    return rows, unmet


def _refits(run: WanRun, rows: list[WanRow], reference_s: float, *, full: bool) -> list[str]:
    unmet: list[str] = []
    warm_ups, timed = (5, 10) if full else (0, 1)
    run.refit(RELAY, CASES[0], warm_up=True)  # first use of every connection, of code and of memory
    for transport in TRANSPORTS:
        for case in CASES:
            for number in range(warm_ups + timed):
                row = run.refit(transport, case, warm_up=number < warm_ups, reference_s=reference_s)
                _say(table([row]))
                rows.append(row)
                unmet += row.unmet()
                if row.least_payloads < LEAST_PAYLOADS:
                    unmet.append(f"{transport}, {case.name}: an owner sent {row.least_payloads} payloads")
        bits = run.mismatched_bits()
        _say(f"{transport}: {bits} mismatched bits on all engines")
        if bits:
            unmet.append(f"{transport}: {bits} stored bits differ from a dense load")
    return [*unmet, *run.foreign_sockets]


def main(
    full: Annotated[bool, typer.Option("--full", help="Ten timed refits of each case at three rates.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory (BF16); default: SmolLM2-135M-Instruct from a package.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write rows and unmet demands to this file.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Keep logs, traces and timelines here; default: a directory that is removed.")
    ] = None,
) -> None:
    """Refit a real model over both transports across an emulated WAN, and check every demand.

    Raises: typer.Exit with 1 when a demand was not met, 3 when an operator is needed, 4 when the run failed.
    """
    here = (directory or Path(tempfile.mkdtemp(prefix="nemo-dcr-wan-"))).resolve()
    rows: list[WanRow] = []
    unmet: list[str] = []
    try:
        checkpoint = model.resolve() if model is not None else smollm2_checkpoint(here / "model")
        for rate in FULL_RATES if full else SHORT_RATES:
            boundary = Boundary(rate_mbit=rate, rtt_ms=RTT_MS, ports=PORTS, http_ports=(STORE_PORT,))
            found, missed = run_boundary(boundary, here / f"{rate:g}-mbit", checkpoint, full=full)
            rows += found
            unmet += missed
    except NemoDcrError as problem:
        _say(f"nemo-dcr wan: {problem}")
        raise typer.Exit(3 if isinstance(problem, OperatorNeeded) else 4) from problem
    finally:
        if directory is None:
            shutil.rmtree(here, ignore_errors=True)
    print(table(rows))
    for line in unmet:
        print(f"not met: {line}")
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report(rows, unmet))) + b"\n")
    if unmet:
        raise typer.Exit(1)


def report(rows: list[WanRow], unmet: list[str]) -> dict[str, Any]:
    """All of it for programs."""
    told = [
        {**asdict(row), "remainder_s": row.remainder_s, "speedup": row.speedup, "unmet": row.unmet()} for row in rows
    ]
    return {"ok": not unmet, "unmet": unmet, "refits": told}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
