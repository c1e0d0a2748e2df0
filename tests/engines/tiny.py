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


def write_checkpoint(directory: Path, config: Any, seed: int = 0) -> Path:
    """A checkpoint with random BF16 weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    directory.mkdir(parents=True)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    if getattr(config, "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return load_file(directory / "model.safetensors")


def stepped(directory: Path, tensors: dict[str, torch.Tensor], seed: int, share: float = 0.05) -> Path:
    """A checkpoint beside `directory` in which a share of every tensor's elements moved, at least one each."""
    rng = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().clone().flatten()
        moved = torch.rand(flat.numel(), generator=rng) < share
        moved[int(torch.randint(flat.numel(), (1,), generator=rng))] = True
        noise = torch.randn(flat.numel(), generator=rng) * 0.5 + 1.5
        flat[moved] = (flat.float() * noise)[moved].to(flat.dtype)
        changed[name] = flat.reshape(tensor.shape)
    target = directory.with_name(f"{directory.name}-{seed}")
    target.mkdir()
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target
