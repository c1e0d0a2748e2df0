"""The reusable scratch, placeholders, and active masks.

One buffer of the size of the largest canonical tensor serves every item; at rest all its bytes are zero. An item is
scattered over a placeholder; XOR items use zero, which changes nothing. An overwrite item needs a pattern that none of
its values has; it is searched for, and zero comes first because then nothing has to be filled or refilled. Equal words
are compared as words, so a NaN among the values is a value like any other.
Where all patterns occur (one-byte dtypes) there is no placeholder: the caller makes two passes with two of them.

Paper: Section 6.1 (scratch, placeholder q), Figure A.10 (active masks)   Proofs: L5 inactive_unchanged
Conditions: LC8
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nemo_dcr.bits import Words, unsigned
from nemo_dcr.bits.tensors import torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Item
from nemo_dcr.receiver.residents import storage_key

_FLOAT_NANS = {
    "BF16": (0x7FC1, 0xFFC1),
    "F16": (0x7E01, 0xFE01),
    "F32": (0x7FC00001, 0xFFC00001),
    "F64": (0x7FF8000000000001, 0xFFF8000000000001),
}


def free_pattern(values: Words, dtype: str) -> int | None:
    """A word that does not occur in `values`, or None when every pattern of the width does.

    The search is complete: among n values, one of any n + 1 different patterns is free.
    """
    kind = unsigned(dtype)
    for candidate in (0, *_FLOAT_NANS.get(dtype, ())):
        if not bool((values == kind.type(candidate)).any()):
            return int(candidate)
    if kind.itemsize <= 2:
        free = np.nonzero(np.bincount(values, minlength=1 << (8 * kind.itemsize)) == 0)[0]
        return int(free[-1]) if len(free) else None
    present = np.unique(values)
    # Counting down from the largest word, the first gap is a free pattern.
    largest = (1 << (8 * kind.itemsize)) - 1
    expected = kind.type(largest) - np.arange(len(present), dtype=kind)
    gap = np.nonzero(present[::-1] != expected)[0]
    free_word = largest - (int(gap[0]) if len(gap) else len(present))
    return free_word if free_word >= 0 else None


def signed(word: int, width: int) -> int:
    """The unsigned `word` as the value that torch's integer view of that width shows."""
    return word if width == 1 or word < 1 << (8 * width - 1) else word - (1 << (8 * width))


@lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


class Scratch:
    """A zeroed host buffer that poses as one canonical tensor at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Bytes; the size of the largest canonical tensor."""
        # numpy's zeros are mapped lazily: pages that no item touches are never resident.
        self._bytes = np.zeros(-(-max(capacity, 8) // 8) * 8, dtype=np.uint8)
        # Made outside inference mode, where tensors do not count the writes to them.
        with torch.inference_mode(False):
            self._buffer = torch.from_numpy(self._bytes)
        self._typed: dict[str, Tensor] = {}
        self._dirty: tuple[TensorMeta, Item | None] | None = None

    @property
    def key(self) -> int:
        """Storage identity of the buffer."""
        return storage_key(self._buffer)

    @property
    def version(self) -> int:
        """Writes that torch counted, through whatever view and on whatever thread, outside inference mode."""
        return int(self._buffer._version)

    def tensor(self, meta: TensorMeta) -> Tensor:
        """The first bytes of the buffer as a contiguous tensor of `meta`.

        Raises: UnsupportedDtype for a dtype that this torch does not know.
        """
        typed = self._typed.get(meta.dtype)
        if typed is None:
            typed = self._typed[meta.dtype] = self._buffer.view(torch_dtype(meta.dtype))
        return typed.as_strided(meta.shape, _row_major(meta.shape))

    def words(self, meta: TensorMeta) -> Words:
        """The same bytes as unsigned words."""
        return self._bytes[: meta.nbytes].view(unsigned(meta.dtype))

    def load(self, item: Item, placeholder: int) -> None:
        """Scatter an item over `placeholder`; the scratch must be at rest."""
        words = self.words(item.tensor)
        sparse = placeholder == 0 or item.count == item.tensor.numel
        # Marked before it is written, so that an interrupted load is cleared as well.
        self._dirty = (item.tensor, item if sparse else None)
        if not sparse:
            words.fill(placeholder)
        if item.indices is None:
            words[item.start : item.start + item.count] = item.values
        else:
            words[item.indices] = item.values

    def fill(self, meta: TensorMeta) -> Words:
        """Words for the caller to fill at will; `clear` resets all of them."""
        self._dirty = (meta, None)
        return self.words(meta)

    def clear(self) -> None:
        """Return to rest: zero what was touched, and only that where it is known."""
        if self._dirty is None:
            return
        meta, item = self._dirty
        words = self.words(meta)
        if item is None:
            words.fill(0)
        elif item.indices is None:
            words[item.start : item.start + item.count] = 0
        else:
            words[item.indices] = 0
        self._dirty = None
