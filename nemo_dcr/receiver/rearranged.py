"""Resident tensors that hold the words of a loaded tensor in another order, and that no path writes.

A transposed or cloned weight that was made after loading goes stale at a refit. It has the same number of elements and
the same multiset of words as its original, which two order-free sums compare.
Not handled: a tensor derived from a part of another, or by arithmetic; tensors of fewer than four elements or of one
repeated word, which prove nothing.

Paper: Section 3 (versioned buffers); Table A.2   Conditions: LC10
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from torch import Tensor

from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.receiver.residents import Residents

_SMALLEST = 4


def rearranged_copies(residents: Residents, written: Collection[int]) -> dict[int, list[str]]:
    """For each written storage, the names of unwritten resident tensors with the same words in any order."""
    loaded: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for number in sorted(written):
        tensor = residents.tensor_of(number)
        loaded.setdefault((tensor.numel(), tensor.itemsize), []).append((number, tensor))
    found: dict[int, list[str]] = {}
    named = {name: entry.tensor for name, entry in residents.tensors.items()} | residents.attributes
    for name, tensor in sorted(named.items()):
        own = residents.number_of(tensor)
        if own is None or own in written or tensor.numel() < _SMALLEST:
            continue
        originals = loaded.get((tensor.numel(), tensor.itemsize), [])
        mark = _multiset_mark(tensor) if originals else None
        for original, other in originals:
            if mark is not None and mark == _multiset_mark(other):
                found.setdefault(original, []).append(name)
    return found


def _multiset_mark(tensor: Tensor) -> tuple[int, int] | None:
    """Two sums over the words that do not depend on their order; None for one repeated word."""
    words = copied_words(tensor).astype(np.uint64)
    if bool((words == words[0]).all()):
        return None
    mixed = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return int(words.sum(dtype=np.uint64)), int(mixed.sum(dtype=np.uint64))
