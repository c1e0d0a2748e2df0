"""Bytes of compressed payload for each changed element, by change rate and coding.

Between measured rates the figure is interpolated over the logarithm of the rate; outside them the nearest one holds.
Both codings were measured on BF16 weights with changes of relative amplitude 1e-2, compressed with zstd level 1.
Not handled: other widths than two bytes, changes of another kind (real optimizer steps compress better).

Paper: Appendix D (locations, one value for each record); Section 8.6 (payload volumes)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from enum import StrEnum

WIDTH = 2
"""Bytes of a BF16 element."""


class Coding(StrEnum):
    """How locations and values are laid out before zstd."""

    planes = "planes"
    """This project's: gaps of one byte with a chain, value bytes in planes."""
    paper = "paper"
    """The paper's: gaps in the smallest suitable integer, whole values."""


BYTES_PER_CHANGE: Mapping[Coding, Mapping[float, float]] = {
    Coding.planes: {0.006: 1.562, 0.012: 1.436, 0.03: 1.275, 0.05: 1.180, 1.0: 0.455},
    Coding.paper: {0.006: 1.980, 0.012: 1.847, 0.03: 1.684, 0.05: 1.569, 1.0: 0.630},
}
"""Measured, for XOR masks."""


def bytes_per_change(change: float, coding: Coding) -> float:
    """Bytes of a compressed payload for each changed element. `change`: changed over all elements, 0 to 1."""
    points = sorted(BYTES_PER_CHANGE[coding].items())
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        if low <= change <= high:
            share = (math.log(change) - math.log(low)) / (math.log(high) - math.log(low))
            return at_low + share * (at_high - at_low)
    return points[0][1] if change < points[0][0] else points[-1][1]


def payload_bytes(checkpoint_bytes: float, change: float, coding: Coding) -> float:
    """V_payload: bytes of all compressed payloads of one XOR attempt."""
    return checkpoint_bytes / WIDTH * change * bytes_per_change(change, coding)
