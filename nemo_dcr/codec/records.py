"""Delta records: an item is one owner's entries for one canonical tensor, all in one encoding.

Locations are sorted and unique, either one contiguous run or an index array. Values are stored words: XOR masks
(old ^ new) or the new bits themselves. The rule that picks the encoding is `choose_encoding`.

Paper: Section 6.1 (item), Figure D.1 (encoding rule)   Conditions: LC5, SC5
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta


class Encoding(IntEnum):
    """What the values of an item are. Numbers are wire bytes; there is room for a third."""

    XOR = 0
    OVERWRITE = 1


class PathClass(StrEnum):
    """What prewarm found for one canonical name on one receiver, and the union over receivers (Section 6.1)."""

    XOR = "xor"
    """Every copy keeps the stored bits: XOR and overwrite are both exact."""
    OVERWRITE = "overwrite"
    """A cast, a transform or an overlap: overwrites only."""
    SKIPPED = "skipped"
    """The native loader takes nothing of it on this rank."""
    UNSUPPORTED = "unsupported"
    """The path breaks a loader condition."""


def unite(classes: Iterable[PathClass]) -> PathClass:
    """The class of one name over all receivers: the most restrictive, where a skip restricts nothing.

    All skipped gives SKIPPED, which the caller refuses: some rank must take every tensor (LC3).
    """
    found = set(classes)
    for worst in (PathClass.UNSUPPORTED, PathClass.OVERWRITE, PathClass.XOR):
        if worst in found:
            return worst
    return PathClass.SKIPPED


def choose_encoding(*, overwrite_attempt: bool, bits_preserved: bool, path: PathClass) -> Encoding:
    """XOR iff the attempt allows it, the source projection keeps the stored bits and the loader path does too."""
    if not overwrite_attempt and bits_preserved and path is PathClass.XOR:
        return Encoding.XOR
    return Encoding.OVERWRITE


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """One owner's entries for one canonical tensor."""

    tensor: TensorMeta
    encoding: Encoding
    start: int
    """First flat index."""
    indices: NDArray[np.int64] | None
    """Strictly increasing flat indices, or None for the contiguous run that begins at `start`."""
    values: bits.Words
    """One unsigned word of the tensor's width for each entry."""

    @classmethod
    def of(cls, tensor: TensorMeta, encoding: Encoding, indices: NDArray[np.int64], values: bits.Words) -> Item:
        """Build an item from sorted unique indices; a contiguous run is stored as one.

        Raises: ValueError when there is no entry, or lengths or the word width do not fit.
        """
        if len(indices) == 0 or len(indices) != len(values):
            raise ValueError(f"{tensor.name}: {len(indices)} indices for {len(values)} values")
        start, last = int(indices[0]), int(indices[-1])
        run = last - start + 1 == len(indices)
        return cls(tensor, encoding, start, None if run else indices, values)

    @classmethod
    def run(cls, tensor: TensorMeta, encoding: Encoding, start: int, values: bits.Words) -> Item:
        """Build an item for the contiguous run of `len(values)` elements from `start`."""
        return cls(tensor, encoding, start, None, values)

    def __post_init__(self) -> None:
        if self.values.dtype != bits.unsigned(self.tensor.dtype):
            raise ValueError(f"{self.tensor.name}: values are {self.values.dtype}, not words of {self.tensor.dtype}")

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.values)

    @property
    def last(self) -> int:
        """Last flat index."""
        return self.start + self.count - 1 if self.indices is None else int(self.indices[-1])

    @property
    def span(self) -> int:
        """last - first + 1, the range that the location rule looks at."""
        return self.last - self.start + 1

    def flat_indices(self) -> NDArray[np.int64]:
        """All flat indices, int64; materialises a run."""
        if self.indices is not None:
            return self.indices
        return np.arange(self.start, self.start + self.count, dtype=np.int64)
