"""The command `stats`: how many elements each committed version changed, by kind of tensor (Figure 2 of the paper).

Owners write what they found in each version (`nemo_dcr.runtime.change_log`); `runtime.change_rates` defines rates.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.runtime.change_log import DIRECTORY, read_changes
from nemo_dcr.runtime.change_rates import RunRates, VersionRates, rate, run_rates

commands = typer.Typer()


@commands.command()
def stats(
    directory: Annotated[Path, typer.Argument(help="Directory of a run, as its trainer was given.")],
    last: Annotated[int, typer.Option(min=1, help="Show so many of the latest versions.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print every version as JSON; rates are fractions.")] = False,
) -> None:
    """Show which share of the elements each committed version changed, by kind of tensor."""
    files = read_changes(directory / DIRECTORY) if (directory / DIRECTORY).is_dir() else []
    if not files:
        raise InvalidConfig(
            "DIRECTORY", f"{directory / DIRECTORY} holds no figures of an owner; name a run's directory"
        )
    rates = run_rates(files)
    if json:
        typer.echo(jsonlib.dumps(_as_json(rates)))
    else:
        Console(highlight=False, markup=False).print(_table(rates, rates.versions[-last:]))


def _as_json(rates: RunRates) -> dict[str, Any]:
    return {
        "elements": rates.elements,
        "versions": [
            {
                "version": row.version,
                "candidate": row.candidate,
                "source_elements": row.source_elements,
                "changed_elements": row.changed_elements,
                "rate": rate(row.changed_elements, row.source_elements, row),
                "missing_owners": row.missing,
                "kinds": {
                    kind: {"changed": count, "rate": rate(count, rates.elements[kind], row)}
                    for kind, count in row.kinds.items()
                },
            }
            for row in rates.versions
        ],
    }


def _table(rates: RunRates, shown: Iterable[VersionRates]) -> Table:
    shown = tuple(shown)
    table = Table("tensors", box=box.SIMPLE)
    table.add_column("elements", justify="right")
    for row in shown:
        table.add_column(f"v{row.version}", justify="right")
    for kind, elements in rates.elements.items():
        table.add_row(kind, f"{elements:,}", *(_percent(rate(row.kinds[kind], elements, row)) for row in shown))
    totals = [_percent(rate(row.changed_elements, row.source_elements, row)) for row in shown]
    table.add_row("all source elements", f"{max((row.source_elements for row in shown), default=0):,}", *totals)
    return table


def _percent(rate: float | None) -> str:
    return "unknown" if rate is None else f"{100 * rate:.3f}%"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
