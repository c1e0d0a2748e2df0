"""Table 2 of the paper: XOR masks beside overwrite values as streams of 16-bit words under zstd level 1.

20 million BF16 normals (seed 42) move by FP32 noise (seed 44) scaled by a. The ratios depend on nothing of the machine.

Paper: Table 2
"""

from __future__ import annotations

import numpy as np
import torch
import zstandard

from bench.rows import Row, Rows, Settings
from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.kernels import hot

GROUP = "Table 2"
WORDS = 20_000_000
LEAST, MOST = 1.7, 2.2
"""The paper's range, rounded to one digit as there."""
PLANES = 1.2
"""Byte planes of the masks are smaller than the raw masks by this much."""


def rows(settings: Settings) -> Rows:
    """Overwrite bytes over XOR bytes for three scales, and what byte planes save beside that."""
    settings.progress("Table 2")
    values = torch.randn(WORDS, generator=torch.Generator().manual_seed(42), dtype=torch.bfloat16)
    noise = torch.randn(WORDS, generator=torch.Generator().manual_seed(44))
    old = copied_words(values)
    for scale in (1e-4, 1e-3, 1e-2):
        new = copied_words((values.float() + noise * scale).to(torch.bfloat16))
        at, masks = hot.loops().changes(new, old, masks=True)
        xor, overwrite = _compressed(masks), _compressed(new[at])
        ratio = round(overwrite / xor, 1)
        yield Row(f"changed elements, a = {scale:g}", len(at) / WORDS * 100, "%", None, True, GROUP)
        yield Row(f"overwrite over XOR bytes, a = {scale:g}, at least", ratio, "x", LEAST, True, GROUP)
        yield Row(f"overwrite over XOR bytes, a = {scale:g}, at most", ratio, "x", MOST, False, GROUP)
        planes = np.empty((2, len(masks)), dtype=np.uint8)
        hot.loops().split_planes(masks, list(planes))
        saved = xor / _compressed(planes.reshape(-1))
        yield Row(f"XOR masks over their byte planes, a = {scale:g}", saved, "x", PLANES, True, GROUP)


def _compressed(words: Words) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(words.data))
