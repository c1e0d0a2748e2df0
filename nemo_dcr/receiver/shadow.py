"""A copy of one resident storage that takes a loader's writes in its place.

While a derived path is probed, operators that would write the storage write the shadow, and operators that read it read
the shadow; the live storage is never written. One storage is shadowed at a time, so the extra memory is that of the
largest one.

Paper: Section 6.1 (prewarm)   Proofs: L5 inactive_unchanged   Conditions: LC4
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.receiver.residents import storage_bytes, storage_key


class Shadow:
    """A clone of the storage behind `live`; `flipped` inverts every bit of it first."""

    def __init__(self, live: Tensor, storage: int, *, flipped: bool) -> None:
        self.storage = storage
        """Number of the resident storage that is shadowed."""
        self._live = storage_key(live)
        raw = storage_bytes(live)
        self._raw = raw.bitwise_not() if flipped else raw.clone()

    @property
    def nbytes(self) -> int:
        """Bytes of extra memory."""
        return self._raw.numel()

    def of(self, live_view: Tensor) -> Tensor:
        """The view of the shadow that stands where `live_view` stands in the live storage."""
        return torch.empty(0, dtype=live_view.dtype, device=live_view.device).set_(
            self._raw.untyped_storage(), live_view.storage_offset(), live_view.shape, live_view.stride()
        )

    def redirect(self, value: Any) -> Any:
        """An operator's argument with every view of the live storage replaced by the shadow's."""
        if isinstance(value, Tensor):
            return self.of(value) if storage_key(value) == self._live else value
        if isinstance(value, list | tuple):
            return type(value)([self.redirect(entry) for entry in value])
        return {key: self.redirect(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    def bits(self, live_view: Tensor) -> Tensor:
        """A flat copy of the shadow's words under `live_view`, as integers."""
        return integer_view(self.of(live_view)).flatten().clone()
