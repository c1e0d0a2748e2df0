"""The command `config`: check a file of settings, and show all that holds with it, as TOML.

Without a file it shows the defaults; its output is a file that says the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_dcr.config_file import Configuration, load_config, write_config

commands = typer.Typer()


@commands.command()
def config(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file of settings; without it the defaults are shown.")
    ] = None,
) -> None:
    """Check a file of settings, and print every setting that holds with it."""
    typer.echo(write_config(Configuration() if file is None else load_config(file)), nl=False)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
