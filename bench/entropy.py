"""The fewest bytes that locations and values can take when nothing is known but how often each occurs.

Locations of k of n elements, drawn uniformly, need n times the binary entropy of k / n. Values need the entropy of
their distribution over the whole set (order 0: neighbours tell nothing about each other).

Paper: Appendix D (location and value buffers)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

import numpy as np

from nemo_dcr.bits import Words


def location_bytes(changed: Iterable[tuple[int, int]]) -> float:
    """For tensors of (changed, all) elements."""
    return sum(_binary(count / numel) * numel for count, numel in changed if 0 < count < numel) / 8


def value_bytes(values: Words) -> float:
    """For all values of a set, each a symbol of its own."""
    if not len(values):
        return 0.0
    _, counts = np.unique(values, return_counts=True)
    shares = counts / len(values)
    return float(-(shares * np.log2(shares)).sum()) * len(values) / 8


def _binary(share: float) -> float:
    return -share * log2(share) - (1 - share) * log2(1 - share)
