"""A counterexample as text: the state before, the step, what it changes, and the claim that is false afterwards.

Only rows that the weakened guard or the claim looks at are shown, and of relations only those that hold.

Spec: none   Proofs: none
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import z3

from spec.proof.bounded import things
from spec.proof.dsl import BOOL, Symbol, Symbolic, closed, constant, parameters
from spec.proof.invariants import STEP_PROPERTIES
from spec.proof.judgement import Counterexample
from spec.proof.model import ACTIONS
from spec.proof.mutant import Mutant
from spec.proof.prove import INVARIANTS
from spec.proof.vocabulary import KINDS, MODES, TABLE


class _Names:
    """Names for the things of one model: modes and kinds by what they are, others by sort and number."""

    def __init__(self, found: Counterexample) -> None:
        self._model = found.model
        self._special = {self._number(found.before.lookup(name)()): name for name in (*MODES, *KINDS)}
        self._special[self._number(found.before.lookup("no_attempt")())] = "no_attempt"

    def of(self, term: Any) -> str:
        """The thing that a term is."""
        value = self._number(term)
        return self._special.get(value, value)

    def _number(self, term: Any) -> str:
        if isinstance(term, bool):
            return str(term)
        value = self._model.evaluate(term, model_completion=True)
        if value.sort() == z3.BoolSort():
            return str(z3.is_true(value))
        for sort in (each for symbol in TABLE.values() for each in (*symbol.args, symbol.result)):
            if sort != BOOL and sort.name == value.sort().name():
                for number, thing in enumerate(things(sort)):
                    if self._model.evaluate(thing, model_completion=True).eq(value):
                        return f"{sort.name.lower()}{number}"
        return str(value)


def text(mutant: Mutant, found: Counterexample) -> str:
    """The counterexample in lines."""
    return "\n".join(_lines(mutant, found))


def _lines(mutant: Mutant, found: Counterexample) -> Iterator[str]:
    names = _Names(found)
    claims = {claim.__name__: claim for claim in (*INVARIANTS, *STEP_PROPERTIES)}
    yield f"mutant {mutant.name}: {mutant.why}"
    yield f"swaps {', '.join(mutant.swaps)}"
    yield "before (a state that keeps every invariant):"
    yield from _rows_before(found, names)
    given = ", ".join(f"{name}={names.of(value)}" for name, value in found.arguments.items())
    yield f"step: {found.action}({given})"
    after = found.before.after(found.post)
    for name in found.post:
        symbol = TABLE[name]
        for key in product(*[things(sort) for sort in symbol.args]):
            old, new = names.of(found.before.lookup(name)(*key)), names.of(after.lookup(name)(*key))
            if old != new:
                yield f"  {_row(symbol, key, names)}: {old} -> {new}"
    said = (claims[found.claim].__doc__ or "").split("\n")[0]
    yield f"broken: {found.claim}. {said}"


def _rows_before(found: Counterexample, names: _Names) -> Iterator[str]:
    """Relations that hold, and functions of things that occur in them or in the step."""
    occurs = {names.of(value) for value in found.arguments.values()}
    symbols = sorted(_looked_at(found), key=lambda symbol: symbol.result != BOOL)
    for symbol in symbols:
        for key in product(*[things(sort) for sort in symbol.args]):
            value = names.of(found.before.lookup(symbol.name)(*key))
            here = [names.of(each) for each in key]
            if symbol.result == BOOL and value != "False":
                occurs.update(here)
                yield f"  {_row(symbol, key, names)}"
            elif symbol.result != BOOL and occurs.issuperset(here):
                occurs.add(value)
                yield f"  {_row(symbol, key, names)} = {value}"


def _row(symbol: Symbol, key: tuple[Any, ...], names: _Names) -> str:
    return f"{symbol.name}({', '.join(names.of(each) for each in key)})" if key else symbol.name


def _looked_at(found: Counterexample) -> list[Symbol]:
    read: set[str] = set()
    state = Symbolic(TABLE, swaps=found.before.swaps, read=read)
    action = ACTIONS[found.action]
    action(state, *[constant(name, sort) for name, sort in parameters(action).items()])
    for claim in INVARIANTS:
        if claim.__name__ == found.claim:
            closed(state, claim)
    return [TABLE[name] for name in TABLE if name in read and not TABLE[name].rigid]
