"""Index maps of the fused parameters that trainers really have, from the canonical tensors that they hold.

Each function gives the whole parameter, as the framework builds it from a checkpoint; `rank_part` cuts a rank's shard
of it where the shard is a range along one axis. Tensor-parallel parameters whose parts are cut one by one take the
parts of the rank themselves.
Not handled: values that change on the way (norms stored around zero, quantised exports); those tasks are residual.

Paper: Appendix A.1, beyond its classes   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.piecewise import IndexMap


def rank_part(whole: IndexMap, axis: int, rank: int, ranks: int) -> IndexMap:
    """Part `rank` of `ranks` equal ones along an axis.

    Raises: UnsupportedMapping (SC5) when the axis has no equal parts.
    """
    size = whole.shape[axis]
    if size % ranks:
        name = whole.tensors[0].name if whole.tensors else ""
        raise UnsupportedMapping(name, "SC5", f"axis {axis} of shape {whole.shape} has no {ranks} equal parts")
    return whole.narrow(axis, rank * (size // ranks), size // ranks)


def interleaved_qkv(query: TensorMeta, key: TensorMeta, value: TensorMeta, *, groups: int) -> IndexMap:
    """Query heads of each key-value group, then its key head, then its value head; group after group.

    Args:
        query: [query heads x head size, ...]: a weight, or a bias.
        key: [groups x head size, ...].
        value: as `key`.
        groups: key-value heads.

    Raises: UnsupportedMapping (SC5) for shapes that are not such heads.
    """

    return interleaved([IndexMap.of(query), IndexMap.of(key), IndexMap.of(value)], groups=groups)


def interleaved(parts: Sequence[IndexMap], *, groups: int) -> IndexMap:
    """The rows of each part that belong to group 0, part after part, then those of group 1, and so on.

    Raises: UnsupportedMapping (SC5) for a part whose rows are not so many groups, or shapes that do not fit.
    """

    def grouped(part: IndexMap) -> IndexMap:
        rows, rest = part.shape[0], part.shape[1:]
        if groups < 1 or rows % groups:
            name = part.tensors[0].name if part.tensors else ""
            raise UnsupportedMapping(name, "SC5", f"{rows} rows are not {groups} groups of heads")
        return part.reshape((groups, rows // groups, *rest))

    joined = IndexMap.concatenate([grouped(part) for part in parts], 1)
    return joined.reshape((joined.shape[0] * joined.shape[1], *joined.shape[2:]))


def concatenated(tensors: Sequence[TensorMeta], *, axis: int = 0, rank: int = 0, ranks: int = 1) -> IndexMap:
    """The rank's part of each tensor along an axis, one after another: gate and up projections.

    Raises: UnsupportedMapping (SC5) when a tensor has no equal parts.
    """
    return IndexMap.concatenate([rank_part(IndexMap.of(t), axis, rank, ranks) for t in tensors], axis)


def sections(tensor: TensorMeta, lengths: Sequence[int], *, rank: int = 0, ranks: int = 1) -> IndexMap:
    """The rank's part of each section of one tensor's rows, one after another: Mamba projections and convolutions.

    Args:
        tensor: whose rows are sections, one after another: z, x, B, C and dt of a Mamba input projection.
        lengths: of the sections.
        rank: of the trainer rank.
        ranks: into which each section is split.

    Raises: UnsupportedMapping (SC5) when the sections do not add up, or one has no equal parts.
    """
    parts = IndexMap.of(tensor).split(0, lengths)
    return IndexMap.concatenate([rank_part(part, 0, rank, ranks) for part in parts], 0)


def stacked(tensors: Sequence[TensorMeta], *, transposed: bool = False) -> IndexMap:
    """Matrices of one shape as one array with the number of the matrix first: experts.

    Args:
        tensors: in order.
        transposed: each matrix lies transposed in the parameter.

    Raises: UnsupportedMapping (SC5) when shapes differ.
    """
    maps = [IndexMap.of(tensor) for tensor in tensors]
    return IndexMap.stack([each.permute((1, 0)) for each in maps] if transposed else maps, 0)


def padded_rows(tensor: TensorMeta, rows: int) -> IndexMap:
    """The tensor with rows of padding after its own: vocabularies that are padded for tensor parallelism.

    Raises: UnsupportedMapping (SC5) when the tensor has more rows.
    """
    return IndexMap.of(tensor).pad(0, 0, rows - tensor.shape[0])
