"""The GRPO objective: advantages within a group, the clipped policy ratio, and the estimated KL divergence.

An advantage is a reward in units of its group's own spread; a group of equal rewards has none. The ratio between the
policy that is trained and the policy that sampled is clipped to [1 - 0.2, 1 + 0.28]; every token of the step weighs the
same. The divergence of the two is estimated on the sampled tokens by exp(d) - 1 - d, with d the log ratio: it is never
negative, and its mean is KL(rollout || trainer).
Not handled: a reference policy; a value function.

Paper: Section 8 and Appendix E (GRPO, ratio_clip_min 0.2, ratio_clip_max 0.28, train/gen_kl_error)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
_LEAST_SPREAD = 1e-6


def advantages(rewards: Sequence[float], group: int) -> tuple[float, ...]:
    """Rewards of consecutive groups of `group` samples, each minus its group's mean and over its standard deviation.

    Raises: ValueError when the rewards are no whole number of groups.
    """
    if group < 1 or len(rewards) % group:
        raise ValueError(f"{len(rewards)} rewards are no groups of {group}")
    found: list[float] = []
    for start in range(0, len(rewards), group):
        part = rewards[start : start + group]
        mean = sum(part) / group
        spread = (sum((value - mean) ** 2 for value in part) / group) ** 0.5
        found += [(value - mean) / spread if spread > _LEAST_SPREAD else 0.0 for value in part]
    return tuple(found)


def clipped_loss(new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """The loss of some rows as their part of the mean over all `tokens` of the step.

    Args:
        new: log probabilities of the sampled tokens by the policy that is trained, [rows, positions].
        old: the same by the policy that sampled them.
        advantage: of each row, [rows].
        mask: 1 at sampled tokens, 0 elsewhere, [rows, positions].
        tokens: sampled tokens of all rows of the step, on all ranks.
    """
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    return -(gain * mask).sum() / tokens


def divergence(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """The estimated divergence of each row, summed over its sampled tokens, [rows]."""
    difference = new - old
    return ((torch.exp(difference) - 1 - difference) * mask).sum(dim=1)
