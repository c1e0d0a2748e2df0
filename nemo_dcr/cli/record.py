"""The commands `record show`, `record history` and `record watch`, for the commit record that coordinators use.

They look and change nothing, so they fence no coordinator. Results go to standard output, as a table or with `--json`
as JSON; errors as everywhere (docs/exit-codes.md).
Not handled: where an attempt stands (`nemo-dcr status` asks the processes).

Paper: Section 6.3
"""

from __future__ import annotations

import json as jsonlib
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from nemo_dcr.control import open_control
from nemo_dcr.errors import EndpointLost
from nemo_dcr.ids import Version
from nemo_dcr.record import ControlView, Record

commands = typer.Typer(no_args_is_help=True, help="Look at the commit record: what every receiver has to hold.")

Url = Annotated[
    str, typer.Argument(help="sqlite:///PATH, etcd://HOST:PORT/PREFIX or s3://BUCKET/PREFIX?endpoint=URL&region=NAME.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: times in seconds since 1970, digests in hex.")]
FOREVER_S = 365 * 24 * 3600.0
_LOOK_S = 5.0
"""One look of a watch; between two of them an interrupt is seen at once."""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(commands, name="record")


@commands.command()
def show(url: Url, json: Json = False) -> None:
    """Show the committed version, who holds it, and which coordinator and attempt were the latest."""
    view = open_control(url, reads_only=True).peek()
    if json:
        typer.echo(jsonlib.dumps(_view(view)))
    else:
        _print(_view_table(view))


@commands.command()
def history(
    url: Url,
    last: Annotated[int | None, typer.Option(min=1, help="Only so many of the latest versions.")] = None,
    json: Json = False,
) -> None:
    """List every committed version in order."""
    records = open_control(url, reads_only=True).history()
    records = records[-last:] if last is not None else records
    if json:
        typer.echo(jsonlib.dumps([_record(record) for record in records]))
    else:
        _print(_history_table(records))


@commands.command()
def watch(
    url: Url,
    until: Annotated[int | None, typer.Option(min=0, help="End when this version is committed.")] = None,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds after which a missing version is a failure.")
    ] = FOREVER_S,
    json: Json = False,
) -> None:
    """Print a line for the committed version and for each one that follows, until interrupted."""
    control, left = open_control(url, reads_only=True), timeout
    after: Version | None = None
    while True:
        record = control.watch(after, timeout_s=min(left, _LOOK_S))
        if record is not None:
            typer.echo(jsonlib.dumps(_record(record)) if json else _line(record))
            after = record.version
            if until is not None and record.version >= until:
                return
            left = timeout
        elif (left := left - _LOOK_S) <= 0:
            wanted = "another version" if until is None else f"version {until}"
            raise EndpointLost("coordinator", f"{wanted} was not committed within {timeout:g} s; see nemo-dcr status")


def _record(record: Record) -> dict[str, Any]:
    return {
        "version": record.version,
        "time": record.time,
        "candidate": record.candidate,
        "digest": record.digest.hex(),
        "baseline": record.baseline,
        "attempt": record.attempt,
        "epoch": record.epoch,
        "required": [{"receiver": each.receiver, "incarnation": each.incarnation} for each in record.required],
    }


def _view(view: ControlView) -> dict[str, Any]:
    record = None if view.record is None else _record(view.record)
    return {"record": record, "epoch": view.epoch, "last_attempt": view.last_attempt}


def _view_table(view: ControlView) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    record = view.record
    if record is None:
        table.add_row("version", "none yet: no receiver was restored and committed")
    else:
        table.add_row("version", str(record.version))
        table.add_row("committed", _time(record))
        table.add_row("candidate", record.candidate or "none: the first record")
        table.add_row("digest", record.digest.hex())
        table.add_row("baseline", str(record.baseline))
        table.add_row("attempt", str(record.attempt))
        table.add_row("by epoch", str(record.epoch))
        for number, member in enumerate(record.required):
            table.add_row("" if number else "receivers", f"{member.receiver} incarnation {member.incarnation}")
    table.add_row("epoch now", str(view.epoch))
    table.add_row("last attempt", str(view.last_attempt))
    return table


def _history_table(records: tuple[Record, ...]) -> Table:
    table = Table("version", "committed", "candidate", "digest", "attempt", "epoch", "receivers", box=box.SIMPLE)
    for record in records:
        table.add_row(
            str(record.version),
            _time(record),
            record.candidate or "-",
            record.digest.hex()[:16],
            str(record.attempt),
            str(record.epoch),
            str(len(record.required)),
        )
    return table


def _line(record: Record) -> str:
    return (
        f"{_time(record)}  version {record.version}  candidate {record.candidate or '-'}  attempt {record.attempt}  "
        f"epoch {record.epoch}  {len(record.required)} receivers"
    )


def _time(record: Record) -> str:
    """In UTC; a record of a package version that stored no time says so."""
    return datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if record.time else "unknown"


def _print(table: Table) -> None:
    Console(highlight=False, markup=False).print(table)
