"""The executable model is the specification: at small size both have the same states and the same steps.

Every state that TLC reaches and every labelled edge of its graph is compared with those of the model, as sets. What the
specification promises holds on the model's states, and falls with every mutant that the specification has.

Paper: Section 6; Algorithms B.1, B.2   Spec: DeltaRefit, Properties, Mutants
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tlc_cfg import read_cfg
from tlc_java import Workshop, find_tools
from tlc_modules import read_folder
from tlc_rows import TABLE, Row, read_table

from model_tests import explore, model, model_actions, model_state
from model_tests.explore import SPEC, Edge, read_bounds
from model_tests.model_actions import Changes, NotEnabled, start_apply
from model_tests.model_decisions import Here
from model_tests.model_mutants import MUTANTS, weakened
from model_tests.model_properties import STATE_PROPERTIES, STEP_PROPERTIES, refit_start
from model_tests.model_state import Config, State
from model_tests.state_graphs import Graph, TlcFailed, differences, model_graph, tlc_graphs, write_unchecked

TABLE_OF_RUNS = read_table(SPEC / TABLE)
ROWS = {row.name: row for row in TABLE_OF_RUNS.rows}
BASE = ROWS["MCDeltaRefit"]
PROPERTIES = {**STATE_PROPERTIES, **STEP_PROPERTIES}


def small(name: str, **constants: str) -> Row:
    """Bounds that no run of `make spec` has, chosen to see many actions in few states."""
    return replace(BASE, name=name, base=BASE.cfg, constants={"MaxCandidate": "1", **constants}, distinct=None)


SMALL = (
    small("Fail", MaxAttempt="2", MayFail="TRUE", MayLose="TRUE", Arrivals="<- AnyArrival"),
    small("Replaced", MaxAttempt="2", Coordinators="{c1, c2}", MaxEpoch="2", MaxFaults="1"),
    small("Faults", MaxRestart="1", MaxOwnerRestart="1", MaxDead="1", MaxFaults="1"),
)
COMPARED = (BASE, *(ROWS[f"MCDeltaRefit_{name}"] for name in ("Cold", "Async", "Owners")), *SMALL)
LARGER = tuple(
    ROWS[f"MCDeltaRefit_{name}"]
    for name in ("Lost", "Takeover", "OwnerRestart", "Abort", "Two", "Failures", "Members", "Restart", "Retry")
)
SLOW_MUTANTS = ("DedupAcrossAttempts", "NoEligRecheck", "OtherCandidate")
"""Their shortest counterexample lies behind thousands of states."""


@pytest.fixture(scope="module")
def workshop():
    with Workshop(find_tools(), SPEC) as found:
        yield found


@pytest.fixture(scope="module")
def bounds(workshop):
    """The rows that CI compares, each with a configuration that TLC and the model both read."""
    return {row.name: write_unchecked(row, workshop.path) for row in COMPARED}


@pytest.fixture(scope="module")
def graphs(workshop, bounds):
    return tlc_graphs(bounds.values(), workshop, jobs=2)


@cache
def explored(cfg: str) -> tuple[Config, tuple[Edge, ...]]:
    config, bound = read_bounds(cfg)
    return config, tuple(explore.edges(config, bound))


def base_edges() -> list[Edge]:
    """The edges of the smallest configuration, explored anew: the model may be weakened just now."""
    return list(explore.edges(*read_bounds(BASE.cfg)))


@pytest.mark.model
@pytest.mark.parametrize("name", [row.name for row in COMPARED])
def test_model_has_the_states_and_steps_of_the_specification(name, bounds, graphs, tally):
    ours = model_graph(explored(bounds[name].cfg)[1])
    assert differences(ours, graphs[name]) == []
    assert bounds[name].distinct in (None, len(ours.states))
    tally.add("states", len(ours.states))


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", LARGER, ids=lambda row: row.name)
def test_model_has_the_states_and_steps_of_larger_configurations(row, workshop, tally):
    unchecked = write_unchecked(row, workshop.path)
    ours = model_graph(list(explore.edges(*read_bounds(unchecked.cfg))))
    assert differences(ours, tlc_graphs([unchecked], workshop, jobs=1)[row.name]) == []
    assert len(ours.states) == row.distinct
    tally.add("states", len(ours.states))


@pytest.mark.model
def test_every_action_is_among_the_compared_steps(graphs):
    taken = {action for graph in graphs.values() for _, action, _ in graph.edges}
    assert taken == set(model.ACTIONS)


MAY_FLUSH = Here.may_flush
WRONG_MODELS = {
    "a guard is weaker": ("not_duplicate", lambda s, r, p: True, "only the model reaches"),
    "a guard is stronger": ("may_flush", lambda s, r: s.rcv[r].att < 3 and MAY_FLUSH(s, r), "only TLC reaches"),
    "a state after is different": ("gate_after_flush", lambda s, r: not s.rcv[r].gate, "only the model reaches"),
    "a step that changes nothing is missing": ("is_stale", lambda s, e, t: False, "only TLC takes IgnoreStale"),
    "a step that changes nothing is too much": ("refuses", lambda s, e, t: True, "only the model takes RefusePrepare"),
}


@pytest.mark.model
@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_comparison_sees_when(wrong, graphs):
    guard, replacement, seen = WRONG_MODELS[wrong]
    with weakened(guard, replacement):
        told = differences(model_graph(base_edges()), graphs[BASE.name])
    assert any(one.startswith(seen) for one in told)
    assert all("store = (r1 -> " in one for one in told), "a difference names a state"


@pytest.mark.model
def test_comparison_sees_an_action_that_forgets_a_variable(monkeypatch, graphs):
    def forgets_the_tag(s: Here, r: str) -> Changes:
        start_apply(s, r)
        return {"rcv": s.receiver_with(r, writing=True, loaded=False)}

    monkeypatch.setitem(model.ACTIONS, "StartApply", forgets_the_tag)
    told = differences(model_graph(base_edges()), graphs[BASE.name])
    assert any(one.startswith("only the model reaches") for one in told)


@pytest.mark.model
def test_comparison_sees_what_is_missing_in_the_specification(graphs):
    ours = model_graph(base_edges())
    state, edge = min(graphs[BASE.name].states), min(graphs[BASE.name].edges)
    assert differences(ours, Graph(ours.states - {state}, ours.edges)) == [
        f"only the model reaches, one of 1:\n{state}"
    ]
    assert differences(ours, Graph(ours.states, ours.edges - {edge}))[0].startswith(f"only the model takes {edge[1]}")


@pytest.mark.model
def test_a_run_of_tlc_that_fails_is_told(workshop, tmp_path):
    cfg = tmp_path / "wrong.cfg"
    cfg.write_text("SPECIFICATION NoSuchThing\n", encoding="utf-8")
    with pytest.raises(TlcFailed, match="MCDeltaRefit ends with exit code"):
        tlc_graphs([replace(BASE, cfg=str(cfg), coverage=False)], workshop, jobs=1)


@pytest.mark.model
@pytest.mark.parametrize("name", [row.name for row in COMPARED])
def test_promises_hold_on_every_state_and_step(name, bounds):
    config, edges = explored(bounds[name].cfg)
    states = {state for before, _, after in edges for state in (before, after)}
    fallen = {promise for promise, holds in STATE_PROPERTIES.items() for s in states if not holds(config, s)}
    pairs = {(before, after) for before, _, after in edges}
    fallen |= {promise for promise, holds in STEP_PROPERTIES.items() for pair in pairs if not holds(config, *pair)}
    assert fallen == set()


@pytest.mark.model
def test_the_first_state_is_one_of_level_0():
    config, _ = read_bounds(ROWS["MCDeltaRefit_Cold"].cfg)
    assert refit_start(model.here(config, model.init(config)))
    assert not refit_start(model.here(config, model.warm(config)))


def falls_with(row: Row) -> bool:
    """Whether the property that a mutant of the specification names falls in the model that has the same mutant."""
    ((guard, mutant),) = row.override.items()
    promise = model.snake("RefitSteps" if row.violates == "RefinesRefit" else str(row.violates))
    config, bound = read_bounds(row.cfg)
    with weakened(model.snake(guard), MUTANTS[mutant]):
        seen: set[State] = set()
        for before, _, after in explore.edges(config, bound):
            if promise in STEP_PROPERTIES and not STEP_PROPERTIES[promise](config, before, after):
                return True
            if promise in STATE_PROPERTIES and after not in seen and not STATE_PROPERTIES[promise](config, after):
                return True
            seen.add(after)
    return False


LIVENESS = {"AllServe", "TransitionEnds"}
SAFETY_MUTANTS = [row for row in TABLE_OF_RUNS.rows if row.kind == "mutant" and row.violates not in LIVENESS]


@pytest.mark.model
@pytest.mark.parametrize(
    "row", [row for row in SAFETY_MUTANTS if row.name not in SLOW_MUTANTS], ids=lambda row: row.name
)
def test_promise_falls_with_the_mutant_that_the_specification_names(row):
    assert falls_with(row)


@pytest.mark.deep
@pytest.mark.parametrize("row", [row for row in SAFETY_MUTANTS if row.name in SLOW_MUTANTS], ids=lambda row: row.name)
def test_promise_falls_with_a_mutant_that_needs_a_long_way(row):
    assert falls_with(row)


def checks_of(row: Row) -> tuple[str, ...]:
    read = read_cfg(SPEC / row.cfg)
    return (*read.invariants, *read.properties)


def test_every_promise_of_the_specification_is_in_the_model_and_can_fall():
    checked = {name for row in TABLE_OF_RUNS.rows if row.kind == "mc" for name in checks_of(row)} - LIVENESS
    assert {model.snake(name) for name in checked - {"RefinesRefit", "AttemptsSuffice"}} == set(PROPERTIES)
    fallen = {model.snake(str(row.violates)) for row in SAFETY_MUTANTS} - {"refines_refit"}
    assert set(PROPERTIES) - fallen == {"ack_kept", "dead_kept", "gate_fresh", "monotone"}


def test_promises_without_a_mutant_fall_on_wrong_states():
    config, _ = read_bounds(BASE.cfg)
    warm = model.warm(config)
    assert not STEP_PROPERTIES["ack_kept"](config, warm, replace(warm, net=frozenset()))
    assert not STEP_PROPERTIES["dead_kept"](config, replace(warm, dead=frozenset({1})), warm)
    assert not STEP_PROPERTIES["monotone"](config, warm, replace(warm, chain=warm.chain * 3))
    stale = replace(warm, chain=(*warm.chain, warm.chain[0]._replace(cand=1)))
    assert not STATE_PROPERTIES["gate_fresh"](config, stale)


def test_every_operator_of_the_specification_has_its_function():
    operators = read_folder(SPEC).modules["DeltaRefit"]
    formal = {"control", "trainer", "vars", "Next", "Spec", "FairSpec", "Fairness", "None", "Delta", "Unknown", "Modes"}
    formal |= {"NoRecord", "CoordinatorProgress", "OwnerProgress", "ReceiverProgress", "Init"}
    places = (Here, model_actions, model_state, model)
    missing = [
        name for name in operators if name not in formal and not any(hasattr(at, model.snake(name)) for at in places)
    ]
    assert missing == []


def test_every_action_has_the_parameters_of_the_specification():
    operators = read_folder(SPEC).modules["DeltaRefit"]
    chosen = {}
    for name, given in model.PARAMETERS.items():
        told = tuple(operators[name].parameters.strip("()").split(","))
        assert given[: len(told)] == told, name
        chosen[name] = given[len(told) :]
    assert {name: rest for name, rest in chosen.items() if rest} == {"Prepare": ("members",), "OpenGate": ("ver",)}


def test_a_step_that_is_not_enabled_says_which_guard_forbids_it():
    config, _ = read_bounds(BASE.cfg)
    with pytest.raises(NotEnabled, match=r"Flush\('r1',\) is not enabled: may_flush"):
        model.take(config, model.warm(config), ("Flush", ("r1",)))
    with pytest.raises(NotEnabled, match="there is no such attempt"):
        model.take(config, model.warm(config), ("OwnerPrepare", ("o1", 7)))


def test_a_configuration_with_symmetry_is_refused():
    with pytest.raises(ValueError, match="symmetry"):
        read_bounds(ROWS["MCDeltaRefit_Three"].cfg)
