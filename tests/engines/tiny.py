"""Tiny real checkpoints that vLLM serves on a CPU: random weights, real architectures, no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


def qwen3(**options: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**{**COMMON, "tie_word_embeddings": False, "architectures": ["Qwen3ForCausalLM"], **options})


def qwen3_moe(**options: Any) -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**{**COMMON, **experts, "architectures": ["Qwen3MoeForCausalLM"], **options})


def nemotron_h(**options: Any) -> Any:
    """Two Mamba mixers, an attention layer and an MLP."""
    from transformers import NemotronHConfig

    sizes = {key: value for key, value in COMMON.items() if key != "num_hidden_layers"}
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16}
    kinds = {"layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"]}
    return NemotronHConfig(**{**sizes, **mamba, **kinds, "architectures": ["NemotronHForCausalLM"], **options})


def mimo(**options: Any) -> Any:
    """A dense layer stack with one MTP head; vLLM knows the class, transformers its parts."""
    from transformers import Qwen2Config

    named = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return Qwen2Config(**{**COMMON, "tie_word_embeddings": False, **named, **options})


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]}
"""Of a checkpoint whose weights are FP8 with a scale for each block."""


def write_config(directory: Path, config: Any) -> Path:
    """A directory with nothing but `config.json`, for engines with dummy weights."""
    config.save_pretrained(directory)
    return directory


def write_checkpoint(directory: Path, config: Any, seed: int = 0) -> Path:
    """A checkpoint with random BF16 weights, under the names that real checkpoints have."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of a checkpoint."""
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def read(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return load_file(directory / "model.safetensors")


def stepped(directory: Path, tensors: dict[str, torch.Tensor], seed: int, share: float = 0.05) -> Path:
    """A checkpoint beside `directory` in which about a share of every tensor's elements moved, at least one each."""
    rng = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().clone().flatten()
        moved = torch.randint(flat.numel(), (max(1, int(share * flat.numel())),), generator=rng)
        noise = torch.randn(moved.numel(), generator=rng) * 0.5 + 1.5
        flat[moved] = (flat[moved].float() * noise).to(flat.dtype)
        changed[name] = flat.reshape(tensor.shape)
    target = directory.with_name(f"{directory.name}-{seed}")
    target.mkdir()
    write_tensors(target, changed)
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target
