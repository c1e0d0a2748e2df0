"""Which server is killed at which step, and when it comes back: a plan that is drawn before the run.

Every five steps one server is killed in the middle of that step's refit, and started again five steps later, before
the rollouts of that step; so the next kill finds all servers alive. A plan is a value: every method of a comparison
runs the same one, and a step says which servers take part in its rollouts.
Not handled: two servers down at once.

Paper: Section 8.3, Figure E.1 (an instance chosen at random, killed mid-refit, restarted five steps later)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

EVERY = 5


@dataclass(frozen=True, slots=True)
class KillPlan:
    """(step of the kill, step of the restart, instance) of every kill, by step."""

    kills: tuple[tuple[int, int, str], ...] = ()

    def __post_init__(self) -> None:
        last = 0
        for kill, restart, instance in self.kills:
            if not last <= kill < restart or kill < 1:
                raise ValueError(f"{instance} dies at {kill} and returns at {restart}: not after the kill before it")
            last = restart

    def killed_at(self, step: int) -> str | None:
        """The instance that dies in the refit of this step."""
        return next((instance for kill, _, instance in self.kills if kill == step), None)

    def restarted_at(self, step: int) -> str | None:
        """The instance that comes back before the rollouts of this step."""
        return next((instance for _, restart, instance in self.kills if restart == step), None)

    def down_at(self, step: int) -> str | None:
        """The instance that is dead during the rollouts of this step."""
        return next((instance for kill, restart, instance in self.kills if kill < step < restart), None)


def every_five_steps(steps: int, instances: Sequence[str], seed: str) -> KillPlan:
    """A kill at 5, 10, ...; which instance is drawn from `seed`. The last one may come back after the run."""
    draw = random.Random(seed)
    kills = [(step, step + EVERY, draw.choice(list(instances))) for step in range(EVERY, steps + 1, EVERY)]
    return KillPlan(tuple(kills))


def one_kill(instances: Sequence[str], *, kill: int, restart: int, seed: str) -> KillPlan:
    """The plan of a short run, with an instance that is drawn from `seed`."""
    return KillPlan(((kill, restart, random.Random(seed).choice(list(instances))),))


def shares(samples: int, group: int, live: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Which samples each live server computes, in order: whole groups, in equal parts as far as they go.

    Raises: ValueError when nobody is alive, or the samples are no whole number of groups.
    """
    if not live or group < 1 or samples % group:
        raise ValueError(f"{samples} samples in groups of {group} cannot be shared among {list(live)}")
    groups, found, start = samples // group, {}, 0
    for position, instance in enumerate(live):
        end = groups * (position + 1) // len(live)
        found[instance] = tuple(range(start * group, end * group))
        start = end
    return found
