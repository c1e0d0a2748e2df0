"""Where the value of a tensor comes from while a loader is observed.

Every storage that an operator makes is remembered with its origins: the numbers of the yielded canonical tensors and
the resident storages that went into it. A tensor of no origin is a constant. Storages are told apart by identity; weak
references keep an identity from being reused while it is remembered.
`GuardedTensor` poses as a yielded tensor and all that is made from it. Only the observing thread can use it: in any
other thread a write from it does nothing, so that a threaded loader cannot touch resident storage unseen. It has no
memory of its own, so that asking for its address or an array over it is refused.
Not handled: values that leave torch (`item()`): they make constants, compared with the resident bits; see also `ties`.

Paper: Section 6.1 (prewarm); Table A.2   Proofs: L5 inactive_unchanged   Conditions: LC2, LC4, LC11, LC12
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor

from nemo_dcr.receiver.hook import operator_of
from nemo_dcr.receiver.residents import Residents, storage_key, weak_storage

NOTHING: frozenset[int] = frozenset()


class Guard(Protocol):
    """Is told what the loader does with a guarded tensor beside operators on the observing thread."""

    def trespass(self) -> None:
        """The tensor is used where no observer is active."""
        ...

    def escape(self, function: str) -> Exception:
        """Note that the loader asks for the tensor's memory; returns what to raise."""
        ...


class GuardedTensor(torch.Tensor):
    """A wrapper without storage of its own; `data_of` holds the data."""

    data_of: Tensor
    guard: Guard
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, guard: Guard) -> GuardedTensor:
        """Wrap `inner`."""
        wrapper: GuardedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        wrapper.data_of = inner
        wrapper.guard = guard
        return wrapper

    def __init__(self, inner: Tensor, guard: Guard) -> None:
        """Nothing is left to do after `__new__`."""

    def _escape(self, *_: Any, function: str) -> NoReturn:
        raise self.guard.escape(function)

    data_ptr = partialmethod(_escape, function="data_ptr")
    untyped_storage = partialmethod(_escape, function="untyped_storage")
    storage = partialmethod(_escape, function="storage")
    share_memory_ = partialmethod(_escape, function="share_memory_")
    numpy = partialmethod(_escape, function="numpy")
    __array__ = partialmethod(_escape, function="__array__")
    __dlpack__ = partialmethod(_escape, function="__dlpack__")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached only where no observing mode is active: another thread, or after the load."""
        found: list[GuardedTensor] = []
        plain_args = unwrap(list(args), found)
        plain_kwargs = {key: unwrap(value, found) for key, value in (kwargs or {}).items()}
        found[0].guard.trespass()
        operator = operator_of(func)
        if operator.positions or operator.keywords:
            return args[0] if args else None
        return wrap(func(*plain_args, **plain_kwargs), found[0].guard)


def unwrap(value: Any, found: list[GuardedTensor]) -> Any:
    """`value` with every guarded tensor replaced by its data; the guarded ones are appended to `found`."""
    if isinstance(value, GuardedTensor):
        found.append(value)
        return value.data_of
    if isinstance(value, list | tuple):
        return type(value)([unwrap(entry, found) for entry in value])
    return value


def wrap(value: Any, guard: Guard) -> Any:
    """`value` with every plain tensor guarded."""
    if isinstance(value, GuardedTensor):
        return value
    if isinstance(value, Tensor):
        return GuardedTensor(value, guard)
    if isinstance(value, list | tuple):
        return type(value)([wrap(entry, guard) for entry in value])
    return value


class Origins:
    """Origins of the storages that were made while a loader ran."""

    _PURGE_AT = 2048

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._of: dict[int, tuple[Any, frozenset[int]]] = {}
        self._purge_at = self._PURGE_AT

    def of(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        """All that has a part in these tensors: yields are positive numbers, resident storage s is -1 - s."""
        found: set[int] = set()
        for tensor in tensors:
            storage = self._residents.number_of(tensor)
            if storage is not None:
                found.add(-1 - storage)
            else:
                found |= self.get(tensor) or NOTHING
        return frozenset(found)

    def get(self, tensor: Tensor) -> frozenset[int] | None:
        """The origins of the tensor's storage, or None when it was not made here."""
        entry = self._of.get(storage_key(tensor))
        return None if entry is None else entry[1]

    def add(self, tensor: Tensor, origins: frozenset[int]) -> None:
        """Remember a new storage, or add origins to a known one."""
        key = storage_key(tensor)
        entry = self._of.get(key)
        if entry is not None:
            self._of[key] = (entry[0], entry[1] | origins)
            return
        if len(self._of) >= self._purge_at:
            self._of = {known: entry for known, entry in self._of.items() if not entry[0].expired()}
            self._purge_at = max(self._PURGE_AT, 2 * len(self._of))
        self._of[key] = (weak_storage(tensor), origins)

    def set(self, tensor: Tensor, origins: frozenset[int]) -> None:
        """Remember a storage with exactly these origins."""
        self._of[storage_key(tensor)] = (weak_storage(tensor), origins)
