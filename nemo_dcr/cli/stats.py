"""The command `stats`: how many elements each committed version changed, by kind of tensor (Figure 2 of the paper).

Owners write what they found in each version (`nemo_dcr.runtime.change_log`). A kind is a canonical name with its
numbers left out, so that the layers and experts of one projection are one row. A rate is changed canonical elements
over all elements of the kind. A version that an owner did not compare, or did not live to see, has no rate.
"""

from __future__ import annotations

import json as jsonlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.runtime.change_log import DIRECTORY, OwnerChanges, read_changes

commands = typer.Typer()

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class VersionRates:
    """What one committed version changed."""

    version: Version
    candidate: str
    changed_elements: int
    """N_chg: source elements."""
    source_elements: int
    """N_src."""
    kinds: dict[str, int]
    """Changed canonical elements by kind; all kinds are there."""
    missing: tuple[OwnerId, ...]
    """Owners without figures; the numbers above are without them, and there is no rate."""


@dataclass(frozen=True, slots=True)
class RunRates:
    """What the owners of a run wrote."""

    elements: dict[str, int]
    """Canonical elements by kind, sorted."""
    versions: tuple[VersionRates, ...]


def kind_of(name: str) -> str:
    """A canonical name with its numbers left out."""
    return _NUMBER.sub("*", name)


def run_rates(files: Iterable[OwnerChanges]) -> RunRates:
    """Unite the files of all owners; of several lives of an owner the latest one that has a version counts."""
    lives: dict[OwnerId, list[OwnerChanges]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.holding.incarnation, reverse=True):
        lives[file.holding.owner].append(file)
    elements: Counter[str] = Counter()
    for files_of_owner in lives.values():
        for name, count in files_of_owner[0].holding.elements.items():
            elements[kind_of(name)] += count
    versions = sorted({version for each in lives.values() for file in each for version in file.versions})
    return RunRates(dict(sorted(elements.items())), tuple(_version(version, lives, elements) for version in versions))


def _version(version: Version, lives: dict[OwnerId, list[OwnerChanges]], elements: Iterable[str]) -> VersionRates:
    kinds, changed, source, missing, candidate = Counter(dict.fromkeys(elements, 0)), 0, 0, [], ""
    for owner, files in sorted(lives.items()):
        file = next((file for file in files if version in file.versions), None)
        if file is None or not file.versions[version].compared:
            missing.append(owner)
            continue
        row = file.versions[version]
        candidate = row.candidate
        changed += row.changed_elements
        source += file.holding.source_elements
        for name, count in row.changed.items():
            kinds[kind_of(name)] += count
    return VersionRates(version, candidate, changed, source, dict(sorted(kinds.items())), tuple(missing))


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


def _rate(changed: int, elements: int, row: VersionRates) -> float | None:
    return changed / elements if elements and not row.missing else None


def _as_json(rates: RunRates) -> dict[str, Any]:
    return {
        "elements": rates.elements,
        "versions": [
            {
                "version": row.version,
                "candidate": row.candidate,
                "source_elements": row.source_elements,
                "changed_elements": row.changed_elements,
                "rate": _rate(row.changed_elements, row.source_elements, row),
                "missing_owners": row.missing,
                "kinds": {
                    kind: {"changed": count, "rate": _rate(count, rates.elements[kind], row)}
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
        table.add_row(kind, f"{elements:,}", *(_percent(_rate(row.kinds[kind], elements, row)) for row in shown))
    totals = [_percent(_rate(row.changed_elements, row.source_elements, row)) for row in shown]
    table.add_row("all source elements", f"{max((row.source_elements for row in shown), default=0):,}", *totals)
    return table


def _percent(rate: float | None) -> str:
    return "unknown" if rate is None else f"{100 * rate:.3f}%"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
