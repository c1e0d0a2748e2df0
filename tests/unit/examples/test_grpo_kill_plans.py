"""Kill plans and shares: who is dead when, and which server computes which samples."""

from __future__ import annotations

import pytest

from examples.grpo.kills import KillPlan, every_five_steps, one_kill, shares

SERVERS = ("left", "right")


def test_one_kill_names_the_steps_of_a_short_run():
    plan = one_kill(["left"], kill=2, restart=5, seed="0")
    assert [plan.killed_at(step) for step in range(1, 7)] == [None, "left", None, None, None, None]
    assert [plan.down_at(step) for step in range(1, 7)] == [None, None, "left", "left", None, None]
    assert [plan.restarted_at(step) for step in range(1, 7)] == [None, None, None, None, "left", None]


def test_every_fifth_step_kills_one_and_brings_the_last_one_back_first():
    plan = every_five_steps(50, SERVERS, seed="3")
    assert [kill for kill, _, _ in plan.kills] == list(range(5, 51, 5))
    for kill, restart, instance in plan.kills:
        assert restart == kill + 5
        assert plan.down_at(kill) is None
        assert plan.down_at(kill + 1) == plan.down_at(kill + 4) == instance
        assert plan.down_at(restart) is None
    assert {instance for _, _, instance in plan.kills} == set(SERVERS)


def test_a_plan_is_drawn_from_its_seed():
    assert every_five_steps(50, SERVERS, seed="1") == every_five_steps(50, SERVERS, seed="1")
    assert len({every_five_steps(50, SERVERS, seed=f"{seed}/relay") for seed in range(8)}) > 1
    assert {one_kill(SERVERS, kill=2, restart=5, seed=str(seed)).killed_at(2) for seed in range(8)} == set(SERVERS)


def test_a_longer_run_has_the_plan_of_a_shorter_one():
    assert every_five_steps(100, SERVERS, seed="1").kills[:10] == every_five_steps(50, SERVERS, seed="1").kills


@pytest.mark.parametrize("kills", [((0, 5, "left"),), ((5, 5, "left"),), ((5, 10, "left"), (9, 14, "right"))])
def test_a_plan_that_kills_two_at_once_or_brings_back_too_early_is_refused(kills):
    with pytest.raises(ValueError, match="dies at"):
        KillPlan(kills)


def test_whole_groups_are_shared_out_in_order():
    assert shares(16, 4, SERVERS) == {"left": tuple(range(8)), "right": tuple(range(8, 16))}
    assert shares(16, 4, ["right"]) == {"right": tuple(range(16))}
    assert shares(12, 4, SERVERS) == {"left": tuple(range(4)), "right": tuple(range(4, 12))}


@pytest.mark.parametrize(("samples", "group", "live"), [(16, 4, ()), (15, 4, SERVERS), (16, 0, SERVERS)])
def test_samples_that_cannot_be_shared_are_refused(samples, group, live):
    with pytest.raises(ValueError, match="cannot be shared"):
        shares(samples, group, live)
