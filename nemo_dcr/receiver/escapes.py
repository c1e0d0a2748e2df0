"""Ways out of torch: memory and values that a loader takes to where no operator is seen.

An array over resident memory (`numpy()`, `__array__`, DLPack) could be written unseen, so that prewarm refuses to hand
one out; `share_memory_()` would move the storage away from its address, which nothing could undo. A value that a loader
reads into Python (`item()`, `bool()`) may come back in the load of another tensor, where it looks like a constant; the
observer remembers the names, and `ties` loads the others over other values of them.
Not handled: arrays that were taken before prewarm, addresses, storage objects: `live_storage` undoes what they write.

Paper: Section 6.1 (dispatch hook); Table A.2   Proofs: L5 inactive_unchanged   Conditions: LC1, LC12
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_dcr.receiver.residents import Residents

_HANDED_OUT = frozenset({"numpy", "__array__", "__dlpack__", "__cuda_array_interface__", "share_memory_"})


class MemoryEscapes(TorchFunctionMode):
    """Raises what `refuse` makes before resident memory is handed out or moved on this thread."""

    def __init__(self, residents: Residents, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._residents = residents
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every call of its Python interface on this thread."""
        name = getattr(func, "__name__", "")
        if name in _HANDED_OUT and any(
            isinstance(a, Tensor) and self._residents.number_of(a) is not None for a in args
        ):
            raise self._refuse(name)
        return func(*args, **(kwargs or {}))


def leaves_torch(result: Any) -> bool:
    """An operator gave a Python number or truth value."""
    return isinstance(result, bool | int | float | complex)
