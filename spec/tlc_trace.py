"""Traces of running code through TLC: logs as a module of constants, and how far each of them was followed.

A log is a JSON file that `python -m model_tests.trace_export export` writes: the constants of the run, and its steps.
Logs over the same receivers, owners and items share one run of TLC. A log is accepted when all of its steps were
taken; otherwise the first step that could not be taken is the line that the specification rejects.

Not handled: which steps a trace line is (model_tests/follower).

Spec: TraceDeltaRefit
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlc_java import Tools, Workshop
from tlc_rows import Row

INVARIANTS = (
    "CommitExact CommitAcked CleanExact DoneExact DirtyRepairable BaselineBound PayloadBound FenceSafe SingleCommit "
    "GateSafe GateFresh GateTransition TakeoverDecides AttemptOrder"
)
PROPERTIES = "Monotone FenceMono AckKept DeadKept RefitSteps"
_AT = re.compile(r'<<"AT", (\d+), (-?\d+)>>')


@dataclass(frozen=True, slots=True)
class Followed:
    """What TLC says about one log."""

    file: Path
    accepted: bool
    steps: int
    told: str
    """For a rejected log: where, and the line."""


def value(data: Any) -> str:
    """Data as TLA+: lists are sequences, {"set": [...]} is a set, other objects are records."""
    match data:
        case bool():
            return "TRUE" if data else "FALSE"
        case int():
            return str(data)
        case str():
            return json.dumps(data)
        case list():
            return f"<<{', '.join(map(value, data))}>>"
        case {"set": list() as members}:
            return f"{{{', '.join(map(value, members))}}}"
        case dict():
            return f"[{', '.join(f'{name} |-> {value(each)}' for name, each in data.items())}]"
        case _:
            raise TypeError(f"{data!r} is no value of a log")


def follow(files: Sequence[Path], tools: Tools, spec: Path, seconds: int = 600) -> list[Followed]:
    """Let TLC follow logs, one run for each set of constants; in the order of the files."""
    groups: dict[str, list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
    for file in files:
        log = json.loads(file.read_text(encoding="utf-8"))
        groups[json.dumps([log["receivers"], log["owner_of"], log["gate"]])].append((file, log))
    found = dict[Path, Followed]()
    for group in groups.values():
        found |= {each.file: each for each in _run(group, tools, spec, seconds)}
    return [found[file] for file in files]


def _run(group: Sequence[tuple[Path, dict[str, Any]]], tools: Tools, spec: Path, seconds: int) -> list[Followed]:
    with Workshop(tools, spec) as workshop:
        for module in spec.glob("*.tla"):
            shutil.copy(module, workshop.path)
        workshop.spec = workshop.path
        logs = [log for _, log in group]
        (workshop.path / "TraceRun.tla").write_text(module_text(logs), encoding="utf-8")
        (workshop.path / "TraceRun.cfg").write_text(configuration(logs), encoding="utf-8")
        row = Row(
            name="TraceRun",
            cfg="TraceRun.cfg",
            module="TraceRun",
            kind="mc",
            expect="ok",
            seconds=seconds,
            why="traces",
        )
        run = workshop.start(row, 1, ["-deadlock"])
        code = workshop.wait(run)
        output = run.output()
    reached = dict.fromkeys(range(1, len(group) + 1), -1)
    for log, at in _AT.findall(output):
        reached[int(log)] = max(reached[int(log)], int(at))
    fallen = re.search(r"(?:Invariant|Action property) (\w+) is violated", output)
    if code != 0 and fallen is None:
        return [Followed(file, False, 0, f"TLC ends with {code}: {output[-2000:]}") for file, _ in group]
    return [_judged(file, log, reached[n], fallen) for n, (file, log) in enumerate(group, 1)]


def _judged(file: Path, log: dict[str, Any], reached: int, fallen: re.Match[str] | None) -> Followed:
    steps = log["steps"]
    if reached == len(steps) and fallen is None:
        return Followed(file, True, reached, "")
    if reached == len(steps):
        return Followed(
            file, False, reached, f"followed to its end, but {fallen[1]} falls in this run" if fallen else ""
        )
    step = steps[max(reached, 0)]
    told = f"rejected at line {step['line']} ({step['where']}): {step['a']}{tuple(step['p'])}"
    return Followed(file, False, max(reached, 0), told + (f"; {fallen[1]} falls in this run" if fallen else ""))


def module_text(logs: Sequence[dict[str, Any]]) -> str:
    """The module with the constants of a run; candidates are numbered through all logs."""
    first, changes, texts = logs[0], list[Any](), list[str]()
    for log in logs:
        before = len(changes)
        changes += [{"set": each} for each in log["changes"]]
        steps = [
            value({name: step[name] for name in ("a", "p", "k", "n", "o")}) for step in _shifted(log["steps"], before)
        ]
        texts.append(f"[before |-> {before}, steps |-> <<{','.join(steps)}>>]")
    coordinators = sorted({each for log in logs for each in log["coordinators"]})
    requests = sorted({each for log in logs for each in log["requests"]})
    owner_of = " @@ ".join(f"({value(item)} :> {value(owner)})" for item, owner in first["owner_of"].items())
    lines = [
        "---- MODULE TraceRun ----",
        "EXTENDS TraceDeltaRefit",
        f"RunReceivers == {value({'set': first['receivers']})}",
        f"RunOwners == {value({'set': first['owners']})}",
        f"RunItems == {value({'set': list(first['owner_of'])})}",
        f"RunOwnerOf == {owner_of}",
        f"RunCoordinators == {value({'set': coordinators})}",
        f"RunRequests == {value({'set': requests})}",
        f"RunAttemptIds == 1..{max(log['attempts'] for log in logs)}",
        f"RunChanges == {value(changes)}",
        'RunArrivals == {"sound"}',
        f"RunLogs == <<{','.join(chr(10) + text for text in texts)}>>",
        "====",
    ]
    return "\n".join(lines) + "\n"


def _shifted(data: Any, before: int) -> Any:
    """{"cand": c} everywhere as the number of c in this run; 0 stays."""
    match data:
        case {"cand": int() as candidate} if len(data) == 1:
            return candidate + before if candidate else 0
        case dict():
            return {name: _shifted(each, before) for name, each in data.items()}
        case list():
            return [_shifted(each, before) for each in data]
        case _:
            return data


def configuration(logs: Sequence[dict[str, Any]]) -> str:
    """The cfg of a run."""
    names = ("Receivers", "Owners", "Items", "OwnerOf", "Coordinators", "Requests", "AttemptIds", "Changes", "Arrivals")
    lines = ["SPECIFICATION TraceSpec", "CONSTANTS", "  TraceLogs <- RunLogs"]
    lines += [f"  {name} <- Run{name}" for name in names]
    lines += [f"  MaxCandidate = {sum(len(log['changes']) for log in logs)}", f"  GateMode = {value(logs[0]['gate'])}"]
    lines += ["CONSTRAINT Reached", f"INVARIANTS {INVARIANTS}", f"PROPERTIES {PROPERTIES}"]
    return "\n".join(lines) + "\n"
