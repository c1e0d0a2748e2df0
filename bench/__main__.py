"""`make bench`: measure everything, write the report, and fail when a demand is missed.

A module that cannot run (a peer is not installed, a package is missing) ends the run: a report without it would look
as if it had held.

Paper: Section 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import apply, construction, encode, limits, report, table_2
from bench.rows import Row, Rows, Settings
from nemo_dcr.kernels import hot

MODULES: dict[str, Callable[[Settings], Rows]] = {
    "limits": limits.rows,
    "encode": encode.rows,
    "construction": construction.rows,
    "apply": apply.rows,
    "table_2": table_2.rows,
}
"""Name -> rows, in the order of the report."""


def main(arguments: list[str]) -> int:
    """Returns 0 when every demand held, 1 when one was missed."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=sorted(MODULES), action="append", help="measure these modules alone")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="directory of results.json and report.md")
    parser.add_argument("--checkpoint", type=Path, help="directory of a SmolLM2-135M checkpoint that is there already")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each method; the best one counts")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    why = hot.warm(hot.WORTH_BYTES)
    if why:
        print(why, file=sys.stderr)
        return 2
    begin = time.monotonic()
    settings = Settings(
        repeats=chosen.repeats,
        checkpoint=chosen.checkpoint,
        progress=lambda line: print(f"[{time.monotonic() - begin:5.0f} s] {line}", file=sys.stderr, flush=True),
    )
    rows: list[Row] = []
    for name, measure in MODULES.items():
        if not chosen.only or name in chosen.only:
            rows += measure(settings)
    chosen.out.mkdir(parents=True, exist_ok=True)
    report.write(chosen.out, rows)
    for row in rows:
        print(
            f"{row.group}: {row.name}: {row.value:.3g} {row.unit}  {report.demand(row)}  {report.verdict(row)}".rstrip()
        )
    missed = report.missed(rows)
    print(f"{sum(row.demand is not None for row in rows)} demands, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
