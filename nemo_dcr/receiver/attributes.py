"""Tensors that hang on modules as plain attributes, kept where they are while a loader is observed.

A loader may bind such a name to another tensor. What prewarm made the loader compute must not stay there, so that each
name gets its own tensor back. A tensor made from the given one would hold scratch contents at a refit: it is refused.
A binding to anything else is the same at a refit as at a dense load, and stays legal.
Not handled: tensors in containers and closures; names that the loader adds.

Paper: Section 3 (rank-local storage P_r)   Conditions: LC9
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_dcr.receiver.provenance import GuardedTensor
from nemo_dcr.receiver.residents import NativeModel, attribute_tensors, storage_key


@dataclass(frozen=True, slots=True)
class _Pinned:
    name: str
    holder: dict[str, Any]
    """Attributes of the module."""
    tensor: Tensor
    data: Tensor
    """Another handle on the same storage."""

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


class PinnedAttributes:
    """The attribute tensors of one model as they were; keeps their memory."""

    def __init__(self, model: NativeModel) -> None:
        self._pinned = [
            _Pinned(name, holder, tensor, tensor.detach())
            for name, tensor, holder in attribute_tensors(model)
            if storage_key(tensor)
        ]

    def taken_from_the_given(self) -> list[str]:
        """Names that are now bound to what the loader was given, or to what it made of it."""
        return [pin.name for pin in self._pinned if isinstance(pin.holder.get(pin.leaf), GuardedTensor)]

    def put_back(self) -> None:
        """Bind every name to its own tensor again, over its own storage; does not undo writes."""
        for pin in self._pinned:
            if pin.holder.get(pin.leaf) is not pin.tensor:
                pin.holder[pin.leaf] = pin.tensor
            if storage_key(pin.tensor) != storage_key(pin.data):
                pin.tensor.data = pin.data
