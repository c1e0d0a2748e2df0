"""Schedules of the specification: paths that together take every edge of its state graph, performed on the cluster.

The graph is the model's own; it is the specification's (test_spec_models). Schedules share their beginnings: the
cluster is copied at each state, and each edge is performed from there once. A state is kept with several clusters,
since one that is ahead with one process can not do what another can; an edge counts as taken when one of them does it.
After each step the cluster is compared with the model.

Not handled: how a step is performed (replay); which edges the code can not take (test_schedules).

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from model_tests import model
from model_tests.replay import Diverged, Realisation, Unrealised, realise

Edge = tuple[model.State, model.Step, model.State]
Graph = dict[model.State, list[tuple[model.Step, model.State]]]
KEPT = 3
"""Clusters that are kept for one state of the model."""


Left = dict[model.State, dict[int, Unrealised | None]]
"""Edges that were not taken yet, by state and place, with what went wrong last."""


@dataclass
class Report:
    """What became of every edge."""

    states: int = 0
    edges: int = 0
    taken: list[Edge] = field(default_factory=list)
    """Edges that a cluster took, with equal states after it."""
    steps: int = 0
    """Steps that were performed and compared; more than edges when a second start walks the same way."""
    schedules: int = 0
    """Paths from a start to where nothing new follows."""
    unrealised: list[tuple[Edge, Unrealised]] = field(default_factory=list)
    diverged: list[tuple[Edge, str]] = field(default_factory=list)
    behind: list[Edge] = field(default_factory=list)
    """Edges that leave states which no cluster reached."""
    lost: set[model.State] = field(default_factory=set)
    """Those states."""


def graph_of(edges: Iterable[Edge]) -> Graph:
    """Edges by the state that they leave."""
    graph: Graph = defaultdict(list)
    for before, step, after in edges:
        graph[before].append((step, after))
        graph.setdefault(after, [])
    return dict(graph)


def cover(
    starts: Iterable[Realisation], graph: Graph, *, kept: int = KEPT, stop: Callable[[], bool] = lambda: False
) -> Report:
    """Take every edge on the cluster, nearest first; each start tries what those before it could not."""
    report = Report(states=len(graph), edges=sum(map(len, graph.values())))
    left: Left = {state: dict.fromkeys(range(len(out))) for state, out in graph.items()}
    reached: set[model.State] = set()
    for number, start in enumerate(starts):
        useful = _useful(graph, left) if number else set(graph)
        walk = _Walk(graph, left, reached, report, kept, useful)
        walk.run(start, stop)
    for state, out in graph.items():
        for n, failure in left[state].items():
            edge = (state, *out[n])
            if failure is not None:
                report.unrealised.append((edge, failure))
            else:
                report.behind.append(edge)
        if state not in reached:
            report.lost.add(state)
    return report


def _useful(graph: Graph, left: Left) -> set[model.State]:
    """States from which an edge can be reached that is not taken yet."""
    before: dict[model.State, list[model.State]] = defaultdict(list)
    for state, out in graph.items():
        for _, after in out:
            before[after].append(state)
    useful = {state for state in graph if left[state]}
    todo = list(useful)
    while todo:
        for state in before[todo.pop()]:
            if state not in useful:
                useful.add(state)
                todo.append(state)
    return useful


@dataclass
class _Walk:
    """One breadth-first walk over the graph, with clusters."""

    graph: Graph
    left: Left
    reached: set[model.State]
    report: Report
    kept: int
    useful: set[model.State]
    known: dict[model.State, set[Any]] = field(default_factory=lambda: defaultdict(set))
    walked: set[tuple[model.State, int]] = field(default_factory=set)

    def run(self, start: Realisation, stop: Callable[[], bool]) -> None:
        """Walk from one start."""
        todo = deque([start])
        while todo and not stop():
            here = todo.popleft()
            self.reached.add(here.state)
            new = [there for n in range(len(self.graph[here.state])) if (there := self._take(here, n)) is not None]
            todo += new
            self.report.schedules += not new

    def _take(self, here: Realisation, n: int) -> Realisation | None:
        """Take one edge; the cluster after it when it is worth going on from."""
        before, left = here.state, self.left[here.state]
        step, after = self.graph[before][n]
        if (before, n) in self.walked or (n not in left and after not in self.useful):
            return None
        try:
            there = realise(here, step, after)
        except Unrealised as failure:
            if n in left and ((last := left[n]) is None or last.one_event):
                left[n] = failure
            return None
        except Diverged as difference:
            self.report.diverged.append(((before, step, after), str(difference)))
            left.pop(n, None)
            return None
        self.walked.add((before, n))
        self.report.steps += 1
        if n in left:
            del left[n]
            self.report.taken.append((before, step, after))
        print_ = (there.stage.prints.of(there.cluster), tuple(node for node, _ in there.owed))
        if len(self.known[after]) >= self.kept or print_ in self.known[after]:
            return None
        self.known[after].add(print_)
        return there
