"""States of a few named things, for questions whose answer is a state: witnesses and counterexamples.

Quantifiers are written out over the names, so no instantiation is searched for, and what is found is a state that a
reader can follow. Only a found state proves something: that none of this size exists says nothing about larger ones.

Spec: none   Proofs: none
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, product
from typing import Any

import z3

from spec.proof.dsl import BOOL, Action, Sort, Symbolic, Term, conj, constant, disj, parameters
from spec.proof.vocabulary import SORT_ORDER, TABLE

SIZES = {"Attempt": 5, "Version": 4, "Candidate": 4, "Mode": 5, "Kind": 7, "Word": 3}
"""How many things of a sort the state has; two of every other sort."""


class Bounded(Symbolic):
    """A state of so many things: `every` speaks of each of them by name."""

    def every(self, sorts: Sort | tuple[Sort, ...], body: Callable[..., Term]) -> Term:
        """See `State.every`."""
        each = sorts if isinstance(sorts, tuple) else (sorts,)
        return conj(*[body(*key) for key in product(*[things(sort) for sort in each])])


def things(sort: Sort) -> list[Any]:
    """The things of one sort, by name."""
    if sort == BOOL:
        return [z3.BoolVal(False), z3.BoolVal(True)]
    return [constant(f"{sort.name.lower()}_{number}", sort) for number in range(SIZES.get(sort.name, 2))]


def closure(state: Symbolic) -> Iterator[Term]:
    """Things of a sort are different, and functions lead to named things only. Numbers follow the orders."""
    for sort in SORT_ORDER:
        yield z3.Distinct(*things(sort))
    for name in ("attempt_le", "version_le", "epoch_le"):
        for left, right in pairwise(things(TABLE[name].args[0])):
            yield state.lookup(name)(left, right)
    for name in ("no_attempt", "first_version", "first_candidate"):
        yield state.lookup(name)() == things(TABLE[name].result)[0]
    for symbol in TABLE.values():
        if symbol.result != BOOL:
            for key in product(*[things(sort) for sort in symbol.args]):
                value = state.lookup(symbol.name)(*key)
                yield disj(*[value == thing for thing in things(symbol.result)])


def argument_names(action: Action) -> dict[str, Any]:
    """One constant for each parameter of an action."""
    return {name: constant(f"the_{name}", sort) for name, sort in parameters(action).items()}


def are_things(action: Action, arguments: Mapping[str, Any]) -> Iterator[Term]:
    """The arguments are named things."""
    for name, sort in parameters(action).items():
        yield disj(*[arguments[name] == thing for thing in things(sort)])
