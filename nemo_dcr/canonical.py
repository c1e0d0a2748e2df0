"""Canonical coordinates: a tensor of the Hugging Face checkpoint and an element of it.

A destination d = (n, k) is a canonical name and a row-major flat index. Indices are exact Python or 64-bit integers:
shapes whose product passes 2**32 are ordinary.

Paper: Section 3 (canonical tensors), Section 5 (d = (n, k))
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nemo_dcr import bits


@dataclass(frozen=True, order=True, slots=True)
class TensorMeta:
    """Name, shape and dtype of one canonical tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """safetensors name, for example BF16."""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor, 0 for an empty one."""
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of one element. Raises: UnsupportedDtype."""
        return bits.width(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor. Raises: UnsupportedDtype."""
        return self.numel * self.width


@dataclass(frozen=True, order=True, slots=True)
class Destination:
    """One canonical element."""

    name: str
    index: int
