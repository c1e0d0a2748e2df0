"""Index maps pi_T: which canonical element each owned source element feeds.

The owned source elements of a task are numbered 0 .. domain-1 in row-major order of the words that the task reads.
A `BoxMap` sends them to a box of the canonical tensor. The canonical tensor may be looked at through a row-major `view`
with as many elements (for interleaved heads or flat shards), and the source may run through the axes of the box in
another order (`axes`, for transposed shards). One formula then covers row and column splits, replication, slices of
fused tensors, uneven and empty shards, and 0-d tensors. A box map is injective by construction.
Not handled: maps in which one source element feeds several canonical elements, or none: such tasks are residual.

Paper: Section 5 (pi_T, k = (i0 + i) w + y); Appendix A.1   Proofs: affine_destinations   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.kernels.plain import Indices

Shape = tuple[int, ...]
FEW = 1024
"""Boxes that are compared with each other pair by pair; the runs of more are sorted instead."""


def row_major_strides(shape: Shape) -> Shape:
    """Elements to step over for each axis of a row-major array of `shape`."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class BoxMap:
    """A bijection between 0 .. domain-1 and a box of one canonical tensor. Build it with `box` or `whole`."""

    tensor: TensorMeta
    view: Shape
    """Row-major shape with the elements of `tensor`, through which the box is cut."""
    start: Shape
    """First corner of the box in the view."""
    extent: Shape
    """Size of the box along each axis of the view; any of them may be 0."""
    axes: tuple[int, ...]
    """Axis i of the source runs along axis axes[i] of the view."""

    @classmethod
    def box(
        cls,
        tensor: TensorMeta,
        start: Shape,
        extent: Shape,
        *,
        view: Shape | None = None,
        axes: tuple[int, ...] | None = None,
    ) -> BoxMap:
        """The box at `start` of size `extent`; the view defaults to the tensor's shape, the axes to its own order.

        Raises: UnsupportedMapping (SC5) when the numbers do not describe a box of the tensor.
        """
        view = tensor.shape if view is None else view
        return cls(tensor, view, start, extent, tuple(range(len(view))) if axes is None else axes)

    @classmethod
    def whole(cls, tensor: TensorMeta) -> BoxMap:
        """The identity on all elements of `tensor`."""
        return cls.box(tensor, (0,) * len(tensor.shape), tensor.shape)

    def __post_init__(self) -> None:
        rank = len(self.view)
        if prod(self.view) != self.tensor.numel:
            raise self._unsupported(f"view {self.view} has not the elements of shape {self.tensor.shape}")
        if len(self.start) != rank or len(self.extent) != rank or sorted(self.axes) != list(range(rank)):
            raise self._unsupported(f"start {self.start}, extent {self.extent} and axes {self.axes} need {rank} axes")
        for first, count, size in zip(self.start, self.extent, self.view, strict=True):
            if first < 0 or count < 0 or first + count > size:
                raise self._unsupported(f"box at {self.start} of size {self.extent} leaves the view {self.view}")

    def _unsupported(self, detail: str) -> UnsupportedMapping:
        return UnsupportedMapping(self.tensor.name, "SC5", detail)

    @property
    def domain(self) -> int:
        """Number of owned source elements."""
        return prod(self.extent)

    @property
    def source_shape(self) -> Shape:
        """Shape of the source elements in the order in which the task reads them."""
        return tuple(self.extent[axis] for axis in self.axes)

    @property
    def monotone(self) -> bool:
        """True iff increasing source indices have increasing destinations."""
        steps = [stride for _, stride in self._steps()]
        return steps == sorted(steps, reverse=True)

    @property
    def contiguous(self) -> bool:
        """True iff the destinations are one run in source order."""
        steps = self._steps()
        return not steps or (len(steps) == 1 and steps[0][1] == 1)

    @property
    def first(self) -> int:
        """Destination of source element 0 (the corner of an empty box)."""
        return sum(s * stride for s, stride in zip(self.start, row_major_strides(self.view), strict=True))

    @property
    def label(self) -> str:
        """Text that names the tensor and the box: equal on all ranks that hold the same box, different otherwise."""
        cut = ",".join(f"{first}:{first + count}" for first, count in zip(self.start, self.extent, strict=True))
        view = "" if self.view == self.tensor.shape else f" of {self.view}"
        axes = "" if self.axes == tuple(range(len(self.axes))) else f" axes {self.axes}"
        return f"{self.tensor.name}[{cut}]{view}{axes}"

    def _steps(self) -> list[tuple[int, int]]:
        """(size, canonical step) of the source axes, outermost first; axes that continue each other are merged."""
        strides = row_major_strides(self.view)
        steps: list[tuple[int, int]] = []
        for axis in self.axes:
            size, step = self.extent[axis], strides[axis]
            if size == 1:
                continue
            if steps and steps[-1][1] == size * step:
                steps[-1] = (steps[-1][0] * size, step)
            else:
                steps.append((size, step))
        return steps

    def destinations(self, indices: Indices) -> Indices:
        """Canonical flat indices of the given source indices (int64, each in 0 .. domain-1), in the same order.

        The result increases when `indices` increase and the map is monotone; the caller sorts it otherwise.
        """
        steps = self._steps()
        if not steps:
            return indices + self.first
        if len(steps) == 1:
            return indices * steps[0][1] + self.first
        rest = indices
        flat = np.full(len(indices), self.first, dtype=np.int64)
        for size, step in reversed(steps[1:]):
            rest, along = np.divmod(rest, size)
            flat += along * step
        return flat + rest * steps[0][1]

    def all_destinations(self) -> Indices:
        """Destinations of the whole domain in source order."""
        return self.destinations(np.arange(self.domain, dtype=np.int64))

    def inverse(self, destinations: Indices) -> Indices:
        """Source indices of the given canonical flat indices, in the same order.

        Raises: ValueError when a destination lies outside the box.
        """
        source = np.zeros(len(destinations), dtype=np.int64)
        source_strides = row_major_strides(self.source_shape)
        strides = row_major_strides(self.view)
        for position, axis in enumerate(self.axes):
            along = destinations // strides[axis] % max(self.view[axis], 1) - self.start[axis]
            if len(along) and (int(along.min()) < 0 or int(along.max()) >= self.extent[axis]):
                raise ValueError(f"{self.label}: a destination lies outside the box")
            source += along * source_strides[position]
        if len(source) and self.domain == 0:
            raise ValueError(f"{self.label}: an empty box has no destination")
        return source

    def runs(self) -> tuple[Indices, int]:
        """The box as canonical runs: first flat indices in increasing order, and the common length of the runs."""
        upright = BoxMap(self.tensor, self.view, self.start, self.extent, tuple(range(len(self.view))))
        if upright.domain == 0:
            return np.empty(0, dtype=np.int64), 0
        steps = upright._steps()
        length = steps[-1][0] if steps and steps[-1][1] == 1 else 1
        heads = np.arange(0, upright.domain, length, dtype=np.int64)
        return upright.destinations(heads), length

    def cut(self, full: NDArray[Any]) -> NDArray[Any]:
        """The box of a flat full array, as an array of `source_shape` that aliases it: a write to it is a write there.

        Raises: ValueError when `full` has not the tensor's number of elements.
        """
        corner: tuple[Any, ...] = tuple(slice(s, s + n) for s, n in zip(self.start, self.extent, strict=True))
        # The ellipsis keeps the result an array, also for a 0-d tensor.
        boxed: NDArray[Any] = full.reshape(self.view)[(*corner, Ellipsis)]
        return boxed.transpose(self.axes)

    def take(self, full: Words) -> Words:
        """A copy of the box of a flat full array, flat in source order."""
        return np.array(self.cut(full)).reshape(-1)


def overlapping(boxes: Sequence[BoxMap]) -> bool:
    """True iff two of these boxes of one tensor have an element in common."""
    boxes = [box for box in boxes if box.domain]
    if len(boxes) < 2:
        return False
    if len({box.view for box in boxes}) == 1 and len(boxes) <= FEW:
        begin = np.array([box.start for box in boxes], dtype=np.int64)
        end = begin + np.array([box.extent for box in boxes], dtype=np.int64)
        meets = ((begin[:, None] < end[None]) & (begin[None] < end[:, None])).all(axis=2)
        return int(meets.sum()) > len(boxes)
    runs = [box.runs() for box in boxes]
    begin = np.concatenate([heads for heads, _ in runs])
    end = np.concatenate([heads + length for heads, length in runs])
    order = np.argsort(begin, kind="stable")
    return bool((end[order][:-1] > begin[order][1:]).any())
