"""Pieces of piecewise-affine maps: boxes of an array that have constant steps in one canonical tensor.

The axes of the array are seen through factors: an axis of 12 may be 3 rows of 4, so that every first row of four is a
box. A factor has a range of its coordinates, and the canonical elements that one step along it moves by.
Not handled: building arrays (piecewise).

Paper: Section 5 (pi_T); Appendix A.1, beyond its classes   Proofs: affine_destinations   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.kernels.plain import Indices
from nemo_dcr.source.maps import BoxMap, Shape, row_major_strides


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of an axis: coordinates `start` .. `start + extent - 1` of `size`."""

    size: int
    start: int
    extent: int
    """At least 1."""
    step: int
    """Canonical elements for one step along it; means nothing where `extent` is 1."""


Group = tuple[Factor, ...]
"""The factors of one axis, outermost first; sizes multiply to that of the axis."""


def merged(group: Group) -> Group:
    """The fewest factors that say the same."""
    found = list[Factor]()
    for factor in group:
        if factor.size == 1:
            continue
        if found and (joined := _joined(found[-1], factor)) is not None:
            found[-1] = joined
        else:
            found.append(factor)
    return tuple(found)


def _joined(outer: Factor, inner: Factor) -> Factor | None:
    size = outer.size * inner.size
    if outer.extent == 1:
        return Factor(size, outer.start * inner.size + inner.start, inner.extent, inner.step)
    if inner.extent == inner.size and outer.step == inner.step * inner.size:
        return Factor(size, outer.start * inner.size, outer.extent * inner.size, inner.step)
    return None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an array, and where it lies in a canonical tensor."""

    tensor: TensorMeta
    first: int
    """Canonical flat index of its corner."""
    axes: tuple[Group, ...]
    """For each axis of the array."""

    def with_axis(self, axis: int, group: Group) -> Piece:
        """The same with other factors of an axis."""
        return Piece(self.tensor, self.first, (*self.axes[:axis], merged(group), *self.axes[axis + 1 :]))

    def moved(self, further: int) -> Piece:
        """The same with a corner that lies `further` canonical elements on."""
        return replace(self, first=self.first + further)

    @property
    def factors(self) -> Group:
        """Of all axes in the order of the array, as few as possible."""
        return merged(tuple(factor for group in self.axes for factor in group))

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(factor.extent for factor in self.factors)

    def strided(self) -> tuple[int, Shape, Shape]:
        """Offset, sizes and strides of the box in the flat array, for `torch.as_strided`."""
        factors = self.factors
        strides = row_major_strides(tuple(factor.size for factor in factors))
        offset = sum(factor.start * stride for factor, stride in zip(factors, strides, strict=True))
        return offset, tuple(factor.extent for factor in factors), strides

    def boxes(self) -> list[tuple[Piece, BoxMap]]:
        """The piece as boxes of the canonical tensor, with the part of the piece that each one is, in array order.

        It is one box where rows and columns of the array are those of some row-major view of the tensor.
        """
        box = _box(self)
        if box is not None:
            return [(self, box)]
        factors = self.factors
        widest = max((place for place, f in enumerate(factors) if f.extent > 1), key=lambda place: factors[place].step)
        return [each for part in _unfolded(self, factors, widest) for each in part.boxes()]

    def destinations(self, elements: Indices) -> tuple[NDArray[np.bool_], Indices]:
        """Which of the flat elements of the array lie in the piece, and the canonical flat indices of those."""
        inside, flat, rest = np.ones(len(elements), dtype=np.bool_), np.full(len(elements), self.first), elements
        for factor in reversed(self.factors):
            rest, along = np.divmod(rest, factor.size)
            along -= factor.start
            inside &= (along >= 0) & (along < factor.extent)
            flat += along * factor.step
        return inside, flat[inside]

    def elements(self, destinations: Indices) -> tuple[NDArray[np.bool_], Indices]:
        """Which of the canonical flat indices the piece has, and the flat elements of the array at those."""
        offset, _, strides = self.strided()
        steps = [each for each in zip(self.factors, strides, strict=True) if each[0].extent > 1]
        rest = destinations - self.first
        inside = rest >= 0
        flat = np.full(len(destinations), offset, dtype=np.int64)
        # The largest step first: the smaller ones together never reach it, because the map is injective on a piece.
        for factor, stride in sorted(steps, key=lambda each: -each[0].step):
            along = np.minimum(rest // factor.step, factor.extent - 1)
            rest = rest - along * factor.step
            flat += along * stride
        inside &= rest == 0
        return inside, flat[inside]


def rows(outer: Factor, inner: Factor) -> Iterator[tuple[Factor, int]]:
    """Two neighbouring factors as one, for each coordinate of the outer one; and how far its corner lies on."""
    for along in range(outer.extent):
        joined = Factor(
            outer.size * inner.size, (outer.start + along) * inner.size + inner.start, inner.extent, inner.step
        )
        yield joined, along * outer.step


def flattened(piece: Piece, axis: int) -> Iterator[Piece]:
    """The piece as pieces in which an axis has at most one factor."""
    group = merged(piece.axes[axis])
    if len(group) <= 1:
        yield piece.with_axis(axis, group)
        return
    for joined, further in rows(group[0], group[1]):
        yield from flattened(piece.with_axis(axis, (joined, *group[2:])).moved(further), axis)


def cut(factor: Factor, inner: int) -> Iterator[tuple[Factor, Factor, int]]:
    """A factor as rows of `inner`: whole rows and the parts before and after; and how far each corner lies on."""
    begin, end = factor.start, factor.start + factor.extent
    first_whole, end_whole = -(-begin // inner) * inner, end // inner * inner
    if begin // inner == (end - 1) // inner:
        ranges = [(begin, end)]
    else:
        ranges = [(begin, first_whole), (first_whole, end_whole), (end_whole, end)]
    for low, high in ranges:
        if low < high:
            count = max(1, (high - low) // inner)
            outer = Factor(factor.size // inner, low // inner, count, factor.step * inner)
            within = Factor(inner, low % inner, (high - low) // count, factor.step)
            yield outer, within, (low - begin) * factor.step


def _unfolded(piece: Piece, factors: Group, place: int) -> Iterator[Piece]:
    """One piece for each coordinate of a factor."""
    for along in range(factors[place].extent):
        single = replace(factors[place], start=factors[place].start + along, extent=1)
        axes = ((*factors[:place], single, *factors[place + 1 :]),)
        yield Piece(piece.tensor, piece.first + along * factors[place].step, axes)


def _box(piece: Piece) -> BoxMap | None:
    """The piece as a box of a row-major view of its tensor; None where it is none."""
    factors = _continued([factor for factor in piece.factors if factor.extent > 1])
    order = sorted(range(len(factors)), key=lambda place: -factors[place].step)
    view, start, extent = list[int](), list[int](), list[int]()
    period, rest = piece.tensor.numel, piece.first
    for place in order:
        factor = factors[place]
        if period % factor.step:
            return None
        view.append(period // factor.step)
        start.append(rest // factor.step)
        extent.append(factor.extent)
        if start[-1] + factor.extent > view[-1]:
            return None
        period, rest = factor.step, rest % factor.step
    axes = tuple(order.index(place) for place in range(len(factors)))
    if period > 1 or not view:
        view, start, extent, axes = [*view, period], [*start, rest], [*extent, 1], (*axes, len(view))
    return BoxMap.box(piece.tensor, tuple(start), tuple(extent), view=tuple(view), axes=axes)


def _continued(factors: list[Factor]) -> list[Factor]:
    """Factors whose destinations continue each other as one; sizes mean nothing any more."""
    found = list[Factor]()
    for factor in factors:
        if found and found[-1].step == factor.step * factor.extent:
            outer = found[-1]
            found[-1] = Factor(0, 0, outer.extent * factor.extent, factor.step)
        else:
            found.append(factor)
    return found
