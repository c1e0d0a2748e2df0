"""The command `report`: a run directory as one HTML page (see nemo_dcr.report).

The page is written beside its place and moved there, so that a reader never sees a half of it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nemo_dcr.errors import OperatorNeeded

commands = typer.Typer()


@commands.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, as its processes or the demo were given.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    last: Annotated[int, typer.Option(min=1, max=1000, help="Tell so many of the latest transitions.")] = 200,
    refits: Annotated[int, typer.Option(min=1, max=50, help="Draw the timelines of so many of them.")] = 8,
) -> None:
    """Write a page with timelines, change rates, payloads, recoveries and served versions of a run."""
    from nemo_dcr.report.page import page
    from nemo_dcr.report.run_story import read_run

    story = read_run(run_dir, last)
    content = page(story, run_dir.resolve().name, refits)
    try:
        handle, name = tempfile.mkstemp(prefix=".report-", dir=output.parent)
        with open(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)
        os.replace(name, output)
    except OSError as problem:
        raise OperatorNeeded(
            f"{output} could not be written: {problem}", "name another file with --output"
        ) from problem
    typer.echo(f"{output}: {len(story.transitions)} transitions, {len(content):,} bytes")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
