"""A second, independent solver: cvc5 answers every query of the proof, handed over as SMT-LIB text.

z3 only prints here; parsing, instantiation and search are cvc5's own. An answer that is not `unsat` is red.

Spec: none   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import cvc5
import z3

from spec.proof.dsl import BOOL, Sort, Symbol, Term
from spec.proof.prove import Query
from spec.proof.vocabulary import SORT_ORDER, TABLE


def _sort(sort: Sort) -> str:
    return "Bool" if sort == BOOL else sort.name


def _declare(symbol: Symbol) -> str:
    return f"(declare-fun {symbol.name} ({' '.join(_sort(sort) for sort in symbol.args)}) {_sort(symbol.result)})"


def _free_constants(terms: Iterable[Term]) -> dict[str, str]:
    """Names and sorts of constants that the state table does not declare: the parameters of the action."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    stack = [term for term in terms if not isinstance(term, bool)]
    while stack:
        term = stack.pop()
        if term.get_id() in seen:
            continue
        seen.add(term.get_id())
        if z3.is_quantifier(term):
            stack.append(term.body())
        elif z3.is_const(term) and term.decl().kind() == z3.Z3_OP_UNINTERPRETED and term.decl().name() not in TABLE:
            found[term.decl().name()] = term.sort().name()
        stack += term.children()
    return found


def script(queries: Sequence[Query]) -> str:
    """One SMT-LIB script for queries with the same assumptions: one `check-sat` each."""
    given = [term for term in queries[0].assumptions if term is not True]
    constants = _free_constants((*given, *[query.broken for query in queries]))
    lines = ["(set-logic UF)", *[f"(declare-sort {sort.name} 0)" for sort in SORT_ORDER]]
    lines += [_declare(symbol) for symbol in TABLE.values()]
    lines += [f"(declare-fun {name} () {sort})" for name, sort in sorted(constants.items())]
    lines += [f"(assert {term.sexpr()})" for term in given]
    for query in queries:
        lines += ["(push 1)", f"(assert {query.broken.sexpr()})", "(check-sat)", "(pop 1)"]
    return "\n".join(lines)


def answers(queries: Sequence[Query], *, seconds: int = 120) -> Iterator[tuple[Query, str]]:
    """cvc5's answer to each query; all of them have the same assumptions. `seconds` limits one query.

    Raises: ValueError when cvc5 does not answer as often as it is asked.
    """
    if not queries:
        return
    terms = cvc5.TermManager()
    solver = cvc5.Solver(terms)
    for option, value in (("incremental", "true"), ("enum-inst", "true"), ("tlimit-per", str(1000 * seconds))):
        solver.setOption(option, value)
    manager = cvc5.SymbolManager(terms)
    parser = cvc5.InputParser(solver, manager)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, script(queries), "proof")
    given: list[str] = []
    while not (command := parser.nextCommand()).isNull():
        said = str(command.invoke(solver, manager)).strip()
        if re.match(r"\(error", said):
            raise ValueError(f"cvc5 does not understand the script: {said}")
        if said:
            given.append(said)
    if len(given) != len(queries):
        raise ValueError(f"cvc5 answered {len(given)} of {len(queries)} queries")
    yield from zip(queries, given, strict=True)
