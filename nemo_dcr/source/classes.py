"""How each tensor of a trainer is mapped: affine, piecewise affine or residual, by the class of its mapping.

The class says what a framework does to a canonical tensor: Megatron-Bridge has mapping objects of these kinds, FSDP2
and tensor-parallel plans of PyTorch have the first three. The paper calls a tensor affine when each shard of it is a
range of one axis, whole, or a slice of a fused parameter; `Mapping.EXTENDED` adds what a piecewise map says exactly
(piecewise, fused). A class that is not known is residual, never a guess.
Not handled: geometry (maps, piecewise), which decides where elements go; this decides which tensors have one.

Paper: Section 5 (tasks); Appendix A.1; Tables D.1 and D.2   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from nemo_dcr.canonical import TensorMeta


class Mapping(StrEnum):
    """Which maps are used."""

    PAPER = "paper"
    EXTENDED = "extended"


class MappingClass(StrEnum):
    """What a framework does to a canonical tensor."""

    REPLICATED = "replicated"
    """Every rank holds it whole."""
    COLUMN = "column"
    """Ranks hold ranges of rows."""
    ROW = "row"
    """Ranks hold ranges of columns."""
    SLICE = "slice"
    """As column, in a parameter that holds other tensors beside it: gate and up projections."""
    QKV = "qkv"
    """Heads interleaved by key-value groups."""
    SECTIONS = "sections"
    """Sections of it are cut one by one: Mamba input projections and convolutions."""
    STACKED = "stacked"
    """One matrix of a stack, or a stack that is held matrix by matrix."""
    PADDED = "padded"
    """Rows of padding are added: embeddings and output heads."""
    PERMUTED = "permuted"
    """Its axes lie in another order."""
    TIED = "tied"
    """One parameter is two canonical tensors."""
    COMPUTED = "computed"
    """Values change on the way, or several inputs are combined."""
    UNKNOWN = "unknown"
    """A class that nobody described."""


class Handling(StrEnum):
    """What a task of a tensor is."""

    AFFINE = "affine"
    PIECEWISE = "piecewise"
    RESIDUAL = "residual"


AFFINE = frozenset({MappingClass.REPLICATED, MappingClass.COLUMN, MappingClass.ROW, MappingClass.SLICE})
PIECEWISE = frozenset(
    {MappingClass.QKV, MappingClass.SECTIONS, MappingClass.STACKED, MappingClass.PADDED, MappingClass.PERMUTED}
)
SPLIT = frozenset({MappingClass.COLUMN, MappingClass.ROW, MappingClass.SLICE})
"""Each shard of these is one affine item; those of a replicated tensor are one."""


class Degree(StrEnum):
    """Which parallel degree splits a tensor."""

    TENSOR = "tensor"
    EXPERT_TENSOR = "expert tensor"


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One row of a trainer's table: a canonical tensor and how it is mapped."""

    tensor: TensorMeta
    mapping: MappingClass
    degree: Degree = Degree.TENSOR
    transformed: bool = False
    """The native loader computes another value of it, so that its items are overwrites wherever they come from."""


def handling(mapping: MappingClass, use: Mapping = Mapping.EXTENDED) -> Handling:
    """What the task of a tensor of this class is."""
    if mapping in AFFINE:
        return Handling.AFFINE
    if use is Mapping.EXTENDED and mapping in PIECEWISE:
        return Handling.PIECEWISE
    return Handling.RESIDUAL


@dataclass(frozen=True, slots=True)
class Share:
    """Canonical tensors of one handling."""

    tensors: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Classified:
    """A trainer's table, classified."""

    rows: tuple[MappedTensor, ...]
    use: Mapping

    def of(self, kind: Handling) -> tuple[MappedTensor, ...]:
        """Its rows of a handling."""
        return tuple(row for row in self.rows if handling(row.mapping, self.use) is kind)

    def share(self, kind: Handling) -> Share:
        """Count and bytes of a handling."""
        rows = self.of(kind)
        return Share(len(rows), sum(row.tensor.nbytes for row in rows))

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(row.tensor.nbytes for row in self.rows)

    @property
    def baseline_nbytes(self) -> int:
        """Of the committed baseline of all owners: one copy of the source, and the residual canonical tensors."""
        return self.nbytes + self.share(Handling.RESIDUAL).nbytes

    def affine_items(self, tensor_parallel: int, expert_tensor_parallel: int) -> int:
        """Items of affine tensors when every shard changes: one for each shard."""
        degree = {Degree.TENSOR: tensor_parallel, Degree.EXPERT_TENSOR: expert_tensor_parallel}
        return sum(degree[row.degree] if row.mapping in SPLIT else 1 for row in self.of(Handling.AFFINE))


def classify(rows: Iterable[MappedTensor], use: Mapping = Mapping.EXTENDED) -> Classified:
    """The table of a trainer under the paper's classes, or with piecewise maps too."""
    return Classified(tuple(rows), use)
