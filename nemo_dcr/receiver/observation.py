"""What is written down about one canonical tensor while a native loader is observed.

Paper: Section 6.1 (prewarm), Figure A.8   Proofs: L6 overwrite_supplies   Conditions: LC1, LC8
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.receiver.conditions import Breach
from nemo_dcr.receiver.paths import Step, StepKind


class LoadAborted(Exception):
    """Ends a load at the first write that must not happen. Never leaves this package's prewarm."""


@dataclass(slots=True)
class Observation:
    """What happened while one canonical tensor was current."""

    tensor: TensorMeta
    number: int
    """Positive origin number of this yield."""
    steps: list[Step] = field(default_factory=list)
    first_bits: list[Tensor] = field(default_factory=list)
    """With a shadow: flat source bits of each non-constant step into the shadowed storage that does not repeat."""
    later_bits: list[tuple[int, Tensor]] = field(default_factory=list)
    """With a shadow: position among `first_bits` of the view that a repeating step writes, and that step's source."""
    live_views: list[Tensor] = field(default_factory=list)
    """The resident views of the steps of `first_bits`."""
    erased: bool = False
    """The loader filled the whole given tensor with a constant."""
    breach: Breach | None = None

    @property
    def copies(self) -> list[Step]:
        """The steps that move values of the tensor."""
        return [step for step in self.steps if step.kind is not StepKind.CONSTANT]

    @property
    def accounted(self) -> list[Step]:
        """See `Taken`."""
        return self.steps if self.erased else self.copies


def convert(destination: Tensor, source: Tensor) -> Tensor:
    """`source` as the copy into `destination` would store it; with the same strides, so that the same kernels run."""
    converted = torch.empty_strided(
        destination.shape, destination.stride(), dtype=destination.dtype, device=destination.device
    )
    return converted.copy_(source.expand(destination.shape))
