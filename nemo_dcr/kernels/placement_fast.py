"""The compiled form of `placement_plain`: the same places and the same bits.

Finding the places and writing them are two loops: a loop that divides, compares and writes at once keeps fewer cache
misses in flight. An index outside the copy is skipped, also where indices are not sorted as they should be, so that no
write leaves the destination view. Loops run without the interpreter's lock and are kept on disk once compiled.
Not handled: the first compilation, which takes about a second for each width; call `warm` before a refit.

Paper: Section 6.1 (destination view)   Proofs: L5 inactive_unchanged
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numba
import numpy as np

from nemo_dcr.bits import Words, unsigned_of_width
from nemo_dcr.kernels.placement_plain import Axes, Indices, reach, usable


def _compiled(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # No directory that can be written: every process compiles for itself.
        return numba.njit(nogil=True)(function)


def _bisect_loop(indices, wanted):  # type: ignore[no-untyped-def]
    low, high = 0, len(indices)
    while low < high:
        middle = (low + high) // 2
        if indices[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


_bisect = _compiled(_bisect_loop)


def _locate_loop(indices, axes, first, target, span, positions, at):  # type: ignore[no-untyped-def]
    found = 0
    for position in range(_bisect(indices, first), _bisect(indices, first + span)):
        rest = indices[position] - first
        place = target
        taken = rest >= 0
        for axis in range(axes.shape[0]):
            stride = axes[axis, 1]
            # Small numbers divide faster, and every tensor below 2**32 elements has only those.
            coordinate = rest
            if stride > 1:
                if (rest | stride) >> 32 == 0:
                    coordinate = np.int64(np.uint32(rest) // np.uint32(stride))
                else:
                    coordinate = rest // stride
            rest -= coordinate * stride
            taken &= coordinate < axes[axis, 0]
            place += coordinate * axes[axis, 2]
        positions[found] = position
        at[found] = place
        found += taken and rest == 0
    return found


def _xor_at_loop(resident, at, shift, masks):  # type: ignore[no-untyped-def]
    for position in range(len(at)):
        resident[np.uint64(at[position] + shift)] ^= masks[position]


def _overwrite_at_loop(resident, at, shift, values):  # type: ignore[no-untyped-def]
    for position in range(len(at)):
        resident[np.uint64(at[position] + shift)] = values[position]


def _xor_block_loop(resident, target, indices, first, length, masks):  # type: ignore[no-untyped-def]
    taken = 0
    for position in range(_bisect(indices, first), _bisect(indices, first + length)):
        distance = indices[position] - first
        if 0 <= distance < length:
            resident[np.uint64(target + distance)] ^= masks[position]
            taken += 1
    return taken


def _overwrite_block_loop(resident, target, indices, first, length, values):  # type: ignore[no-untyped-def]
    taken = 0
    for position in range(_bisect(indices, first), _bisect(indices, first + length)):
        distance = indices[position] - first
        if 0 <= distance < length:
            resident[np.uint64(target + distance)] = values[position]
            taken += 1
    return taken


_locate = _compiled(_locate_loop)
_xor_at = _compiled(_xor_at_loop)
_overwrite_at = _compiled(_overwrite_at_loop)
_xor_block = _compiled(_xor_block_loop)
_overwrite_block = _compiled(_overwrite_block_loop)


def locate(indices: Indices, axes: Axes, first: int, target: int) -> tuple[Indices, Indices]:
    """See `placement_plain.locate`."""
    positions, at = np.empty((2, len(indices) + 1), dtype=np.int64)
    found = _locate(usable(indices), axes, first, target, reach(axes), positions, at)
    return positions[:found], at[:found]


def xor_at(resident: Words, at: Indices, shift: int, masks: Words) -> None:
    """See `placement_plain.xor_at`."""
    _xor_at(resident, at, shift, usable(masks))


def overwrite_at(resident: Words, at: Indices, shift: int, values: Words) -> None:
    """See `placement_plain.overwrite_at`."""
    _overwrite_at(resident, at, shift, usable(values))


def xor_block(resident: Words, target: int, indices: Indices, first: int, length: int, masks: Words) -> int:
    """See `placement_plain.xor_block`."""
    return int(_xor_block(resident, target, usable(indices), first, length, usable(masks)))


def overwrite_block(resident: Words, target: int, indices: Indices, first: int, length: int, values: Words) -> int:
    """See `placement_plain.overwrite_block`."""
    return int(_overwrite_block(resident, target, usable(indices), first, length, usable(values)))


def warm(widths: Iterable[int]) -> None:
    """Compile, or fetch from disk, the loops for words of these many bytes."""
    if not (widths := set(widths)):
        return
    indices = np.zeros(1, dtype=np.int64)
    locate(indices, np.array([[1, 1, 1]], dtype=np.int64), 0, 0)
    for width in widths:
        words = np.zeros(1, dtype=unsigned_of_width(width))
        for write in (xor_at, overwrite_at):
            write(words, indices, 0, words)
        for write_block in (xor_block, overwrite_block):
            write_block(words, 0, indices, 0, 1, words)
