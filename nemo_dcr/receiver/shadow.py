"""A copy of one resident storage that takes a loader's writes in its place.

While a derived path is probed, operators that would write the storage write the shadow, and operators that read it read
the shadow; the live storage is never written. One storage is shadowed at a time, so the extra memory is that of the
largest one.

Paper: Section 6.1 (prewarm)   Proofs: L5 inactive_unchanged   Conditions: LC4
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view


class Shadow:
    """A clone of the storage behind `live`; `flipped` inverts every bit of it first."""

    def __init__(self, live: Tensor, storage: int, *, flipped: bool) -> None:
        self.storage = storage
        """Number of the resident storage that is shadowed."""
        source = live.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=live.device).set_(source, 0, (source.nbytes(),), (1,))
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

    def bits(self, live_view: Tensor) -> Tensor:
        """A flat copy of the shadow's words under `live_view`, as integers."""
        return integer_view(self.of(live_view)).flatten().clone()
