"""A tensor-parallel trainer layout in the style of Megatron, for a Llama-family checkpoint.

Each rank holds fused parameters: query, key and value rows interleaved by key-value group, gate rows above up rows,
column-split output and down projections, a slice of the padded vocabulary, and whole norms. The layout knows how its
parameters came from canonical tensors (`load`), and describes them to the source side as Table D.2 does: output
projections, gate, up, down and norms are affine; query, key, value, embedding and head are residual.
Not handled: training steps (a test loads the next version), key-value groups that do not divide by the ranks.

Paper: Section 3 (two layouts); Appendix D (Table D.2)   Conditions: SC5, SC6
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words, tensor_from_words, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.tasks import AffineTask, Part, ResidualInput, ResidualTask, tensor_reader

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Load = Callable[[TensorMeta], Words]
"""Gives the full flat words of a canonical tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedShape:
    """Sizes of the model and of its padding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this times the ranks."""
    tied: bool = True
    """The head shares the embedding's storage."""
    head_in_checkpoint: bool = False
    """A tied head is listed under its own canonical name as well."""
    dtype: str = "BF16"

    @property
    def has_head(self) -> bool:
        """True iff the checkpoint lists the output head."""
        return self.head_in_checkpoint or not self.tied

    def tensors(self) -> tuple[TensorMeta, ...]:
        """The canonical tensors, sorted by name."""
        wide, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, wide), NORM: (wide,)}
        if self.has_head:
            shapes[HEAD] = (self.vocab, wide)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (wide,),
                f"{prefix}post_attention_layernorm.weight": (wide,),
                f"{prefix}self_attn.q_proj.weight": (q, wide),
                f"{prefix}self_attn.k_proj.weight": (kv, wide),
                f"{prefix}self_attn.v_proj.weight": (kv, wide),
                f"{prefix}self_attn.o_proj.weight": (wide, q),
                f"{prefix}mlp.gate_proj.weight": (self.intermediate, wide),
                f"{prefix}mlp.up_proj.weight": (self.intermediate, wide),
                f"{prefix}mlp.down_proj.weight": (wide, self.intermediate),
            }
        return tuple(TensorMeta(name, shape, self.dtype) for name, shape in sorted(shapes.items()))


class FusedRank:
    """The parameters of tensor-parallel rank `rank` of `ranks`.

    Raises: InvalidConfig when heads or the intermediate size do not divide by the ranks.
    """

    def __init__(self, shape: FusedShape, rank: int, ranks: int, load: Load) -> None:
        if shape.kv_heads % ranks or shape.intermediate % ranks or shape.heads % shape.kv_heads:
            raise InvalidConfig("fused_layout.ranks", f"{ranks} ranks do not divide heads and intermediate size")
        self.shape, self.rank, self.ranks = shape, rank, ranks
        self._meta = {tensor.name: tensor for tensor in shape.tensors()}
        self.parameters: dict[str, Tensor] = {}
        self.load(load)

    @property
    def _groups(self) -> int:
        return self.shape.kv_heads // self.ranks

    @property
    def _group_rows(self) -> tuple[int, int, int]:
        """Query, key and value rows of one key-value group."""
        query = self.shape.heads // self.shape.kv_heads * self.shape.head_dim
        return query, self.shape.head_dim, self.shape.head_dim

    @property
    def _vocab_rows(self) -> int:
        multiple = self.shape.vocab_multiple * self.ranks
        return -(-self.shape.vocab // multiple) * multiple // self.ranks

    def load(self, load: Load) -> None:
        """Set all parameters from full canonical tensors: the weights of the next version. Pad rows are zero."""

        def full(name: str) -> Tensor:
            tensor = self._meta[name]
            return tensor_from_words(load(tensor), tensor.dtype, tensor.shape)

        def half(name: str) -> Tensor:
            return full(name).chunk(self.ranks, dim=0)[self.rank]

        for name in (EMBEDDING, *((HEAD,) if not self.shape.tied else ())):
            rows = torch.zeros(self._vocab_rows, self.shape.hidden, dtype=torch_dtype(self.shape.dtype))
            first = self.rank * self._vocab_rows
            mine = full(name)[first : first + self._vocab_rows]
            rows[: len(mine)] = mine
            self._set(name, rows)
        self._set(NORM, full(NORM))
        for layer in range(self.shape.layers):
            prefix, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
            grouped = [
                half(f"{attention}{kind}_proj.weight").reshape(self._groups, rows, self.shape.hidden)
                for kind, rows in zip("qkv", self._group_rows, strict=True)
            ]
            self._set(f"{attention}qkv", torch.cat(grouped, dim=1).reshape(-1, self.shape.hidden))
            both = [half(f"{prefix}mlp.{kind}_proj.weight") for kind in ("gate", "up")]
            self._set(f"{prefix}mlp.gate_up", torch.cat(both, dim=0))
            for name in (f"{attention}o_proj.weight", f"{prefix}mlp.down_proj.weight"):
                self._set(name, full(name).chunk(self.ranks, dim=1)[self.rank])
            for kind in ("input", "post_attention"):
                self._set(f"{prefix}{kind}_layernorm.weight", full(f"{prefix}{kind}_layernorm.weight"))

    def _set(self, name: str, value: Tensor) -> None:
        if name in self.parameters:
            self.parameters[name].copy_(value)
        else:
            self.parameters[name] = value.clone(memory_format=torch.contiguous_format)

    def affine_tasks(self) -> list[AffineTask]:
        """Output projections, gate, up, down and norms."""
        tasks = [self._whole(NORM)]
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}."
            tasks += [self._whole(f"{prefix}{kind}_layernorm.weight") for kind in ("input", "post_attention")]
            for name in (f"{prefix}self_attn.o_proj.weight", f"{prefix}mlp.down_proj.weight"):
                width = self._meta[name].shape[1] // self.ranks
                box = BoxMap.box(self._meta[name], (0, self.rank * width), (self.shape.hidden, width))
                tasks.append(AffineTask.identity(box, self._reader(name, box.label)))
            rows = self.shape.intermediate // self.ranks
            for position, kind in enumerate(("gate", "up")):
                tensor = self._meta[f"{prefix}mlp.{kind}_proj.weight"]
                box = BoxMap.box(tensor, (self.rank * rows, 0), (rows, self.shape.hidden))
                read = self._reader(f"{prefix}mlp.gate_up", box.label, slice(position * rows, (position + 1) * rows))
                tasks.append(AffineTask.identity(box, read))
        return tasks

    def _whole(self, name: str) -> AffineTask:
        return AffineTask.identity(BoxMap.whole(self._meta[name]), self._reader(name, name))

    def _reader(self, name: str, key: str, rows: slice = slice(None)) -> Callable[[], Words]:
        return tensor_reader(lambda: self.parameters[name][rows], key)

    def residual(self) -> tuple[list[ResidualInput], list[ResidualTask]]:
        """Inputs and conversions of query, key, value, embedding and head."""
        inputs, tasks = [], []
        for name, outputs, convert in self._conversions():
            parameter, shard = self.parameters[name], f"{self.rank}/{self.ranks}"
            inputs.append(
                ResidualInput(
                    name=name,
                    shard=shard,
                    dtype=self.shape.dtype,
                    count=parameter.numel(),
                    read=self._reader(name, name),
                )
            )
            tasks.append(
                ResidualTask(
                    name=f"convert {name}",
                    shard=shard,
                    outputs=outputs,
                    depends=(name,),
                    nbytes=parameter.nbytes,
                    convert=convert,
                )
            )
        return inputs, tasks

    def _conversions(self) -> Iterator[tuple[str, tuple[TensorMeta, ...], Callable[[TensorMeta], Sequence[Part]]]]:
        embedding = (self._meta[EMBEDDING],)
        if self.shape.tied:
            yield EMBEDDING, (embedding + ((self._meta[HEAD],) if self.shape.has_head else ())), self._vocab(EMBEDDING)
        else:
            yield EMBEDDING, embedding, self._vocab(EMBEDDING)
            yield HEAD, (self._meta[HEAD],), self._vocab(HEAD)
        for layer in range(self.shape.layers):
            attention = f"model.layers.{layer}.self_attn."
            outputs = tuple(self._meta[f"{attention}{kind}_proj.weight"] for kind in "qkv")
            yield f"{attention}qkv", outputs, self._split_qkv(f"{attention}qkv", outputs)

    def _vocab(self, parameter: str) -> Callable[[TensorMeta], Sequence[Part]]:
        def convert(tensor: TensorMeta) -> Sequence[Part]:
            first = min(self.rank * self._vocab_rows, self.shape.vocab)
            rows = min(first + self._vocab_rows, self.shape.vocab) - first
            box = BoxMap.box(tensor, (first, 0), (rows, self.shape.hidden))
            return [Part(box, copied_words(self.parameters[parameter][:rows]))]

        return convert

    def _split_qkv(self, parameter: str, outputs: tuple[TensorMeta, ...]) -> Callable[[TensorMeta], Sequence[Part]]:
        def convert(tensor: TensorMeta) -> Sequence[Part]:
            fused = self.parameters[parameter].reshape(self._groups, sum(self._group_rows), self.shape.hidden)
            mine = torch.split(fused, list(self._group_rows), dim=1)[outputs.index(tensor)]
            rows = mine.shape[0] * mine.shape[1]
            box = BoxMap.box(tensor, (self.rank * rows, 0), (rows, self.shape.hidden))
            return [Part(box, copied_words(mine))]

        return convert
