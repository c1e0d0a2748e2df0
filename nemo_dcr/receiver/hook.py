"""Interception of every dispatched write while a native loader runs.

The hook is a TorchDispatchMode: it sees copies that C++ issues (item assignment) as well as `Tensor.copy_`, and only on
the thread that runs the loader. A copy into resident storage is handed to a `Placer` as (name, destination view, source
view) and does not execute by itself; any other write into resident storage is handed over too. Where the placer lets
none of them pass, nothing reaches resident storage. Operators that write nothing run untouched.
Not handled: writes that torch does not dispatch (`.data =`, numpy, other threads): see conditions LC2 and LC9.

Paper: Section 6.1 (dispatch hook)   Proofs: L5 inactive_unchanged   Conditions: LC1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dcr.receiver.residents import Residents, storage_key

_FILLS = ("aten::fill_", "aten::zero_")


@dataclass(frozen=True, slots=True)
class Operator:
    """What the schema of one operator says about writing."""

    name: str
    copies: bool
    """It is `aten.copy_`."""
    fills: bool
    """It is `aten.fill_` or `aten.zero_`."""
    is_view: bool
    """Its results alias an argument and nothing is written."""
    positions: tuple[int, ...]
    keywords: tuple[str, ...]
    """Arguments that it writes, by position and by keyword."""
    writes: bool
    """There is such an argument."""

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        """The tensors that a call with these arguments writes."""
        for position in self.positions:
            if position < len(args):
                yield from tensors_in(args[position])
        for keyword in self.keywords:
            yield from tensors_in(kwargs.get(keyword))


@cache
def operator_of(func: Any) -> Operator:
    """The facts about one overload."""
    schema = func._schema
    written = [
        (position, argument)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return Operator(
        name=str(func),
        copies=func is torch.ops.aten.copy_.default,
        fills=schema.name in _FILLS,
        is_view=bool(func.is_view) and not written,
        positions=tuple(position for position, argument in written if not argument.kwarg_only),
        keywords=tuple(argument.name for _, argument in written),
        writes=bool(written),
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in an operator's argument or result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


class Placer(Protocol):
    """Decides what a write into resident storage does."""

    def place(self, name: str, destination: Tensor, source: Tensor) -> None:
        """Carry out the copy of `source` into the resident view `destination`, for the canonical tensor `name`.

        The source may still need to be expanded to the destination's shape. Raises: ConditionViolated.
        """
        ...

    def other_write(self, name: str, operator: Operator, destination: Tensor, arguments: Sequence[Any]) -> None:
        """Judge a write that is no copy; it never executes, so returning means that it would have changed nothing.

        Raises: ConditionViolated.
        """
        ...

    def scratch_write(self, name: str, operator: Operator) -> None:
        """Refuse a write into the tensor that the loader was given. Raises: ConditionViolated."""
        ...


class WriteHook(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every write into resident storage to `placer`; `name` is the canonical tensor that was yielded last."""

    def __init__(self, residents: Residents, scratch: int, placer: Placer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = ""
        self._residents = residents
        self._scratch = scratch
        self._placer = placer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would switch its compiler off and on again around every operator, which takes longer than the hook."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator of this thread while the hook is active."""
        operator = operator_of(func)
        if not operator.writes:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if operator.copies and self._residents.number_of(args[0]) is not None:
            self._placer.place(self.name, args[0], args[1])
            return args[0]
        intercepted = False
        for tensor in operator.written(args, kwargs):
            if self._residents.number_of(tensor) is not None:
                intercepted = True
                self._placer.other_write(self.name, operator, tensor, args)
            elif storage_key(tensor) == self._scratch:
                self._placer.scratch_write(self.name, operator)
        # Only judged fills get here with `intercepted`; they return the tensor that they write.
        return args[0] if intercepted else func(*args, **kwargs)
