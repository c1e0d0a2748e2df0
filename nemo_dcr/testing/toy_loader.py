"""A small library of native loaders for tests: each rule places one canonical tensor on one rank, for any rank count.

Rules follow what real loaders do: narrow views and `copy_`, fused parameters, transposes, casts, composed transforms,
native skips, padded rows that are zeroed by `fill_`. `ToyModel` is built from a tensor table and one rule a tensor; it
is a torch module with a `load_weights` of its own, and knows nothing of deltas.

Paper: Section 3 (native loader L_r)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from nemo_dcr.bits import unsigned
from nemo_dcr.bits.tensors import dtype_name, tensor_from_words, torch_dtype
from nemo_dcr.canonical import TensorMeta

Parameters = Mapping[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def shard(size: int, rank: int, world: int) -> tuple[int, int]:
    """Start and length of a rank's part of an axis, as torch.chunk cuts it; the last parts may be short or empty."""
    step = -(-size // world)
    start = min(rank * step, size)
    return start, min(step, size - start)


class Rule:
    """How one canonical tensor is stored on a rank. Stateless: geometry comes from the tensor and the rank."""

    def declare(self, meta: TensorMeta, rank: int, world: int) -> Shapes:
        """Names, shapes and dtypes of the parameters that this rank holds for the tensor."""
        return {meta.name: (self.local_shape(meta, rank, world), torch_dtype(meta.dtype))}

    def local_shape(self, meta: TensorMeta, rank: int, world: int) -> tuple[int, ...]:
        """Shape of the parameter of the tensor's own name."""
        return meta.shape

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy the rank's part into the parameters; returns the parameters that were loaded."""
        parameters[name].copy_(tensor)
        return [name]


class Replicate(Rule):
    """Every rank holds the whole tensor."""


@dataclass(frozen=True)
class Slice(Rule):
    """Each rank holds a part of one axis; rank parts may be uneven or empty. 0-d tensors are replicated."""

    axis: int = 0
    by_item: bool = False
    """Assign with `p[...] = t`, which copies inside C++."""

    def local_shape(self, meta: TensorMeta, rank: int, world: int) -> tuple[int, ...]:
        """The shape with the rank's share of the axis."""
        if not meta.shape:
            return ()
        axis = self.axis % len(meta.shape)
        return (*meta.shape[:axis], shard(meta.shape[axis], rank, world)[1], *meta.shape[axis + 1 :])

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy from a narrow view."""
        if tensor.dim() > 0:
            axis = self.axis % tensor.dim()
            tensor = tensor.narrow(axis, *shard(tensor.shape[axis], rank, world))
        if self.by_item:
            parameters[name].data[...] = tensor
        else:
            parameters[name].data.copy_(tensor)
        return [name]


class Split(Rule):
    """The first axis is cut into an upper and a lower parameter."""

    def declare(self, meta: TensorMeta, rank: int, world: int) -> Shapes:
        """Two parameters, `name.upper` and `name.lower`."""
        rows = (meta.shape or (1,))[0]
        rest, dtype = meta.shape[1:], torch_dtype(meta.dtype)
        return {
            f"{meta.name}.upper": ((rows // 2, *rest), dtype),
            f"{meta.name}.lower": ((rows - rows // 2, *rest), dtype),
        }

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy both parts."""
        rows = tensor.reshape(-1) if tensor.dim() == 0 else tensor
        upper, lower = parameters[f"{name}.upper"], parameters[f"{name}.lower"]
        upper.copy_(rows[: len(upper)])
        lower.copy_(rows[len(upper) :])
        return [f"{name}.upper", f"{name}.lower"]


@dataclass(frozen=True)
class Transpose(Rule):
    """The axes are stored in reverse order, copied from a view or from a contiguous copy of it."""

    contiguous: bool = False

    def local_shape(self, meta: TensorMeta, rank: int, world: int) -> tuple[int, ...]:
        """The reversed shape."""
        return meta.shape[::-1]

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy the permuted tensor."""
        turned = tensor.permute(tuple(range(tensor.dim() - 1, -1, -1)))
        parameters[name].copy_(turned.clone() if self.contiguous else turned)
        return [name]


@dataclass(frozen=True)
class Cast(Rule):
    """Stored in another dtype, converted by the copy or before it."""

    dtype: torch.dtype
    before: bool = False

    def declare(self, meta: TensorMeta, rank: int, world: int) -> Shapes:
        """The same shape in the other dtype."""
        return {meta.name: (meta.shape, self.dtype)}

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy across dtypes."""
        parameters[name].copy_(tensor.to(self.dtype) if self.before else tensor)
        return [name]


@dataclass(frozen=True)
class Composed(Rule):
    """A raw copy, then a transform of the parameter into itself (as Mamba's A_log); stored in FP32 or as it is."""

    dtype: torch.dtype | None = None

    def declare(self, meta: TensorMeta, rank: int, world: int) -> Shapes:
        """The same shape."""
        return {meta.name: (meta.shape, self.dtype or torch_dtype(meta.dtype))}

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy, then transform in place by a second copy."""
        target = parameters[name]
        target.data.copy_(tensor)
        target.data.copy_(-target.exp() if target.dtype.is_floating_point else -target)
        return [name]


class Negate(Rule):
    """The stored value is computed from the tensor before the copy."""

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy a computed tensor."""
        parameters[name].copy_(-tensor)
        return [name]


@dataclass(frozen=True)
class OnRank(Rule):
    """Only one rank holds the tensor (as an expert); the others skip it natively."""

    owner: int = 0

    def declare(self, meta: TensorMeta, rank: int, world: int) -> Shapes:
        """The parameter on the owning rank, nothing elsewhere."""
        return super().declare(meta, rank, world) if rank == self.owner % world else {}

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy on the owning rank."""
        return super().load(name, tensor, parameters, rank, world) if rank == self.owner % world else []


@dataclass(frozen=True)
class PadRows(Rule):
    """A row-split tensor padded to a multiple; pad rows are zeroed by a fill, or come from a padded copy."""

    multiple: int = 4
    by_copy: bool = False

    def _rows(self, meta_rows: int, rank: int, world: int) -> tuple[int, int, int]:
        padded = -(-meta_rows // (self.multiple * world)) * self.multiple * world
        start, length = shard(padded, rank, world)
        return start, length, max(0, min(length, meta_rows - start))

    def local_shape(self, meta: TensorMeta, rank: int, world: int) -> tuple[int, ...]:
        """The rank's share of the padded rows."""
        return (self._rows((meta.shape or (1,))[0], rank, world)[1], *meta.shape[1:])

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy the rows of this rank and zero the rest."""
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        start, length, filled = self._rows(rows.shape[0], rank, world)
        part = rows.narrow(0, min(start, rows.shape[0]), filled)
        if self.by_copy:
            padding = torch.zeros((length - filled, *rows.shape[1:]), dtype=rows.dtype)
            parameters[name].copy_(torch.cat([part, padding]))
        else:
            parameters[name][:filled].data.copy_(part)
            parameters[name][filled:].data.fill_(0)
        return [name]


class Interleave(Rule):
    """The halves of the last axis are stored in its even and odd positions; odd sizes and 0-d are replicated."""

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy both halves into strided views."""
        if tensor.dim() == 0 or tensor.shape[-1] % 2:
            return super().load(name, tensor, parameters, rank, world)
        half = tensor.shape[-1] // 2
        parameters[name][..., ::2].copy_(tensor[..., :half])
        parameters[name][..., 1::2].copy_(tensor[..., half:])
        return [name]


class Duplicate(Rule):
    """One canonical tensor fills two parameters."""

    def declare(self, meta: TensorMeta, rank: int, world: int) -> Shapes:
        """`name` and `name.again`."""
        return {key: (meta.shape, torch_dtype(meta.dtype)) for key in (meta.name, f"{meta.name}.again")}

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy twice."""
        parameters[name].copy_(tensor)
        parameters[f"{name}.again"].copy_(tensor)
        return [name, f"{name}.again"]


@dataclass(frozen=True)
class Stacked(Rule):
    """A stack along the first axis, copied slice by slice; a rank holds its share of the slices."""

    def local_shape(self, meta: TensorMeta, rank: int, world: int) -> tuple[int, ...]:
        """The rank's slices."""
        return (shard(meta.shape[0], rank, world)[1], *meta.shape[1:]) if meta.shape else ()

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """One copy for each slice."""
        if tensor.dim() == 0:
            return super().load(name, tensor, parameters, rank, world)
        start, length = shard(tensor.shape[0], rank, world)
        for number in range(length):
            parameters[name][number].copy_(tensor[start + number])
        return [name] if length else []


@dataclass(frozen=True)
class Fuse(Rule):
    """Several canonical tensors of one row shape share a parameter; this one's rows begin at `first_row`."""

    fused: str
    first_row: int
    rows: int
    """Rows of the fused parameter over all its tensors, before the split over ranks by columns."""

    def declare(self, meta: TensorMeta, rank: int, world: int) -> Shapes:
        """The fused parameter; every member declares the same one."""
        columns = shard(meta.shape[1], rank, world)[1]
        return {self.fused: ((self.rows, columns, *meta.shape[2:]), torch_dtype(meta.dtype))}

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        """Copy the rank's columns into the rows of this member."""
        part = tensor.narrow(1, *shard(tensor.shape[1], rank, world))
        parameters[self.fused].data.narrow(0, self.first_row, tensor.shape[0]).copy_(part)
        return [self.fused]


class ToyModel(torch.nn.Module):
    """One rank of a toy engine: parameters by rule, a buffer that no rule loads, and a native loader."""

    def __init__(self, tensors: Sequence[TensorMeta], rules: Mapping[str, Rule], rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self._rules = dict(rules)
        self._stored: dict[str, Tensor] = {}
        shapes: Shapes = {}
        for meta in tensors:
            shapes |= rules[meta.name].declare(meta, rank, world)
        for name, (shape, dtype) in shapes.items():
            # torch allows no dots in a registered name; the loader keeps its own table by canonical name.
            key = name.replace(".", "__")
            words = np.zeros(prod(shape), dtype=unsigned(dtype_name(dtype)))
            stored = tensor_from_words(words, dtype_name(dtype), shape)
            if dtype.is_floating_point and len(self._stored) % 2 == 0:
                stored = torch.nn.Parameter(stored, requires_grad=False)
                self.register_parameter(key, stored)
            else:
                self.register_buffer(key, stored, persistent=len(self._stored) % 4 == 1)
            self._stored[name] = stored
        self.register_buffer("frequencies", torch.arange(3, dtype=torch.float32), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Place canonical tensors by their rules; returns the names of the resident tensors that were loaded."""
        loaded: set[str] = set()
        with torch.no_grad():
            for name, tensor in weights:
                targets = self._rules[name].load(name, tensor, self._stored, self.rank, self.world)
                loaded.update(target.replace(".", "__") for target in targets)
        return loaded


class ScriptedModel(torch.nn.Module):
    """A module whose loader is a function of its resident tensors and the weights: for loaders that break a rule."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        load: Callable[[Mapping[str, Tensor], Iterable[tuple[str, Tensor]]], Iterable[str] | None],
    ) -> None:
        super().__init__()
        self._load = load
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str] | None:
        """Call the function with the module's buffers as they are now."""
        with torch.no_grad():
            return self._load(dict(self.named_buffers(remove_duplicate=False)), weights)
