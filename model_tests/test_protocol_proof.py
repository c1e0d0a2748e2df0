"""The unbounded proof: every action keeps every invariant, for any number of everything; and it could have failed.

z3 and cvc5 answer every query; each action may be taken in some good state; each mutant breaks what it names or is
proved safe; the same functions run concretely through a story of every action and through random walks.

Paper: Proposition 1; Appendix B   Spec: DeltaRefit   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_dcr.trace import Action
from spec.proof import second
from spec.proof.dsl import (
    BOOL,
    Concrete,
    State,
    Symbol,
    Symbolic,
    Term,
    constant,
    neg,
    parameters,
    symbols_read,
)
from spec.proof.explain import text
from spec.proof.judgement import Judge
from spec.proof.model import ACTIONS, TRACED, UNTRACED
from spec.proof.mutant import Mutant
from spec.proof.mutants import MUTANTS
from spec.proof.prove import INVARIANTS, decide, first_queries, step_queries
from spec.proof.sane import witnesses
from spec.proof.story import Story, boot, tell
from spec.proof.vocabulary import SORT_ORDER, TABLE, Receiver, axioms, first_state
from spec.proof.walk import NotEnabled, World, broken, broken_steps, first, newly_broken, take, wander

pytestmark = pytest.mark.proof

ROOT = Path(__file__).resolve().parents[1]
BREAKING = [mutant for mutant in MUTANTS.values() if mutant.breaks]
SAFE = [mutant for mutant in MUTANTS.values() if not mutant.breaks]


def names(mutant: Mutant) -> str:
    return mutant.name


# -------------------------------------------------------------------------------------------------- the vocabulary


def upward(table: dict[str, Symbol]) -> list[str]:
    """Functions that do not lead down the order of sorts: with them a query might have no finite answer."""
    rank = {sort: number for number, sort in enumerate(SORT_ORDER)}
    functions = [symbol for symbol in table.values() if symbol.result != BOOL]
    return [each.name for each in functions for sort in each.args if rank[sort] >= rank[each.result]]


def test_functions_lead_down_the_order_of_sorts() -> None:
    assert upward(TABLE) == []
    known = {*SORT_ORDER, BOOL}
    assert [each.name for each in TABLE.values() if not {*each.args, each.result} <= known] == []


def test_a_function_that_leads_up_is_found() -> None:
    version, attempt = (next(sort for sort in SORT_ORDER if sort.name == name) for name in ("Version", "Attempt"))
    assert upward({"back": Symbol("back", (version,), attempt, False, "")}) == ["back"]


def test_every_traced_action_is_an_action_of_the_model() -> None:
    assert set(TRACED) == {action.value for action in Action}
    assert not set(TRACED) & set(UNTRACED)


def test_every_changing_symbol_is_changed_and_looked_at() -> None:
    """A row that no action changes, or that no guard and no claim looks at, would be a promise without content."""
    changed: set[str] = set()
    looked_at: set[str] = set()
    for action in ACTIONS.values():
        state = Symbolic(TABLE, read=looked_at)
        changed |= action(state, *[constant(name, sort) for name, sort in parameters(action).items()])[1].keys()
    looked_at = looked_at.union(*symbols_read(TABLE, INVARIANTS).values())
    assert {symbol.name for symbol in TABLE.values() if not symbol.rigid} == changed
    assert sorted(changed - looked_at) == []


# --------------------------------------------------------------------------------------------------------- the proof


@pytest.mark.parametrize("action", ["", *ACTIONS], ids=lambda name: name or "first state")
def test_every_invariant_is_kept(action: str) -> None:
    verdicts = list(decide(step_queries(action) if action else first_queries()))
    assert [f"{each.query.claim}: {each.answer}" for each in verdicts if each.answer != "unsat"] == []
    assert action in ("Conflict", "RefusePrepare", "IgnoreStale", "IgnoreDuplicate") or verdicts


@pytest.mark.parametrize("action", ["", *ACTIONS], ids=lambda name: name or "first state")
def test_a_second_solver_agrees(action: str) -> None:
    queries = list(step_queries(action) if action else first_queries())
    assert [f"{query.claim}: {said}" for query, said in second.answers(queries) if said != "unsat"] == []


def gates_stay_closed(s: State, r: Receiver) -> Term:
    return neg(s.gate(r))


def test_a_claim_that_is_not_kept_is_refuted_by_both_solvers() -> None:
    queries = list(step_queries("OpenGate", claims=(gates_stay_closed,)))
    verdicts = {each.query.claim: each for each in decide(queries)}
    assert verdicts["gates_stay_closed"].answer == "sat"
    assert verdicts["gates_stay_closed"].model is not None
    said = {query.claim: answer for query, answer in second.answers(queries, seconds=2)}
    assert said["gates_stay_closed"] != "unsat"


def test_a_script_that_cvc5_does_not_understand_is_an_error() -> None:
    (query, *_) = step_queries("OpenGate", claims=(gates_stay_closed,))
    broken_name = type(query)(query.action, query.claim, ("(",), query.broken)
    with pytest.raises((ValueError, AttributeError, RuntimeError)):
        list(second.answers([broken_name]))


# ----------------------------------------------------------------------------------------------------- not vacuous


def test_every_action_may_be_taken_in_some_good_state() -> None:
    assert [(name, answer) for name, answer in witnesses() if answer != "sat"] == []


@pytest.fixture(scope="module")
def told() -> tuple[Story, list[str]]:
    faults: list[str] = []

    def watch(name: str, arguments: tuple[Any, ...], before: Concrete, after: Concrete) -> None:
        faults.extend(f"{name}{arguments}: {claim}" for claim in newly_broken(before, after))
        faults.extend(f"{name}{arguments}: {claim}" for claim in broken_steps(before, after))

    return tell(World(), watch), faults


def test_a_story_of_every_action_keeps_every_claim(told: tuple[Story, list[str]]) -> None:
    story, faults = told
    assert faults == []
    assert set(story.told) == set(ACTIONS)
    assert story.state.record_version() == 2
    assert broken(story.state) == []


def test_the_concrete_world_satisfies_axioms_and_first_state() -> None:
    state = first(World())
    assert [number for number, each in enumerate(axioms(state)) if each is not True] == []
    assert [number for number, each in enumerate(first_state(state)) if each is not True] == []
    assert broken(state) == []


def test_a_step_whose_guard_is_false_is_refused() -> None:
    with pytest.raises(NotEnabled, match="Commit"):
        take(first(World()), "Commit", 1, 1)


@pytest.mark.parametrize(
    "world",
    [
        World(attempts=14),
        World(attempts=14, sync=lambda attempt: False),
        World(attempts=14, sync=lambda attempt: attempt % 3 > 0),
        World(attempts=14, survives=False),
        World(attempts=14, instances=1, ranks=2),
    ],
    ids=["sync", "async", "both-gates", "candidates-may-be-gone", "two-ranks"],
)
def test_random_walks_keep_every_claim(world: World) -> None:
    before, steps = first(world), 0
    if world.ranks == 1:
        story = Story(world, lambda *step: None)
        boot(story)
        before = story.state
    for name, arguments, after in wander(before, 3, 300):
        assert (name, arguments, [*newly_broken(before, after), *broken_steps(before, after)]) == (name, arguments, [])
        before, steps = after, steps + 1
    assert steps > 100


def test_a_walk_of_a_weakened_model_is_caught() -> None:
    """The claims that walks are checked with can fail: without deduplication a repeated payload breaks them."""
    story = Story(World(), lambda *step: None)
    boot(story)
    for o in story.owners:
        story.do("BeginTransition", o, 1)
    t = story.ask("k0", "by_xor", 1)
    story.install(t, story.receivers)
    story.stream(t)
    story.do("FinishRequest", "r0", "q0")
    story.take_in("r0", t)
    story.quiet(t, story.receivers)
    story.write("r0", t)
    payload = next(p for p in story.payloads if any(story.state.carries(t, p, e) for e in story.elements))
    weak = Concrete(
        story.state.table, story.state.things, story.state.values, story.state.defaults, MUTANTS["no_dedup"].swaps
    )
    assert "unwritten_words_are_old" in broken(take(weak, "Accept", "r0", t, payload))


# ----------------------------------------------------------------------------------------------------------- mutants


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.mark.parametrize("mutant", BREAKING, ids=names)
def test_mutant_breaks_the_claim_that_it_names(mutant: Mutant, judge: Judge) -> None:
    assert judge.counterexample(mutant) is not None


@pytest.mark.parametrize("mutant", SAFE, ids=names)
def test_safe_mutant_is_proved_and_its_guard_has_a_test(mutant: Mutant, judge: Judge) -> None:
    assert judge.touched(mutant)
    assert list(judge.undecided_or_broken(mutant)) == []
    path, _, name = mutant.covered_by.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name.split("::")[-1] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_an_unweakened_model_has_no_counterexample(judge: Judge) -> None:
    same = Mutant(
        "same", "nothing is weakened", {"not_duplicate": lambda s, r, p: neg(s.seen(r, p))}, "unwritten_words_are_old"
    )
    assert judge.touched(same) == ["Accept", "IgnoreDuplicate"]
    assert judge.counterexample(same) is None


def guards() -> set[str]:
    found = set()
    for module in ("control", "coordinator", "owners", "receivers", "receiver_guards"):
        tree = ast.parse((ROOT / "spec" / "proof" / f"{module}.py").read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        found |= {each.name for each in functions if any(ast.unparse(d) == "guard" for d in each.decorator_list)}
    return found


def test_every_guard_has_a_mutant() -> None:
    swapped = {name for mutant in MUTANTS.values() for name in mutant.swaps}
    assert sorted(swapped - guards()) == []
    assert sorted(guards() - swapped - WHOLE) == []


WHOLE = {
    "holds_epoch", "holds_version", "holds_record", "is_current", "is_running", "may_stream", "may_commit", "may_flush",
"may_open_gate", }  # fmt: skip
"""Guards that are made of others, each of which has its own mutant."""


def test_a_counterexample_is_told_in_words(judge: Judge) -> None:
    mutant = MUTANTS["no_dedup"]
    found = judge.counterexample(mutant)
    assert found is not None
    lines = text(mutant, judge.smallest(found)).splitlines()
    assert lines[0] == "mutant no_dedup: a repeated payload is written again"
    assert any(line.startswith("step: Accept(") for line in lines)
    assert any("pending(" in line and "False -> True" in line for line in lines)
    assert lines[-1].startswith("broken: unwritten_words_are_old")


# ------------------------------------------------------------------------------------------- names, beside DeltaRefit


MUTANTS_NOT_HERE = {
    "NoPayloadDigest": "payloads arrive whole or not at all here (A4)",
    "NoSetDigest": "the same, for the sets of manifests",
    "SkipRollForward": "what a coordinator chooses is free here; owners and gates protect themselves",
    "NeverFinish": "progress only", "NeverRestore": "progress only", "NeverRollForward": "progress only",
    "NeverOpen": "progress only", "NeverDense": "progress only",
    "LateClose": "progress only: here a gate may close at any time",
}  # fmt: skip


def test_mutants_of_the_specification_are_mutants_here() -> None:
    text_ = (ROOT / "spec" / "Mutants.tla").read_text(encoding="utf-8")
    theirs = {name.lower() for name in re.findall(r"^Mut(\w+?)(?:\(| ==)", text_, re.MULTILINE)}
    ours = {name.replace("_", "") for name in MUTANTS}
    assert sorted(theirs - ours) == sorted(name.lower() for name in MUTANTS_NOT_HERE)
    assert len(MUTANTS) > 40
