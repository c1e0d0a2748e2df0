"""Every behaviour of the cluster, step by step with the model: the other direction of a replayed schedule.

From one start every move that the cluster can make is made, in every order, and the follower takes every line. Nothing
may be rejected, and after each move the two states must not differ. Clusters that go on in the same way, at the same
state of the model, are looked at once. With `faults` deadlines pass, replies are lost and endpoints can not be reached.

Not handled: restarts and takeovers, which walks draw (machine, test_traces).

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from model_tests.follower import Rejected
from model_tests.moves import Move
from model_tests.proposals import reads, silent
from model_tests.replay import Realisation

OF_FAULTS = frozenset({"leave", "unknown"})


@dataclass
class Explored:
    """What was seen of the cluster."""

    states: int = 0
    """Clusters that differ, or differ in the model's state."""
    moves: int = 0
    modelled: set[Any] = field(default_factory=set)
    """States of the model that were met."""
    rejected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    complete: bool = True
    """Nothing was left to do."""


def explore(start: Realisation, *, faults: bool = False, limit: int = 100_000, patient: bool = True) -> Explored:
    """Make every move in every order; `limit` bounds the clusters that are looked at. Not `patient`: until a fault."""
    seen = Explored()
    known: set[Any] = set()
    todo = deque([start])
    while todo:
        if seen.states >= limit or not (patient or (seen.rejected + seen.different) == []):
            seen.complete = False
            break
        here = todo.popleft()
        seen.states += 1
        seen.modelled.add(here.state)
        for move in possible(here, faults=faults):
            there = here.fork(past=True)
            seen.moves += 1
            try:
                for line in there.lines_of(move):
                    there.take(line)
            except Rejected as rejected:
                seen.rejected.append(f"{move[0]}: {rejected}")
                continue
            key = (there.stage.prints.of(there.cluster), there.state)
            if key in known:
                continue
            known.add(key)
            if found := there.differences():
                seen.different.append(f"{move[0]}: {'; '.join(found)}")
                continue
            todo.append(there)
    return seen


def possible(here: Realisation, *, faults: bool) -> Iterator[Move]:
    """Every move that the cluster can make."""
    cluster, stage, state = here.cluster, here.stage, here.state
    for c, node in enumerate(cluster.coordinators):
        yield from (move for move in silent(cluster, c) if faults or move[0] not in OF_FAULTS)
        yield from reads(cluster, c)
        if node.control is not None:
            yield "control", c
        if faults:
            yield "expire", c
    yield from (("deliver", message) for message in cluster.net)
    for name, r in cluster.receivers.items():
        for key in cluster.payloads:
            yield "payload_of", name, key, "sound"
        yield from (("manifest", name, which) for which in cluster.manifests)
        yield from (("permit", name, key) for key in sorted(r.staged))
        yield from (("write_item", name, each[1]) for each in r.issued)
        if r.flushing is not None:
            yield "flush", name
        if r.draining is not None and not r.issued:
            yield "drain", name
    for o, own in cluster.owners.items():
        if own.stream is not None:
            yield from (("publish", o, item) for group in own.stream for item in group)
            yield "end", o
        if own.stopping is not None:
            yield "stopped", o
        if own.copying:
            yield from (("copy_item", o, item) for item in own.copying)
        elif own.copying is not None:
            yield "copy", o
    fresh = all(own.state.candidate == "" and own.state.filling is None for own in cluster.owners.values())
    if fresh and state.step < stage.config.max_candidate:
        yield "begin", stage.config.owners[0], state.step + 1, stage.config.changes[state.step + 1]
