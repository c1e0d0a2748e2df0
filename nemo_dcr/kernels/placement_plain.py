"""Entries of an item to the resident words that one copy moves them to: the definition, in numpy.

A copy names elements of the canonical tensor and, in the same order, elements of resident storage. Both are given by
common axes, each with a size, a stride in the canonical tensor and a stride in the storage. The axes are nested in the
canonical tensor: sorted by falling stride, each steps over everything inside it, so that an index has at most one set
of coordinates, and integer division finds it. An entry that the copy does not take has none.
Not handled: axes that repeat a canonical element (the caller adds the shift of each repeat), resident elements that two
axes reach (prewarm refuses them), indices that are not sorted (numpy keeps them inside the resident words, no more).

Paper: Section 6.1 (destination view)   Proofs: L5 inactive_unchanged
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.bits import Words

Indices = NDArray[np.int64]
Axes = NDArray[np.int64]
"""A row for each axis: size, stride in the canonical tensor, stride in the storage; by falling canonical stride."""


def reach(axes: Axes) -> int:
    """Span of the canonical elements: one more than the distance from the first to the last of them."""
    return 1 + int(((axes[:, 0] - 1) * axes[:, 1]).sum())


def locate(indices: Indices, axes: Axes, first: int, target: int) -> tuple[Indices, Indices]:
    """The entries that the copy takes: their positions in `indices`, and the resident words that they go to.

    `first` is the canonical index of the first element and `target` the word that it goes to.
    """
    low, high = np.searchsorted(indices, (first, first + reach(axes)))
    rest = indices[low:high] - first
    at = np.full(len(rest), target, dtype=np.int64)
    taken = np.ones(len(rest), dtype=np.bool_)
    for size, stride, move in axes.tolist():
        coordinate, rest = np.divmod(rest, stride)
        taken &= coordinate < size
        at += coordinate * move
    taken &= rest == 0
    return np.flatnonzero(taken) + low, at[taken]


def xor_at(resident: Words, at: Indices, shift: int, masks: Words) -> None:
    """XOR each mask into the resident word at its place plus `shift`; places are unique."""
    resident[at + shift] ^= masks


def overwrite_at(resident: Words, at: Indices, shift: int, values: Words) -> None:
    """Store each value in the resident word at its place plus `shift`; places are unique."""
    resident[at + shift] = values


def xor_block(resident: Words, target: int, indices: Indices, first: int, length: int, masks: Words) -> int:
    """As `locate` and `xor_at` for one axis of stride 1 on both sides; returns the entries taken."""
    at, low, high = _block(indices, first, length)
    resident[at + target] ^= masks[low:high]
    return len(at)


def overwrite_block(resident: Words, target: int, indices: Indices, first: int, length: int, values: Words) -> int:
    """As `locate` and `overwrite_at` for one axis of stride 1 on both sides; returns the entries taken."""
    at, low, high = _block(indices, first, length)
    resident[at + target] = values[low:high]
    return len(at)


def _block(indices: Indices, first: int, length: int) -> tuple[Indices, int, int]:
    low, high = np.searchsorted(indices, (first, first + length)).tolist()
    return indices[low:high] - first, low, high


def usable(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself where it is contiguous and writable, else a copy: compiled loops know one kind of array."""
    flags = array.flags
    return array if flags.c_contiguous and flags.writeable else array.copy()
