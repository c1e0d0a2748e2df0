"""Where the value of a tensor comes from while a loader is observed.

Every storage that an operator makes is remembered with its origins: the numbers of the yielded canonical tensors and
the resident storages that went into it. A tensor of no origin is a constant. Storages are told apart by identity; weak
references keep an identity from being reused while it is remembered.
`GuardedTensor` poses as a yielded tensor and all that is made from it. Only the observing thread can use it: in any
other thread a write from it does nothing, so that a threaded loader cannot touch resident storage unseen.
Not handled: values that leave torch (`item()`): they make constants, compared with the resident bits; see also `ties`.

Paper: Section 6.1 (prewarm); Table A.2   Proofs: L5 inactive_unchanged   Conditions: LC2, LC4, LC11, LC12
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nemo_dcr.receiver.hook import operator_of
from nemo_dcr.receiver.residents import storage_key, weak_storage

NOTHING: frozenset[int] = frozenset()


class GuardedTensor(torch.Tensor):
    """A wrapper without storage of its own; `data_of` holds the data."""

    data_of: Tensor
    trespass: Callable[[], None]
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, trespass: Callable[[], None]) -> GuardedTensor:
        """Wrap `inner`; `trespass` is called when another thread uses the wrapper."""
        wrapper: GuardedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        wrapper.data_of = inner
        wrapper.trespass = trespass
        return wrapper

    def __init__(self, inner: Tensor, trespass: Callable[[], None]) -> None:
        """Nothing is left to do after `__new__`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached only where no observing mode is active: another thread, or after the load."""
        found: list[GuardedTensor] = []
        plain_args = unwrap(list(args), found)
        plain_kwargs = {key: unwrap(value, found) for key, value in (kwargs or {}).items()}
        found[0].trespass()
        operator = operator_of(func)
        if operator.positions or operator.keywords:
            return args[0] if args else None
        return wrap(func(*plain_args, **plain_kwargs), found[0].trespass)


def unwrap(value: Any, found: list[GuardedTensor]) -> Any:
    """`value` with every guarded tensor replaced by its data; the guarded ones are appended to `found`."""
    if isinstance(value, GuardedTensor):
        found.append(value)
        return value.data_of
    if isinstance(value, list | tuple):
        return type(value)([unwrap(entry, found) for entry in value])
    return value


def wrap(value: Any, trespass: Callable[[], None]) -> Any:
    """`value` with every plain tensor guarded."""
    if isinstance(value, GuardedTensor):
        return value
    if isinstance(value, Tensor):
        return GuardedTensor(value, trespass)
    if isinstance(value, list | tuple):
        return type(value)([wrap(entry, trespass) for entry in value])
    return value


class Origins:
    """Origins of the storages that were made while a loader ran."""

    _PURGE_AT = 2048

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, frozenset[int]]] = {}
        self._purge_at = self._PURGE_AT

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
