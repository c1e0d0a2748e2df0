"""Shard geometry of DTensors (FSDP2, HSDP, FSDP2 over tensor parallelism), from placements alone.

A rank's box follows from global shape, placements, mesh shape and mesh coordinate, without a collective and without
the full tensor. Each axis is cut by torch.chunk's rule, so the last shards may be short or empty. Mesh dimensions cut
an axis from left to right, except that a strided placement cuts after all mesh dimensions to its right: tensor
parallelism cuts first, FSDP then cuts the rows that are left. Replicate cuts nothing.
Not handled: partial sums and placements that are not boxes: `UnsupportedMapping`.

Paper: Section 5 (fixed shard geometry); Appendix A.1   Proofs: affine_destinations   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from nemo_dcr.bits.tensors import dtype_name
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.maps import BoxMap, Shape
from nemo_dcr.source.tasks import AffineTask, served_cast, tensor_reader


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of part `index` of `torch.chunk(x, parts)`; parts that torch omits are empty."""
    step = -(-size // parts)
    begin = min(index * step, size)
    return begin, min(begin + step, size) - begin


def local_box(
    shape: Shape, placements: Sequence[Placement], mesh_shape: Shape, coordinate: Sequence[int], name: str = ""
) -> tuple[Shape, Shape]:
    """Start and extent of the box that the rank at `coordinate` holds of a tensor of the given global shape.

    Raises: UnsupportedMapping (SC5) for a placement that is not a box.
    """
    start, extent = [0] * len(shape), list(shape)

    def cut(mesh_dim: int, axis: int) -> None:
        begin, length = chunk_bounds(extent[axis], mesh_shape[mesh_dim], coordinate[mesh_dim])
        start[axis] += begin
        extent[axis] = length

    late: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            inner = prod(
                size
                for size, later in zip(mesh_shape[mesh_dim + 1 :], placements[mesh_dim + 1 :], strict=True)
                if isinstance(later, Shard | _StridedShard) and later.dim == placement.dim
            )
            if placement.split_factor != inner:
                detail = (
                    f"{placement} has split factor {placement.split_factor}, the mesh dimensions after it cut {inner}"
                )
                raise UnsupportedMapping(name, "SC5", detail)
            late.append((mesh_dim, placement.dim))
        elif isinstance(placement, Shard):
            cut(mesh_dim, placement.dim)
        elif not isinstance(placement, Replicate):
            raise UnsupportedMapping(name, "SC5", f"placement {placement} is not a box; make the task residual")
    for mesh_dim, axis in reversed(late):
        cut(mesh_dim, axis)
    return tuple(start), tuple(extent)


def dtensor_map(tensor: TensorMeta, value: Tensor) -> BoxMap:
    """The map of this rank's shard of a DTensor whose global shape is the canonical one, or of a whole plain tensor.

    Raises: UnsupportedMapping (SC5) when the shape differs, the rank is outside the mesh or a placement is no box.
    """
    return BoxMap.box(tensor, *held_box(value, tensor.shape, tensor.name))


def held_box(value: Tensor, shape: Shape, name: str) -> tuple[Shape, Shape]:
    """Start and extent of what this rank holds of a parameter whose global shape is `shape`.

    Raises: UnsupportedMapping (SC5) when the shape differs, the rank is outside the mesh or a placement is no box.
    """
    if tuple(value.shape) != shape:
        raise UnsupportedMapping(name, "SC5", f"the parameter has shape {tuple(value.shape)}, not {shape}")
    if not isinstance(value, DTensor):
        return (0,) * len(shape), shape
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedMapping(name, "SC5", "this rank is not part of the tensor's device mesh")
    start, extent = local_box(shape, value.placements, tuple(mesh.shape), coordinate, name)
    local = tuple(value.to_local().shape)
    if local != extent:
        raise UnsupportedMapping(name, "SC5", f"the local shard has shape {local}, its placements say {extent}")
    return start, extent


def dtensor_tasks(parameters: Iterable[tuple[TensorMeta, Tensor | Callable[[], Tensor]]]) -> list[AffineTask]:
    """Identity tasks of this rank's shards of parameters and buffers, empty shards included.

    Each is given with its canonical tensor; give a callable when the object changes from step to step. The canonical
    dtype is the one that the trainer stores its policy in: an FP32 master shard of a BF16 tensor reads as the BF16 cast
    of the local shard, and an FP32 router bias of an FP32 tensor as it is.

    Raises: UnsupportedMapping (SC5) for a shape, placement or dtype that does not fit, and when one parameter object
    has two names (name a tied weight once, or make it residual).
    """
    seen: dict[int, str] = {}
    tasks = []
    for tensor, given in parameters:
        get = _getter(given)
        value = get()
        other = seen.setdefault(id(value), tensor.name)
        if other != tensor.name:
            raise UnsupportedMapping(
                tensor.name, "SC5", f"it is the same parameter as {other!r}; name a tied weight once"
            )
        convert = served_cast(dtype_name(value.dtype), tensor)
        box = dtensor_map(tensor, value)
        tasks.append(AffineTask.identity(box, tensor_reader(local_of(get), box.label, convert=convert)))
    return tasks


def _getter(given: Tensor | Callable[[], Tensor]) -> Callable[[], Tensor]:
    if isinstance(given, Tensor):
        return lambda: given
    return given


def local_of(get: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The local tensor of what `get` returns: a DTensor's shard, or a plain tensor itself."""

    def local() -> Tensor:
        value = get()
        return value.to_local() if isinstance(value, DTensor) else value

    return local
