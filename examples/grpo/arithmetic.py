"""Short arithmetic problems and their verifiable reward.

Which problems a step asks is a pure function of (seed, step): the same in every run and for every method. A prompt
shows one solved problem and leaves the next one open; a completion ends with its line. It is graded by its last
whole number: 1 when that number is right, between 0.1 and 0.4 by how near it is; without a number at most 0.05, by how
short it is. Partial credit keeps rewards of one group apart, and so the gradient from vanishing.
Not handled: fractions, words for numbers.

Paper: Section 8 (verifiable rewards)
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

END = "\n"
"""Ends a completion; one token."""
_LARGEST = 40
_SOLVED = "21 + 14 = 35\n"
_NUMBER = re.compile(r"-?\d+")
_DIGITS_AT_MOST = 12
"""A longer number is as wrong as one of this length."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its only right answer."""

    left: int
    sign: str
    right: int

    @property
    def prompt(self) -> str:
        """What the model completes."""
        return f"{_SOLVED}{self.left} {self.sign} {self.right} ="

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.left + self.right if self.sign == "+" else self.left - self.right


def problems(*, seed: int, step: int, count: int) -> tuple[Problem, ...]:
    """The `count` problems of a step; the same arguments always give the same problems."""
    return tuple(_problem(f"{seed}/{step}/{number}") for number in range(count))


def _problem(key: str) -> Problem:
    digest = hashlib.blake2b(key.encode(), digest_size=3).digest()
    left, right = 1 + digest[0] % _LARGEST, 1 + digest[1] % _LARGEST
    if digest[2] % 2:
        return Problem(left, "+", right)
    return Problem(max(left, right), "-", min(left, right))


def reward(problem: Problem, completion: str) -> float:
    """The reward of a completion, from 0 to 1."""
    line = _first_line(completion)
    numbers = _NUMBER.findall(line)
    if not numbers:
        return 0.05 / (1 + len(line))
    error = abs(int(numbers[-1][:_DIGITS_AT_MOST]) - problem.answer)
    return 1.0 if error == 0 else 0.1 + 0.6 / (1 + error)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""
