"""Which entries of an item one copy moves, and where each of them goes: the copy read as integer arithmetic.

A copy whose source is a view of the scratch, in the dtype of its destination, stores canonical element
first + sum(c_k * source_k) in resident word target + sum(c_k * target_k) for every coordinate c below the shape. So
an item's sorted indices lead to resident words without the scratch being filled, read or reset, and the cost follows
the entries. A source that is expanded has axes of stride 0: each entry goes to every repeat. The map is made only where
no canonical element comes twice but by such a repeat; everything else has none and takes the dense scratch.
Not handled: casts, computed sources, and dtypes of another width than the tensor's (no map).

Paper: Section 6.1 (destination view)   Proofs: L5 inactive_unchanged   Conditions: LC5, LC7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.kernels.placement import loops
from nemo_dcr.kernels.placement_plain import Axes, Indices, reach
from nemo_dcr.receiver.paths import Step
from nemo_dcr.receiver.residents import Residents

_MOST_REPEATS = 4096
"""More copies of one element than that are cheaper as a dense load."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexMap:
    """One pair of views, apart from where they begin."""

    axes: Axes
    """Axes with more than one element, without the repeated ones, by falling canonical stride."""
    repeats: tuple[int, ...]
    """Distance of each repeat from the first, in resident words; (0,) where nothing repeats."""
    span: int
    """Canonical indices from the first element to the last, both counted; 0 for an empty view."""
    is_block: bool
    """Both views are contiguous."""

    @property
    def elements(self) -> int:
        """Canonical elements that the copy takes."""
        return int(np.prod(self.axes[:, 0])) if self.span else 0

    def write(self, item: Item, resident: Words, first: int, target: int) -> int:
        """Store the item's entries that the copy takes; `resident` is all words of the storage.

        `first` is the flat index of the source's first element, `target` the word of the destination's. Returns the
        number of entries taken, each counted once.
        """
        is_xor, kernels = item.encoding is Encoding.XOR, loops()
        if self.is_block and len(self.repeats) == 1:
            if item.indices is None:
                return self._write_run(item, resident, first, target)
            write_block = kernels.xor_block if is_xor else kernels.overwrite_block
            return int(write_block(resident, target, item.indices, first, self.span, item.values))
        indices, values = _entries(item, first, first + self.span)
        positions, at = kernels.locate(indices, self.axes, first, target) if self.span else (indices[:0], indices[:0])
        taken = values[positions]
        write = kernels.xor_at if is_xor else kernels.overwrite_at
        for shift in self.repeats:
            write(resident, at, shift, taken)
        return len(at)

    def _write_run(self, item: Item, resident: Words, first: int, target: int) -> int:
        begin, end = max(item.start, first), min(item.last + 1, first + self.span)
        if begin >= end:
            return 0
        words = resident[target + begin - first : target + end - first]
        values = item.values[begin - item.start : end - item.start]
        if item.encoding is Encoding.XOR:
            words ^= values
        else:
            words[:] = values
        return end - begin


def _entries(item: Item, begin: int, end: int) -> tuple[Indices, NDArray[np.generic]]:
    """Indices and values of an item; of a run only the part between `begin` and `end` is laid out."""
    if item.indices is not None:
        return item.indices, item.values
    begin, end = max(item.start, begin), min(item.last + 1, end)
    begin = min(begin, end)
    return np.arange(begin, end, dtype=np.int64), item.values[begin - item.start : end - item.start]


@lru_cache(maxsize=4096)
def index_map(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> IndexMap | None:
    """The map of a copy between views of one shape with these strides, in elements.

    None where some canonical element could come twice other than as a repeat, or repeats very often.
    """
    if 0 in shape:
        return IndexMap(np.empty((0, 3), dtype=np.int64), (0,), 0, is_block=True)
    axes: list[tuple[int, int, int]] = []
    for size, stride, move in zip(shape, source, target, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride and axes[-1][2] == size * move:
            axes[-1] = (axes[-1][0] * size, stride, move)
        else:
            axes.append((size, stride, move))
    shifts = np.zeros(1, dtype=np.int64)
    for size, stride, move in axes:
        if stride == 0:
            if size * len(shifts) > _MOST_REPEATS:
                return None
            shifts = (shifts[:, None] + np.arange(size, dtype=np.int64) * move).reshape(-1)
    kept = sorted((axis for axis in axes if axis[1] != 0), key=lambda axis: -axis[1])
    inside = 1
    for size, stride, _ in reversed(kept):
        if stride < inside:
            return None
        inside += (size - 1) * stride
    table = np.array(kept, dtype=np.int64).reshape(-1, 3)
    is_block = not kept or (len(kept) == 1 and kept[0][1:] == (1, 1))
    return IndexMap(table, tuple(shifts.tolist()), reach(table), is_block=is_block)


def mapped_elements(tensor: TensorMeta, copies: Sequence[Step], residents: Residents) -> int | None:
    """Canonical elements that the copies of a path take together, or None where one of them has no index map."""
    taken = 0
    for step in copies:
        source, target = step.source, step.target
        if source is None or step.repeats or source.dtype != target.dtype or source.width != tensor.width:
            return None
        shape, strides = tuple(size for size, _ in source.dims), tuple(stride for _, stride in source.dims)
        # Whether there is a map depends on the source alone, and not on the shape in which the copy names its elements.
        found = index_map(shape, strides, strides)
        if found is None or residents.words_of(target.storage, target.width) is None:
            return None
        taken += found.elements
    return taken
