"""The tensors that are measured: made-up experts, and how they change.

Weights are normal with deviation 0.02, stored as BF16. `relative` changes move a uniformly drawn element by 0.5 to 1.5%
of its value, up or down; one whose stored bits would stay the same moves to the next stored value, so that exactly the
drawn elements change.
Not handled: changes of a real optimizer (bench/steps.py).

Paper: Section 8.1 (element change rates)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bench.rows import Settings
from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words, tensor_from_words

DTYPE = "BF16"


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One tensor before and after an optimizer step."""

    name: str
    shape: tuple[int, ...]
    old: Words
    new: Words


def nbytes(pairs: list[Pair]) -> int:
    """Bytes of the checkpoint that the pairs stand for: one copy."""
    return sum(pair.old.nbytes for pair in pairs)


def experts(settings: Settings, rate: float, *, seed: int = 7) -> list[Pair]:
    """`settings.tensors` experts of which `rate` of the elements changed."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = settings.shape
    made = []
    for number in range(settings.tensors):
        values = (torch.randn(rows * columns, generator=generator) * 0.02).to(torch.bfloat16)
        old = copied_words(values)
        made.append(Pair(f"experts.{number}.w", settings.shape, old, relative(old, rate, generator)))
    return made


def relative(old: Words, rate: float, generator: torch.Generator) -> Words:
    """The same words with `rate` of them moved."""
    drawn = torch.rand(len(old), generator=generator) < rate
    amplitude = 0.005 + 0.01 * torch.rand(len(old), generator=generator)
    sign = torch.where(torch.rand(len(old), generator=generator) < 0.5, -1.0, 1.0)
    values = tensor_from_words(old, DTYPE, (len(old),)).float()
    moved = copied_words((values * (1 + sign * amplitude)).to(torch.bfloat16))
    new = np.where(drawn.numpy(), moved, old).astype(old.dtype)
    new[drawn.numpy() & (new == old)] += 1
    return new
