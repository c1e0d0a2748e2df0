"""One question to z3: is a claim true of every value of its free variables?

A claim is proved when its negation has no model. z3 answers with a proof, a counterexample, or "unknown"; the last is
an error here, never a pass. A counterexample is put back into the claim and has to make it false.
Not handled: claims with quantifiers; the unbounded proof of the protocol has its own prover.

Proofs: none; the facts that are put to it name their lemmas
"""

from __future__ import annotations

import z3


class Undecided(Exception):
    """z3 gave up on a claim: make it smaller, or narrow its words."""


def counterexample(claim: z3.BoolRef) -> dict[str, int | bool] | None:
    """None when `claim` holds for every value of its variables; otherwise values for which it is false.

    Raises: Undecided when z3 can not tell, or when its counterexample does not make the claim false.
    """
    solver = z3.Solver()
    solver.set("random_seed", 0)
    solver.set("timeout", 60_000)
    solver.add(z3.Not(claim))
    answer = solver.check()
    if answer == z3.unsat:
        return None
    if answer != z3.sat:
        raise Undecided(f"z3 says {answer} ({solver.reason_unknown()}) to: {claim}")
    model = solver.model()
    if not z3.is_false(model.evaluate(claim, model_completion=True)):
        raise Undecided(f"the counterexample {model} does not break the claim: {claim}")
    return {str(each.name()): _value(model[each]) for each in model.decls() if each.arity() == 0}


def evaluate(term: z3.BitVecRef, **values: int) -> int:
    """The value of a bit-vector term at constants for its variables, by name; 64 bits at most.

    Raises: ValueError when a variable is left without a value.
    """
    constants = {str(each): each for each in _variables(term)}
    chosen = [(constants[name], z3.BitVecVal(value, constants[name].size())) for name, value in values.items()]
    result = z3.simplify(z3.substitute(term, *chosen))
    if not z3.is_bv_value(result):
        raise ValueError(f"no value for {sorted(set(constants) - set(values))} in {term}")
    return int(result.as_long())


def _variables(term: z3.ExprRef) -> list[z3.ExprRef]:
    found, stack, seen = [], [term], set()
    while stack:
        each = stack.pop()
        if each.get_id() in seen:
            continue
        seen.add(each.get_id())
        if z3.is_const(each) and each.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            found.append(each)
        stack += each.children()
    return found


def _value(each: z3.ExprRef) -> int | bool:
    return int(each.as_long()) if z3.is_bv_value(each) else z3.is_true(each)
