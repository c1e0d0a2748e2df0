"""What a mapping object of Megatron-Bridge does to canonical tensors, and where this rank's parameter lies in them.

A mapping object says how a parameter of Megatron becomes tensors of the checkpoint. Its class decides: `describe` knows
the index map of each class in `LAYOUTS`, for the rank and the degree that the object itself reports (tensor parallel,
or expert tensor parallel for experts; the names of experts already say which expert-parallel rank holds them). An
object counts as one of those classes only if it is exactly of it and nothing of it was replaced; the same holds for
the objects inside of it. Whatever is left, is of a class that nobody described, or does not fit its parameter is
`UNKNOWN` or `COMPUTED` with the reason, and so residual.
Not handled: running a conversion (residual), or checking a map against one (verification).

Paper: Section 5 (affine and residual tasks); Appendix A.1   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.classes import Degree, MappingClass
from nemo_dcr.source.fused import concatenated, interleaved, padded_rows, rank_part, sections
from nemo_dcr.source.maps import Shape
from nemo_dcr.source.piecewise import IndexMap

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Ends of the names of parameters whose rows Megatron pads, and may tie."""
RESIDUAL = {
    "QKVGMapping": "a scalar gate is expanded",
    "RMSNorm2ZeroCenteredRMSNormMapping": "1 is added",
    "FusedExpertMapping": "the export gathers the experts in a loop of its own",
    "FusedGatedExpertMapping": "the export gathers the experts in a loop of its own",
}
"""Classes of Bridge that are known not to be index maps here, and why."""


@dataclass(frozen=True, slots=True)
class Described:
    """One mapping object."""

    mapping: MappingClass
    degree: Degree
    outputs: tuple[str, ...]
    """Canonical names, as the object has them."""
    map: IndexMap | None = None
    """Of this rank's parameter. None where the class is no index map."""
    reason: str = ""
    """Why it is no index map."""


@dataclass(frozen=True, slots=True)
class Held:
    """A mapping object with what this rank holds of its parameter."""

    mapping: Any
    module: Any
    """Of the parameter: its class and its configuration are looked at."""
    shape: Shape
    """Of the local parameter."""
    tensors: Mapping[str, TensorMeta]
    """Of the checkpoint."""

    def tensor(self, part: str | None = None) -> TensorMeta:
        """The canonical tensor, or the one of a part.

        Raises: UnsupportedMapping (SC1) when the checkpoint lacks it.
        """
        name = self.mapping.hf_param if part is None else self.mapping.hf_param[part]
        if name not in self.tensors:
            raise UnsupportedMapping(name, "SC1", f"{self.mapping.megatron_param} becomes it; the checkpoint lacks it")
        return self.tensors[name]

    @property
    def config(self) -> Any:
        """Of the model."""
        return self.mapping._get_config(self.module)

    @property
    def rank(self) -> tuple[int, int]:
        """Rank and degree that cut it."""
        return self.mapping.tp_rank, self.mapping.tp_size

    def cut(self, whole: IndexMap, *, like: Any = None) -> IndexMap:
        """This rank's part of a whole parameter, cut as the mapping inside (`like`) cuts it for the module.

        Raises: UnsupportedMapping (SC5) for a cut that is no range of rows.
        """
        kind = type(like).__name__
        how = like._detect_parallelism_type(self.module) if kind == "AutoMapping" else kind
        if how in ("column", "ColumnParallelMapping"):
            return rank_part(whole, 0, *self.rank)
        if how in ("replicated", "ReplicatedMapping"):
            return whole
        raise UnsupportedMapping(str(self.mapping.hf_param), "SC5", f"a fused parameter that is cut as {how!r}")


Layout = Callable[[Held], tuple[MappingClass, IndexMap]]


def describe(held: Held) -> Described:
    """What the mapping object does to the parameter; an object that is no index map has its reason."""
    mapping = held.mapping
    degree = Degree.EXPERT_TENSOR if getattr(mapping, "is_expert", False) else Degree.TENSOR
    outputs = names_of(mapping)
    if reason := foreign(mapping):
        return Described(MappingClass.UNKNOWN, degree, outputs, None, reason)
    kind = type(mapping).__name__
    if kind in RESIDUAL:
        return Described(MappingClass.COMPUTED, degree, outputs, None, f"{kind}: {RESIDUAL[kind]}")
    if kind not in LAYOUTS or getattr(mapping, "is_grouped_export", False):
        return Described(MappingClass.UNKNOWN, degree, outputs, None, f"{kind} is not described")
    try:
        found, index_map = LAYOUTS[kind](held)
        index_map.check()
    except (UnsupportedMapping, ValueError, AttributeError) as error:
        return Described(MappingClass.UNKNOWN, degree, outputs, None, f"{kind}: {error}")
    if index_map.shape != held.shape:
        detail = f"{kind} gives shape {index_map.shape}, the parameter has {held.shape}"
        return Described(MappingClass.UNKNOWN, degree, outputs, None, detail)
    return Described(found, degree, outputs, index_map)


def names_of(mapping: Any) -> tuple[str, ...]:
    """The canonical names of a mapping object, sorted."""
    names = mapping.hf_param
    return tuple(sorted(names.values())) if isinstance(names, dict) else (str(names),)


def foreign(mapping: Any) -> str:
    """Why an object is none of Bridge's own classes as Bridge wrote them; empty when it is."""
    from megatron.bridge.models.conversion import param_mapping

    kind = type(mapping)
    if getattr(param_mapping, kind.__name__, None) is not kind:
        return f"{kind.__module__}.{kind.__qualname__} is none of Bridge's own classes"
    for name, value in _methods(kind, param_mapping.__name__):
        if name in vars(mapping) or not _written_in(value, param_mapping.__file__):
            return f"{name} of {kind.__name__} was replaced"
    inside = [value for value in vars(mapping).values() if isinstance(value, param_mapping.MegatronParamMapping)]
    return next((reason for each in inside if (reason := foreign(each))), "")


def _methods(kind: type, module: str) -> Iterator[tuple[str, Any]]:
    """What can be called of a class and of those bases of it that the module has."""
    for base in kind.__mro__:
        if base.__module__ == module:
            for name, value in vars(base).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if callable(function) and (name == "__init__" or not name.startswith("__")):
                    yield name, function


def _written_in(function: Any, path: str | None) -> bool:
    return isinstance(function, FunctionType) and function.__code__.co_filename == path


# ---------------------------------------------------------------------------------------------------------- layouts


def _replicated(held: Held) -> tuple[MappingClass, IndexMap]:
    return MappingClass.REPLICATED, IndexMap.of(held.tensor())


def _column(held: Held) -> tuple[MappingClass, IndexMap]:
    rank, ranks = held.rank
    tensor = held.tensor()
    if held.mapping.megatron_param.endswith(VOCABULARY):
        return MappingClass.PADDED, rank_part(padded_rows(tensor, held.shape[0] * ranks), 0, rank, ranks)
    return MappingClass.COLUMN, rank_part(IndexMap.of(tensor), 0, rank, ranks)


def _row(held: Held) -> tuple[MappingClass, IndexMap]:
    if len(held.shape) == 1:
        return _replicated(held)
    return MappingClass.ROW, rank_part(IndexMap.of(held.tensor()), 1, *held.rank)


def _auto(held: Held) -> tuple[MappingClass, IndexMap]:
    how = {"column": _column, "row": _row, "replicated": _replicated}[
        held.mapping._detect_parallelism_type(held.module)
    ]
    order = held.mapping.permute_dims
    if order is None:
        return how(held)
    tensor = held.tensor()
    # The export permutes the gathered parameter by `order`; the parameter is the tensor permuted back.
    back = sorted(range(len(order)), key=lambda axis: int(order[axis]))
    permuted = IndexMap.of(tensor).permute(back)
    if how is _replicated or (how is _row and len(order) == 1):
        return MappingClass.PERMUTED, permuted
    return MappingClass.PERMUTED, rank_part(permuted, 0 if how is _column else 1, *held.rank)


def _gated(held: Held) -> tuple[MappingClass, IndexMap]:
    rank, ranks = held.rank
    return MappingClass.SLICE, concatenated([held.tensor("gate"), held.tensor("up")], rank=rank, ranks=ranks)


def _heads(held: Held, parts: Sequence[IndexMap]) -> tuple[MappingClass, IndexMap]:
    if getattr(held.config, "attention_output_gate", False):
        raise UnsupportedMapping(str(held.mapping.hf_param), "SC5", "query heads come with gates")
    whole = interleaved(parts, groups=held.config.num_query_groups)
    return MappingClass.QKV, held.cut(whole, like=held.mapping._tp_mapping)


def _query_key_value(held: Held) -> tuple[MappingClass, IndexMap]:
    return _heads(held, [IndexMap.of(held.tensor(part)) for part in "qkv"])


def _key_value(held: Held) -> tuple[MappingClass, IndexMap]:
    return _heads(held, [IndexMap.of(held.tensor(part)) for part in "kv"])


def _concatenated_qkv(held: Held) -> tuple[MappingClass, IndexMap]:
    config = held.config
    query, groups = (count * config.kv_channels for count in (config.num_attention_heads, config.num_query_groups))
    return _heads(held, IndexMap.of(held.tensor()).split(0, [query, groups, groups]))


def _mamba_projection(held: Held) -> tuple[MappingClass, IndexMap]:
    config = held.config
    inner = config.mamba_num_heads * config.mamba_head_dim
    state = config.mamba_state_dim * config.mamba_num_groups
    return _sections(held, [inner, inner, state, state, config.mamba_num_heads])


def _chunked(held: Held) -> tuple[MappingClass, IndexMap]:
    return _sections(held, [len(each) for each in held.mapping.get_shard_idx(held.config, local_tp=False)])


def _sections(held: Held, lengths: Sequence[int]) -> tuple[MappingClass, IndexMap]:
    rank, ranks = held.rank
    return MappingClass.SECTIONS, sections(held.tensor(), lengths, rank=rank, ranks=ranks)


LAYOUTS: Mapping[str, Layout] = {
    "DirectMapping": _replicated,
    "ReplicatedMapping": _replicated,
    "ColumnParallelMapping": _column,
    "RowParallelMapping": _row,
    "AutoMapping": _auto,
    "GatedMLPMapping": _gated,
    "QKVMapping": _query_key_value,
    "KVMapping": _key_value,
    "ConcatenatedQKVMapping": _concatenated_qkv,
    "MambaInProjMapping": _mamba_projection,
    "MambaConv1dMapping": _chunked,
    "GDNConv1dMapping": _chunked,
}
"""Index map of each class, by its name in megatron.bridge.models.conversion.param_mapping."""
