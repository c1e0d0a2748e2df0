"""Not vacuous: for every action there is a state that satisfies all invariants and in which it may be taken.

The state has two committed versions after version 0, three attempts, two receivers and two owners, so that a guard
which contradicts the invariants, or invariants that contradict each other, can not make the proof easy. The search is
for a state of exactly the named things: quantifiers are written out over them.

Spec: the sanity claims of DeltaRefit   Proofs: none
"""

from __future__ import annotations

from collections.abc import Iterator

import z3

from spec.proof.bounded import Bounded, are_things, argument_names, closure, things
from spec.proof.dsl import Symbolic, Term, conj, neg
from spec.proof.model import ACTIONS
from spec.proof.prove import premises
from spec.proof.vocabulary import ATTEMPT, TABLE, VERSION


def rich(s: Symbolic, *, booted: bool) -> Term:
    """Two commits and a third attempt; or, for the first record, three attempts before any commit."""
    attempts = things(ATTEMPT)[1:4]
    made = conj(*[s.made(t) for t in attempts])
    if not booted:
        return conj(made, neg(s.booted()))
    v1, v2 = things(VERSION)[1:3]
    commits = conj(
        s.succ(s.first_version(), v1), s.succ(v1, v2), s.committed(v1, attempts[0]), s.committed(v2, attempts[1])
    )
    return conj(made, s.booted(), commits)


def witnesses(names: tuple[str, ...] = tuple(ACTIONS)) -> Iterator[tuple[str, str]]:
    """For each action, z3's answer to "is there such a state?"; `sat` is what is wanted."""
    state = Bounded(TABLE)
    solver = z3.SolverFor("QF_UF")
    solver.add(*closure(state), *[term for term in premises(state) if term is not True])
    for name in names:
        solver.push()
        arguments = argument_names(ACTIONS[name])
        guard, _ = ACTIONS[name](state, *arguments.values())
        solver.add(*are_things(ACTIONS[name], arguments), rich(state, booted=name != "Bootstrap"), guard)
        yield name, str(solver.check())
        solver.pop()
