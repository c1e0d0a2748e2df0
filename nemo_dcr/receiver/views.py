"""Which bytes a strided view covers, exactly.

A view is normalised: axes of size 1 vanish and adjacent axes that are contiguous merge, so two views are equal iff they
name the same elements in the same row-major order. Overlap is decided on exact byte runs, never on spans: the even and
the odd columns of one matrix are disjoint.
Not handled: negative strides (torch has none).

Paper: Section 6.1 (destination view); Table A.2   Proofs: L5 inactive_unchanged   Conditions: LC1, LC6, LC7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nemo_dcr.bits.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class View:
    """Elements of one storage in row-major order."""

    storage: int
    """Number of the resident storage, or `CANONICAL` for elements of the canonical tensor."""
    offset: int
    """First element, in elements of `dtype` from the start of the storage."""
    dims: tuple[tuple[int, int], ...]
    """(size, stride) of each normalised axis, outermost first."""
    dtype: str
    width: int
    """Bytes of one element."""

    @property
    def numel(self) -> int:
        """Number of elements, counting repeated ones."""
        return prod(size for size, _ in self.dims)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and one past the last byte; empty views have an empty span."""
        start = self.offset * self.width
        if self.numel == 0:
            return start, start
        return start, start + (sum((size - 1) * stride for size, stride in self.dims) + 1) * self.width


CANONICAL = -1
"""Storage number of views of the canonical tensor that a loader is given."""


def view_of(tensor: Tensor, storage: int) -> View:
    """The normalised view of `tensor`; `storage` is the number that stands for the storage behind it.

    Raises: UnsupportedDtype.
    """
    dims = _normalised(tensor.shape, tensor.stride())
    return View(storage, int(tensor.storage_offset()), dims, dtype_name(tensor.dtype), tensor.itemsize)


def is_view(tensor: Tensor, storage: int, view: View | None) -> bool:
    """As `view_of(tensor, storage) == view`, without making the view: it is asked at every copy.

    Raises: UnsupportedDtype.
    """
    return (
        view is not None
        and view.storage == storage
        and view.offset == tensor.storage_offset()
        and view.dims == _normalised(tensor.shape, tensor.stride())
        and view.dtype == dtype_name(tensor.dtype)
    )


@lru_cache(maxsize=4096)
def _normalised(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if 0 in shape:
        return ((0, 1),)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return tuple(dims)


def in_bytes(view: View, storage: int, base: int) -> View:
    """The same memory as single bytes of the piece number `storage`, in which the view's storage begins at `base`."""
    dims = tuple((size, stride * view.width) for size, stride in view.dims)
    return View(storage, base + view.offset * view.width, (*dims, (view.width, 1)), "U8", 1)


def byte_runs(view: View) -> tuple[NDArray[np.int64], int]:
    """Starts of the contiguous byte runs of `view`, unsorted, and the common length of the runs in bytes."""
    if view.numel == 0:
        return np.empty(0, dtype=np.int64), 0
    length = view.width
    outer = sorted(view.dims, key=lambda dim: dim[1])
    while outer and outer[0][1] * view.width == length:
        length *= outer.pop(0)[0]
    starts = np.array([view.offset * view.width], dtype=np.int64)
    for size, stride in outer:
        steps = np.arange(size, dtype=np.int64) * (stride * view.width)
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts, length


def overlapping(views: Sequence[View]) -> dict[int, int]:
    """Every view that shares a byte with another one or with itself, mapped to one such partner.

    All views must be of one storage. Only groups whose spans meet are expanded into runs.
    """
    found: dict[int, int] = {}
    cluster: list[int] = []
    cluster_end = 0
    for number in sorted(range(len(views)), key=lambda n: views[n].span):
        start, end = views[number].span
        if start == end:
            continue
        if cluster and start >= cluster_end:
            found.update(_overlapping_cluster(views, cluster))
            cluster = []
        cluster_end = max(cluster_end, end) if cluster else end
        cluster.append(number)
    found.update(_overlapping_cluster(views, cluster))
    return found


def _overlapping_cluster(views: Sequence[View], members: list[int]) -> dict[int, int]:
    if not members or (len(members) == 1 and _is_nested(views[members[0]])):
        return {}
    runs = [byte_runs(views[member]) for member in members]
    starts = np.concatenate([run for run, _ in runs])
    ends = np.concatenate([run + length for run, length in runs])
    owners = np.repeat(np.array(members, dtype=np.int64), [len(run) for run, _ in runs])
    order = np.argsort(starts, kind="stable")
    starts, ends, owners = starts[order], ends[order], owners[order]
    reach = np.maximum.accumulate(ends)
    # The run that reaches farthest so far: where `ends` sets a new maximum.
    is_record = np.concatenate([[True], ends[1:] > reach[:-1]])
    holder = np.maximum.accumulate(np.where(is_record, np.arange(len(ends)), 0))
    late = np.nonzero(starts[1:] < reach[:-1])[0]
    found: dict[int, int] = {}
    for left, right in zip(owners[holder[late]].tolist(), owners[late + 1].tolist(), strict=True):
        found.setdefault(left, right)
        found.setdefault(right, left)
    return found


def _is_nested(view: View) -> bool:
    """True when every axis steps over everything inside it, so that no element repeats."""
    reach = 1
    for size, stride in sorted(view.dims, key=lambda dim: dim[1]):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def covered_bytes(views: Sequence[View]) -> int:
    """Number of distinct bytes that the views cover together (all of one storage)."""
    if len(views) == 1 and _is_nested(views[0]):
        return views[0].numel * views[0].width
    runs = [byte_runs(view) for view in views]
    starts = np.concatenate([run for run, _ in runs]) if runs else np.empty(0, dtype=np.int64)
    if len(starts) == 0:
        return 0
    ends = np.concatenate([run + length for run, length in runs])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    before = np.concatenate([[starts[0]], np.maximum.accumulate(ends)[:-1]])
    return int(np.maximum(ends - np.maximum(starts, before), 0).sum())
