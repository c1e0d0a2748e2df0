"""What this machine can do at best, measured in the same run: compare two arrays, copy one, compress one.

The comparison is the C library's `memcmp` of two equal arrays: it reads both and decides nothing else.

Paper: Section 8
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import zstandard

from bench.clock import best_together
from bench.rows import Row, Rows, Settings
from bench.weights import Pair, experts, nbytes
from nemo_dcr.bits import Words

GROUP = "Limits of this machine"


def comparison(pairs: list[Pair]) -> Callable[[], object]:
    """A call that compares every tensor with an equal copy, one by one."""
    library = ctypes.CDLL(None)
    library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    twins = [(pair.old, np.array(pair.old)) for pair in pairs]

    def call() -> int:
        return sum(library.memcmp(left.ctypes.data, right.ctypes.data, left.nbytes) for left, right in twins)

    return call


def rows(settings: Settings) -> Rows:
    """GB/s of checkpoint bytes, one copy."""
    settings.progress("limits of this machine")
    pairs = experts(settings, 0.05)
    total = nbytes(pairs)
    target = [np.empty_like(pair.old) for pair in pairs]
    masks: Words = np.concatenate([(pair.new ^ pair.old)[pair.new != pair.old] for pair in pairs])

    def copy() -> None:
        for pair, place in zip(pairs, target, strict=True):
            np.copyto(place, pair.old)

    took = best_together(
        {
            "compare": comparison(pairs),
            "copy": copy,
            "zstd": lambda: zstandard.ZstdCompressor(level=1).compress(masks.data),
        },
        settings,
    )
    yield Row("compare two arrays, nothing else", total / took["compare"] / 1e9, "GB/s", None, True, GROUP)
    yield Row("copy", total / took["copy"] / 1e9, "GB/s", None, True, GROUP)
    yield Row("zstd level 1 of 16-bit XOR masks", masks.nbytes / took["zstd"] / 1e9, "GB/s", None, True, GROUP)
