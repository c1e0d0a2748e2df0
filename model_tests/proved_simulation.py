"""The proved model simulates the specification: each step that is allowed there is a run of the proof's actions.

A search goes through all pairs of a state of the specification and a state of the proved model that come from the same
steps. In each pair, each step of the specification is taken by the proved model, whose guards have to be true and whose
state after it has to agree. So whatever the proof says of every state of its model, it says of these.
Not handled: payloads that arrive damaged or foreign (A4); sizes beyond the bounds.

Paper: Appendix B   Spec: Next   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from model_tests import model
from model_tests.explore import Bounds, permits, read_bounds
from model_tests.model_state import Config, State
from model_tests.proved import Proved
from model_tests.proved_agreement import agreement
from model_tests.proved_world import Rejected, Step
from spec.proof.dsl import Concrete
from spec.proof.walk import broken

Key = frozenset[tuple[str, tuple[Any, ...], Any]]


@dataclass
class Simulation:
    """What a search saw."""

    states: set[State] = field(default_factory=set)
    """Of the specification."""
    pairs: int = 0
    edges: int = 0
    checked: int = 0
    """States of the proved model in which every invariant of the proof was looked at."""
    taken: Counter[str] = field(default_factory=Counter)
    """Actions of the proof."""
    complete: bool = False
    """No pair is left."""
    faults: Counter[str] = field(default_factory=Counter)
    """Steps that the proved model refused, differences after a step, invariants that do not hold."""


def simulate(
    config: Config,
    bounds: Bounds,
    *,
    start: Callable[[Proved], None] = lambda proved: None,
    limit: int = 10**9,
    invariants: int = 0,
    patience: int = 1,
) -> Simulation:
    """Search all pairs.

    Args:
        start: may change the proved model before its first step.
        limit: stop after so many pairs.
        invariants: check those of the proof in every state of that number of pairs; never when 0.
        patience: stop after so many faults.
    """
    state = model.init(config) if bounds.cold else model.warm(config)
    proved = Proved.start(config) if bounds.cold else Proved.warm(config)
    silent = frozenset[int]() if bounds.cold else frozenset({1})
    start(proved)
    found = Simulation(states={state}, pairs=1)
    found.faults.update(agreement(proved, state, silent=silent))
    seen, waiting = {(state, key(proved.state))}, deque([(state, proved)])
    while waiting and found.pairs < limit and found.faults.total() < patience:
        state, proved = waiting.popleft()
        here = model.here(config, state)
        for step, after in model.successors(config, state):
            if not permits(bounds, here, step):
                continue
            found.edges += 1
            other = proved.fork()
            if why := _refused(other, step):
                found.faults[why] += 1
                continue
            found.taken.update(name for name, _ in other.done)
            pair = (after, key(other.state))
            if pair in seen:
                continue
            seen.add(pair)
            found.pairs += 1
            found.states.add(after)
            wrong = [f"after {step[0]}: {each}" for each in agreement(other, after, silent=silent)]
            if invariants and found.pairs % invariants == 0:
                found.checked += 1
                wrong += [f"after {step[0]}: {claim} does not hold" for claim in broken(other.state)]
            found.faults.update(wrong)
            waiting.append((after, other))
    found.complete = not waiting
    return found


def sound(cfg: str) -> tuple[Config, Bounds]:
    """Constants and bounds of a configuration file, with payloads that arrive as they were sent."""
    config, bounds = read_bounds(cfg)
    return replace(config, arrivals=("sound",)), bounds


def key(state: Concrete) -> Key:
    """Every row that does not hold its default."""
    return frozenset(
        (name, row, value)
        for name, written in state.values.items()
        for row, value in written.items()
        if value != (state.defaults[name](*row) if name in state.defaults else False)
    )


def _refused(proved: Proved, step: Step) -> str:
    try:
        proved.take(step)
    except Rejected as rejected:
        return str(rejected)
    return ""
