"""Residual tasks of a Megatron model: Bridge's own export, restricted to the parameters that make a tensor.

The export gathers over tensor, expert and pipeline ranks by itself, so every rank has a shard of each task and runs the
export of the required tensors in the same order. The result is the same on all of them; the rank that keeps the
residual baseline of the tensor contributes it, and nothing travels twice. Inputs are the local parameters, watched by
name and tensor-parallel rank.
Not handled: a rank that fails inside Bridge's collectives; the process group reports it. Adapters that are merged while
exporting.

Paper: Section 5 (residual conversion, U_req); Figure A.4   Conditions: SC4, SC6
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_dcr.adapters.megatron.agreement import Place
from nemo_dcr.adapters.megatron.mappings import VOCABULARY
from nemo_dcr.bits.tensors import copied_words, dtype_name, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import ConditionViolated, UnsupportedMapping
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.ownership import residual_owner
from nemo_dcr.source.tasks import Part, ResidualInput, ResidualTask, served_cast, tensor_reader


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """How Bridge exports the model of this rank."""

    bridge: Any
    models: Sequence[Any]
    checkpoint: Any
    tasks: Sequence[Any]
    """Conversion tasks of Bridge."""
    rank: int
    """Of the trainer."""
    world: int

    def tensor(self, name: str, places: Sequence[Place]) -> Tensor | None:
        """The canonical tensor that the places become, if they do; all ranks together."""
        stream = self.bridge.stream_weights_megatron_to_hf(
            list(self.models),
            self.checkpoint,
            show_progress=False,
            conversion_tasks=[self.tasks[place.place] for place in places],
            merge_adapter_weights=False,
        )
        found = None
        for exported, value in stream:  # to its end: the other ranks gather every tensor of it
            if exported == name:
                found = value
        return found


def residual_task(
    export: Export, group: Sequence[Place], tensors: Mapping[str, TensorMeta], *, everything: bool = False
) -> ResidualTask:
    """The task of a group of places; all ranks have one.

    Args:
        export: of this rank.
        group: places whose tensors are converted together.
        tensors: of the checkpoint.
        everything: the group may make any of them.

    Raises: UnsupportedMapping (SC1) when the checkpoint has none of its tensors.
    """
    names = sorted(tensors) if everything else sorted({name for place in group for name in place.outputs})
    outputs = tuple(tensors[name] for name in names if name in tensors)
    inputs = tuple(sorted({name for place in group for name in place.inputs}))
    if not outputs:
        raise UnsupportedMapping(inputs[0], "SC1", "no tensor of the checkpoint is made of this parameter")
    padded = frozenset(name for place in group if place.inputs[0].endswith(VOCABULARY) for name in place.outputs)

    def convert(tensor: TensorMeta) -> list[Part]:
        made = export.tensor(tensor.name, group)
        if residual_owner(tensor.name, export.world) != export.rank:
            return []
        if made is None:
            raise ConditionViolated("SC6", tensor.name, "Bridge's export did not make it")
        return [_part(tensor, made, padded=tensor.name in padded)]

    return ResidualTask(
        name=f"export {outputs[0].name}",
        shard=f"rank {export.rank}",
        outputs=outputs,
        depends=inputs,
        nbytes=sum(tensor.nbytes for tensor in outputs),
        convert=convert,
    )


def residual_input(name: str, mapping: Any, get: Callable[[], Tensor]) -> ResidualInput:
    """The local parameter of a residual place."""
    value = get()
    shard = f"tensor rank {mapping.tp_rank} of {mapping.tp_size}"
    read = tensor_reader(get, f"{name}#{shard}")
    return ResidualInput(name=name, shard=shard, dtype=dtype_name(value.dtype), count=value.numel(), read=read)


def _part(tensor: TensorMeta, value: Tensor, *, padded: bool) -> Part:
    """Raises: ConditionViolated (SC6) for another shape; UnsupportedMapping (SC5) for a dtype that is not served."""
    value = value.detach()
    if padded and value.dim() and value.shape[0] > tensor.shape[0]:
        value = value[: tensor.shape[0]]
    if tuple(value.shape) != tensor.shape:
        raise ConditionViolated(
            "SC6", tensor.name, f"Bridge's export has shape {tuple(value.shape)}, not {tensor.shape}"
        )
    cast = served_cast(dtype_name(value.dtype), tensor)
    return Part(BoxMap.whole(tensor), copied_words(value if cast is None else value.to(torch_dtype(cast))))
