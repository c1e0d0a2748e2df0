"""The command line: `nemo-dcr demo`, `doctor`, `diff`, `apply`, `verify`, `inspect` for checkpoint files, `relay`,
`record`, `coordinator`, `config`, `status`, `stats`, `report` and `plan`.

Errors are one line that says what to do. Exit codes (docs/exit-codes.md): 0 all well, 1 a stored bit differs, 2 usage,
3 an operator is needed, 4 a part of the run failed, 5 this coordinator was replaced, 130 interrupted.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nemo_dcr import __version__
from nemo_dcr.cli import checkpoint, coordinator, loader_check, plan, record, relay, run_report, settings, stats, status
from nemo_dcr.errors import Conflict, InvalidConfig, NemoDcrError, OperatorNeeded

EXIT_MISMATCH, EXIT_USAGE, EXIT_OPERATOR, EXIT_FAILED, EXIT_REPLACED = 1, 2, 3, 4, 5

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Bit-exact delta-compressed refits from RL trainers to inference servers.",
)


class Engine(StrEnum):
    """What serves in a demo."""

    reference = "reference"
    vllm = "vllm"


class Store(StrEnum):
    """How payloads travel in a demo."""

    file = "file"
    s3 = "s3"
    relay = "relay"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Bit-exact delta-compressed refits from RL trainers to inference servers."""


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory (BF16); default: SmolLM2-135M-Instruct from a package.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Optimizer steps, one refit after each.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file too.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the timeline of every refit to this file, as Chrome trace JSON.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
    engine: Annotated[
        Engine | None,
        typer.Option(help="What serves: vLLM servers, or the reference engine. Default: vLLM where it is installed."),
    ] = None,
    transport: Annotated[
        Store,
        typer.Option(
            help="How payloads travel: a directory, S3 object storage (SeaweedFS on this machine), or a relay tree."
        ),
    ] = Store.file,
    s3_url: Annotated[
        str | None,
        typer.Option(help="With --transport s3: s3://BUCKET/PREFIX?endpoint=URL&region=NAME of a server that runs."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Keep logs, traces and the commit record here; default: a directory that is removed."),
    ] = None,
) -> None:
    """Train, refit two engines four times, kill one on the way, and compare every stored bit."""
    from nemo_dcr.cli.demo import run_demo
    from nemo_dcr.cli.doctor import vllm_problem
    from nemo_dcr.cli.job import plan_job
    from nemo_dcr.cli.payload_store import open_payload_store
    from nemo_dcr.cli.report import table
    from nemo_dcr.testing.checkpoint import smollm2_checkpoint

    if run_dir is not None and run_dir.exists() and any(run_dir.iterdir()):
        raise InvalidConfig("--run-dir", f"{run_dir} is not empty; name another directory")
    problem = vllm_problem() if engine is not Engine.reference else None
    if problem is not None and engine is Engine.vllm:
        raise problem
    if problem is not None:
        typer.echo(f"nemo-dcr: the reference engine serves, because {problem.reason}; {problem.action}", err=True)
    served = Engine.reference if problem is not None else engine or Engine.vllm
    directory = (run_dir or Path(tempfile.mkdtemp(prefix="nemo-dcr-demo-"))).resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint = model.resolve() if model is not None else smollm2_checkpoint(directory / "model")
        with open_payload_store(transport.value, s3_url, directory / "transport") as store:
            job = plan_job(
                *(directory / "run", checkpoint, served.value, store.url),
                name=store.name,
                tree=store.tree,
                nodes=store.nodes,
            )
            report = run_demo(job, steps, quiet=quiet, store=store, timeline=timeline)
    finally:
        if run_dir is None:
            shutil.rmtree(directory, ignore_errors=True)
    typer.echo(table(report))
    if json is not None:
        report.write(json)
    if not report.ok:
        raise typer.Exit(EXIT_MISMATCH)


@app.command()
def doctor() -> None:
    """Say what is missing or broken on this machine, and how to mend it."""
    from nemo_dcr.cli.doctor import examine

    findings = examine()
    for finding in findings:
        typer.echo(finding.line)
    if any(finding.broken for finding in findings):
        raise typer.Exit(EXIT_OPERATOR)


checkpoint.register(app)
loader_check.register(app)
relay.register(app)
record.register(app)
coordinator.register(app)
status.register(app)
stats.register(app)
run_report.register(app)
settings.register(app)
plan.register(app)


def main() -> None:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except InvalidConfig as problem:
        _say(problem, EXIT_USAGE)
    except OperatorNeeded as problem:
        _say(problem, EXIT_OPERATOR)
    except Conflict as problem:
        _say(problem, EXIT_REPLACED)
    except NemoDcrError as problem:
        _say(problem, EXIT_FAILED)


def _say(problem: NemoDcrError, code: int) -> None:
    typer.echo(f"nemo-dcr: {problem}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
