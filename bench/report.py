"""What a run leaves behind: `results.json` for programs, `report.md` for people, and the verdict on its demands.

Paper: Section 8
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from bench.rows import Row

PACKAGES = ("numpy", "numba", "torch", "zstandard")


def machine() -> dict[str, str]:
    """What the figures depend on beside the code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": f"{model}, {os.cpu_count()} cores",
        "python": f"{platform.python_version()}, {packages}",
    }


def verdict(row: Row) -> str:
    """`held`, `missed`, or nothing for a row without a demand."""
    if row.demand is None:
        return ""
    return "held" if row.held else "missed"


def demand(row: Row) -> str:
    """The demand in words."""
    return "" if row.demand is None else f"{'>=' if row.at_least else '<='} {row.demand:g}"


def missed(rows: Sequence[Row]) -> list[Row]:
    """Rows whose demand is not met."""
    return [row for row in rows if not row.held]


def write(directory: Path, rows: Sequence[Row]) -> None:
    """Write both files, each complete or not at all."""
    told = machine()
    results = {
        "machine": told,
        "rows": [
            {
                "group": row.group,
                "name": row.name,
                "value": row.value,
                "unit": row.unit,
                "demand": row.demand,
                "at_least": row.at_least,
                "held": row.held,
            }
            for row in rows
        ],
    }
    _replace(directory / "results.json", json.dumps(results, indent=1) + "\n")
    _replace(directory / "report.md", page(told, rows))


def page(told: dict[str, str], rows: Sequence[Row]) -> str:
    """The report: one table for each group, in the order of the run."""
    lines = ["# Benchmark report", "", *(f"{key.capitalize()}: {value}." for key, value in told.items()), ""]
    lines += [
        "GB/s are bytes of the checkpoint, one copy, in a second of processor time of one thread. Methods of one block",
        "took turns in one process; only ratios within a run mean anything.",
        "",
    ]
    for group, members in groupby(rows, key=lambda row: row.group):
        lines += [f"## {group}", "", "| | Measured | Demand | |", "|---|---|---|---|"]
        lines += [f"| {row.name} | {row.value:.3g} {row.unit} | {demand(row)} | {verdict(row)} |" for row in members]
        lines.append("")
    return "\n".join(lines)


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(path.suffix + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
