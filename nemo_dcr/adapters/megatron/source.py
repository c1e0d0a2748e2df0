"""The conversion tasks of one rank of a Megatron model, as Megatron-Bridge maps it.

Bridge itself lists its conversions and knows process groups and global names; `describe` says what each does to this
rank's parameter, and all ranks agree on which are index maps. Those become affine tasks that need no other rank, the
rest becomes residual tasks that run Bridge's own export. With `mapping="paper"` only the paper's classes count as index
maps. Before a map is used, one of each kind is compared with what Bridge's export really does (`verification`).
FP32 masters of a BF16 policy are compared as the BF16 cast that is served.
Not handled: parameters that are stored quantised or as DTensors, and adapters that are trained beside frozen weights;
both are refused.

Paper: Section 5; Appendix A.1; Table D.2   Conditions: SC1, SC5, SC6
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from nemo_dcr.adapters.megatron.agreement import (
    Place,
    agree,
    by_tensor,
    described_row,
    replaced_steps,
    residual_groups,
)
from nemo_dcr.adapters.megatron.mappings import VOCABULARY, Described, Held, describe
from nemo_dcr.adapters.megatron.residual import Export, residual_input, residual_task
from nemo_dcr.adapters.megatron.verification import check_exports
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.classes import Classified, Handling, MappedTensor, MappingClass, classify, handling
from nemo_dcr.source.classes import Mapping as Use
from nemo_dcr.source.exchange import Exchange
from nemo_dcr.source.parameter import parameter_tasks
from nemo_dcr.source.piecewise import IndexMap
from nemo_dcr.source.tasks import AffineTask, ResidualInput, ResidualTask


@dataclass(frozen=True, slots=True, eq=False)
class MegatronSource:
    """What a rank hands to `source.setup.agree_plan`, and how the whole checkpoint was classified."""

    affine: tuple[AffineTask, ...]
    inputs: tuple[ResidualInput, ...]
    residual: tuple[ResidualTask, ...]
    classified: Classified
    """Every canonical tensor that the model makes, under the classes in use. Equal on all ranks."""
    reasons: Mapping[str, str]
    """Residual canonical tensor -> why it has no index map."""

    @property
    def residual_share(self) -> float:
        """Residual bytes over all canonical bytes."""
        return self.classified.share(Handling.RESIDUAL).nbytes / max(1, self.classified.nbytes)

    def summary(self) -> str:
        """Tensors and bytes of each handling, and the reasons for what is residual; several lines."""
        lines = []
        for kind in Handling:
            share = self.classified.share(kind)
            percent = 100 * share.nbytes / max(1, self.classified.nbytes)
            lines.append(f"{kind}: {share.tensors} tensors, {share.nbytes} bytes, {percent:.2f}%")
        counted: dict[str, int] = {}
        for reason in self.reasons.values():
            counted[reason] = counted.get(reason, 0) + 1
        return "\n".join([*lines, *(f"  {count} residual: {reason}" for reason, count in sorted(counted.items()))])


def megatron_source(
    bridge: Any,
    model: nn.Module | Sequence[nn.Module],
    checkpoint: Any,
    tensors: Iterable[TensorMeta],
    exchange: Exchange,
    *,
    mapping: str = Use.EXTENDED,
    verify: bool = True,
) -> MegatronSource:
    """The tasks of this rank; all ranks call this together.

    Args:
        bridge: of Megatron-Bridge, for the architecture of the model.
        model: of this rank, or one for each virtual pipeline stage; wrapped by Megatron's DDP or not.
        checkpoint: what `bridge` loaded the model from, or its configuration.
        tensors: of the checkpoint; their dtypes are what is served.
        exchange: of the trainer ranks.
        mapping: "extended", or "paper" for the paper's classes alone.
        verify: compare one map of each kind with Bridge's export; all ranks alike.

    Raises: UnsupportedMapping (SC1) for a trained parameter that becomes no tensor; (SC5) for a parameter that is no
    plain tensor, or a map that Bridge's export contradicts; EndpointLost.
    """
    use = Use(mapping)
    table = {tensor.name: tensor for tensor in tensors}
    models = _unwrapped(model)
    tasks = bridge.build_conversion_tasks(checkpoint, models)
    local = {place: task for place, task in enumerate(tasks) if task is not None and task.megatron_module is not None}
    _check_trained(bridge, models, local.values())
    described = {place: _described(bridge, models, task, table) for place, task in local.items()}
    rows = [
        described_row(place, task.global_param_name, tuple(task.param_weight.shape), described[place])
        for place, task in local.items()
    ]
    places = agree(exchange, len(tasks), rows)
    replaced = replaced_steps(bridge)
    groups = residual_groups(places, use, everything=bool(replaced))
    converted = {place.place for group in groups for place in group}
    maps = {place: found.map for place, found in described.items() if found.map is not None and place not in converted}
    if verify:
        _verify(bridge, models, checkpoint, [place for place in places if place.place not in converted], maps, table)
    export = Export(bridge, models, checkpoint, tasks, exchange.rank, exchange.world)
    return MegatronSource(
        tuple(task for place in sorted(maps) for task in parameter_tasks(maps[place], _getter(local[place]))),
        tuple(
            residual_input(task.global_param_name, task.mapping, _getter(task))
            for place, task in local.items()
            if place in converted
        ),
        tuple(residual_task(export, group, table, everything=bool(replaced)) for group in groups),
        _classified(places, groups, table, use, everything=bool(replaced)),
        _reasons(groups, table, replaced),
    )


# ------------------------------------------------------------------------------------------------------- parameters


def _unwrapped(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    from megatron.bridge.models.conversion.utils import unwrap_model

    given = [model] if isinstance(model, nn.Module) else list(model)
    return list(unwrap_model(given))


def _getter(task: Any) -> Callable[[], Tensor]:
    """The parameter as its module has it now; the object may change from step to step."""
    owner, leaf = task.megatron_module, task.param_name.rpartition(".")[2]
    found: Tensor = task.param_weight
    if getattr(owner, leaf, None) is found:
        return lambda: getattr(owner, leaf)
    return lambda: found


def _check_trained(bridge: Any, models: Sequence[Any], tasks: Iterable[Any]) -> None:
    """Raises: UnsupportedMapping (SC1, SC5)."""
    known = set()
    for task in tasks:
        known.add((task.vp_stage, task.param_name))
        value = task.param_weight
        if type(value) not in (nn.Parameter, Tensor) or type(value.data) is not Tensor:
            raise UnsupportedMapping(
                task.global_param_name, "SC5", f"it is stored as {type(value).__name__}; train it in a plain dtype"
            )
    for stage, model in enumerate(models):
        tied = bridge._share_embeddings_and_output_weights(model.config)
        for name, value in model.named_parameters():
            copied = tied and "output_layer" in name
            if value.requires_grad and not copied and (stage, bridge._unwrap_name(name)) not in known:
                raise UnsupportedMapping(name, "SC1", "it is trained and Bridge maps it to no tensor of the checkpoint")


def _described(bridge: Any, models: Sequence[Any], task: Any, table: Mapping[str, TensorMeta]) -> Described:
    found = describe(Held(task.mapping, task.megatron_module, tuple(task.param_weight.shape), table))
    named = task.global_param_name.endswith(VOCABULARY)
    if named and bridge._share_embeddings_and_output_weights(models[0].config):
        other = bridge._get_tied_output_hf_name(task, bridge.mapping_registry())
        if other in table:
            names = tuple(sorted({*found.outputs, other}))
            return replace(found, mapping=MappingClass.TIED, outputs=names, map=None, reason="the head is tied to it")
    return found


# --------------------------------------------------------------------------------------------------------- the whole


def _verify(
    bridge: Any,
    models: Sequence[Any],
    checkpoint: Any,
    places: Iterable[Place],
    maps: Mapping[int, IndexMap],
    table: Mapping[str, TensorMeta],
) -> None:
    """Raises: UnsupportedMapping (SC5)."""
    # Of their own: a mapping object remembers the dtype of what it exported over a pipeline.
    fresh = bridge.build_conversion_tasks(checkpoint, list(models))
    chosen = {(place.mapping, place.degree, place.shapes, _pattern(place)): place.place for place in places}

    check_exports([(fresh[place], maps.get(place)) for place in sorted(chosen.values())], table)


def _pattern(place: Place) -> str:
    return re.sub(r"\d+", "*", " ".join(place.outputs[:1]))


def _classified(
    places: Sequence[Place],
    groups: Iterable[Sequence[Place]],
    table: Mapping[str, TensorMeta],
    use: Use,
    *,
    everything: bool,
) -> Classified:
    """The table of the checkpoint; a tensor that is residual for another reason than its class is unknown."""
    converted = {name for group in groups for place in group for name in place.outputs}
    rows = []
    for name, place in by_tensor(places, table).items():
        found = place.mapping
        if (everything or name in converted) and handling(found, use) is not Handling.RESIDUAL:
            found = MappingClass.UNKNOWN
        rows.append(MappedTensor(table[name], found, place.degree))
    return classify(sorted(rows, key=lambda row: row.tensor), use)


def _reasons(
    groups: Iterable[Sequence[Place]], table: Mapping[str, TensorMeta], replaced: Sequence[str]
) -> dict[str, str]:
    found = {}
    for group in groups:
        told = next((place.reason for place in group if place.reason), "")
        if replaced:
            told = f"the bridge has its own {', '.join(replaced)}"
        for name in {name for place in group for name in place.outputs} & set(table):
            found[name] = told or f"{group[0].mapping} is no class of the paper"
    return found
