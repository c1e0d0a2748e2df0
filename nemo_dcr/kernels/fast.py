"""The compiled loops behind the interface of `plain`: the same bits, and the same errors, on every input.

A call whose arrays the loops cannot walk (strided, misaligned, of another byte order) or whose input is refused goes to
`plain`, which is the definition. A comparison gives indices and values in one pass: each operand is read once, and
beside the result it needs a buffer of fixed size; a result may be the first part of an array of twice its length.
Scatters look at their locations before they write.
Not handled: what `plain` does not handle.

Paper: Section 5 (compare step), Section 6.1 (entries of an item), Appendix D (gaps, value buffer)
Proofs: change_detection_complete
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.bits import Words
from nemo_dcr.kernels import plain
from nemo_dcr.kernels.loops import (
    ENTRIES,
    ESCAPE,
    SCANS,
    bounds,
    join_two,
    overwrite_scatter_loop,
    read_bitmap,
    read_chain,
    split_two,
    write_bitmap,
    write_chain,
    xor_scatter_loop,
)
from nemo_dcr.kernels.plain import Bytes, Indices, Locations, Planes

_ROOM = 8 * ENTRIES
"""Entries that a scan finds before they are taken out of its buffer."""

_TAIL = 8
"""Room for the elements behind the last whole word."""

_SPARSE = 4
"""Escapes for each gap, from which on a chain is mostly escapes."""

_KEEP_ALL, _KEEP_NOTHING = np.uint64(0xFFFF_FFFF_FFFF_FFFF), np.uint64(0)
_WIDTHS = {np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")}

if sys.byteorder != "little":
    raise ImportError("the compiled loops are for little-endian machines")


class _Buffers(threading.local):
    """What a scan of this thread writes into first; made at its first scan and used by all of them."""

    def __init__(self) -> None:
        self.at: Indices = np.empty(_ROOM, dtype=np.int64)
        self.values: NDArray[np.uint64] = np.empty(_ROOM, dtype=np.uint64)


_BUFFERS = _Buffers()


def changes(new: Words, old: Words, *, masks: bool) -> tuple[Indices, Words]:
    """See `plain.changes`."""
    if new.dtype != old.dtype or new.shape != old.shape or not (_walks(new) and _walks(old)):
        return plain.changes(new, old, masks=masks)
    at, values = _BUFFERS.at, _BUFFERS.values.view(new.dtype)[:_ROOM]
    keep = _KEEP_ALL if masks else _KEEP_NOTHING
    whole = new.nbytes // 8 * 8
    left, right = new.view(np.uint8)[:whole], old.view(np.uint8)[:whole]
    scan, word, end, count = SCANS[new.itemsize], 0, whole // 8, 0
    while word < end:
        if word:
            at, values = _grown(at, values, count, count * end // word)
        word, found = scan(left, right, np.uint64(word), keep, at[count:-_TAIL], values[count:-_TAIL])
        word, count = int(word), count + int(found)
    rest = whole // new.itemsize
    if rest < len(new):
        last, tail = plain.changes(new[rest:], old[rest:], masks=masks)
        at[count : count + len(last)] = last + rest
        values[count : count + len(last)] = tail
        count += len(last)
    if at is _BUFFERS.at or 2 * count < len(at):
        return at[:count].copy(), values[:count].copy()
    return at[:count], values[:count]


def _grown(at: Indices, values: Words, count: int, expected: int) -> tuple[Indices, Words]:
    """Longer arrays with the first `count` entries, for about `expected` of them: an eighth more, and a block."""
    room = expected + expected // 8 + ENTRIES + _TAIL
    more: tuple[Indices, Words] = np.empty(room, dtype=np.int64), np.empty(room, dtype=values.dtype)
    more[0][:count], more[1][:count] = at[:count], values[:count]
    return more


def changed_indices(new: Words, old: Words) -> Indices:
    """See `plain.changed_indices`."""
    return changes(new, old, masks=True)[0]


def xor_scatter(resident: Words, at: Locations, masks: Words) -> None:
    """See `plain.xor_scatter`."""
    if not (_fits(resident, at, masks) and xor_scatter_loop(resident, at, masks)):
        plain.xor_scatter(resident, at, masks)


def overwrite_scatter(resident: Words, at: Locations, values: Words) -> None:
    """See `plain.overwrite_scatter`."""
    if not (_fits(resident, at, values) and overwrite_scatter_loop(resident, at, values)):
        plain.overwrite_scatter(resident, at, values)


def gap_bounds(indices: Indices) -> tuple[int, int]:
    """See `plain.gap_bounds`."""
    if len(indices) < 2 or not _is_index(indices):
        return plain.gap_bounds(indices)
    smallest, largest = bounds(indices)
    return smallest, largest


def chain_of(indices: Indices) -> Bytes:
    """See `plain.chain_of`."""
    if len(indices) < 2 or not _is_index(indices):
        return plain.chain_of(indices)
    escapes = int(indices[-1] - indices[0]) // ESCAPE
    if not 0 <= escapes <= _SPARSE * len(indices):  # mostly escapes: numpy writes those in bulk
        return plain.chain_of(indices)
    chain = np.empty(len(indices) - 1 + escapes, dtype=np.uint8)
    nbytes = write_chain(indices, chain)
    return chain[:nbytes] if nbytes >= 0 else plain.chain_of(indices)


def bitmap_of(indices: Indices) -> Bytes:
    """See `plain.bitmap_of`."""
    if len(indices) < 2 or not _is_index(indices) or bounds(indices)[0] < 1:
        return plain.bitmap_of(indices)
    bitmap = np.empty(int(indices[-1] - indices[0]) // 8 + 1, dtype=np.uint8)
    write_bitmap(indices, bitmap)
    return bitmap


def chain_locations(chain: Bytes, start: int, count: int) -> Indices:
    """See `plain.chain_locations`."""
    if not _walks(chain) or count < 1:
        return plain.chain_locations(chain, start, count)
    locations = np.empty(count, dtype=np.int64)
    locations[0] = start
    ends, repeats = read_chain(chain, start, locations[1:])
    if ends != count - 1 or repeats or (len(chain) and chain[-1] == ESCAPE):
        return plain.chain_locations(chain, start, count)
    return locations


def bitmap_locations(bitmap: Bytes, start: int, count: int) -> Indices:
    """See `plain.bitmap_locations`."""
    if not _walks(bitmap):
        return plain.bitmap_locations(bitmap, start, count)
    locations = np.empty(count, dtype=np.int64)
    if read_bitmap(bitmap, start, locations) != count:
        return plain.bitmap_locations(bitmap, start, count)
    return locations


def split_planes(words: Words, planes: Planes) -> None:
    """See `plain.split_planes`."""
    if words.itemsize == 2 and _walks(words) and len(planes) == 2 and all(_takes(plane, words) for plane in planes):
        split_two(words, planes[0], planes[1])
    else:
        plain.split_planes(words, planes)


def join_planes(planes: Planes, dtype: np.dtype[Any]) -> Words:
    """See `plain.join_planes`."""
    if len(planes) == 2 and dtype == np.dtype("<u2") and len(planes[0]) == len(planes[1]) and all(map(_walks, planes)):
        words: Words = np.empty(len(planes[0]), dtype=dtype)
        join_two(planes[0], planes[1], words)
        return words
    return plain.join_planes(planes, dtype)


def _walks(words: Words) -> bool:
    """Whether a loop can walk along the words."""
    flags = words.flags
    return words.ndim == 1 and flags.c_contiguous and flags.aligned and words.dtype in _WIDTHS


def _takes(plane: Bytes, words: Words) -> bool:
    return _walks(plane) and len(plane) == len(words) and plane.flags.writeable


def _is_index(at: Locations) -> bool:
    return (
        isinstance(at, np.ndarray)
        and at.dtype == np.int64
        and at.ndim == 1
        and at.flags.c_contiguous
        and at.flags.aligned
    )


def _fits(resident: Words, at: Locations, entries: Words) -> bool:
    """Whether a scatter can run; overlapping arrays are numpy's to copy."""
    return (
        isinstance(at, np.ndarray)
        and _is_index(at)
        and _walks(resident)
        and resident.flags.writeable
        and _walks(entries)
        and entries.dtype == resident.dtype
        and len(entries) == len(at)
        and not np.may_share_memory(resident, entries)
        and not np.may_share_memory(resident, at)
    )
