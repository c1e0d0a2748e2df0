"""Projections are functions of one stored word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.bits import unsigned
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.projection import Cast, Identity, ScaledCast
from nemo_dcr.testing.source_cases import random_words

PROJECTIONS = [
    Cast("F32", "BF16"),
    Cast("F32", "F16"),
    Cast("BF16", "F32"),
    Cast("BF16", "F8_E4M3"),
    Cast("F32", "F8_E5M2"),
    Cast("F64", "F32"),
    ScaledCast("F32", "BF16", 0.1),
    ScaledCast("BF16", "BF16", 1.0),
    ScaledCast("BF16", "F8_E4M3", 1 / 3),
]


@given(st.sampled_from(PROJECTIONS), st.integers(0, 2**32 - 1), st.integers(0, 70))
def test_a_subset_projects_to_the_same_bits_as_the_whole(projection, seed, count) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    words = random_words(rng, projection.source, count)
    whole = projection.apply(words)
    assert whole.dtype == unsigned(projection.target)
    chosen = np.flatnonzero(rng.random(count) < 0.4)
    assert projection.apply(words[chosen]).tolist() == whole[chosen].tolist()
    for index in chosen[:3]:
        assert projection.apply(words[index : index + 1])[0] == whole[index]


def test_identity_hands_every_word_through() -> None:
    words = np.arange(65536, dtype="<u2")
    assert Identity("BF16").apply(words) is words
    assert Identity("BF16").preserves_bits


def test_a_scaled_cast_multiplies_in_its_compute_dtype() -> None:
    values = torch.tensor([1.0, 3.0, -0.0, 1e-3], dtype=torch.bfloat16)
    words = values.view(torch.int16).numpy().view("<u2")
    expected = (values.to(torch.float32) * torch.tensor(0.1, dtype=torch.float32)).to(torch.bfloat16)
    projected = ScaledCast("BF16", "BF16", 0.1).apply(words)
    assert projected.tolist() == expected.view(torch.int16).numpy().view("<u2").tolist()


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_only_identity_may_carry_masks(projection) -> None:  # type: ignore[no-untyped-def]
    assert not projection.preserves_bits


def test_conversions_that_torch_lacks_are_refused_where_they_are_declared() -> None:
    with pytest.raises(UnsupportedMapping, match="SC5"):
        Cast("F32", "F4")
    with pytest.raises(UnsupportedMapping, match="use Identity"):
        Cast("BF16", "BF16")
