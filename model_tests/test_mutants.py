"""Every mutant of the code is killed by the property that the specification names for it, and sound code by nothing.

Spec: Mutants, Properties
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from model_tests import mutants
from model_tests.adversary import start, unsettled, walk
from model_tests.cluster_lines import attach
from model_tests.counterexample import NOT_PERFORMED
from model_tests.follower import Rejected
from model_tests.model import snake as snake_of_the_model
from model_tests.model_mutants import MUTANTS as MODEL_MUTANTS
from model_tests.mutants import BY_NAME, MUTANTS, NOT_IN_LINES, ONLY_HERE, REAL, ROWS, SCHEDULES, Kill
from model_tests.patching import patched
from tests.house.modules import ROOT
from tests.unit.protocol.invariants import FINALLY, INVARIANTS

pytestmark = pytest.mark.timeout(900)
LIVE = {name for name, mutant in BY_NAME.items() if mutant.is_live}


def kills(*arguments: str) -> dict[str, Kill]:
    """The report of a process that has nothing of ours loaded."""
    command = [sys.executable, "-m", "model_tests.mutants", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=mutants.environment(), capture_output=True, text=True, check=False)
    found = [Kill(**json.loads(line)) for line in done.stdout.splitlines()]
    assert done.returncode in (0, 1), done.stderr
    return {kill.name: kill for kill in found}


@pytest.fixture(scope="module")
def killed(tally) -> dict[str, Kill]:
    """What became of each mutant."""
    found = kills()
    tally.add("mutants", sum(kill.is_killed for kill in found.values()))
    return found


# ------------------------------------------------------------------------------------------------------------ the table


def test_mutants_are_those_of_the_specification():
    assert set(BY_NAME) - set(ROWS) == set(ONLY_HERE)
    assert set(ROWS) <= set(BY_NAME)
    assert len(MUTANTS) == len(ROWS) + len(ONLY_HERE) == 56


def test_mutants_break_properties_that_exist():
    assert {mutant.falls for mutant in MUTANTS} <= {*INVARIANTS, *FINALLY}


def test_mutants_replace_functions_that_exist_and_leave_none_replaced():
    for mutant in MUTANTS:
        before = [getattr(place, name) for place, name, _ in mutant.patches]
        assert before, mutant.name
        with patched(*mutant.patches):
            assert all(getattr(place, name) is weaker for place, name, weaker in mutant.patches), mutant.name
        assert [getattr(place, name) for place, name, _ in mutant.patches] == before


def test_each_mutant_of_the_model_has_one_of_the_code():
    weakened = {next(iter(ROWS[name].override.values())) for name in ROWS if name not in LIVE}
    assert weakened == set(MODEL_MUTANTS)
    assert snake_of_the_model("NotDuplicate") == "not_duplicate"


# ------------------------------------------------------------------------------------------------------------- killed


@pytest.mark.model
def test_every_mutant_is_killed_by_the_property_that_it_names(killed):
    assert [kill for kill in killed.values() if not kill.is_killed] == []
    assert set(killed) == set(BY_NAME)
    assert {name for name, kill in killed.items() if kill.schedule} == set(SCHEDULES)


@pytest.mark.model
def test_counterexamples_of_the_specification_kill_in_both_worlds(killed):
    performed = {name for name in ROWS if name not in LIVE and name not in NOT_PERFORMED}
    assert [kill for name, kill in killed.items() if name in performed and not kill.both] == []
    assert len(performed) >= 20


@pytest.mark.model
def test_model_beside_the_mutant_rejects_a_line_where_lines_can_tell(killed):
    assert {name for name, kill in killed.items() if not kill.rejected} == {*REAL, *NOT_IN_LINES}


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_walks_alone_find_most_mutants():
    found = kills("--deep")
    assert [kill for kill in found.values() if not kill.is_killed] == []
    assert sum(kill.walk is not None for kill in found.values()) >= 45


# ----------------------------------------------------------------------------------------------------------- sound code


@pytest.mark.model
@pytest.mark.parametrize(
    "schedule", sorted(set(SCHEDULES.values()), key=lambda s: s.__name__), ids=lambda s: s.__name__
)
def test_sound_code_keeps_every_property_on_the_schedule_of_a_mutant(schedule):
    cluster = mutants.served(schedule)
    schedule(cluster, tuple(INVARIANTS))
    assert cluster.settled()


@pytest.mark.model
def test_sound_code_keeps_every_property_on_drawn_walks_and_the_model_rejects_nothing():
    for seed in range(1000, 1012):
        rng = random.Random(seed)
        cluster = start(rng, on_start=attach)
        walk(cluster, rng, tuple(INVARIANTS))
        assert unsettled(cluster, rng) == []


@pytest.mark.model
def test_a_mutant_that_changes_nothing_survives():
    idle = replace(BY_NAME["no_dedup"], patches=())
    assert not mutants.falls_on_schedule(idle)
    assert not any(mutants.falls_on_walk(idle, seed) or mutants.is_rejected(idle, seed) for seed in range(3))


@pytest.mark.model
@pytest.mark.parametrize("name", ["late_close", "never_dense"])
def test_what_is_weakened_along_with_a_guard_of_progress_kills_nobody_alone(name):
    helper = replace(BY_NAME[name], patches=BY_NAME[name].patches[1:])
    assert not mutants.falls_on_schedule(helper)


@pytest.mark.model
def test_model_beside_a_mutant_rejects_the_line_that_its_guard_forbids():
    mutant, seed = BY_NAME["gate_not_closed"], 5
    rng = random.Random(seed)
    cluster = start(rng, on_start=attach)
    with patched(*mutant.patches), pytest.raises(Rejected, match="gate is True, in the model False"):
        walk(cluster, rng, ())
