"""The state graph of a configuration from both sides, the model and TLC, and how they differ.

TLC explores without invariants and properties here: which states there are does not depend on them, and what TLC says
about them is the business of `make spec`.
Not handled: how values are written (canonical); bounds (explore).

Spec: MCDeltaRefit, models.json
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tlc_cfg import generated_cfg, read_cfg
from tlc_java import Run, Workshop
from tlc_rows import Row

from model_tests.canonical import Graph, read_dot, state_text
from model_tests.explore import SPEC, Edge
from model_tests.model_state import State

SHOWN = 3
"""Differences of one kind that are told in full."""


class TlcFailed(Exception):
    """TLC did not explore a configuration to its end. The message ends with what it printed."""


def write_unchecked(row: Row, target: Path) -> Row:
    """The row with a configuration in `target` that explores the same and checks nothing."""
    base = replace(read_cfg(SPEC / (row.base or row.cfg)), invariants=(), properties=())
    path = target / f"unchecked_{row.name}.cfg"
    path.write_text(generated_cfg(replace(row, constants=row.constants if row.base else {}), base), encoding="utf-8")
    return replace(row, cfg=str(path), coverage=False)


def tlc_graphs(rows: Iterable[Row], workshop: Workshop, *, jobs: int) -> dict[str, Graph]:
    """The graphs that TLC finds, by the names of the rows; `jobs` runs of TLC at once, of one worker each.

    Raises: TlcFailed; UnreadableDump when the text of a state is not understood.
    """
    waiting, running, graphs = list(rows), list[tuple[Row, Run, Path]](), dict[str, Graph]()
    while waiting or running:
        while waiting and len(running) < jobs:
            row = waiting.pop(0)
            dump = workshop.path / f"{row.name}.dot"
            run = workshop.start(row, 1, ["-dump", "dot,actionlabels", str(dump.with_suffix(""))])
            running.append((row, run, dump))
        workshop.pause()
        for row, run, dump in [one for one in running if workshop.ended(one[1])]:
            running.remove((row, run, dump))
            if run.process.returncode != 0 or not dump.is_file():
                raise TlcFailed(f"{row.name} ends with exit code {run.process.returncode}:\n{run.output()[-2000:]}")
            graphs[row.name] = read_dot(dump.read_text(encoding="utf-8"))
    return graphs


def model_graph(edges: Sequence[Edge]) -> Graph:
    """The graph of the model out of its edges, of which there must be one."""
    texts: dict[State, str] = {}
    for before, _, after in edges:
        for state in (before, after):
            if state not in texts:
                texts[state] = state_text(state)
    named = frozenset((texts[before], step[0], texts[after]) for before, step, after in edges)
    return Graph(frozenset(texts.values()), named)


def differences(model: Graph, tlc: Graph) -> list[str]:
    """What one side has and the other has not: states first, then steps between states that both have."""
    told = []
    for only, there, other in (("the model", model, tlc), ("TLC", tlc, model)):
        states = sorted(there.states - other.states)
        told += [f"only {only} reaches, one of {len(states)}:\n{state}" for state in states[:SHOWN]]
        both = there.states & other.states
        steps = sorted(edge for edge in there.edges - other.edges if edge[0] in both and edge[2] in both)
        for before, action, after in steps[:SHOWN]:
            told.append(f"only {only} takes {action}, one of {len(steps)}:\n{before}\nto\n{_changes(before, after)}")
    return told


def _changes(before: str, after: str) -> str:
    """The lines of a state that are not in the one before."""
    old = before.splitlines()
    return "\n".join(line for line in after.splitlines() if line not in old) or "itself"
