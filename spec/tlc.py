#!/usr/bin/env python3
"""The runner of the specification: every configuration of models.json through TLC, and red when anything differs.

`mc` checks the specification, `mutants` weakens one guard at a time, `sanity` shows that the interesting states are
reachable, `all` does the three. With --deep, a mutant that has bounds of its own also runs without the mutation, which
must be clean. `check` looks at the table and the files only; `write` puts the table into its one format and generates
the configurations of rows with a base. `run`, `graph` and `states` show one configuration.
Exit codes: 0 all as the table says, 1 something differs, 2 usage or a table that cannot be read, 3 Java or TLC is not
installed, 130 interrupted.
Not handled: the meaning of the models; see README.md of this folder.

Spec: models.json and every module of this folder
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path

import tlc_report
from tlc_audit import audit_row, audit_table, write_generated
from tlc_cfg import CfgError, control_of
from tlc_graph import GraphError, draw, figure
from tlc_java import NotInstalled, Tools, Workshop, find_tools
from tlc_modules import Folder, actions_of_next, read_folder
from tlc_report import Verdict
from tlc_rows import TABLE, Row, Table, TableError, read_table, write_table
from tlc_schedule import Effort, run_all
from tlc_trace import follow

RED, USAGE, NOT_INSTALLED, INTERRUPTED = 1, 2, 3, 130
KINDS = {"mc": ("mc",), "mutants": ("mutant",), "sanity": ("sanity",), "all": ("mc", "mutant", "sanity")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        table = read_table(options.spec / TABLE)
        folder = read_folder(options.spec)
        if options.command == "trace":
            return _trace(options)
        if options.command == "check":
            return _check(table, folder, table.rows, whole=True)
        if options.command == "write":
            return _write(options.spec, table, folder)
        if options.command in ("run", "graph", "states"):
            return _one(options, _row_named(table, options.name))
        return _many(options, table, folder)
    except (TableError, CfgError) as error:
        return _complain(str(error), USAGE)
    except NotInstalled as error:
        return _complain(str(error), NOT_INSTALLED)
    except GraphError as error:
        return _complain(str(error), RED)
    except KeyboardInterrupt:
        return _complain("interrupted; every run was stopped", INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spec/tlc.py", description=(__doc__ or "").split("\n\nSpec:")[0])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--spec", type=Path, default=Path(__file__).parent, metavar="DIR", help="other folder")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {
        "mc": "check the specification: invariants, properties, exact counts, every action taken",
        "mutants": "check that each weakened guard makes the property fall that it names",
        "sanity": "check that each claim of unreachability is violated",
        "all": "mc, mutants and sanity",
    }
    for name, text in helps.items():
        many = commands.add_parser(name, help=text, description=text)
        many.add_argument("--deep", action="store_true", help="the rows of set deep as well")
        many.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows by name; * matches")
        many.add_argument("--workers", type=_natural, metavar="N", help="workers for each run, in place of the rows'")
        many.add_argument("--jobs", type=_natural, default=2, metavar="N", help="runs at once (default 2)")
        many.add_argument("--patience", type=float, default=1.0, metavar="F", help="factor on every time budget")
        many.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
        many.add_argument(
            "--update", action="store_true", help="record new counts in models.json, after you explained them"
        )
    commands.add_parser("check", help="look at the table and its files, without a run")
    commands.add_parser("write", help="format the table, generate the configurations of rows with a base")
    run = commands.add_parser("run", help="one row, with TLC's own output and exit code")
    graph = commands.add_parser("graph", help="the state graph of one small row as a figure")
    graph.add_argument("--show", nargs="+", default=[], metavar="VARIABLE", help="fold the graph onto these variables")
    states = commands.add_parser("states", help="every distinct state of one row as text")
    for one in (run, graph, states):
        one.add_argument("name", metavar="NAME", help="row of models.json")
    run.add_argument("extra", nargs="*", metavar="OPTION", help="more options for TLC, after --")
    for one in (graph, states):
        one.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    trace = commands.add_parser("trace", help="do exported traces of running code follow the specification?")
    trace.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of model_tests.trace_export export")
    return parser


def _natural(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _complain(text: str, code: int) -> int:
    print(f"spec/tlc.py: {text}", file=sys.stderr)
    return code


def _row_named(table: Table, name: str) -> Row:
    for row in table.rows:
        if name in (row.name, row.cfg):
            return row
    raise TableError(f"no row is called {name}; there are {', '.join(row.name for row in table.rows)}")


def _check(table: Table, folder: Folder, rows: Sequence[Row], *, whole: bool) -> int:
    """Print the faults of the table and its files."""
    faults = [f"{row.name}: {fault}" for row in rows for fault in audit_row(row, folder, table)]
    faults += audit_table(table, folder) if whole else []
    for fault in faults:
        print(f"RED  {fault}")
    if not faults:
        print(f"ok   {TABLE}: {len(rows)} rows agree with their files")
    return RED if faults else 0


def _write(spec: Path, table: Table, folder: Folder) -> int:
    write_table(spec / TABLE, table)
    written = write_generated(table, folder)
    print(f"wrote {', '.join(written)}" if written else "every generated configuration is up to date")
    return 0


def _one(options: argparse.Namespace, row: Row) -> int:
    """Show one configuration: TLC's output, its states or its graph."""
    with Workshop(find_tools(), options.spec) as workshop:
        if options.command == "run":
            run = workshop.start(row, row.workers, options.extra, shown=True)
            return workshop.wait(run)
        dump = workshop.path / "dump"
        extra = ["-dump", *(["dot,actionlabels"] if options.command == "graph" else []), str(dump)]
        run = workshop.start(row, 1, extra)
        code = workshop.wait(run)
        result = dump.with_suffix(".dot" if options.command == "graph" else ".dump")
        if code != 0 or not result.is_file():
            raise GraphError(f"{row.name} ends with exit code {code}; look closer: python spec/tlc.py run {row.name}")
        text = result.read_text(encoding="utf-8")
    if options.command == "graph":
        draw(figure(text, options.show), options.output)
    else:
        options.output.write_text(text, encoding="utf-8")
    print(f"wrote {options.output}")
    return 0


def _trace(options: argparse.Namespace) -> int:
    """Follow logs, and print for each whether it is accepted, or the line that is not."""
    found = follow(options.files, find_tools(), options.spec)
    for one in found:
        print(f"{one.file}: accepted, {one.steps} steps" if one.accepted else f"RED  {one.file}: {one.told}")
    return 0 if all(one.accepted for one in found) else RED


def _many(options: argparse.Namespace, table: Table, folder: Folder) -> int:
    """Check the table, run its rows, judge them, and print what came out."""
    rows = [row for row in table.rows if row.kind in KINDS[options.command] and (options.deep or row.suite == "ci")]
    if options.only:
        rows = [row for row in table.rows if any(fnmatchcase(row.name, wanted) for wanted in options.only)]
        rows = [row for row in rows if row.kind in KINDS[options.command]]
    if not rows:
        raise TableError("no row is left to run; see the names in models.json")
    tools = find_tools()
    if _check(table, folder, rows, whole=not options.only):
        return _complain("nothing was run: make the table and its files agree first", RED)
    effort = Effort(jobs=options.jobs, workers=options.workers, patience=options.patience)
    start = time.monotonic()
    with Workshop(tools, options.spec) as workshop:
        if options.deep:
            bounded = [row for row in rows if row.kind == "mutant" and row.constants]
            rows += [control_of(row, options.spec, workshop.path) for row in bounded]
        verdicts = run_all(rows, workshop, effort, lambda verdict: print(tlc_report.line(verdict), flush=True))
    if options.update:
        verdicts = _record(options.spec, table, verdicts)
    missing = _coverage(verdicts, folder) if not options.only and options.command in ("mc", "all") else []
    print(f"\n{tlc_report.table(verdicts)}\n")
    red = [verdict.row.name for verdict in verdicts if not verdict.green]
    seconds = time.monotonic() - start
    if options.json is not None:
        _report(options.json, tools, verdicts, missing, seconds)
    states = sum(verdict.outcome.distinct or 0 for verdict in verdicts)
    print(f"{len(verdicts)} runs, {states:,} distinct states, {seconds:.0f} s: ", end="")
    print(f"RED: {', '.join([*red, *missing])}" if red or missing else "all as the table says")
    return RED if red or missing else 0


def _coverage(verdicts: Sequence[Verdict], folder: Folder) -> list[str]:
    """Say which actions of Next were never taken, and return their names."""
    actions = {
        action for verdict in verdicts if verdict.row.coverage for action in actions_of_next(folder, verdict.row.module)
    }
    missing = tlc_report.never_taken(verdicts, actions)
    for action in missing:
        print(f"RED  action {action} is never taken in any run with coverage")
    if not actions:
        print("RED  no run with coverage, or no Next in its module: nothing shows that any action is taken")
        return ["coverage"]
    print(
        f"{'ok ' if not missing else 'RED'}  {len(actions) - len(missing)} of {len(actions)} actions of Next are taken"
    )
    return missing


def _record(spec: Path, table: Table, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Write new counts of runs that are right in all else, and say each one."""
    after, rows = [], {row.name: row for row in table.rows}
    for verdict in verdicts:
        row, outcome = verdict.row, verdict.outcome
        if verdict.recount is not None:
            depth = outcome.depth if row.depth is not None else None
            new = replace(row, distinct=outcome.distinct if row.expect == "ok" else None, depth=depth)
            print(f"recorded {row.name}: distinct {row.distinct} -> {new.distinct}, depth {row.depth} -> {new.depth}")
            rows[row.name] = new
            verdict = replace(verdict, row=new, recount=None)
        after.append(verdict)
    if list(rows.values()) != list(table.rows):
        write_table(spec / TABLE, Table(tuple(rows.values()), table.no_mutant))
    return after


def _report(path: Path, tools: Tools, verdicts: Sequence[Verdict], missing: Sequence[str], seconds: float) -> None:
    data = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Java {tools.java_version}",
        "seconds": round(seconds, 1),
        "green": not missing and all(verdict.green for verdict in verdicts),
        "actions_never_taken": list(missing),
        "runs": [tlc_report.as_data(verdict) for verdict in verdicts],
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
