"""Acts of a loader that are no intercepted copies: writes, rebindings, threads, and reads of what it should not read.

`FOREIGN` acts go through torch on the resident tensor, so that an observer sees them before they happen. Those of
`TAKEN_EARLIER` go through memory that was taken before any observer was there, or through threads: they have happened
when they are seen. Each of them flips bits or writes a constant, so that a load after a load shows it.

Paper: Table A.2   Conditions: LC1, LC2, LC4, LC5, LC7, LC9, LC12
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from nemo_dcr.bits.tensors import integer_view


def _in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def _rebind(p: Tensor, tensor: Tensor) -> None:
    p.data = tensor


def _masked(p: Tensor, value: Tensor) -> None:
    p[torch.ones(p.shape, dtype=torch.bool)] = value.reshape(-1).to(p.dtype)


def _numpy(p: Tensor, value: Tensor) -> None:
    words = integer_view(p.data).numpy().reshape(-1)
    words[:] = words[::-1].copy()


def _undone_flip(p: Tensor, value: Tensor) -> None:
    p.copy_(value)
    p.copy_(p.flip(0))
    p.copy_(p.flip(0))


FOREIGN: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "bits in place": lambda p, value, given: integer_view(p).bitwise_xor_(1),
    "zero": lambda p, value, given: integer_view(p).zero_(),
    "zero, then copy again": lambda p, value, given: (integer_view(p).zero_(), p.copy_(value)),
    "masked assignment": lambda p, value, given: _masked(p, value),
    "index_copy": lambda p, value, given: p.index_copy_(0, torch.arange(p.shape[0]), value.to(p.dtype)),
    "foreach": lambda p, value, given: torch._foreach_copy_([p], [value.to(p.dtype)]),
    "out argument": lambda p, value, given: torch.bitwise_or(
        integer_view(value.to(p.dtype)), integer_view(value.to(p.dtype)), out=integer_view(p)
    ),
    "set_": lambda p, value, given: torch.ops.aten.set_.source_Tensor(p, value.to(p.dtype).clone()),
    "resize_": lambda p, value, given: p.resize_(p.shape),
    "rebind to a clone": lambda p, value, given: _rebind(p, p.detach().clone()),
    "rebind to the value": lambda p, value, given: _rebind(p, value.to(p.dtype)),
    "array": lambda p, value, given: _numpy(p, value),
    "storage item": lambda p, value, given: torch.ops.aten.fill_.Scalar(
        torch.tensor((), dtype=torch.uint8).set_(p.untyped_storage()), 7
    ),
    "copy in a thread": lambda p, value, given: _in_thread(lambda: p.copy_(value)),
    "transform in a thread": lambda p, value, given: _in_thread(lambda: p.copy_(value.flip(0))),
    "edit the given": lambda p, value, given: (given.zero_(), p.copy_(given.reshape(-1)[0])),
    "accumulate": lambda p, value, given: p.copy_(p + value),
    "a part again": lambda p, value, given: p[:1].copy_(value[:1]),
    "move elements and back": lambda p, value, given: _undone_flip(p, value),
    "neighbours": lambda p, value, given: p.copy_(torch.maximum(value, value.roll(1, 0))),
    "order": lambda p, value, given: p.copy_(value.sort(0).values),
    "noise": lambda p, value, given: p.copy_(value + torch.rand(value.shape).to(value.dtype)),
    "one element everywhere": lambda p, value, given: p.copy_(value.reshape(-1)[0]),
}
"""Acts after the copies, on the first resident tensor of the path; `value` is the source after its transforms."""
FLOAT_FOREIGN = frozenset({"accumulate", "neighbours", "order", "noise", "transform in a thread"})
"""Acts that every torch has for floating-point dtypes only."""


@dataclass(frozen=True)
class Memory:
    """Ways to the memory of a resident tensor on the CPU that no operator shows."""

    tensor: Tensor
    array: NDArray[Any]
    """Its bytes."""
    storage: torch.UntypedStorage
    alias: Tensor
    """Another storage object over the same memory."""

    @classmethod
    def of(cls, tensor: Tensor) -> Memory:
        """Take them; the tensor must be contiguous."""
        words = integer_view(tensor)
        return cls(tensor, words.reshape(-1).numpy().view("u1"), tensor.untyped_storage(), from_dlpack(words))

    @property
    def raw(self) -> Any:
        """The bytes by address."""
        return (ctypes.c_ubyte * len(self.array)).from_address(self.array.ctypes.data)

    def flip_array(self) -> None:
        """Invert the lowest bit of every byte."""
        self.array[:] ^= 1

    def flip_address(self) -> None:
        """Invert the lowest bit of the first byte."""
        self.raw[0] ^= 1

    def flip_operator(self) -> None:
        """As `flip_array`, by an operator on the tensor."""
        integer_view(self.tensor).bitwise_xor_(1)


TAKEN_EARLIER: dict[str, Callable[[Memory], object]] = {
    "array taken earlier": lambda m: m.flip_array(),
    "constant through an array": lambda m: m.array.fill(1),
    "places change in an array": lambda m: m.array.put(range(len(m.array)), m.array[::-1].copy()),
    "address": lambda m: m.flip_address(),
    "constant by address": lambda m: ctypes.memset(m.raw, 1, len(m.array)),
    "storage object": lambda m: m.storage.__setitem__(0, m.storage[0] ^ 1),  # type: ignore[no-untyped-call]
    "fill of a storage object": lambda m: m.storage.fill_(1),  # type: ignore[attr-defined]
    "copy of a storage object": lambda m: m.storage.copy_(torch.ones_like(m.tensor).untyped_storage()),
    "alias": lambda m: m.alias.bitwise_xor_(1),
    "array of an alias": lambda m: m.alias.numpy().__ixor__(1),
    "array in a thread": lambda m: _in_thread(m.flip_array),
    "address in a thread": lambda m: _in_thread(m.flip_address),
    "operator in a thread": lambda m: _in_thread(m.flip_operator),
}
"""Acts on the first resident tensor of a path, before or after its copies."""
