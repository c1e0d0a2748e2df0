"""A tensor-parallel rank of a Llama-family engine in plain torch, with a native loader in the style of vLLM's.

The rank owns fused parameters (`qkv_proj`, `gate_up_proj`), row-split projections, a vocabulary split over the ranks
and padded, replicated norms, FP32 rotary buffers, and a tied head that shares storage with the embedding under two
names. `load_weights` consumes one checkpoint tensor at a time, writes it through `narrow` views with `copy_`, zeroes
pad rows with `fill_`, and returns the names of the parameters it wrote. KV heads are replicated where there are more
ranks than KV heads. `forward` needs one collective, a sum over the ranks, that the caller passes in.
Not handled: key/value caches, quantised parameters, rotary scaling, sliding windows, experts (`InvalidConfig`).

Paper: Section 6.1 (native loader paths), Section 3 (resident storage)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nemo_dcr.testing.llama_config import LlamaShape

Reduce = Callable[[Tensor], Tensor]
"""Sum over the tensor-parallel ranks; called in the same order on every rank."""

# (part of a checkpoint name, part of the resident name, shard) as in vLLM's stacked_params_mapping.
FUSED = (
    (".q_proj.", ".qkv_proj.", "q"),
    (".k_proj.", ".qkv_proj.", "k"),
    (".v_proj.", ".qkv_proj.", "v"),
    (".gate_proj.", ".gate_up_proj.", "gate"),
    (".up_proj.", ".gate_up_proj.", "up"),
)


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Replicated(nn.Module):
    """A weight vector that every rank holds whole (a norm)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(size, dtype=dtype)

    def load(self, param: nn.Parameter, loaded: Tensor, shard: str | None) -> None:
        """Copy the whole tensor."""
        _copy(param.data, loaded)

    def forward(self, x: Tensor) -> Tensor:
        """RMS normalisation in FP32, scaled in the activation dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class FusedColumns(nn.Module):
    """Several output-split projections in one parameter; `parts` maps shard names to (rows, index of the split)."""

    def __init__(self, parts: Mapping[str, tuple[int, int]], inputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = dict(parts)
        rows = sum(size for size, _ in parts.values())
        self.weight = _parameter(rows, inputs, dtype=dtype)
        self.bias = _parameter(rows, dtype=dtype) if bias else None

    def load(self, param: nn.Parameter, loaded: Tensor, shard: str | None) -> None:
        """Copy this rank's rows of one projection to its place in the fused parameter.

        Raises: ValueError for a projection or a shape that this parameter does not have.
        """
        if shard is None:
            raise ValueError("a fused parameter is loaded one projection at a time")
        offset = 0
        for name, (size, index) in self.parts.items():
            if name == shard:
                _copy(param.data.narrow(0, offset, size), loaded.narrow(0, index * size, size))
                return
            offset += size
        raise ValueError(f"there is no projection {shard!r}; known are {', '.join(self.parts)}")

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One output for each projection."""
        fused = functional.linear(x, self.weight, self.bias)
        return tuple(fused.split_with_sizes([size for size, _ in self.parts.values()], dim=-1))


class RowSplit(nn.Module):
    """A projection whose inputs are split over the ranks; the bias is added by rank 0 only, but held by all."""

    def __init__(self, outputs: int, inputs: int, rank: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        self.weight = _parameter(outputs, inputs, dtype=dtype)
        self.bias = _parameter(outputs, dtype=dtype) if bias else None

    def load(self, param: nn.Parameter, loaded: Tensor, shard: str | None) -> None:
        """Copy this rank's columns, or the whole bias."""
        if loaded.ndim == 2:
            columns = param.shape[1]
            loaded = loaded.narrow(1, self.rank * columns, columns)
        _copy(param.data, loaded)

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        """The full output, summed over the ranks."""
        return reduce(functional.linear(x, self.weight, self.bias if self.rank == 0 else None))


class VocabRows(nn.Module):
    """Rows of the padded vocabulary that one rank holds: embedding or head."""

    def __init__(self, shape: LlamaShape, rank: int, tp: int) -> None:
        super().__init__()
        self.rows = shape.padded_vocab // tp
        self.first = rank * self.rows
        self.vocab = shape.vocab_size
        self.weight = _parameter(self.rows, shape.hidden_size, dtype=shape.dtype)

    def load(self, param: nn.Parameter, loaded: Tensor, shard: str | None) -> None:
        """Copy this rank's real rows and zero its pad rows.

        Raises: ValueError when the checkpoint has another number of rows.
        """
        if loaded.shape[0] != self.vocab:
            raise ValueError(f"checkpoint has {loaded.shape[0]} vocabulary rows, config.json says {self.vocab}")
        first = min(self.first, self.vocab)
        real = min(self.rows, self.vocab - first)
        _copy(param.data[:real], loaded.narrow(0, first, real))
        if real < self.rows:
            param.data[real:].fill_(0)

    def embed(self, tokens: Tensor, reduce: Reduce) -> Tensor:
        """Rows of `tokens` (any shape), summed over the ranks: exactly one rank contributes to each."""
        local = tokens - self.first
        mine = (local >= 0) & (local < self.rows)
        rows = functional.embedding(torch.where(mine, local, 0), self.weight)
        return reduce(rows.masked_fill(~mine.unsqueeze(-1), 0))

    def logits(self, x: Tensor, reduce: Reduce) -> Tensor:
        """Logits of the whole vocabulary without padding, in the activation dtype."""
        parts = x.new_zeros(*x.shape[:-1], max(self.vocab, self.first + self.rows))
        parts[..., self.first : self.first + self.rows] = functional.linear(x, self.weight)
        return reduce(parts[..., : self.vocab].contiguous())


def _copy(target: Tensor, loaded: Tensor) -> None:
    if target.shape != loaded.shape:
        raise ValueError(f"cannot load shape {tuple(loaded.shape)} into {tuple(target.shape)}")
    target.copy_(loaded)


class Rotary(nn.Module):
    """FP32 rotary tables, computed once and shared by all layers; not part of a checkpoint."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        inv_freq = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float64), inv_freq)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `x` of shape [batch, heads, positions, head_dim]; positions count from 0."""
        table: Tensor = self.get_buffer("cos_sin_cache")[: x.shape[-2]].to(x.dtype)
        cos, sin = table.chunk(2, dim=-1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention over this rank's heads."""

    def __init__(self, shape: LlamaShape, rank: int, tp: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
        replicas = max(1, tp // shape.kv_heads)
        parts = {
            "q": (heads * shape.head_dim, rank),
            "k": (kv_heads * shape.head_dim, rank // replicas),
            "v": (kv_heads * shape.head_dim, rank // replicas),
        }
        self.qkv_proj = FusedColumns(parts, shape.hidden_size, shape.qkv_bias, shape.dtype)
        self.o_proj = RowSplit(shape.hidden_size, heads * shape.head_dim, rank, shape.o_bias, shape.dtype)
        self.q_norm = Replicated(shape.head_dim, shape.rms_norm_eps, shape.dtype) if shape.qk_norm else None
        self.k_norm = Replicated(shape.head_dim, shape.rms_norm_eps, shape.dtype) if shape.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary, reduce: Reduce) -> Tensor:
        """Attention output of shape [batch, positions, hidden], summed over the ranks."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotary(q.transpose(1, 2)), rotary(k.transpose(1, 2)), v.transpose(1, 2)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2), reduce)
        return out


class GatedUnit(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, shape: LlamaShape, rank: int, tp: int) -> None:
        super().__init__()
        inner = shape.intermediate_size // tp
        parts = {"gate": (inner, rank), "up": (inner, rank)}
        self.gate_up_proj = FusedColumns(parts, shape.hidden_size, shape.mlp_bias, shape.dtype)
        self.down_proj = RowSplit(shape.hidden_size, inner, rank, shape.mlp_bias, shape.dtype)

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        """Output of shape [batch, positions, hidden], summed over the ranks."""
        gate, up = self.gate_up_proj(x)
        out: Tensor = self.down_proj(functional.silu(gate) * up, reduce)
        return out


class DecoderLayer(nn.Module):
    """One residual block pair."""

    def __init__(self, shape: LlamaShape, rank: int, tp: int) -> None:
        super().__init__()
        self.input_layernorm = Replicated(shape.hidden_size, shape.rms_norm_eps, shape.dtype)
        self.self_attn = Attention(shape, rank, tp)
        self.post_attention_layernorm = Replicated(shape.hidden_size, shape.rms_norm_eps, shape.dtype)
        self.mlp = GatedUnit(shape, rank, tp)

    def forward(self, x: Tensor, rotary: Rotary, reduce: Reduce) -> Tensor:
        """Hidden state after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, reduce)
        after: Tensor = x + self.mlp(self.post_attention_layernorm(x), reduce)
        return after


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: LlamaShape, rank: int, tp: int) -> None:
        super().__init__()
        self.embed_tokens = VocabRows(shape, rank, tp)
        self.layers = nn.ModuleList([DecoderLayer(shape, rank, tp) for _ in range(shape.layers)])
        self.norm = Replicated(shape.hidden_size, shape.rms_norm_eps, shape.dtype)
        self.rotary_emb = Rotary(shape)

    def forward(self, tokens: Tensor, reduce: Reduce) -> Tensor:
        """Hidden states of shape [batch, positions, hidden]."""
        x = self.embed_tokens.embed(tokens, reduce)
        for layer in self.layers:
            x = layer(x, self.rotary_emb, reduce)
        out: Tensor = self.norm(x)
        return out


class ReferenceEngine(nn.Module):
    """Rank `rank` of `tp` of an engine for the model that `config` (a Hugging Face `config.json`) describes.

    The vocabulary is padded to a multiple of `vocab_padding` that the ranks can share evenly. Storage is not
    initialised: load weights before use.
    Raises: InvalidConfig when the model or the split is not supported.
    """

    def __init__(self, config: Mapping[str, Any], rank: int, tp: int, *, vocab_padding: int = 1000) -> None:
        super().__init__()
        self.shape = LlamaShape.of(config, rank=rank, tp=tp, vocab_padding=vocab_padding)
        self.rank = rank
        self.tp = tp
        self.model = Decoder(self.shape, rank, tp)
        self.lm_head = VocabRows(self.shape, rank, tp)
        if self.shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load checkpoint tensors in place, one at a time, and return the names of the parameters that were written.

        A tied engine skips the head. Any part of a checkpoint may be given, in any order, as often as wanted.
        Raises: ValueError for a name or shape that this model does not have.
        """
        parameters = dict(self.named_parameters(remove_duplicate=False))
        loaded_names: set[str] = set()
        for name, loaded in weights:
            if self.shape.tied and name.startswith("lm_head."):
                continue
            resident, shard = name, None
            for part, fused, fused_shard in FUSED:
                if part in name:
                    resident, shard = name.replace(part, fused), fused_shard
            if resident not in parameters:
                raise ValueError(f"checkpoint tensor {name!r} has no place in this model")
            owner: Any = self.get_submodule(resident.rpartition(".")[0])
            owner.load(parameters[resident], loaded, shard)
            loaded_names.add(resident)
        return loaded_names

    @torch.inference_mode()
    def forward(self, tokens: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Logits [batch, positions, vocabulary] for integer `tokens` [batch, positions].

        `reduce` sums a tensor over the ranks; every rank calls it in the same order. One rank alone needs none.
        Raises: ValueError when there are several ranks and no `reduce`.
        """
        if reduce is None:
            if self.tp > 1:
                raise ValueError("a tensor-parallel rank needs `reduce`, a sum over the ranks")
            reduce = _alone
        return self.lm_head.logits(self.model(tokens, reduce), reduce)

    def generate(self, tokens: list[int], count: int, reduce: Reduce | None = None) -> list[int]:
        """The next `count` greedy tokens after `tokens`."""
        sequence = list(tokens)
        for _ in range(count):
            sequence.append(int(self(torch.tensor([sequence]), reduce)[0, -1].argmax()))
        return sequence[len(tokens) :]


def _alone(x: Tensor) -> Tensor:
    return x
