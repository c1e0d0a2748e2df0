"""What a mutant is: one guard weakened, and the claim that falls with it.

Spec: Mutants   Proofs: none
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spec.proof.dsl import State, Term

UNIT = "tests/unit/protocol/"
RULES_TESTS, COORDINATOR_TESTS = f"{UNIT}test_control_rules.py::", f"{UNIT}test_coordinator.py::"
OWNER_TESTS, ENDPOINT_TESTS = f"{UNIT}test_owner.py::", f"{UNIT}test_endpoint.py::"

Swap = Callable[..., Term]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One weakened guard."""

    name: str
    why: str
    swaps: Mapping[str, Swap]
    breaks: str = ""
    """A claim that falls; empty when the mutant is proved safe."""
    covered_by: str = ""
    """For a safe one: the unit test of the guard."""


def always(s: State, *things: Term) -> Term:
    """A guard that is gone."""
    return True


def never(s: State, *things: Term) -> Term:
    """An effect that is gone."""
    return False


def mutant(name: str, why: str, breaks: str, *, covered_by: str = "", **swaps: Swap) -> Mutant:
    """A mutant that swaps these guards, by name."""
    return Mutant(name, why, swaps, breaks, covered_by)
