"""Which canonical elements of an attempt were already changed by XOR items.

An element that two XOR items carry would be changed twice, which cancels. Ownership excludes it at the source; here it
is excluded again, since nothing later would show it. Runs cost nothing to remember, scattered items one or two bytes an
entry; they are only expanded where two items of one name have spans that meet.

Paper: Section 6.1 (XOR byte ranges are disjoint)   Proofs: L4 xor_reconstructs, L7 loader_commutes   Conditions: LC6
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.codec.records import Item
from nemo_dcr.receiver.conditions import DisjointXor

_Remembered = tuple[int, int, NDArray[Any] | None]
"""First and last index, and the gaps of a scattered item in the smallest type."""


_SMALL = (1 << 16) - 1
"""Gaps within a span of that fit two bytes, so that the largest need not be looked for."""


class XorRepeats:
    """Remembers the XOR items of one attempt."""

    def __init__(self) -> None:
        self._items: dict[str, list[_Remembered]] = {}

    def add(self, item: Item) -> None:
        """Remember an item.

        Raises: ConditionViolated (LC6) when one of its elements came before in this attempt.
        """
        earlier = self._items.setdefault(item.tensor.name, [])
        last = item.last
        for start, end, gaps in earlier:
            if start <= last and item.start <= end:
                common = _common(item, start, end, gaps)
                DisjointXor(repeated=common).require(item.tensor.name)
        earlier.append((item.start, last, None if item.indices is None else _gaps(item.indices)))


def _gaps(indices: NDArray[np.int64]) -> NDArray[Any]:
    if indices[-1] - indices[0] <= _SMALL:
        return np.subtract(indices[1:], indices[:-1], dtype=np.uint16, casting="unsafe")
    gaps: NDArray[np.int64] = indices[1:] - indices[:-1]
    largest = int(gaps.max())
    return gaps.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.int64)


def _common(item: Item, start: int, last: int, gaps: NDArray[Any] | None) -> int:
    if item.indices is None and gaps is None:
        return min(item.last, last) - max(item.start, start) + 1
    if gaps is None:
        return _inside(item.flat_indices(), start, last)
    other = np.concatenate([np.array([start], dtype=np.int64), start + np.cumsum(gaps, dtype=np.int64)])
    if item.indices is None:
        return _inside(other, item.start, item.last)
    return len(np.intersect1d(item.indices, other, assume_unique=True))


def _inside(indices: NDArray[np.int64], start: int, last: int) -> int:
    return int(np.searchsorted(indices, last, side="right") - np.searchsorted(indices, start, side="left"))
