"""Command line of the unbounded proof: `python -m spec.proof prove | second | sane | mutants | explain NAME | all`.

Exit code 0: everything is as it should be; 1: something is not proved, not refuted, or not reachable; 2: usage.

Spec: none   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from spec.proof.explain import text
from spec.proof.judgement import Judge
from spec.proof.model import ACTIONS
from spec.proof.mutants import MUTANTS
from spec.proof.prove import decide, first_queries, step_queries
from spec.proof.sane import witnesses

Faults = list[str]


def prove_one(action: str) -> tuple[int, float, Faults]:
    """z3 on one action, or on the first state: queries, slowest query in seconds, what is not proved."""
    verdicts = list(decide(step_queries(action) if action else first_queries()))
    faults = [f"{action or 'first state'}: {v.query.claim} ({v.answer})" for v in verdicts if v.answer != "unsat"]
    return len(verdicts), max(v.seconds for v in verdicts) if verdicts else 0.0, faults


def second_one(action: str) -> tuple[int, float, Faults]:
    """cvc5 on the same queries."""
    from spec.proof.second import answers

    queries = list(step_queries(action) if action else first_queries())
    begin = time.perf_counter()
    faults = [f"{action or 'first state'}: {q.claim} ({said})" for q, said in answers(queries) if said != "unsat"]
    return len(queries), time.perf_counter() - begin, faults


def _each_action(title: str, one: Callable[[str], tuple[int, float, Faults]], jobs: int) -> Faults:
    begin = time.perf_counter()
    faults: Faults = []
    queries, slowest = 0, 0.0
    with ProcessPoolExecutor(jobs) as pool:
        for count, seconds, found in pool.map(one, ["", *ACTIONS]):
            queries, slowest = queries + count, max(slowest, seconds)
            faults += found
    print(f"{title}: {queries} queries, {len(faults)} not proved, {time.perf_counter() - begin:.0f} s", end="")
    print(f" (slowest {slowest:.2f} s)")
    return faults


def prove(jobs: int) -> Faults:
    """Every invariant is kept by every action: z3."""
    return _each_action("z3", prove_one, jobs)


def second(jobs: int) -> Faults:
    """The same by cvc5; the slowest time is that of an action."""
    return _each_action("cvc5", second_one, jobs)


def sane(jobs: int) -> Faults:
    """Every action may be taken in some good state."""
    begin = time.perf_counter()
    answers = list(witnesses())
    faults = [f"{name} may never be taken ({answer})" for name, answer in answers if answer != "sat"]
    print(f"sane: {len(answers)} actions, {len(faults)} never possible, {time.perf_counter() - begin:.0f} s")
    return faults


def mutants(jobs: int) -> Faults:
    """Every mutant breaks the claim that it names, or is proved safe where it names none."""
    begin = time.perf_counter()
    faults = list(_judged())
    broken = sum(bool(mutant.breaks) for mutant in MUTANTS.values())
    print(f"mutants: {broken} break, {len(MUTANTS) - broken} proved safe, {len(faults)} wrong", end="")
    print(f", {time.perf_counter() - begin:.0f} s")
    return faults


def _judged() -> Iterator[str]:
    judge = Judge()
    for mutant in MUTANTS.values():
        if not judge.touched(mutant):
            yield f"mutant {mutant.name}: no action looks at what it swaps"
        elif mutant.breaks and judge.counterexample(mutant) is None:
            yield f"mutant {mutant.name}: {mutant.breaks} does not fall"
        elif not mutant.breaks:
            yield from (f"mutant {mutant.name} is not safe: {fault}" for fault in judge.undecided_or_broken(mutant))


def explain(name: str) -> Faults:
    """Print the counterexample of one mutant."""
    if name not in MUTANTS:
        return [f"there is no mutant {name!r}; there are: {', '.join(sorted(MUTANTS))}"]
    judge, mutant = Judge(), MUTANTS[name]
    if not mutant.breaks:
        print(f"mutant {name}: {mutant.why}\nproved safe; the guard is covered by {mutant.covered_by}")
        return []
    found = judge.counterexample(mutant)
    if found is None:
        return [f"mutant {name}: {mutant.breaks} does not fall"]
    print(text(mutant, judge.smallest(found)))
    return []


PARTS: dict[str, Callable[[int], Faults]] = {"prove": prove, "second": second, "sane": sane, "mutants": mutants}


def main(arguments: list[str]) -> int:
    """Run one part, or all."""
    parser = argparse.ArgumentParser(prog="python -m spec.proof", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "explain", "all"])
    parser.add_argument("mutant", nargs="?", default="", help="name of the mutant to explain")
    parser.add_argument("--jobs", type=int, default=2, help="processes for the two solvers")
    given = parser.parse_args(arguments)
    if given.part == "explain":
        faults = explain(given.mutant)
    else:
        chosen = PARTS.values() if given.part == "all" else [PARTS[given.part]]
        faults = [fault for part in chosen for fault in part(given.jobs)]
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
