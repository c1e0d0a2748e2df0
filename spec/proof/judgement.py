"""What becomes of a mutant: a step that breaks a claim, with a finite counterexample, or the proof that it is safe.

A counterexample is searched among states of a few named things that satisfy every invariant; the step starts there,
under the weakened guard, and the named claim is false after it. A safe mutant goes through the whole proof instead.

Spec: Mutants   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import z3

from spec.proof.bounded import Bounded, are_things, argument_names, closure, things
from spec.proof.dsl import BOOL, Claim, Post, Term, closed, neg, parameters, symbols_read
from spec.proof.invariants import STEP_PROPERTIES
from spec.proof.model import ACTIONS
from spec.proof.mutant import Mutant
from spec.proof.prove import INVARIANTS, decide, guards_used, premises, step_queries
from spec.proof.vocabulary import TABLE


@dataclass(frozen=True, slots=True)
class Counterexample:
    """One step of a weakened model from a good state to a bad one."""

    action: str
    claim: str
    model: z3.ModelRef
    arguments: dict[str, Any]
    before: Bounded
    post: Post
    conditions: tuple[Term, ...]
    """What was asked beyond a good state: the arguments, the weakened guard, the broken claim."""


class Judge:
    """Judges mutants one after another; the good states are described once."""

    def __init__(self) -> None:
        self._state = Bounded(TABLE)
        self._solver = z3.SolverFor("QF_UF")
        self._solver.add(*closure(self._state), *[term for term in premises(self._state) if term is not True])
        self._uses = {name: guards_used(name) for name in ACTIONS}
        self._reads = symbols_read(TABLE, INVARIANTS)

    def touched(self, mutant: Mutant) -> list[str]:
        """Actions that look at a guard which the mutant swaps."""
        return [name for name, uses in self._uses.items() if uses & mutant.swaps.keys()]

    def counterexample(self, mutant: Mutant) -> Counterexample | None:
        """A step that breaks the claim which the mutant names; None when there is none of this size.

        Raises: ValueError when the mutant names no claim that exists.
        """
        claims = {claim.__name__: claim for claim in (*INVARIANTS, *STEP_PROPERTIES)}
        if mutant.breaks not in claims:
            raise ValueError(f"mutant {mutant.name}: there is no claim {mutant.breaks!r}")
        for name in self.touched(mutant):
            found = self._broken(mutant, name, claims[mutant.breaks])
            if found is not None:
                return found
        return None

    def undecided_or_broken(self, mutant: Mutant) -> Iterator[str]:
        """The whole proof of a mutant that is safe: whatever z3 does not prove, as `action: claim (answer)`."""
        for name in self.touched(mutant):
            for verdict in decide(step_queries(name, swaps=mutant.swaps)):
                if verdict.answer != "unsat":
                    yield f"{name}: {verdict.query.claim} ({verdict.answer})"

    def _broken(self, mutant: Mutant, name: str, claim: Claim) -> Counterexample | None:
        weak = Bounded(TABLE, swaps=mutant.swaps)
        arguments = argument_names(ACTIONS[name])
        guard, post = ACTIONS[name](weak, *arguments.values())
        after = weak.after(post)
        if claim in STEP_PROPERTIES:
            sorts = tuple(parameters(claim).values())
            kept = weak.every(sorts, lambda *key: claim(weak, after, *key))
        elif self._reads[claim.__name__] & post.keys():
            kept = closed(after, claim)
        else:
            return None
        conditions = (*are_things(ACTIONS[name], arguments), guard, neg(kept))
        self._solver.push()
        self._solver.add(*[term for term in conditions if term is not True])
        model = self._solver.model() if self._solver.check() == z3.sat else None
        self._solver.pop()
        if model is None:
            return None
        return Counterexample(name, claim.__name__, model, arguments, weak, post, conditions)

    def smallest(self, found: Counterexample) -> Counterexample:
        """The same kind of step from a state in which no relation holds that need not hold."""
        self._solver.push()
        self._solver.add(*[term for term in found.conditions if term is not True])
        model = found.model
        for symbol in TABLE.values():
            if symbol.rigid or symbol.result != BOOL:
                continue
            for key in product(*[things(sort) for sort in symbol.args]):
                row = found.before.lookup(symbol.name)(*key)
                if not z3.is_true(model.evaluate(row, model_completion=True)):
                    self._solver.add(z3.Not(row))
                    continue
                self._solver.push()
                self._solver.add(z3.Not(row))
                if self._solver.check() == z3.sat:
                    model = self._solver.model()
                    self._solver.pop()
                    self._solver.add(z3.Not(row))
                else:
                    self._solver.pop()
        self._solver.pop()
        return replace(found, model=model)
