"""Words and record sets for tests of the source side, in plain numpy.

`random_words` mixes uniform words with the ones that careless comparisons get wrong: both zeros, subnormals, infinities
and NaNs with payloads. `apply_items` is the reference receiver: it writes records into full canonical tensors, and it
refuses a destination that has two records in one attempt.

Paper: Section 5 (changed set); Section 6.2 (reference)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nemo_dcr.bits import Words, unsigned, width
from nemo_dcr.canonical import Destination
from nemo_dcr.codec.records import Encoding, Item

SPECIAL: dict[int, tuple[int, ...]] = {
    1: (0x00, 0x80, 0x01, 0x7F, 0xFF, 0x78, 0xF8),
    2: (0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0x7C01, 0x3F80),
    4: (0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0x3F800000),
    8: (0, 1 << 63, 1, 0x7FF << 52, 0x7FF8 << 48, (0x7FF8 << 48) + 1, 0xFFF8 << 48, (0x7FF << 52) + 1),
}
"""By width in bytes: zeros, subnormals, infinities, quiet and signalling NaNs of the usual formats."""


def random_words(rng: np.random.Generator, dtype: str, count: int) -> Words:
    """`count` words of `dtype`, about a third of them special."""
    kind = unsigned(dtype)
    words = np.frombuffer(rng.bytes(count * kind.itemsize), dtype=kind).copy()
    special = rng.random(count) < 1 / 3
    words[special] = rng.choice(np.array(SPECIAL[width(dtype)], dtype=kind), int(special.sum()))
    if dtype == "BOOL":
        words &= kind.type(1)
    return words


def changed_words(rng: np.random.Generator, dtype: str, old: Words, rate: float) -> Words:
    """A copy of `old` in which about `rate` of the elements hold new random words (some of them the same again)."""
    return np.where(rng.random(len(old)) < rate, random_words(rng, dtype, len(old)), old)


def apply_items(full: dict[str, Words], items: Iterable[Item]) -> dict[Destination, int]:
    """Write the records into the full flat tensors, in place; the new word of each destination.

    Raises: ValueError when a destination has two records.
    """
    written: dict[Destination, int] = {}
    for item in items:
        words = full[item.tensor.name]
        indices = item.flat_indices()
        words[indices] = words[indices] ^ item.values if item.encoding is Encoding.XOR else item.values
        for index in indices.tolist():
            destination = Destination(item.tensor.name, index)
            if destination in written:
                raise ValueError(f"{destination} has two records")
            written[destination] = int(words[index])
    return written


def changed_set(old: dict[str, Words], new: dict[str, Words]) -> dict[Destination, int]:
    """D_chg with the new words, from full tensors."""
    return {
        Destination(name, index): int(new[name][index])
        for name in old
        for index in np.flatnonzero(old[name] != new[name]).tolist()
    }
