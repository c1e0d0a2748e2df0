"""How the locations of one item are coded, chosen by the item's own span.

A run needs only its start. Scattered locations are the gaps between neighbours after the start: a chain of bytes where
changes are dense enough, else the smallest of u16, u32 or u64 that holds the largest gap. Where more than a fifth of
the span is active, a bitmap of the span is smaller. The span (last - first + 1) decides, not the tensor: a shard's
changes are as dense as they are, however large the tensor around them is.
The decoder accepts any location type for any item, and accepts no coding that is out of order, repeats a location,
leaves the tensor or has bytes left over.
Not handled: where the coded bytes lie in the payload (codec/layout.py).

Paper: Appendix D (contiguous locations, gaps in the smallest suitable integer type)
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from nemo_dcr import bits
from nemo_dcr.codec.records import Item
from nemo_dcr.kernels import hot
from nemo_dcr.kernels.plain import Bytes, Indices


class LocationType(IntEnum):
    """Coding of one item's locations. Numbers are wire values."""

    RUN = 0
    """Contiguous: start and count say it all."""
    CHAIN_U8 = 1
    """Gaps as bytes: 255 means add 255 and go on."""
    GAPS_U16 = 2
    GAPS_U32 = 3
    GAPS_U64 = 4
    BITMAP = 5
    """Bits from the first index on, least significant first."""

    @property
    def planes(self) -> int:
        """Bytes of one unit, each in its own plane; 0 for a run, which has no units."""
        return _PLANES[self]


_PLANES = {
    LocationType.RUN: 0,
    LocationType.CHAIN_U8: 1,
    LocationType.GAPS_U16: 2,
    LocationType.GAPS_U32: 4,
    LocationType.GAPS_U64: 8,
    LocationType.BITMAP: 1,
}

DENSE_SPAN = 5
"""A bitmap iff count * 5 > span: there it is smaller than a chain after zstd."""
CHAIN_SPAN = 400
"""A chain iff count * 400 >= span: below 0.25% the escapes cost more than the second byte of a u16 gap."""


def choose_location(item: Item) -> LocationType:
    """The location type that an encoder uses for `item`."""
    if item.indices is None:
        return LocationType.RUN
    if DENSE_SPAN * item.count > item.span:
        return LocationType.BITMAP
    if CHAIN_SPAN * item.count >= item.span:
        return LocationType.CHAIN_U8
    return _gap_type(hot.loops().gap_bounds(item.indices)[1])


def _gap_type(largest: int) -> LocationType:
    for kind in (LocationType.GAPS_U16, LocationType.GAPS_U32):
        if largest < 1 << (8 * kind.planes):
            return kind
    return LocationType.GAPS_U64


def encode_locations(item: Item, kind: LocationType) -> bits.Words:
    """The units of `item`'s locations in `kind`: words of `kind.planes` bytes; empty for a run.

    Raises: ValueError when the indices are not strictly increasing inside the tensor, or do not fit `kind`.
    """
    if item.count == 0 or item.start < 0 or item.last >= item.tensor.numel:
        raise ValueError(f"{item.tensor.name}: entries {item.start} to {item.last} of {item.tensor.numel} elements")
    if kind is LocationType.RUN:
        if item.indices is not None:
            raise ValueError(f"{item.tensor.name}: scattered locations are not a run")
        return np.empty(0, dtype=np.uint8)
    indices = item.flat_indices()
    if len(indices) != item.count or int(indices[0]) != item.start:
        raise ValueError(f"{item.tensor.name}: start or count do not match the indices")
    try:
        if kind is LocationType.CHAIN_U8:
            return hot.loops().chain_of(indices)
        if kind is LocationType.BITMAP:
            return hot.loops().bitmap_of(indices)
    except ValueError as error:
        raise ValueError(f"{item.tensor.name}: {error}") from None
    smallest, largest = hot.loops().gap_bounds(indices)
    if smallest < 1:
        raise ValueError(f"{item.tensor.name}: indices are not strictly increasing")
    if largest >= 1 << (8 * kind.planes):
        raise ValueError(f"{item.tensor.name}: a gap of {largest} does not fit {kind.name}")
    return np.diff(indices).astype(bits.unsigned_of_width(kind.planes))


def units_bound(kind: LocationType, count: int, numel: int) -> tuple[int, int]:
    """Fewest and most units that `count` locations in a tensor of `numel` elements can need.

    A decoder checks this before it touches the units, so that their number bounds its work.
    """
    if kind is LocationType.RUN:
        return 0, 0
    if kind is LocationType.CHAIN_U8:
        return count - 1, count - 1 + numel // 255
    if kind is LocationType.BITMAP:
        return -(-count // 8), -(-numel // 8)
    return count - 1, count - 1


def decode_locations(kind: LocationType, start: int, count: int, numel: int, planes: list[Bytes]) -> Indices | None:
    """Sorted unique flat indices inside the tensor; None for a run. `planes` are the units, byte by byte.

    Raises: ValueError when the coding breaks order, uniqueness or a bound, or has units left over.
    """
    if not 1 <= count <= numel - start:
        raise ValueError(f"{count} entries from {start} in {numel} elements")
    if kind is LocationType.RUN:
        return None
    if kind is LocationType.BITMAP:
        indices = _bitmap_locations(planes[0], start, count)
    elif kind is LocationType.CHAIN_U8:
        indices = hot.loops().chain_locations(planes[0], start, count)
    else:
        indices = _gap_locations(planes, start, count, numel)
    if int(indices[-1]) >= numel or int(indices[0]) < start:
        raise ValueError(f"a location lies outside {numel} elements")
    return indices


def _gap_locations(planes: list[Bytes], start: int, count: int, numel: int) -> Indices:
    gaps = hot.loops().join_planes(planes, bits.unsigned_of_width(len(planes)))
    if int(gaps.min(initial=1)) < 1 or int(gaps.max(initial=0)) >= numel:
        raise ValueError("a gap is zero or larger than the tensor")
    indices = np.full(count, start, dtype=np.int64)
    np.cumsum(gaps, dtype=np.int64, out=indices[1:])
    indices[1:] += start
    # Each gap is below numel < 2**63: if the running sum wraps, its first wrapped value is negative.
    if int(indices.min()) < start:
        raise ValueError(f"a location lies outside {numel} elements")
    return indices


def _bitmap_locations(bitmap: Bytes, start: int, count: int) -> Indices:
    if not len(bitmap) or not bitmap[0] & 1 or not bitmap[-1]:
        raise ValueError("the bitmap does not begin at the start index or has bytes left over")
    return hot.loops().bitmap_locations(bitmap, start, count)
