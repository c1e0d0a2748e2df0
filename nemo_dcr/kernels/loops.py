"""The compiled loops of `fast`, and nothing else: numba code that releases the interpreter lock.

Each loop is compiled for the argument types written above it and for no others; numba keeps the machine code in a file
beside this module, or in the user's cache directory. Importing this module compiles what is not kept (some seconds,
once), and nothing is compiled after that.
The comparison first lists the eight-byte words that differ, without a branch, and then takes the lanes of those apart.
A lane is one element of 1, 2, 4 or 8 bytes; its width is that of the output array.
Not handled: contiguity, lengths and bounds, which `fast` has checked; big-endian machines.

Paper: Section 5 (compare step), Section 6.1 (entries of an item), Appendix D (gaps, value buffer)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.cpython.unsafe.numbers import trailing_zeros

Array = Any
"""A numpy array as numba sees it; the types stand in the decorators."""

BLOCK = 1024
"""Eight-byte words that are listed before their lanes are taken apart: both operands stay in the first cache."""

ENTRIES = 8 * BLOCK
"""Most entries that one block gives."""

ESCAPE = 255
_ONES = 0xFFFF_FFFF_FFFF_FFFF

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_AT = types.Array(types.int64, 1, "C", readonly=True)
_AT_OUT = types.Array(types.int64, 1, "C")
_WIDTHS = (types.uint8, types.uint16, types.uint32, types.uint64)
_WORDS = {kind: types.Array(kind, 1, "C", readonly=True) for kind in _WIDTHS}
_WORDS_OUT = {kind: types.Array(kind, 1, "C") for kind in _WIDTHS}


def _compiled(*signatures: Any) -> Any:
    return njit(list(signatures), nogil=True, cache=True, error_model="numpy")


def _scan(kind: Any) -> Any:
    """The comparison for one width, which is a constant in it: shifts and masks cost nothing then."""
    width = kind.bitwidth // 8
    bits, lanes, low_bits = np.uint64(8 * width), np.uint64(8 // width), np.uint64(8 * width - 1)
    mask, one, zero = np.uint64(_ONES >> (64 - 8 * width)), np.uint64(1), np.uint64(0)

    @_compiled(types.UniTuple(types.uint64, 2)(_BYTES, _BYTES, types.uint64, types.uint64, _AT_OUT, _WORDS_OUT[kind]))
    def scan(new: Array, old: Array, begin: Any, keep: Any, at: Array, values: Array) -> Any:
        left, right = new.view(np.uint64), old.view(np.uint64)
        dirty = np.empty(BLOCK, dtype=np.uint32)
        end, found, room = np.uint64(len(left)), zero, np.uint64(len(at))
        block = begin
        while block < end and room - found >= np.uint64(ENTRIES):
            size, listed = min(np.uint64(BLOCK), end - block), zero
            for word in range(size):
                dirty[listed] = np.uint32(word)
                listed += np.uint64(left[block + np.uint64(word)] != right[block + np.uint64(word)])
            for place in range(listed):
                word = block + np.uint64(dirty[place])
                differ = left[word] ^ right[word]
                kept = left[word] ^ (right[word] & keep)
                while differ != zero:
                    shift = np.uint64(trailing_zeros(differ)) & ~low_bits
                    at[found] = np.int64(word * lanes + shift // bits)
                    values[found] = (kept >> shift) & mask
                    found += one
                    differ &= ~(mask << shift)
            block += size
        return block, found

    return scan


SCANS = {kind.bitwidth // 8: _scan(kind) for kind in _WIDTHS}
"""By the bytes of an element: elements that differ from word `begin` on, flat index to `at`, `new ^ (old & keep)` to
`values`. `new` and `old` are whole eight-byte words. Returns the word to go on with and the entries written; it stops
before the block for which the outputs may lack room."""


@njit(inline="always")
def _inside(at: Array, numel: int) -> bool:
    outside = 0
    for entry in range(len(at)):
        outside |= (at[entry] < 0) | (at[entry] >= numel)
    return outside == 0


@_compiled(*(types.boolean(_WORDS_OUT[kind], _AT, _WORDS[kind]) for kind in _WIDTHS))
def xor_scatter_loop(resident: Array, at: Array, masks: Array) -> bool:
    """XOR `masks` into `resident`; False, and nothing written, when a location lies outside."""
    if not _inside(at, len(resident)):
        return False
    for entry in range(len(at)):
        resident[np.uint64(at[entry])] ^= masks[entry]
    return True


@_compiled(*(types.boolean(_WORDS_OUT[kind], _AT, _WORDS[kind]) for kind in _WIDTHS))
def overwrite_scatter_loop(resident: Array, at: Array, values: Array) -> bool:
    """Write `values` into `resident`; False, and nothing written, when a location lies outside."""
    if not _inside(at, len(resident)):
        return False
    for entry in range(len(at)):
        resident[np.uint64(at[entry])] = values[entry]
    return True


@_compiled(types.UniTuple(types.int64, 2)(_AT))
def bounds(at: Array) -> Any:
    """The smallest and the largest gap between neighbours, of at least one."""
    smallest = largest = at[1] - at[0]
    for entry in range(1, len(at)):
        gap = at[entry] - at[entry - 1]
        smallest, largest = min(smallest, gap), max(largest, gap)
    return smallest, largest


@_compiled(types.int64(_AT, _BYTES_OUT))
def write_chain(at: Array, chain: Array) -> Any:
    """The chain of the gaps of `at`; returns its bytes, or -1 where a gap is not positive.

    `chain` has room for one byte for each gap and one for each 255 elements between the first and the last location.
    """
    done = np.uint64(0)
    for entry in range(1, len(at)):
        gap = at[entry] - at[entry - 1]
        if gap < 1:
            return -1
        while gap >= ESCAPE:
            chain[done] = np.uint8(ESCAPE)
            done += np.uint64(1)
            gap -= ESCAPE
        chain[done] = np.uint8(gap)
        done += np.uint64(1)
    return np.int64(done)


@_compiled(types.void(_AT, _BYTES_OUT))
def write_bitmap(at: Array, bitmap: Array) -> None:
    """One bit for each location from `at[0]` on, least significant first; `bitmap` reaches to `at[-1]`."""
    for place in range(len(bitmap)):
        bitmap[place] = np.uint8(0)
    for entry in range(len(at)):
        distance = np.uint64(at[entry] - at[0])
        bitmap[distance >> np.uint64(3)] |= np.uint8(np.uint64(1) << (distance & np.uint64(7)))


@_compiled(types.UniTuple(types.int64, 2)(_BYTES, types.int64, _AT_OUT))
def read_chain(chain: Array, start: Any, at: Array) -> Any:
    """Running sums of the gaps, from `start` on. Returns how many gaps end, and how many repeat a location."""
    ends, repeats, total, room = np.uint64(0), np.int64(0), start, np.uint64(len(at))
    before = np.int64(0)
    for place in range(len(chain)):
        byte = np.int64(chain[place])
        total += byte
        repeats += (byte == 0) & (before != ESCAPE)
        if ends < room:
            at[ends] = total
        ends += np.uint64(byte != ESCAPE)
        before = byte
    return np.int64(ends), repeats


@_compiled(types.int64(_BYTES, types.int64, _AT_OUT))
def read_bitmap(bitmap: Array, start: Any, at: Array) -> Any:
    """Locations of the set bits, from `start` on; returns how many are set."""
    found, room = np.uint64(0), np.uint64(len(at))
    for place in range(len(bitmap)):
        byte = np.uint64(bitmap[place])
        while byte != np.uint64(0):
            if found < room:
                at[found] = start + 8 * place + np.int64(trailing_zeros(byte))
            found += np.uint64(1)
            byte &= byte - np.uint64(1)
    return np.int64(found)


@_compiled(types.void(_WORDS[types.uint16], _BYTES_OUT, _BYTES_OUT))
def split_two(words: Array, low: Array, high: Array) -> None:
    """The bytes of two-byte words."""
    for place in range(len(words)):
        low[place] = np.uint8(words[place] & 255)
        high[place] = np.uint8(words[place] >> 8)


@_compiled(types.void(_BYTES, _BYTES, _WORDS_OUT[types.uint16]))
def join_two(low: Array, high: Array, words: Array) -> None:
    """Two-byte words from their bytes."""
    for place in range(len(words)):
        words[place] = np.uint16(low[place]) | (np.uint16(high[place]) << np.uint16(8))
