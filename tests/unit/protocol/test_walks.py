"""Whole clusters under faults: every invariant after every step, and everybody serves at the end.

Seeded walks give coverage without luck; the state machine lets Hypothesis search and shrink schedules.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemo_dcr.config import GateMode
from nemo_dcr.ids import OwnerId, instance_of
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.trace import Action
from tests.unit.protocol.chaos import ALL_FAULTS, disturb, fault, settle_down, walk
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.invariants import STATE_INVARIANTS, check

SEEDS = range(24)


@pytest.mark.parametrize("seed", SEEDS)
def test_walk_with_faults_keeps_every_invariant_and_settles(seed):
    walk(seed, budget=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_more_walks_with_faults_keep_every_invariant_and_settle(seed):
    walk(seed, steps=350, budget=8, trainings=4)


@pytest.mark.parametrize("kind", ALL_FAULTS)
def test_walk_with_one_kind_of_fault_keeps_every_invariant_and_settles(kind):
    for seed in range(3):
        walk(seed, budget=6, faults=(kind,))


def test_walk_without_faults_commits_every_transition_by_its_first_attempt():
    cluster = walk(1, faults=())
    modes = Counter(cluster.entry(record.attempt).mode.value for record in cluster.control.history()[1:])
    assert modes == {"xor": len(cluster.control.history()) - 1}
    assert modes["xor"] > 0


def test_walks_reach_what_they_are_for():
    """Commits in every mode, aborts, roll-forwards by a new coordinator, restores, late payloads, conflicts."""
    reached: Counter[str] = Counter()
    for seed in range(30):
        cluster = walk(seed, budget=5, settle=seed < 10)
        reached.update(cluster.entry(record.attempt).mode.value for record in cluster.control.history()[1:])
        reached.update(
            entry.mode.value for entry in cluster.control._attempts if entry.mode.value in ("finish", "restore")
        )
        reached.update(entry.action.value for entry in cluster.control.journal())
        reached.update(
            e.action.value for e in cluster.emits if e.action in (Action.IGNORE_STALE, Action.IGNORE_DUPLICATE)
        )
    wanted = [
        "xor",
        "overwrite",
        "dense",
        "finish",
        "restore",
        "KillCandidate",
        "Conflict",
        "IgnoreStale",
        "IgnoreDuplicate",
    ]
    assert {name: reached[name] > 0 for name in wanted} == dict.fromkeys(wanted, True)


class ClusterMachine(RuleBasedStateMachine):
    """Hypothesis picks the schedule; the machines, storage and control plane are the real ones."""

    @initialize(
        instances=st.integers(1, 3),
        ranks=st.integers(1, 2),
        owners=st.integers(1, 2),
        gate=st.sampled_from(GateMode),
    )
    def bootstrap(self, instances: int, ranks: int, owners: int, gate: GateMode) -> None:
        self.cluster = Cluster(instances=instances, ranks=ranks, owners=owners, gate=gate)
        self.cluster.become(0)
        self.cluster.run()
        check(self.cluster)

    @rule(picks=st.lists(st.integers(0, 50), min_size=1, max_size=40))
    def progress(self, picks: list[int]) -> None:
        for pick in picks:
            possible = self.cluster.progress()
            if not possible:
                return
            self.cluster.do(possible[pick % len(possible)])
            check(self.cluster)

    @rule(seed=st.integers(1, 511))
    @precondition(lambda self: self.cluster.can_train() and len(self.cluster.candidates) < 4)
    def train(self, seed: int) -> None:
        self.cluster.train(seed)

    @rule(seed=st.integers(0, 999))
    def disturb(self, seed: int) -> None:
        disturb(self.cluster, random.Random(seed))

    @rule(kind=st.sampled_from(ALL_FAULTS), seed=st.integers(0, 999))
    @precondition(lambda self: len(self.cluster.control._attempts) < 12)
    def fault(self, kind: str, seed: int) -> None:
        fault(self.cluster, kind, random.Random(seed))

    @rule(seed=st.integers(0, 99))
    def settle(self, seed: int) -> None:
        settle_down(self.cluster, random.Random(seed))

    @invariant()
    def every_invariant_holds(self) -> None:
        if hasattr(self, "cluster"):
            check(self.cluster)


ClusterMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCluster = ClusterMachine.TestCase


def test_fixed_walk_through_every_rule():
    """One schedule that needs no luck: two versions, a kill, a takeover, an abort and a restore."""
    c = Cluster(instances=2, owners=2)
    c.become(0)
    c.run()
    c.train(7)
    c.run_until(lambda: any(r.issued for r in c.receivers.values()))
    c.kill_instance("e1")
    c.run_until(lambda: bool(c.commits))
    c.become(1)
    c.restart_instance("e1")
    c.run()
    check(c, tuple(STATE_INVARIANTS))
    assert c.settled()
    c.train(9)
    c.run_until(lambda: c.coordinators[1].state.phase is Phase.RUNNING)
    c.crash_owner(OwnerId(1))
    c.abort(1)
    c.run()
    assert c.settled()
    assert (c.record().version, len(c.control._dead)) == (1, 1)
    assert {instance_of(member.receiver) for member in c.record().required} == {"e0"}
    c.train(11)
    c.run()
    assert c.settled()
    assert {instance_of(member.receiver) for member in c.record().required} == {"e0", "e1"}
