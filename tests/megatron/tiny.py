"""Small checkpoints of real architectures, with random BF16 weights, and the bridges that there are for them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge
from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from nemo_dcr.bits.tensors import dtype_name
from nemo_dcr.canonical import TensorMeta
from tests.megatron.trainer import Checkpoint

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
BRIDGES = {"dense": Qwen3Bridge, "mixture": Qwen3MoEBridge}


def checkpoint(kind: str, *, stacked: bool = False, **options: Any) -> Checkpoint:
    """A checkpoint of a kind of `BRIDGES`, under the names of checkpoints on disk; experts one by one or stacked."""
    config: Any
    if kind == "dense":
        config = Qwen3Config(**{**COMMON, "architectures": ["Qwen3ForCausalLM"], **options})
    else:
        config = Qwen3MoeConfig(**{**COMMON, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], **options})
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if name.endswith("experts.gate_up_proj") and not stacked:
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                at = f"{name.removesuffix('gate_up_proj')}{expert}"
                tensors |= {f"{at}.gate_proj.weight": gate.clone(), f"{at}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj") and not stacked:
            for expert, down in enumerate(value):
                tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[name] = value.clone()
    return Checkpoint(config, tensors)


def table(given: Checkpoint) -> list[TensorMeta]:
    """The tensors of a checkpoint."""
    return [TensorMeta(name, tuple(value.shape), dtype_name(value.dtype)) for name, value in given.tensors.items()]
