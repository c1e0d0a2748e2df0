"""The proved model simulates the specification at small sizes, and takes every trace alone, without another model.

So its theorems, which hold for all sizes, speak of the specification that TLC checks and of what the code does: at
these sizes and in these runs. Each check has a control that it fails.

Paper: Appendix B   Spec: Next   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tlc_rows import TABLE, read_table

from model_tests import proved_runs as runs
from model_tests import trace_export
from model_tests.explore import SPEC
from model_tests.model_decisions import Here
from model_tests.mutants import BY_NAME
from model_tests.proved import Proved
from model_tests.proved_lines import validate
from model_tests.proved_simulation import Simulation, simulate, sound
from model_tests.trace_runs import Run, both_gates
from spec.proof.dsl import Concrete
from spec.proof.model import ACTIONS
from spec.proof.mutants import MUTANTS
from spec.proof.walk import broken

CI = ("", "_Cold", "_Owners", "_Lost", "_Async")
DEEP = ("_OwnerRestart", "_Abort", "_Takeover", "_Restart", "_Members")
LARGE = ("_Retry", "_Failures", "_FailuresLost", "_OwnersRestart", "_AsyncRestart", "_RestartOwner", "_TakeoverAbort")
DISTINCT = {row.name: row.distinct for row in read_table(SPEC / TABLE).rows}
ELSEWHERE = {
    "StartOwner": "OwnerRestart, deep",
    "StartReceiver": "Restart, deep; every search begins with it",
    "StepDown": "Takeover, deep",
    "KillCandidate": "Abort, deep",
    "DropCandidate": "Abort, deep",
    "RefusePrepare": "takes no action of the proof: a line that changes nothing",
    "IgnoreStale": "as RefusePrepare",
    "IgnoreDuplicate": "as RefusePrepare",
    "FailOwner": "Failures, deep",
    "FailReceiver": "Failures, deep",
    "ReloadWeights": "OwnerRestart, deep",
}
"""Actions of the proof that no configuration in CI takes."""


# ---------------------------------------------------------------------------------------------------------- simulation


@cache
def searched(cfg: str) -> Simulation:
    return simulate(*sound(f"MCDeltaRefit{cfg}.cfg"), invariants=60)


@pytest.mark.model
@pytest.mark.parametrize("cfg", CI)
def test_every_step_of_the_specification_is_a_run_of_the_proved_model(cfg: str) -> None:
    found = searched(cfg)
    assert found.faults == {}
    assert found.complete
    assert len(found.states) == DISTINCT[f"MCDeltaRefit{cfg}"]
    assert found.checked > 0


@pytest.mark.model
def test_the_search_takes_every_action_of_the_proof_but_those_of_deep_runs() -> None:
    taken = {name for cfg in CI for name in searched(cfg).taken}
    assert set(ACTIONS) - taken == set(ELSEWHERE)


@pytest.mark.deep
@pytest.mark.parametrize("cfg", DEEP)
def test_every_step_of_a_larger_configuration_is_a_run_too(cfg: str) -> None:
    found = simulate(*sound(f"MCDeltaRefit{cfg}.cfg"), invariants=500)
    assert found.faults == {}
    assert len(found.states) == DISTINCT[f"MCDeltaRefit{cfg}"]


@pytest.mark.deep
@pytest.mark.parametrize("cfg", LARGE)
def test_the_first_steps_of_a_large_configuration_are_runs_too(cfg: str) -> None:
    found = simulate(*sound(f"MCDeltaRefit{cfg}.cfg"), invariants=1000, limit=15_000)
    assert found.faults == {}


@pytest.mark.deep
def test_a_coordinator_that_was_replaced_before_its_first_read_is_covered() -> None:
    """Three epochs and two coordinators: one reads under an epoch that is over."""
    config, bounds = sound("MCDeltaRefit_Takeover.cfg")
    found = simulate(config, replace(bounds, max_epoch=3, max_faults=2), limit=15_000)
    assert found.faults == {}


def never(s: Concrete, *things: Any) -> bool:
    return False


def swapping(name: str, guard: Callable[..., Any]) -> Callable[[Proved], None]:
    def change(proved: Proved) -> None:
        s = proved.state
        proved.state = Concrete(s.table, s.things, s.values, s.defaults, {**s.swaps, name: guard})

    return change


@pytest.mark.model
@pytest.mark.parametrize(
    ("guard", "other", "fault"),
    [
        ("streams_undisturbed", never, "UpdateBaseline"),
        ("is_eligible", never, "EndpointPrepare"),
        ("is_staged", never, "Flush"),
        ("transition_ended", never, "OpenGate"),
        ("commit_matches", never, "Commit"),
        ("gate_after_flush", lambda s, r: True, "after Flush: r1 gate: False in the specification, True"),
        ("dirty_tag", lambda s, r: s.none(), "after StartApply: r1 tag"),
        ("stopped_by_stop", never, "after StopAndWait: r1 stopped"),
        ("copy_source", lambda s, o: s.resident(o), "after CopyItem: baselines"),
    ],
)
def test_a_change_of_the_proved_model_is_found(guard: str, other: Callable[..., Any], fault: str) -> None:
    found = simulate(*sound("MCDeltaRefit.cfg"), start=swapping(guard, other))
    (why, *_) = found.faults
    assert why.startswith(fault)
    assert why.startswith("after") or guard in why


@pytest.mark.model
@pytest.mark.parametrize(
    ("operator", "weaker", "guard"),
    [
        ("nothing_pending", lambda s, r: True, "nothing_pending"),
        ("is_staged", lambda s, r: True, "is_staged"),
        ("is_drained", lambda s, r: True, "is_drained"),
        ("has_followed", lambda s, o, v: True, "has_followed"),
        ("all_copied", lambda s, o: True, "all_copied"),
        ("all_emitted", lambda s, o, t: True, "all_emitted"),
        ("is_over", lambda s, t: True, "has_all_acks"),
        ("needs_roll_forward", lambda s, c: False, "transition_ended"),
        ("prepare_holds_epoch", lambda s, c: True, "prepare_holds_epoch"),
    ],
)
def test_a_weaker_guard_of_the_specification_is_found(
    operator: str, weaker: Callable[..., bool], guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proved model refuses what the weakened specification allows, and names its own guard."""
    monkeypatch.setattr(Here, operator, weaker)
    cfg = "MCDeltaRefit_Takeover.cfg" if operator == "prepare_holds_epoch" else "MCDeltaRefit.cfg"
    found = simulate(*sound(cfg), patience=40)
    assert [why for why in found.faults if guard in why] != []


@pytest.mark.model
def test_an_invariant_that_falls_in_both_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides forget that a payload is accepted once: they agree, and the invariants of the proof fall."""
    monkeypatch.setattr(Here, "not_duplicate", lambda s, r, p: True)
    start = swapping("not_duplicate", MUTANTS["no_dedup"].swaps["not_duplicate"])
    found = simulate(*sound("MCDeltaRefit.cfg"), start=start, invariants=1, patience=10, limit=200)
    assert any("does not hold" in why for why in found.faults)


# -------------------------------------------------------------------------------------------------------------- traces


@cache
def calm() -> Run:
    return runs.calm()


@pytest.mark.model
@pytest.mark.parametrize("seed", range(12))
def test_a_trace_of_a_simulated_cluster_is_accepted(seed: int) -> None:
    assert runs.rejected(runs.drawn(seed)) is None


@pytest.mark.model
@pytest.mark.parametrize("seed", range(4))
def test_a_trace_of_real_nodes_is_accepted(seed: int) -> None:
    assert runs.rejected(runs.real(seed)) is None


@pytest.mark.model
def test_each_attempt_has_a_gate_mode_of_its_own() -> None:
    run = both_gates()
    (asynchronous, *_) = [
        place
        for place, line in enumerate(run.lines)
        if line.action == "StartAttempt" and line.emitted.args["gate"] == "async"
    ]
    emitted = run.lines[asynchronous].emitted
    doctored = replace(run.lines[asynchronous], emitted=replace(emitted, args={**emitted.args, "gate": "sync"}))
    assert trace_export.validate(run.lines, run.changes).excuses == {"DV31": 1}
    assert runs.rejected(run) is None
    found = runs.rejected(replace(run, lines=[*run.lines[:asynchronous], doctored, *run.lines[asynchronous + 1 :]]))
    assert found is not None
    assert found.line.action == "EndpointPrepare"


@pytest.mark.model
def test_a_run_projected_to_one_item_of_each_owner_is_accepted_and_a_doctored_one_is_not() -> None:
    run = calm()
    config, names = trace_export.constants(run.lines, items_each=1)
    assert len(config.items) == len(config.owners) == 2
    assert len(names.left_out) > 2
    assert runs.rejected(run, items_each=1) is None
    for action in ("StartApply", "Flush", "SeeManifest", "EmitPayload", "Commit"):
        place = [line.action for line in run.lines].index(action)
        assert runs.rejected(runs.dropped(run, place), items_each=1) is not None, action


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 200, 10))
def test_more_traces_are_accepted(seed: int) -> None:
    for each in range(seed, seed + 10):
        assert runs.rejected(runs.drawn(each)) is None
    assert runs.rejected(runs.real(seed)) is None


@pytest.mark.model
def test_every_invariant_of_the_proof_holds_after_a_trace() -> None:
    run = runs.calm(trainings=1)
    assert broken(validate(run.lines, run.changes).state) == []


FREE = {
    ("AcquireEpoch", "attempt"): "an epoch is about no attempt",
    ("BecomeCoordinator", "attempt"): "as AcquireEpoch",
    ("BecomeCoordinator", "version"): "it reads the record a little later",
    ("RollForward", "attempt"): "names the record, not the attempt",
    ("StartReceiver", "ranks"): "a rank is an instance of its own",
    ("StartReceiver", "loaded"): "another digest is another checkpoint, which nothing here tells apart",
    ("StartAttempt", "owners"): "read ahead",
    ("Flush", "digest"): "A4",
    ("SendCommit", "digest"): "A4",
    ("Commit", "digest"): "A4",
    ("Bootstrap", "digest"): "A4",
}
"""Fields that the proved model does not look at, with the reason; further ones hold for whole kinds of lines, below."""
LATER = {
    ("EmitPayload", "payload"): "a payload of another number, which nobody accepts",
    ("EmitPayload", "names"): "a tensor of another name, whose stream does not end without the right one",
    ("StopAndWait", "attempt"): "a fence against another attempt, which is installed all the same",
}
"""Fields that tell another possible step; a later line contradicts it."""
CALLS = ("IgnoreStale", "IgnoreDuplicate", "Conflict", "RefusePrepare")
"""Lines that change nothing: only the state after them is compared."""


def unseen(action: str, where: str, name: str) -> bool:
    phase = name == "phase" and action in (
        "BecomeCoordinator",
        "SendCommit",
        "ResolveCommit",
        "RollForward",
        "StepDown",
    )
    return (
        (action, name or where) in FREE
        or (action in CALLS and where != "post")
        or phase  # the code has more phases (divergence DV8)
        or name == "reason"
    )


@pytest.mark.model
def test_an_altered_field_is_rejected_at_its_line() -> None:
    run, seen, wrong = calm(), set[tuple[str, str, str]](), list[str]()
    for place, line in enumerate(run.lines):
        for where, name in runs.fields(line):
            kind = (line.action, where, name)
            if kind in seen or unseen(*kind):
                continue
            seen.add(kind)
            found = runs.rejected(runs.altered(run, place, where, name))
            if found is None and (line.action, name or where) in LATER:
                assert runs.rejected(runs.altered(run, place, where, name, cut=False)) is not None
            elif found is None or found.number > place + 1:
                wrong.append(f"{kind}: {found}")
    assert wrong == []
    assert len(seen) > 130


DROPPABLE = {
    "IgnoreStale": "changes nothing",
    "IgnoreDuplicate": "changes nothing",
    "RollForward": "may be told again",
    "CopyItem": "of an item that is equal anyhow",
}


@pytest.mark.model
def test_a_dropped_line_is_missed_by_a_later_one() -> None:
    run, seen, wrong = calm(), set[str](), list[str]()
    for place, line in enumerate(run.lines):
        if line.action in seen or line.action in DROPPABLE:
            continue
        seen.add(line.action)
        if runs.rejected(runs.dropped(run, place)) is None:
            wrong.append(line.action)
    assert wrong == []
    assert len(seen) > 25


@pytest.mark.model
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("Prepare", "StartAttempt"),
        ("StartAttempt", "EndpointPrepare"),
        ("StartAttempt", "OwnerPrepare"),
        ("OwnerPrepare", "EmitPayload"),
        ("EmitPayload", "Accept"),
        ("EndStream", "SeeManifest"),
        ("OpenApply", "StartApply"),
        ("StartApply", "ApplyItem"),
        ("Flush", "CompleteAttempt"),
        ("CompleteAttempt", "SendCommit"),
        ("SendCommit", "Commit"),
        ("Commit", "ResolveCommit"),
        ("UpdateBaseline", "CopyItem"),
        ("CopyItem", "BaselineFilled"),
        ("EndTransition", "OpenGate"),
    ],
)
def test_a_line_before_its_cause_is_rejected_there(first: str, then: str) -> None:
    run = calm()
    place, after = runs.pair(run.lines, first, then)
    found = runs.rejected(runs.late(run, place, after))
    assert found is not None
    assert found.number <= after


BROKEN = {
    "retry_xor": "EmitPayload",
    "no_endpoint_fence": "Accept",
    "ack_before_flush": "Flush",
    "commit_partial_acks": "CompleteAttempt",
    "base_before_commit": "UpdateBaseline",
}
FREER = {
    "no_payload_digest": "digests are outside (A4)",
    "no_set_digest": "digests are outside (A4)",
    "never_finish": "liveness",
    "never_restore": "liveness",
    "never_roll_forward": "liveness",
    "never_open": "liveness",
    "never_dense": "liveness",
    "late_close": "liveness",
    "end_early": "its cluster plays the owner itself; it runs on real owners only",
}
"""Weakened code whose traces the proved model accepts."""


@pytest.mark.model
@pytest.mark.parametrize(("name", "action"), BROKEN.items())
def test_a_trace_of_weakened_code_is_rejected_at_the_faulty_line(name: str, action: str) -> None:
    found = [each for run in runs.weakened(BY_NAME[name]) if (each := runs.rejected(run)) is not None]
    assert {each.line.action for each in found} == {action}


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(set(BY_NAME) - set(FREER)))
def test_a_trace_of_any_weakened_code_is_rejected(name: str) -> None:
    assert any(runs.rejected(run) is not None for run in runs.weakened(BY_NAME[name]))


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(set(FREER) - {"end_early"}))
def test_where_the_proved_model_is_freer_is_known(name: str) -> None:
    assert all(runs.rejected(run) is None for run in runs.weakened(BY_NAME[name], walks=3))
