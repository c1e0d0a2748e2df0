"""The numpy definition of every hot loop: compare, gather, scatter, gap chain, byte planes.

A kernel takes one-dimensional arrays of little-endian unsigned words over any memory; it never assumes where they live
or that they are contiguous. What could grow with the tensor is done block by block, so a temporary is one block or
proportional to the changes, never to the tensor. A faster kernel must give the same bits on every input.
Not handled: bounds of indices and shapes, which the caller has checked; a negative index would wrap.

Paper: Section 5 (compare step), Section 6.1 (entries of an item), Appendix D (gaps, value buffer)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.bits import Words

BLOCK_BYTES = 1 << 19
"""Bytes of one operand that a loop touches before it goes on: two operands and their temporaries stay in cache."""

Indices = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Locations = Indices | slice
"""Unique flat indices, or a slice for a contiguous run."""

Planes = Sequence[Bytes]
"""One array of bytes for each byte of a word, least significant first."""

_ESCAPE = 255


def changes(new: Words, old: Words, *, masks: bool) -> tuple[Indices, Words]:
    """Sorted flat indices at which the stored words differ, and there `old ^ new` with `masks`, else the new words.

    Raises: ValueError when width or length differ.
    """
    indices = changed_indices(new, old)
    return indices, xor_masks(new, old, indices) if masks else gather(new, indices)


def changed_indices(new: Words, old: Words) -> Indices:
    """Sorted flat indices at which the stored words differ; int64.

    Raises: ValueError when width or length differ.
    """
    if new.dtype != old.dtype or new.shape != old.shape or new.ndim != 1:
        raise ValueError(f"cannot compare {new.dtype}{list(new.shape)} with {old.dtype}{list(old.shape)}")
    step = BLOCK_BYTES // new.itemsize
    found = []
    for start in range(0, len(new), step):
        block: Indices = np.flatnonzero(new[start : start + step] != old[start : start + step])
        if len(block):
            block += start
            found.append(block)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def xor_masks(new: Words, old: Words, at: Locations) -> Words:
    """`old ^ new` at the given locations; a new array."""
    masks: Words = new[at] ^ old[at]
    return masks


def gather(new: Words, at: Locations) -> Words:
    """The words at the given locations; always a new array."""
    return np.array(new[at])


def xor_scatter(resident: Words, at: Locations, masks: Words) -> None:
    """XOR `masks` into `resident` at the given unique locations, in place."""
    resident[at] ^= masks


def overwrite_scatter(resident: Words, at: Locations, values: Words) -> None:
    """Write `values` into `resident` at the given unique locations, in place."""
    resident[at] = values


def gap_bounds(indices: Indices) -> tuple[int, int]:
    """The smallest and the largest step between neighbours; (1, 0) for fewer than two indices."""
    gaps = np.diff(indices)
    return int(gaps.min()) if len(gaps) else 1, int(gaps.max()) if len(gaps) else 0


def encode_chain(gaps: Indices) -> Bytes:
    """Gaps (each >= 1) as a chain of bytes: 255 means add 255 and go on, any other byte adds itself and ends a gap."""
    if not len(gaps) or int(gaps.max()) < _ESCAPE:
        return gaps.astype(np.uint8)
    escapes = gaps // _ESCAPE
    ends = np.cumsum(escapes)
    ends += np.arange(len(gaps))
    chain = np.full(int(ends[-1]) + 1, _ESCAPE, dtype=np.uint8)
    chain[ends] = gaps % _ESCAPE
    return chain


def chain_of(indices: Indices) -> Bytes:
    """The chain of the gaps between strictly increasing indices; empty for a single one.

    Raises: ValueError when the indices do not increase.
    """
    return encode_chain(_increasing(indices))


def chain_locations(chain: Bytes, start: int, count: int) -> Indices:
    """The `count` locations, at least one, that begin at `start` and go on by the gaps of `chain`.

    Raises: ValueError when the chain does not hold exactly `count - 1` gaps of at least 1.
    """
    locations = np.zeros(count, dtype=np.int64)
    locations[1:] = decode_chain(chain, count - 1)
    locations += start
    return locations


def decode_chain(chain: Bytes, count: int) -> Indices:
    """Distances of `count` entries from the entry before the chain: the running sums of its gaps, strictly increasing.

    Raises: ValueError when the chain does not hold exactly `count` gaps of at least 1.
    """
    if (int(chain[-1]) if len(chain) else 0) == _ESCAPE:
        raise ValueError("the gap chain ends inside a gap")
    zeros = np.flatnonzero(chain == 0)
    if len(zeros) and (zeros[0] == 0 or np.any(chain[zeros - 1] != _ESCAPE)):
        raise ValueError("the gap chain repeats a location")
    distances = np.empty(count, dtype=np.int64)
    done, carry = 0, 0
    for start in range(0, len(chain), BLOCK_BYTES):
        block = chain[start : start + BLOCK_BYTES]
        sums = np.cumsum(block, dtype=np.int64)
        sums += carry
        carry = int(sums[-1])
        ends = sums[block != _ESCAPE]
        if len(ends) > count - done:
            raise ValueError(f"the gap chain holds more than {count} gaps")
        distances[done : done + len(ends)] = ends
        done += len(ends)
    if done != count:
        raise ValueError(f"the gap chain holds {done} gaps, not {count}")
    return distances


def encode_bitmap(distances: Indices, span: int) -> Bytes:
    """Sorted unique distances below `span` as bits, least significant first; the padding bits are zero."""
    bitmap = np.empty(-(-span // 8), dtype=np.uint8)
    for start in range(0, span, BLOCK_BYTES):
        first, last = np.searchsorted(distances, (start, start + BLOCK_BYTES))
        active = np.zeros(min(BLOCK_BYTES, span - start), dtype=np.bool_)
        active[distances[first:last] - start] = True
        packed = np.packbits(active, bitorder="little")
        bitmap[start // 8 : start // 8 + len(packed)] = packed
    return bitmap


def bitmap_of(indices: Indices) -> Bytes:
    """Strictly increasing indices, at least one, as bits from the first one on.

    Raises: ValueError when the indices do not increase.
    """
    _increasing(indices)
    return encode_bitmap(indices - indices[0], int(indices[-1] - indices[0]) + 1)


def bitmap_locations(bitmap: Bytes, start: int, count: int) -> Indices:
    """The `count` locations whose bits are set in a bitmap that begins at `start`.

    Raises: ValueError when not exactly `count` bits are set.
    """
    locations = decode_bitmap(bitmap, count)
    locations += start
    return locations


def decode_bitmap(bitmap: Bytes, count: int) -> Indices:
    """Sorted distances of the bits set in `bitmap`.

    Raises: ValueError when not exactly `count` bits are set.
    """
    distances = np.empty(count, dtype=np.int64)
    done = 0
    step = BLOCK_BYTES // 8
    for start in range(0, len(bitmap), step):
        found = np.flatnonzero(np.unpackbits(bitmap[start : start + step], bitorder="little"))
        if len(found) > count - done:
            raise ValueError(f"the bitmap holds more than {count} locations")
        distances[done : done + len(found)] = found + 8 * start
        done += len(found)
    if done != count:
        raise ValueError(f"the bitmap holds {done} locations, not {count}")
    return distances


def split_planes(words: Words, planes: Planes) -> None:
    """Write byte k of every word, least significant first, into `planes[k]`; one plane for each byte of the width."""
    lanes = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), len(planes))
    for byte, plane in enumerate(planes):
        plane[:] = lanes[:, byte]


def join_planes(planes: Planes, dtype: np.dtype[Any]) -> Words:
    """The words whose byte k is `planes[k]`; a new writable array of the little-endian unsigned `dtype`."""
    words: Words = np.empty(len(planes[0]), dtype=dtype)
    lanes = words.view(np.uint8).reshape(len(words), len(planes))
    for byte, plane in enumerate(planes):
        lanes[:, byte] = plane
    return words


def _increasing(indices: Indices) -> Indices:
    gaps = np.diff(indices)
    if len(gaps) and int(gaps.min()) < 1:
        raise ValueError("indices are not strictly increasing")
    return gaps
