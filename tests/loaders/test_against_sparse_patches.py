"""vLLM's own sparse patches (`load_checkpoint_weight_patches`) and ours, with the same versions on the same loaders.

Where one plain copy ends a tensor's way, both are exact. A composed loader is silently wrong under vLLM's patches,
whose contract excludes it and does not check it; a NaN among the new values is refused by them. Ours is exact on all.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
BOTH_EXACT = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v2")
COMPOSED = ("granitemoehybrid", "nemotron_h", "falcon_h1", "mamba2")


def loaded(workshop, model: str, *, special: bool):
    """A rank that holds the old version, and both versions."""
    from nemo_dcr.adapters.vllm.forged import Place
    from tests.loaders.exactness import Rank, two_versions

    _, tensors, _, _ = workshop.of(model)
    old, new = two_versions(tensors, seed=3, special=special)
    return Rank(workshop.build(model, Place()), tensors, old, new)


def patched(rank) -> tuple[list[bytes], list[bytes]]:
    """Storage after vLLM's patches, and after a dense load."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    from nemo_dcr.bits.tensors import tensor_from_words, torch_dtype
    from nemo_dcr.testing.refit_outcome import dense_load

    dense_load(rank.model, rank.tensors, rank.new)
    dense = rank.stored()
    rank.put(rank.before)
    patches = []
    for meta in rank.tensors:
        at = np.flatnonzero(rank.old[meta.name] != rank.new[meta.name])
        values = tensor_from_words(rank.new[meta.name][at], meta.dtype, (len(at),))
        patches.append(
            CheckpointWeightPatch(meta.name, meta.shape, torch_dtype(meta.dtype), values, torch.from_numpy(at))
        )
    load_checkpoint_weight_patches(rank.model, patches)
    return rank.stored(), dense


def differing(rank, found: list[bytes], wanted: list[bytes]) -> set[str]:
    """First names of the storages that differ."""
    pairs = enumerate(zip(found, wanted, strict=True))
    return {rank.residents.names[number][0] for number, (one, other) in pairs if one != other}


@pytest.mark.parametrize("model", BOTH_EXACT)
def test_both_are_exact_where_plain_copies_end_the_way(model, workshop):
    rank = loaded(workshop, model, special=False)
    assert differing(rank, *patched(rank)) == set()
    rank.put(rank.before)
    assert rank.play(np.random.default_rng(0)).faults == ()


@pytest.mark.parametrize("model", COMPOSED)
def test_composed_loader_is_silently_wrong_under_patches_and_exact_here(model, workshop):
    rank = loaded(workshop, model, special=False)
    wrong = differing(rank, *patched(rank))
    assert wrong
    assert all(name.endswith(".A") for name in wrong)
    rank.put(rank.before)
    assert rank.play(np.random.default_rng(0)).faults == ()


def test_nan_among_the_new_values_is_refused_by_patches_and_exact_here(workshop):
    rank = loaded(workshop, "qwen3", special=True)
    with pytest.raises(ValueError, match="NaN values"):
        patched(rank)
    rank.put(rank.before)
    assert rank.play(np.random.default_rng(0)).faults == ()
