"""Affine tasks of a PyTorch module: plain, DDP, FSDP2, HSDP, tensor parallel, and both together.

Each parameter and persistent buffer has an index map of the whole (huggingface.checkpoint_maps, or the tensor of its
own name); the placements of a DTensor say which part of it this rank holds, and the part's boxes become affine tasks. A
policy that is trained in FP32 and served in BF16 is compared as its BF16 cast. A forward pass may leave parameters of
FSDP2 gathered; the shards behind them are read all the same.
Not handled: parameters with partial sums; two names for one parameter where the checkpoint has both (residual).

Paper: Section 5 (fixed shard geometry, stored values)   Conditions: SC1, SC5
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.dtensor import held_box, local_of
from nemo_dcr.source.parameter import parameter_tasks
from nemo_dcr.source.piecewise import IndexMap
from nemo_dcr.source.tasks import AffineTask

COMPILED = "_orig_mod"
"""Where torch.compile keeps the module that it wraps, also inside of another one."""


def module_tasks(
    module: nn.Module, maps: Mapping[str, IndexMap], *, converted: Collection[str] = ()
) -> list[AffineTask]:
    """The tasks of this rank's parameters and persistent buffers; empty shards have none.

    Args:
        module: as it is trained: wrapped by DDP or torch.compile, sharded by FSDP2, tensor parallel, or plain.
        maps: of whole parameters and buffers by their names in the bare module.
        converted: names of parameters that residual conversions read; they need no map.

    Raises: UnsupportedMapping (SC1) for a trained parameter without a map, or a map without a parameter; (SC5) for
    placements that are no boxes, shapes that differ, and an element with two sources.
    """
    getters = _state(module)
    missing = sorted(set(maps) - set(getters))
    if missing:
        raise UnsupportedMapping(missing[0], "SC1", "the module has no parameter or persistent buffer of this name")
    seen: dict[int, str] = {}
    mapped = {id(getters[name]()) for name in (*maps, *(name for name in converted if name in getters))}
    tasks: list[AffineTask] = []
    for name, get in getters.items():
        value = get()
        if name not in maps:
            if id(value) not in mapped and value.requires_grad:
                raise UnsupportedMapping(name, "SC1", "it is trained and no tensor of the checkpoint is loaded into it")
            continue
        if (other := seen.setdefault(id(value), name)) != name:
            detail = f"it is the same parameter as {other!r}; name a tied weight once, or make it residual"
            raise UnsupportedMapping(name, "SC5", detail)
        tasks += parameter_tasks(local_map(maps[name], value, name), local_of(get))
    return tasks


def local_map(whole: IndexMap, value: Tensor, name: str) -> IndexMap:
    """The map of what this rank holds of a parameter.

    Raises: UnsupportedMapping (SC5) when shapes differ, the rank is outside of the mesh, or a placement is no box.
    """
    start, extent = held_box(value, whole.shape, name)
    for axis, (first, count) in enumerate(zip(start, extent, strict=True)):
        whole = whole.narrow(axis, first, count)
    return whole


def bare_module(module: nn.Module) -> nn.Module:
    """The module without DDP and torch.compile around it."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif (compiled := module._modules.get(COMPILED)) is not None:
            module = compiled
        else:
            return module


def bare_name(path: str) -> str:
    """The name of a parameter without the levels that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part not in ("", COMPILED))


def reshard(module: nn.Module) -> None:
    """Let go of parameters that FSDP2 keeps gathered after a forward pass; its parameters are shards then."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _state(module: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Getters of all parameters and persistent buffers by bare name; the objects may change from step to step."""
    module = bare_module(module)
    reshard(module)
    found: dict[str, Callable[[], Tensor]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        persistent = set(owner._buffers) - owner._non_persistent_buffers_set
        for name in [n for n, p in owner._parameters.items() if p is not None] + [
            n for n in persistent if owner._buffers[n] is not None
        ]:
            found.setdefault(bare_name(f"{path}.{name}"), _getter(owner, name))
    return dict(sorted(found.items()))


def _getter(owner: nn.Module, name: str) -> Callable[[], Tensor]:
    first = getattr(owner, name)
    if not isinstance(first, DTensor):
        return lambda: getattr(owner, name)

    def shard() -> Tensor:
        """FSDP2 puts a gathered tensor in the place of its shard for a while; the shard stays what is trained."""
        now = getattr(owner, name)
        return now if isinstance(now, DTensor) else first

    return shard
