"""Each weakened guard is caught by the invariant that it names; the unweakened machines survive the same schedules."""

from __future__ import annotations

import pytest

from tests.unit.protocol import mutants
from tests.unit.protocol.chaos import walk
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.invariants import INVARIANTS, InvariantBroken

SEEDS = 20
SCHEDULES = {m.schedule.__name__: m.schedule for m in mutants.MUTANTS if m.schedule and m.patches}


def bootstrapped() -> Cluster:
    cluster = Cluster()
    cluster.become(0)
    cluster.run()
    return cluster


def run(mutant: mutants.Mutant) -> None:
    """The mutant's schedule, or random walks until one is killed; a mutant may also get stuck, which does not count."""
    if mutant.schedule is not None:
        mutant.schedule(bootstrapped(), (mutant.invariant,))
        return
    for seed in range(SEEDS):
        try:
            walk(seed, faults=mutant.faults, names=(mutant.invariant,), settle=False)
        except InvariantBroken:
            raise
        except AssertionError:
            continue


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed_by_the_invariant_it_names(mutant, monkeypatch):
    for module, name, weakened in mutant.patches:
        monkeypatch.setattr(module, name, weakened)
    with pytest.raises(InvariantBroken, match=mutant.invariant):
        run(mutant)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_of_a_mutant_holds_every_invariant_without_it(name):
    cluster = bootstrapped()
    SCHEDULES[name](cluster, tuple(INVARIANTS))
    assert cluster.settled()


def test_mutants_name_invariants_that_exist():
    assert {m.invariant for m in mutants.MUTANTS} <= set(INVARIANTS)
    assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 12
