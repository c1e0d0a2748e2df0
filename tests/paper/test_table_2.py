"""Table 2: XOR masks against overwrite values, both as streams of 16-bit words under zstd level 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard

from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.kernels import plain

WORDS = 20_000_000


def compressed(words: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(words)


def plane_bytes(words: np.ndarray) -> int:
    planes = np.empty((words.itemsize, len(words)), dtype=np.uint8)
    plain.split_planes(words, list(planes))
    return len(compressed(planes.reshape(-1)))


@pytest.mark.slow
def test_xor_masks_are_1_7_to_2_2_times_smaller_than_overwrite_values() -> None:
    """20 million BF16 normals (seed 42) plus FP32 noise (seed 44) scaled by a; the changed words in input order."""
    values = torch.randn(WORDS, generator=torch.Generator().manual_seed(42), dtype=torch.bfloat16)
    noise = torch.randn(WORDS, generator=torch.Generator().manual_seed(44))
    old = copied_words(values)
    for scale, expected, changed in ((1e-4, 2.2, 0.023), (1e-3, 2.2, 0.224), (1e-2, 1.7, 0.826)):
        new = copied_words((values.float() + noise * scale).to(torch.bfloat16))
        at = plain.changed_indices(new, old)
        masks, written = plain.xor_masks(new, old, at), plain.gather(new, at)
        xor, overwrite = compressed(masks), compressed(written)
        assert round(len(at) / WORDS, 3) == pytest.approx(changed, abs=0.002)
        assert round(len(overwrite) / len(xor), 1) == expected
        decoded = np.frombuffer(zstandard.ZstdDecompressor().decompress(xor), "<u2")
        assert np.array_equal(plain.gather(old, at) ^ decoded, written)
        # What this package ships is smaller still: the byte planes of the same words.
        assert plane_bytes(masks) < len(xor) / 1.2
        assert plane_bytes(written) < len(overwrite) / 1.1
