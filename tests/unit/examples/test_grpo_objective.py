"""Advantages, the clipped loss and the estimated divergence, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from examples.grpo.arithmetic import Problem, problems, reward
from examples.grpo.objective import CLIP_HIGH, CLIP_LOW, advantages, clipped_loss, divergence


def test_advantages_have_mean_zero_and_spread_one_in_each_group():
    found = advantages([0.0, 1.0, 0.25, 0.75, 5.0, 7.0, 5.0, 7.0], 4)
    assert abs(sum(found[:4])) < 1e-12
    assert abs(sum(value * value for value in found[:4]) / 4 - 1) < 1e-12
    assert found[4:] == (-1.0, 1.0, -1.0, 1.0)


def test_a_group_of_equal_rewards_has_no_advantage():
    assert advantages([0.3, 0.3, 0.0, 1.0], 2) == (0.0, 0.0, -1.0, 1.0)


@pytest.mark.parametrize("group", [0, 3])
def test_rewards_that_are_no_groups_are_refused(group):
    with pytest.raises(ValueError, match="no groups"):
        advantages([1.0, 2.0, 3.0, 4.0], group)


def one(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token, and its gradient by the new log probability."""
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    row = {"old": torch.zeros(1, 1, dtype=torch.float64), "mask": torch.ones(1, 1, dtype=torch.float64)}
    loss = clipped_loss(new, row["old"], torch.tensor([advantage], dtype=torch.float64), row["mask"], 1)
    loss.backward()
    return float(loss.detach()), float(new.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "learns"),
    [
        (1.0, 2.0, 2.0, True),
        (1.2, 1.0, 1.2, True),
        (1.5, 1.0, 1 + CLIP_HIGH, False),
        (1.5, -1.0, -1.5, True),
        (0.5, -1.0, -(1 - CLIP_LOW), False),
        (0.5, 1.0, 0.5, True),
    ],
)
def test_the_ratio_is_clipped_only_where_it_would_gain(ratio, advantage, gain, learns):
    loss, gradient = one(ratio, advantage)
    assert abs(loss + gain) < 1e-9
    assert (gradient != 0) == learns


def test_padding_takes_no_part_and_every_token_weighs_the_same():
    new, old = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 9.0], [0.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert float(clipped_loss(new, old, torch.tensor([3.0, -6.0]), mask, 3)) == 0.0
    assert float(clipped_loss(new, old, torch.tensor([3.0, -3.0]), mask, 6)) == -0.5
    assert divergence(new, old, mask).tolist() == [0.0, 0.0]


def test_the_divergence_is_zero_for_equal_policies_and_positive_for_others():
    old = torch.log(torch.tensor([[0.5, 0.25]], dtype=torch.float64))
    mask = torch.ones_like(old)
    assert divergence(old, old, mask).tolist() == [0.0]
    for shift in (0.3, -0.3):
        found = float(divergence(old + shift, old, mask))
        assert abs(found - 2 * (math.exp(shift) - 1 - shift)) < 1e-12
        assert found > 0


def test_the_mean_of_the_estimate_is_the_divergence():
    rollout = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    trainer = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    each = divergence(trainer.log()[:, None], rollout.log()[:, None], torch.ones(3, 1, dtype=torch.float64))
    exact = float((rollout * (rollout / trainer).log()).sum())
    assert abs(float((rollout * each).sum()) - exact) < 1e-12


@pytest.mark.parametrize(
    ("completion", "earned"),
    [
        (" 12", 1.0),
        (" 5 + 7 = 12.\n13 + 1", 1.0),
        (" 5 + 7 = 11", 0.4),
        (" -12", 0.1 + 0.6 / 25),
        (" twelve", 0.05 / 7),
        ("", 0.05),
        ("\n\n12", 1.0),
    ],
)
def test_an_answer_is_graded_by_the_last_number_of_its_first_line(completion, earned):
    assert reward(Problem(5, "+", 7), completion) == earned


def test_a_right_answer_earns_more_than_any_other_and_a_near_one_more_than_a_far_one():
    earned = [reward(Problem(20, "-", 6), f" {number}") for number in (14, 15, 20, 10**30)]
    assert earned == sorted(earned, reverse=True)
    assert len(set(earned)) == 4


def test_problems_follow_from_seed_and_step_and_have_no_negative_answer():
    assert problems(seed=1, step=2, count=4) == problems(seed=1, step=2, count=4)
    assert problems(seed=1, step=2, count=4) != problems(seed=1, step=3, count=4)
    many = problems(seed=0, step=0, count=200)
    assert {problem.sign for problem in many} == {"+", "-"}
    assert min(problem.answer for problem in many) >= 0
