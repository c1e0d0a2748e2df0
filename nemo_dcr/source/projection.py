"""Source projections Q_T: the canonical value of one changed source element.

`Identity` hands the stored word through; it is the only projection whose records may be XOR masks, because a mask of
source bits is then a mask of canonical bits. `Cast` and `ScaledCast` compute a new value, so their records are
overwrites. A projection looks at one element at a time and always runs over a flat contiguous array, so an element's
result does not depend on its neighbours, on the shard or on how many elements changed.
Not handled: rules that combine elements; such tasks are residual.

Paper: Section 5 (Q_T, o_T); Figure D.1   Proofs: xor_reconstructs, overwrite_supplies   Conditions: SC5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from nemo_dcr.bits import Words, unsigned
from nemo_dcr.bits.tensors import resident_words, tensor_from_words, torch_dtype
from nemo_dcr.errors import UnsupportedMapping


class Projection(Protocol):
    """What a task does to one source word."""

    @property
    def source(self) -> str:
        """Dtype name of the source elements."""
        ...

    @property
    def target(self) -> str:
        """Dtype name of the canonical elements."""
        ...

    @property
    def preserves_bits(self) -> bool:
        """True iff every word is handed through unchanged."""
        ...

    def apply(self, words: Words) -> Words:
        """The canonical words of the given source words; same length. The result may alias `words`."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """The stored bits are the canonical bits."""

    dtype: str

    @property
    def source(self) -> str:
        """Dtype name of the source elements."""
        return self.dtype

    @property
    def target(self) -> str:
        """Dtype name of the canonical elements."""
        return self.dtype

    @property
    def preserves_bits(self) -> bool:
        """Always true."""
        return True

    def apply(self, words: Words) -> Words:
        """The words themselves."""
        return words


@dataclass(frozen=True, slots=True)
class Cast:
    """torch's conversion from `source` to `target`.

    Raises: UnsupportedMapping (SC5) where torch has no such conversion; UnsupportedDtype.
    """

    source: str
    target: str

    def __post_init__(self) -> None:
        _try_out(self, self.source, self.target)

    @property
    def preserves_bits(self) -> bool:
        """Always false."""
        return False

    def apply(self, words: Words) -> Words:
        """Convert every element; a new array."""
        source = tensor_from_words(words, self.source, (len(words),))
        return resident_words(source.to(torch_dtype(self.target)))


@dataclass(frozen=True, slots=True)
class ScaledCast:
    """Convert to `compute`, multiply by `factor`, convert to `target`: two roundings, in this order.

    Raises: UnsupportedMapping (SC5) where torch has no such conversion; UnsupportedDtype.
    """

    source: str
    target: str
    factor: float
    """Rounded to `compute` before the multiplication."""
    compute: str = "F32"

    def __post_init__(self) -> None:
        _try_out(self, self.source, self.target)

    @property
    def preserves_bits(self) -> bool:
        """Always false, also for the factor 1: a NaN may change its payload."""
        return False

    def apply(self, words: Words) -> Words:
        """Convert and scale every element; a new array."""
        compute = torch_dtype(self.compute)
        source = tensor_from_words(words, self.source, (len(words),)).to(compute)
        scaled = source * torch.tensor(self.factor, dtype=compute)
        return resident_words(scaled.to(torch_dtype(self.target)).contiguous())


def _try_out(projection: Projection, source: str, target: str) -> None:
    """Convert one zero, so that a pair of dtypes without a conversion is refused where the task is declared."""
    if source == target and isinstance(projection, Cast):
        raise UnsupportedMapping(f"{source} to {target}", "SC5", "a cast to the same dtype; use Identity")
    try:
        result = projection.apply(np.zeros(1, dtype=unsigned(source)))
    except (RuntimeError, TypeError) as error:
        raise UnsupportedMapping(f"{source} to {target}", "SC5", f"torch cannot convert: {error}") from error
    if result.dtype != unsigned(target) or len(result) != 1:
        raise UnsupportedMapping(f"{source} to {target}", "SC5", "the conversion does not give one word an element")
