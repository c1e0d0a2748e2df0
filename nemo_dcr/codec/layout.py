"""Where the byte planes of every item lie in a payload body.

A stream holds one kind of unit for the whole payload: all gaps of one location type, or all values of one encoding and
width. Items take consecutive ranges of it in declared order, without holes or overlaps. A stream is stored as byte
planes: byte 0 of all its units, then byte 1, and so on. Streams follow the metadata in the order of `Stream`.
Encoder and decoder reserve the same ranges in the same order, so an offset that a payload declares has one legal value.
Not handled: what the units mean (codec/locations.py); the metadata itself (codec/wire.py).

Paper: Appendix D (flat location and value buffers, offsets into both), Figure D.3
"""

from __future__ import annotations

from typing import NamedTuple

from nemo_dcr.codec.locations import LocationType
from nemo_dcr.codec.records import Encoding
from nemo_dcr.kernels.plain import Bytes


class Stream(NamedTuple):
    """Identity of a stream; streams lie in the body in tuple order, so locations come before values."""

    part: int
    """0: locations; 1: values."""
    kind: int
    """Location type or encoding."""
    planes: int
    """Bytes of one unit."""


def location_stream(kind: LocationType) -> Stream:
    """The stream of a location type."""
    return Stream(0, kind, kind.planes)


def value_stream(encoding: Encoding, width: int) -> Stream:
    """The stream of the values of one encoding and width: masks and new bits differ too much to share a plane."""
    return Stream(1, encoding, width)


class Layout:
    """Ranges reserved so far. Reserve for every item first, then ask for planes."""

    def __init__(self) -> None:
        self._units: dict[Stream, int] = {}
        self._bases: dict[Stream, int] = {}

    def reserve(self, stream: Stream, units: int) -> int:
        """Take the next `units` units of `stream`; returns the offset of the first, in units."""
        offset = self._units.get(stream, 0)
        self._units[stream] = offset + units
        return offset

    @property
    def nbytes(self) -> int:
        """Bytes of all planes: the body without its metadata."""
        return sum(units * stream.planes for stream, units in self._units.items())

    def place(self, base: int) -> None:
        """Fix the streams in a body whose planes begin at byte `base`; nothing may be reserved after it."""
        for stream in sorted(self._units):
            self._bases[stream] = base
            base += self._units[stream] * stream.planes

    def plane_ends(self) -> list[int]:
        """The offset in the body at which each plane ends, in order."""
        return [
            self._bases[stream] + (plane + 1) * self._units[stream]
            for stream in sorted(self._units)
            for plane in range(stream.planes)
        ]

    def planes(self, body: Bytes, stream: Stream, offset: int, units: int) -> list[Bytes]:
        """Views of `body`: plane by plane, the `units` units from `offset`."""
        base, total = self._bases[stream] + offset, self._units[stream]
        return [body[base + plane * total : base + plane * total + units] for plane in range(stream.planes)]
