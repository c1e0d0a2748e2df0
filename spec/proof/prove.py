"""The proof: the invariants hold at first, and every action keeps each of them and every step property.

One query for each action and invariant: axioms, all invariants and the guard before, the negation of the invariant
after. No model means kept. An invariant that looks at no symbol which the action changes is kept without a question.

Spec: none   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import z3

from spec.proof import control_lemmas, instance_lemmas, owner_lemmas, receiver_lemmas
from spec.proof.dsl import Claim, Symbolic, Term, closed, constant, parameters, symbols_read
from spec.proof.invariants import PROPERTIES, STEP_PROPERTIES
from spec.proof.model import ACTIONS
from spec.proof.vocabulary import TABLE, axioms, first_state

INVARIANTS: tuple[Claim, ...] = (
    *PROPERTIES,
    *control_lemmas.LEMMAS,
    *owner_lemmas.LEMMAS,
    *receiver_lemmas.LEMMAS,
    *instance_lemmas.LEMMAS,
)
SECONDS = 60
"""Limit for one query; the slowest takes a fraction of a second."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question: can this invariant break in this step?"""

    action: str
    """Empty for the first state."""
    claim: str
    assumptions: tuple[Term, ...]
    broken: Term
    """The negation of the claim after the step."""


def premises(state: Symbolic) -> tuple[Term, ...]:
    """Axioms and invariants of a state."""
    return (*axioms(state), *[closed(state, claim) for claim in INVARIANTS])


def first_queries() -> Iterator[Query]:
    """Does every invariant hold in the first state?"""
    state = Symbolic(TABLE)
    given = (*axioms(state), *first_state(state))
    for claim in INVARIANTS:
        yield Query("", claim.__name__, given, z3.Not(closed(state, claim)))


def step_queries(
    name: str, *, swaps: Mapping[str, Callable[..., Term]] | None = None, claims: Iterable[Claim] = INVARIANTS
) -> Iterator[Query]:
    """Does the action keep every invariant that looks at what it changes?"""
    action = ACTIONS[name]
    state = Symbolic(TABLE, swaps=swaps)
    things = [constant(f"the_{each}", sort) for each, sort in parameters(action).items()]
    guard, post = action(state, *things)
    after = state.after(post)
    given = (*premises(state), guard)
    reads = symbols_read(TABLE, claims)
    for claim in claims:
        if reads[claim.__name__] & post.keys():
            yield Query(name, claim.__name__, given, z3.Not(closed(after, claim)))
    for step in STEP_PROPERTIES:
        sorts = tuple(parameters(step).values())
        kept = state.every(sorts, lambda *each, step=step: step(state, after, *each)) if sorts else step(state, after)
        if not isinstance(kept, bool):
            yield Query(name, step.__name__, given, z3.Not(kept))


@dataclass(frozen=True, slots=True)
class Verdict:
    """z3's answer to one query."""

    query: Query
    answer: str
    """`unsat`: kept. `sat`: broken, and `model` is a finite counterexample. Anything else: undecided, which is red."""
    seconds: float
    model: z3.ModelRef | None


def decide(queries: Iterable[Query]) -> Iterator[Verdict]:
    """Ask z3; queries with the same assumptions share a solver."""
    solver, given = z3.Solver(), None
    for query in queries:
        if given is not query.assumptions:
            solver, given = z3.Solver(), query.assumptions
            solver.set("timeout", 1000 * SECONDS)
            solver.set("random_seed", 0)
            solver.add(*[term for term in given if term is not True])
        begin = time.perf_counter()
        solver.push()
        solver.add(query.broken)
        answer = solver.check()
        model = solver.model() if answer == z3.sat else None
        solver.pop()
        yield Verdict(query, str(answer), time.perf_counter() - begin, model)


def all_queries() -> Iterator[Query]:
    """The whole proof."""
    yield from first_queries()
    for name in ACTIONS:
        yield from step_queries(name)


class _Uses(dict[str, Callable[..., Term]]):
    """Swaps nothing and remembers which guards were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default


def guards_used(name: str) -> set[str]:
    """Names of the guards that an action looks at, in its guard or in what it writes."""
    uses = _Uses()
    state = Symbolic(TABLE, swaps=uses)
    things = [constant(f"the_{each}", sort) for each, sort in parameters(ACTIONS[name]).items()]
    _, post = ACTIONS[name](state, *things)
    after = state.after(post)
    for symbol in post:
        after.lookup(symbol)(*[constant(f"key_{number}", sort) for number, sort in enumerate(TABLE[symbol].args)])
    return uses.names
