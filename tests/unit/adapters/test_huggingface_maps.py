"""Maps of `transformers` models say what loading their checkpoint puts into every parameter and buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nemo_dcr.adapters.huggingface import checkpoint_maps
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.testing.checkpoint import read_checkpoint

BASE: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 0),
    "qwen2": ({"tie_word_embeddings": True}, 0),
    "gemma2": ({}, 0),
    "gpt2": ({"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}, 0),
    "qwen3_moe": ({**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}, 4),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 4),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, 4),
    "deepseek_v3": (LATENT, 2),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}, 0),
}
"""Configuration, and how many parameters are fused of tensors that the checkpoint has one by one."""


def small(kind: str, **more: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**BASE, **MODELS[kind][0], **more})
    torch.manual_seed(1)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.normal_()
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_every_element_of_a_model_is_where_the_map_says(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    full = {meta: copied_words(value) for meta, value in read_checkpoint(tmp_path)}
    maps = checkpoint_maps(model, full)
    state = {name: copied_words(value) for name, value in model.state_dict().items()}
    used = dict.fromkeys(full, 0)
    for name, index_map in maps.items():
        words = state[name]
        which, flat = index_map.destinations(np.arange(len(words), dtype=np.int64))
        assert (which >= 0).all()
        for place, tensor in enumerate(index_map.tensors):
            chosen = which == place
            assert words[chosen].tobytes() == full[tensor][flat[chosen]].tobytes(), name
            used[tensor] += int(chosen.sum())
    assert used == {meta: meta.numel for meta in full}
    assert sum(len(index_map.tensors) > 1 for index_map in maps.values()) == MODELS[kind][1]


def test_a_tensor_that_the_model_does_not_load_is_named(tmp_path: Path) -> None:
    model = small("llama")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = [meta for meta, _ in read_checkpoint(tmp_path)]
    with pytest.raises(UnsupportedMapping, match=r"model\.extra.*does not load it"):
        checkpoint_maps(model, [*tensors, TensorMeta("model.extra", (2,), "BF16")])
    wrong = [TensorMeta(t.name, (*t.shape[:-1], t.shape[-1] + 1), t.dtype) for t in tensors if "q_proj" in t.name]
    with pytest.raises(UnsupportedMapping, match="loading the checkpoint gives"):
        checkpoint_maps(model, wrong)


def test_a_conversion_that_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    class Scaled(MergeModulelist):
        def convert(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: torch.mul(value, 2) for name, value in super().convert(*args, **kwargs).items()}  # type: ignore[no-untyped-call]

    model = small("qwen3_moe")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    converter = WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [Scaled(dim=0)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: [converter])
    down = [meta for meta, _ in read_checkpoint(tmp_path) if "down_proj" in meta.name]
    with pytest.raises(UnsupportedMapping, match=r"experts\.0\.down_proj.*torch\.mul"):
        checkpoint_maps(model, down)


def test_a_module_without_conversions_has_its_own_names() -> None:
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    tensors = [TensorMeta("weight", (2, 3), "BF16"), TensorMeta("bias", (2,), "BF16")]
    assert {name: m.tensors for name, m in checkpoint_maps(module, tensors).items()} == {
        tensor.name: (tensor,) for tensor in tensors
    }
    with pytest.raises(UnsupportedMapping, match="the model does not"):
        checkpoint_maps(module, [TensorMeta("other", (1,), "BF16")])
