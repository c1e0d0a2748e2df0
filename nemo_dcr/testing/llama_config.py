"""The sizes of a Llama-family model, read from its `config.json` and checked before anything is built.

Whatever the reference engine would compute differently is refused by name: other activations, rotary scaling,
sliding windows, experts, quantised weights, and splits that the heads do not allow.
Not handled: other model types (`InvalidConfig`).

Paper: Section 8 (models)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch

from nemo_dcr.errors import InvalidConfig

# model type -> (bias on q/k/v and bias on o where the config does not say, per-head norms of q and k)
_MODEL_TYPES = {
    "llama": (False, False, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (False, False, True),
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """What the engine needs to know of a model; sizes are of the whole model, not of a rank."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab: int
    """Rows of embedding and head over all ranks together, pad rows included."""
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Mapping[str, Any], *, rank: int, tp: int, vocab_padding: int) -> LlamaShape:
        """Read a `config.json` for rank `rank` of `tp`.

        Raises: InvalidConfig for a missing field, an unsupported model or a split that does not fit.
        """
        model_type = config.get("model_type")
        if model_type not in _MODEL_TYPES:
            known = ", ".join(_MODEL_TYPES)
            raise InvalidConfig("model_type", f"is {model_type!r}; the reference engine knows {known}")
        _refuse_unsupported(config)
        qkv_bias, o_bias, qk_norm = _MODEL_TYPES[model_type]
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        vocab = _size(config, "vocab_size")
        kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
        shape = cls(
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            layers=_size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads if config.get("head_dim") is None else _size(config, "head_dim"),
            vocab_size=vocab,
            padded_vocab=-(-vocab // lcm(vocab_padding, tp)) * lcm(vocab_padding, tp),
            max_positions=_size(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", qkv_bias)),
            o_bias=bool(config.get("attention_bias", o_bias)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qk_norm,
            dtype=_dtype(config),
        )
        shape._check_split(rank, tp)
        return shape

    def _check_split(self, rank: int, tp: int) -> None:
        if not 0 <= rank < tp:
            raise InvalidConfig("rank", f"must be 0 to {tp - 1}, got {rank}")
        if self.heads % self.kv_heads:
            raise InvalidConfig("num_key_value_heads", f"{self.kv_heads} does not divide {self.heads} attention heads")
        if self.heads % tp:
            raise InvalidConfig("tensor parallel size", f"{tp} does not divide {self.heads} attention heads")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise InvalidConfig("tensor parallel size", f"{tp} and {self.kv_heads} KV heads do not divide each other")
        if self.intermediate_size % tp:
            raise InvalidConfig("tensor parallel size", f"{tp} does not divide intermediate_size")
        if self.head_dim % 2:
            raise InvalidConfig("head_dim", f"must be even for rotary positions, got {self.head_dim}")


def _size(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise InvalidConfig(field, f"config.json must have a positive integer, got {value!r}")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise InvalidConfig("hidden_act", f"the reference engine knows silu, got {config['hidden_act']!r}")
    if config.get("quantization_config") is not None:
        raise InvalidConfig("quantization_config", "the reference engine holds no quantised weights")
    # Qwen models carry a window size that `use_sliding_window` switches; Mistral's size is the switch itself.
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise InvalidConfig("sliding_window", "the reference engine attends to all earlier positions")


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Newer configs keep the base in `rope_parameters`, older ones beside `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InvalidConfig("rope_parameters", f"the reference engine has no rotary scaling, got {kind!r}")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = str(config.get("dtype", config.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidConfig("dtype", f"must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
