"""Every trace line is one atomic step: real runs are read line by line, and altered traces are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from nemo_dcr.config import GateMode
from nemo_dcr.trace import Action, Emit
from tests.unit.protocol.chaos import walk
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.trace_steps import step_faults

Lines = list[tuple[str, Emit]]
INSTALLS = (Action.ENDPOINT_PREPARE, Action.START_RESTORE)
NO_STEP = {Action.REFUSE_PREPARE, Action.IGNORE_STALE, Action.IGNORE_DUPLICATE}
"""Lines that change nothing: one more or less of them explains as much."""


def items_of(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    return {f"owner {o}": items for o, items in cluster.items.items()}


@pytest.fixture(scope="module", params=list(GateMode))
def refit(request: pytest.FixtureRequest) -> Cluster:
    """Two transitions without faults, the second after an owner lost its baseline in between."""
    cluster = Cluster(owners=2, gate=request.param)
    cluster.become(0)
    cluster.run()
    cluster.train(7)
    cluster.run()
    cluster.crash_owner(next(iter(cluster.owners)))
    cluster.become(1)
    cluster.run()
    cluster.train(9)
    cluster.run()
    assert cluster.settled()
    return cluster


def test_lines_of_undisturbed_transitions_are_steps(refit: Cluster) -> None:
    assert step_faults(refit.lines, items_of(refit)) == []
    seen = {line.action for _, line in refit.lines}
    assert {*INSTALLS, Action.UPDATE_BASELINE, Action.REBUILD_BASELINE, Action.COPY_ITEM} <= seen


@pytest.mark.parametrize("seed", range(24))
def test_lines_of_walks_with_faults_are_steps(seed: int) -> None:
    cluster = walk(seed, budget=6)
    assert step_faults(cluster.lines, items_of(cluster)) == []


def test_lines_of_one_event_are_steps_that_follow_each_other() -> None:
    """An old attempt ends and the next begins, or does not; a stream fails with its baseline; never one step twice."""
    together: set[tuple[Action, ...]] = set()

    def note_groups(cluster: Cluster) -> None:
        plain = cluster._note

        def note(node: str, effects: Any) -> list[Any]:
            together.add(tuple(effect.action for effect in effects if isinstance(effect, Emit)))
            return plain(node, effects)

        cluster._note = note  # type: ignore[method-assign]

    for seed in range(24):
        walk(seed, budget=6, on_start=note_groups)
    wholes = {group for group in together if len(group) > 1}
    stops = {Action.STOP_AND_WAIT, Action.STOP_OWNER}
    nexts = {*INSTALLS, Action.OWNER_PREPARE, Action.REFUSE_PREPARE, Action.IGNORE_STALE, Action.DROP_CANDIDATE}
    replaced = {group for group in wholes if len(group) == 2 and group[0] in stops and group[1] in nexts}
    assert len(replaced) > 1
    assert wholes - replaced <= {
        (Action.LOSE_BASELINE, Action.FAIL_OWNER),
        (Action.COMPLETE_ATTEMPT, Action.SEND_COMMIT),
        (Action.COMPLETE_ATTEMPT, Action.ROLL_FORWARD),
        (Action.RESOLVE_COMMIT, Action.ROLL_FORWARD),
    }


def test_a_missing_line_is_noticed(refit: Cluster) -> None:
    lines, items = refit.lines, items_of(refit)
    needed = (*INSTALLS, Action.STOP_AND_WAIT, Action.OPEN_APPLY, Action.OPEN_GATE, Action.COPY_ITEM, Action.FLUSH)
    missed = Counter[Action]()
    for action in (*needed, Action.OWNER_PREPARE, Action.BEGIN_TRANSITION, Action.UPDATE_BASELINE):
        at = [number for number, (_, line) in enumerate(lines) if line.action is action]
        missed[action] += any(step_faults([*lines[:number], *lines[number + 1 :]], items) != [] for number in at[:2])
    assert missed == Counter(dict.fromkeys(missed, 1))


def test_a_line_that_is_told_twice_is_noticed(refit: Cluster) -> None:
    lines, items = refit.lines, items_of(refit)
    twice = {Action.ACCEPT, Action.SEE_MANIFEST, Action.APPLY_ITEM, Action.EMIT_PAYLOAD, *NO_STEP}
    for number, (node, line) in enumerate(lines):
        if node.startswith("coordinator") or line.action in {*twice, Action.START_OWNER, Action.START_RECEIVER}:
            continue
        if line.action is Action.FINISH_RESTORE:
            continue  # a second one says the same
        assert step_faults([*lines[:number], (node, line), *lines[number:]], items) != [], line


@pytest.mark.parametrize("name", ["att", "gate", "tag", "tracker", "frozen"])
def test_another_state_after_a_line_is_noticed(refit: Cluster, name: str) -> None:
    lines, items = refit.lines, items_of(refit)
    other = {"att": 99, "gate": None, "tag": "clean(9)", "tracker": "at(9)", "frozen": "c9"}[name]
    starts = (Action.START_RECEIVER, Action.START_OWNER)
    changed = 0
    for number, (node, line) in enumerate(lines):
        if name in line.post and line.action not in starts:
            altered = replace(line, post={**line.post, name: other})
            assert step_faults([*lines[:number], (node, altered), *lines[number + 1 :]], items) != [], line
            changed += 1
    assert changed > 20


def test_a_gate_that_a_prepare_closed_is_not_closed_by_a_second_line(refit: Cluster) -> None:
    for number, (node, line) in enumerate(refit.lines):
        if line.action in INSTALLS and line.post["gate"] is False:
            second = (node, replace(line, action=Action.CLOSE_GATE, args={}))
            lines = [*refit.lines[: number + 1], second, *refit.lines[number + 1 :]]
            assert step_faults(lines, items_of(refit)) != []
