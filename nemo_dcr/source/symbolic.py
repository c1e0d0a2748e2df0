"""A stand-in for a tensor that knows where its elements come from: a framework's own import code runs on it.

Frameworks turn checkpoints into parameters with a few functions of torch that move elements: cat, stack, chunk, view,
transpose. Given `SymbolicTensor`s of the canonical tensors, that code gives the index map of its parameter, so that the
map is what the framework does, not what we think it does. Anything else, arithmetic above all, is refused, and the task
is residual.
Not handled: functions that write in place; nothing here has values.

Paper: Section 5 (pi_T); Appendix A.1, beyond its classes   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self

import torch

from nemo_dcr.bits.tensors import torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.piecewise import IndexMap


class SymbolicTensor:
    """An index map with the shape, the dtype and some of the methods of a tensor."""

    def __init__(self, index_map: IndexMap, dtype: torch.dtype) -> None:
        self.map, self.dtype = index_map, dtype
        self.device = torch.device("meta")

    @classmethod
    def of(cls, tensor: TensorMeta) -> Self:
        """A canonical tensor."""
        return cls(IndexMap.of(tensor), torch_dtype(tensor.dtype))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        if name not in _FUNCTIONS:
            names = [each.map.tensors[0].name for each in args if isinstance(each, cls) and each.map.tensors]
            raise UnsupportedMapping(", ".join(names), "SC5", f"the framework calls torch.{name} on it")
        return _FUNCTIONS[name](*args, **(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        return torch.Size(self.map.shape)

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return len(self.map.shape)

    @property
    def T(self) -> SymbolicTensor:  # noqa: N802
        """As of a matrix."""
        return self.transpose(0, 1)

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def numel(self) -> int:
        """As of a tensor."""
        return prod(self.map.shape)

    def contiguous(self) -> SymbolicTensor:
        """The same."""
        return self

    clone = detach = contiguous

    def view(self, *shape: Any) -> SymbolicTensor:
        """The same elements in row-major order under another shape; one size may be -1."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            known = prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = self.numel() // known if known else 0
        return self._with(self.map.reshape(tuple(int(size) for size in sizes)))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> SymbolicTensor:
        """As of a tensor."""
        begin, end = start_dim % self.ndim, end_dim % self.ndim
        sizes = self.map.shape
        return self.view(*sizes[:begin], prod(sizes[begin : end + 1]), *sizes[end + 1 :])

    def unsqueeze(self, dim: int) -> SymbolicTensor:
        """As of a tensor."""
        dim %= self.ndim + 1
        return self.view(*self.map.shape[:dim], 1, *self.map.shape[dim:])

    def squeeze(self, dim: int | None = None) -> SymbolicTensor:
        """As of a tensor."""
        drop = range(self.ndim) if dim is None else [dim % self.ndim]
        kept = [size for axis, size in enumerate(self.map.shape) if axis not in drop or size != 1]
        return self.view(tuple(kept))

    def transpose(self, dim0: int, dim1: int) -> SymbolicTensor:
        """As of a tensor."""
        axes = list(range(self.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return self._with(self.map.permute(axes))

    def permute(self, *dims: Any) -> SymbolicTensor:
        """As of a tensor."""
        axes = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
        return self._with(self.map.permute([axis % self.ndim for axis in axes]))

    def narrow(self, dim: int, start: int, length: int) -> SymbolicTensor:
        """As of a tensor."""
        return self._with(self.map.narrow(dim, start, length))

    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[SymbolicTensor, ...]:
        """As of a tensor."""
        total, given = self.shape[dim], split_size_or_sections
        sizes = [min(given, total - at) for at in range(0, total, given)] if isinstance(given, int) else given
        return tuple(self._with(part) for part in self.map.split(dim, sizes))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[SymbolicTensor, ...]:
        """As of a tensor."""
        return self.split(-(-self.shape[dim] // chunks), dim)

    def __getitem__(self, key: Any) -> SymbolicTensor:
        """Integers and slices with step 1, axis by axis from the first one."""
        found, axis = self, 0
        for each in key if isinstance(key, tuple) else (key,):
            if isinstance(each, int):
                found = found.narrow(axis, each % found.shape[axis], 1).squeeze(axis)
            elif isinstance(each, slice) and each.step in (None, 1):
                start, stop, _ = each.indices(found.shape[axis])
                found, axis = found.narrow(axis, start, max(0, stop - start)), axis + 1
            else:
                raise UnsupportedMapping(
                    self.map.tensors[0].name if self.map.tensors else "", "SC5", f"the framework takes [{each}] of it"
                )
        return found

    def _with(self, index_map: IndexMap) -> SymbolicTensor:
        return SymbolicTensor(index_map, self.dtype)


def _joined(join: Callable[[Sequence[IndexMap], int], IndexMap]) -> Callable[..., SymbolicTensor]:
    def joined(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise UnsupportedMapping("", "SC5", f"the framework joins tensors of {sorted(map(str, dtypes))}")
        return SymbolicTensor(join([tensor.map for tensor in tensors], dim), tensors[0].dtype)

    return joined


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cat": _joined(IndexMap.concatenate),
    "concat": _joined(IndexMap.concatenate),
    "stack": _joined(IndexMap.stack),
    **{
        name: getattr(SymbolicTensor, name)
        for name in (
            "chunk",
            "split",
            "transpose",
            "permute",
            "narrow",
            "reshape",
            "flatten",
            "squeeze",
            "unsqueeze",
            "clone",
            "detach",
        )
    },
}
"""What torch functions of these names do here."""
