"""A tiny checkpoint of the Llama family for fast tests: same names, fusions and files as a real one.

Values are either small random numbers, so that the model trains, or random stored bits, so that NaN payloads,
infinities, -0.0 and subnormals occur in every tensor. The tokenizer has one token for each byte.
Not handled: mixed dtypes; every tensor has the dtype that the configuration names.

Paper: Section 3 (canonical tensors)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_dcr.bits import unsigned
from nemo_dcr.bits.tensors import dtype_name, tensor_from_words
from nemo_dcr.testing.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from nemo_dcr.testing.llama_config import LlamaShape

BYTE_TOKENS = 256
SPECIAL_BITS = {1: (0,), 2: (0x7FC1, 0xFFA5, 0x8000, 0x0001, 0x7F80), 4: (0x7FC00001, 0xFFA00005, 0x80000000, 1)}
"""By width of a word: NaN payloads, -0.0, a subnormal, infinity."""


def synthetic_config(**fields: Any) -> dict[str, Any]:
    """A `config.json` with two layers, six heads and two KV heads; `fields` replace or add entries."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": BYTE_TOKENS + 2,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BYTE_TOKENS,
        "eos_token_id": BYTE_TOKENS + 1,
        "pad_token_id": BYTE_TOKENS + 1,
        "dtype": "bfloat16",
    }
    return {**config, **fields}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every canonical tensor of the model that `config` describes, by name.

    Raises: InvalidConfig, see `LlamaShape.of`.
    """
    shape = LlamaShape.of(config, rank=0, tp=1, vocab_padding=1)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = {
        "self_attn.q_proj": (q, hidden, shape.qkv_bias),
        "self_attn.k_proj": (kv, hidden, shape.qkv_bias),
        "self_attn.v_proj": (kv, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, q, shape.o_bias),
        "mlp.gate_proj": (inner, hidden, shape.mlp_bias),
        "mlp.up_proj": (inner, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, inner, shape.mlp_bias),
    }
    vectors = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.qk_norm:
        vectors |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.layers):
        for name, size in vectors.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
        for name, (outputs, inputs, bias) in projections.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (outputs,)
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes


def synthetic_tensors(config: Mapping[str, Any], *, seed: int = 0, random_bits: bool = False) -> dict[str, Tensor]:
    """Tensors of the model by canonical name; the same seed gives the same bits.

    `random_bits` gives every stored pattern the same chance and starts each tensor with the special ones.
    """
    dtype = LlamaShape.of(config, rank=0, tp=1, vocab_padding=1).dtype
    stored, rng = dtype_name(dtype), np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if random_bits:
            words = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype=unsigned(stored)).copy()
            special = SPECIAL_BITS[dtype.itemsize][: len(words)]
            words[: len(special)] = special
            tensors[name] = tensor_from_words(words, stored, shape)
        else:
            centre, spread = (1.0, 0.02) if "norm" in name else (0.0, shape[-1] ** -0.5)
            values = rng.normal(centre, spread, size=shape)
            tensors[name] = torch.from_numpy(values).to(dtype)
    return tensors


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, shards: int = 1
) -> Path:
    """Write `config.json` and safetensors, in one file or in `shards` files with an index. Returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(dict(config)), encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), directory / SINGLE_FILE, metadata={"format": "pt"})
        return directory
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token for each byte, and a start and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def synthetic_checkpoint(
    directory: Path, *, seed: int = 0, random_bits: bool = False, shards: int = 1, **fields: Any
) -> Path:
    """A complete tiny checkpoint directory with a tokenizer; `fields` change the configuration."""
    config = synthetic_config(**fields)
    write_checkpoint(directory, config, synthetic_tensors(config, seed=seed, random_bits=random_bits), shards=shards)
    write_byte_tokenizer(Path(directory))
    return Path(directory)
