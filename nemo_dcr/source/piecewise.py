"""Piecewise-affine index maps: a trainer's parameter as it is put together from canonical tensors.

An `IndexMap` is an array of the trainer whose elements are elements of canonical tensors, or padding. It starts as a
canonical tensor and follows what the framework does when it imports a checkpoint: narrow, split, concatenate, stack,
permute, reshape, pad. Interleaved query, key and value heads, the fused projections of a Mamba layer, stacked experts
and padded vocabularies are such arrays, and so is each rank's part of them. None of these operations touches a value.
The map is kept as pieces. A piece is a box of the array, seen through factors of its axes, whose steps in the canonical
tensor are constant; `boxes` gives each piece as the `BoxMap` of an affine task (piecewise_tasks), so comparison,
ownership and coverage need nothing new.
Not handled: an element that feeds two destinations, or arithmetic; those tasks are residual. A reshape or cut that
would leave more than `MAX_PIECES` pieces is refused.

Paper: Section 5 (pi_T); Appendix A.1, beyond its classes   Proofs: affine_destinations   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.kernels.plain import Indices
from nemo_dcr.source.maps import Shape, overlapping, row_major_strides
from nemo_dcr.source.pieces import Factor, Group, Piece, cut, flattened, merged, rows

MAX_PIECES = 1 << 16


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Which canonical element each element of an array is. Build it with `of` and the operations."""

    shape: Shape
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tensor: TensorMeta) -> IndexMap:
        """The canonical tensor itself."""
        axes = tuple(
            merged((Factor(size, 0, size, step),))
            for size, step in zip(tensor.shape, row_major_strides(tensor.shape), strict=True)
        )
        return cls(tensor.shape, (Piece(tensor, 0, axes),) if tensor.numel else ())

    # ------------------------------------------------------------------------------------------------- operations

    def narrow(self, axis: int, start: int, length: int) -> IndexMap:
        """Elements `start` .. `start + length - 1` along an axis, as `torch.narrow`.

        Raises: UnsupportedMapping (SC5) for a range that leaves the axis.
        """
        axis = self._axis(axis)
        if start < 0 or length < 0 or start + length > self.shape[axis]:
            raise self._unsupported(f"range {start}:{start + length} leaves axis {axis} of shape {self.shape}")
        found = (part for piece in self.pieces for part in _narrowed(piece, axis, start, length))
        return self._with(self._resized(axis, length), found)

    def split(self, axis: int, lengths: Sequence[int]) -> tuple[IndexMap, ...]:
        """Parts along an axis, as `torch.split`.

        Raises: UnsupportedMapping (SC5) when the lengths do not add up to the axis.
        """
        axis = self._axis(axis)
        if sum(lengths) != self.shape[axis]:
            raise self._unsupported(f"lengths {tuple(lengths)} do not add up to axis {axis} of shape {self.shape}")
        begins = np.cumsum([0, *lengths]).tolist()
        return tuple(self.narrow(axis, begin, length) for begin, length in zip(begins, lengths, strict=False))

    @classmethod
    def concatenate(cls, parts: Sequence[IndexMap], axis: int) -> IndexMap:
        """Arrays one after another along an axis, as `torch.cat`.

        Raises: UnsupportedMapping (SC5) when there is none, or shapes differ along another axis.
        """
        if not parts:
            raise UnsupportedMapping("", "SC5", "nothing to concatenate")
        axis, total = parts[0]._axis(axis), 0
        for part in parts:
            if part._resized(axis, 0) != parts[0]._resized(axis, 0):
                raise part._unsupported(f"shapes {parts[0].shape} and {part.shape} do not fit along axis {axis}")
            total += part.shape[axis]
        found, offset = list[Piece](), 0
        for part in parts:
            found += [moved for piece in part.pieces for moved in _moved(piece, axis, offset, part.shape[axis], total)]
            offset += part.shape[axis]
        return parts[0]._with(parts[0]._resized(axis, total), found)

    @classmethod
    def stack(cls, parts: Sequence[IndexMap], axis: int) -> IndexMap:
        """Arrays of one shape along a new axis, as `torch.stack`. Raises: as `concatenate`."""

        def raised(part: IndexMap) -> IndexMap:
            return part.reshape((*part.shape[:axis], 1, *part.shape[axis:]))

        return cls.concatenate([raised(part) for part in parts], axis)

    def pad(self, axis: int, before: int, after: int) -> IndexMap:
        """Elements without a destination before and after those along an axis.

        Raises: UnsupportedMapping (SC5) for a negative count.
        """
        axis = self._axis(axis)
        if before < 0 or after < 0:
            raise self._unsupported(f"padding of {before} and {after} elements")
        total = before + self.shape[axis] + after
        found = (moved for piece in self.pieces for moved in _moved(piece, axis, before, self.shape[axis], total))
        return self._with(self._resized(axis, total), found)

    def permute(self, axes: Sequence[int]) -> IndexMap:
        """Axis i of the result is axis axes[i], as `torch.permute`.

        Raises: UnsupportedMapping (SC5) when `axes` is no permutation.
        """
        if sorted(axes) != list(range(len(self.shape))):
            raise self._unsupported(f"{tuple(axes)} is no permutation of the axes of shape {self.shape}")
        pieces = (replace(piece, axes=tuple(piece.axes[axis] for axis in axes)) for piece in self.pieces)
        return self._with(tuple(self.shape[axis] for axis in axes), pieces)

    def reshape(self, shape: Shape) -> IndexMap:
        """The same elements in row-major order under another shape.

        Raises: UnsupportedMapping (SC5) for a shape with another number of elements.
        """
        if prod(shape) != prod(self.shape):
            raise self._unsupported(f"shape {self.shape} has not the elements of {shape}")
        return self._with(shape, (part for piece in self.pieces for part in _regrouped(piece, shape)))

    # ---------------------------------------------------------------------------------------------------- answers

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """The canonical tensors that it has elements of, sorted by name."""
        return tuple(sorted({piece.tensor for piece in self.pieces}))

    @property
    def domain(self) -> int:
        """Number of elements that have a destination."""
        return sum(piece.count for piece in self.pieces)

    def check(self) -> None:
        """The proof obligation: no canonical element is two elements of the array.

        Raises: UnsupportedMapping (SC5) that names the tensor.
        """
        for tensor in self.tensors:
            boxes = [box for piece in self.pieces if piece.tensor == tensor for _, box in piece.boxes()]
            if overlapping(boxes):
                raise UnsupportedMapping(tensor.name, "SC5", "an element of it is put into the parameter twice")

    def destinations(self, elements: Indices) -> tuple[Indices, Indices]:
        """For each flat element of the array: place of its canonical tensor in `tensors`, and the flat index there.

        Both are -1 for padding.
        """
        which, flat = np.full((2, len(elements)), -1, dtype=np.int64)
        number = {tensor: place for place, tensor in enumerate(self.tensors)}
        for piece in self.pieces:
            inside, found = piece.destinations(elements)
            which[inside], flat[inside] = number[piece.tensor], found
        return which, flat

    def elements(self, tensor: TensorMeta, destinations: Indices) -> Indices:
        """The flat element of the array at each canonical flat index of a tensor; -1 where the array has it not."""
        found = np.full(len(destinations), -1, dtype=np.int64)
        for piece in self.pieces:
            if piece.tensor == tensor:
                inside, elements = piece.elements(destinations)
                found[inside] = elements
        return found

    # ---------------------------------------------------------------------------------------------------- helpers

    def _with(self, shape: Shape, pieces: Iterable[Piece]) -> IndexMap:
        kept = list[Piece]()
        for piece in pieces:
            kept.append(piece)
            if len(kept) > MAX_PIECES:
                raise self._unsupported(f"it falls into more than {MAX_PIECES} pieces")
        return IndexMap(shape, tuple(kept))

    def _axis(self, axis: int) -> int:
        if not -len(self.shape) <= axis < len(self.shape):
            raise self._unsupported(f"shape {self.shape} has no axis {axis}")
        return axis % len(self.shape)

    def _resized(self, axis: int, size: int) -> Shape:
        return (*self.shape[:axis], size, *self.shape[axis + 1 :])

    def _unsupported(self, detail: str) -> UnsupportedMapping:
        return UnsupportedMapping(self.pieces[0].tensor.name if self.pieces else "", "SC5", detail)


def _narrowed(piece: Piece, axis: int, start: int, length: int) -> Iterator[Piece]:
    group = merged(piece.axes[axis])
    inner = prod(factor.size for factor in group[1:])
    if len(group) > 1 and (start % inner or length % inner):
        for part in flattened(piece, axis):
            yield from _narrowed(part, axis, start, length)
        return
    outer = group[0] if group else Factor(1, 0, 1, 0)
    begin, count = start // inner, length // inner
    low, high = max(outer.start, begin), min(outer.start + outer.extent, begin + count)
    if low < high:
        left = Factor(count, low - begin, high - low, outer.step)
        yield piece.with_axis(axis, (left, *group[1:])).moved((low - outer.start) * outer.step)


def _moved(piece: Piece, axis: int, offset: int, size: int, total: int) -> Iterator[Piece]:
    """The piece of an array of `size` along an axis, in one of `total` where it begins at `offset`."""
    group = merged(piece.axes[axis])
    inner = prod(factor.size for factor in group[1:])
    if len(group) > 1 and (offset % inner or total % inner):
        for part in flattened(piece, axis):
            yield from _moved(part, axis, offset, size, total)
        return
    outer = group[0] if group else Factor(1, 0, 1, 0)
    moved = replace(outer, size=total // inner, start=outer.start + offset // inner)
    yield piece.with_axis(axis, (moved, *group[1:]))


def _regrouped(piece: Piece, shape: Shape) -> Iterator[Piece]:
    """The piece under another shape of the array, cut where a factor lies in two axes."""
    if not shape:
        yield replace(piece, axes=())
        return
    yield from _dealt(piece, piece.factors, shape[:-1], shape[-1], (), ())


def _dealt(
    piece: Piece, left: Group, outside: Shape, need: int, group: Group, inside: tuple[Group, ...]
) -> Iterator[Piece]:
    """Deal factors out to the axes of a shape, from the innermost one.

    Args:
        piece: whose tensor and corner count.
        left: factors without an axis, outermost first.
        outside: sizes of the axes outside of this one.
        need: product of the sizes of the factors that this axis still lacks.
        group: what this axis has.
        inside: what the axes inside of it have.
    """
    if need == 1:
        inside = (group, *inside)
        if outside:
            yield from _dealt(piece, left, outside[:-1], outside[-1], (), inside)
        else:
            yield replace(piece, axes=inside)
        return
    factor, rest = left[-1], left[:-1]
    if need % factor.size == 0:
        yield from _dealt(piece, rest, outside, need // factor.size, (factor, *group), inside)
    elif factor.size % need == 0:
        for outer, inner, further in cut(factor, need):
            yield from _dealt(piece.moved(further), (*rest, outer), outside, 1, (inner, *group), inside)
    else:
        for joined, further in rows(rest[-1], factor):
            yield from _dealt(piece.moved(further), (*rest[:-1], joined), outside, need, group, inside)
