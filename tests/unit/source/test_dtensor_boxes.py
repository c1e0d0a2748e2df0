"""Boxes of DTensor placements, against a plain simulation of how FSDP and tensor parallelism cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.spawn import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.dtensor import chunk_bounds, dtensor_map, dtensor_tasks, local_box
from nemo_dcr.source.geometry import check_cover
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.testing.changes import inject


@given(st.integers(0, 40), st.integers(1, 9))
def test_bounds_are_those_of_torch_chunk(size: int, parts: int) -> None:
    chunks = list(torch.arange(size).chunk(parts))
    for index in range(parts):
        begin, length = chunk_bounds(size, parts, index)
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert list(range(begin, begin + length)) == expected


def cut(values: np.ndarray, axis: int, parts: int, index: int) -> np.ndarray:  # type: ignore[type-arg]
    begin, length = chunk_bounds(values.shape[axis], parts, index)
    return np.take(values, range(begin, begin + length), axis=axis)


@pytest.mark.parametrize("shape", [(8, 5), (7, 3), (5, 2), (1, 4), (3, 250)])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_fsdp_cuts_the_rows_that_tensor_parallelism_left(shape: tuple[int, int], dp: int, tp: int) -> None:
    """Column-parallel weights: rows are split by tp first and by dp after it, also when neither divides."""
    numbered = np.arange(shape[0] * shape[1]).reshape(shape)
    boxes = []
    for coordinate in itertools.product(range(dp), range(tp)):
        start, extent = local_box(shape, (_StridedShard(0, split_factor=tp), Shard(0)), (dp, tp), coordinate)
        box = BoxMap.box(TensorMeta("w", shape, "BF16"), start, extent)
        expected = cut(cut(numbered, 0, tp, coordinate[1]), 0, dp, coordinate[0])
        assert box.take(numbered.reshape(-1)).tolist() == expected.reshape(-1).tolist()
        boxes.append(box)
    check_cover(TensorMeta("w", shape, "BF16"), boxes)


def fsdp_over_tensor_parallel(_: int) -> None:
    """Rank 1 of a 2 x 2 mesh, built by torch itself over a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    numbered = torch.arange(35, dtype=torch.float32)
    placements = {"column": Shard(0), "row": Shard(1), "whole": Replicate()}
    module = nn.Module()
    for name, placement in placements.items():
        value = distribute_tensor(numbered.reshape(7, 5), mesh["tp"], [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(value))
    fully_shard(module, mesh=mesh["dp"])
    sizes = []
    for task in dtensor_tasks([(TensorMeta(n, (7, 5), "F32"), p) for n, p in module.named_parameters()]):
        expected = task.map.take(numbered.view(torch.int32).numpy().view("<u4"))
        assert task.words().tolist() == expected.tolist()
        sizes.append(task.map.extent)
    assert sizes == [(2, 5), (4, 2), (4, 5)]
    inject(module, 0.5, seed=4)
    for name, parameter in module.named_parameters():
        changed, box = numbered.reshape(7, 5).clone(), dtensor_map(TensorMeta(name, (7, 5), "F32"), parameter)
        inject({name: changed}, 0.5, seed=4)
        assert copied_words(parameter.to_local()).tolist() == box.take(copied_words(changed)).tolist()
    dist.destroy_process_group()


@pytest.mark.slow
def test_boxes_hold_the_values_that_torch_puts_there() -> None:
    """Injected changes too are those of the whole tensor, cut by the box."""
    spawn(fsdp_over_tensor_parallel)


@st.composite
def layouts(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


@given(layouts())
def test_shards_cut_left_to_right_and_cover_the_tensor(layout) -> None:  # type: ignore[no-untyped-def]
    shape, mesh, placements = layout
    tensor = TensorMeta("w", shape, "BF16")
    numbered = np.arange(tensor.numel)
    boxes = {}
    for coordinate in itertools.product(*map(range, mesh)):
        start, extent = local_box(shape, placements, mesh, coordinate)
        box = BoxMap.box(tensor, start, extent)
        expected = numbered.reshape(shape)
        for placement, parts, index in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, Shard):
                expected = cut(expected, placement.dim, parts, index)
        assert box.take(numbered).tolist() == expected.reshape(-1).tolist()
        boxes[box.label] = box
    check_cover(tensor, list(boxes.values()))


def test_placements_that_are_no_box_are_refused() -> None:
    with pytest.raises(UnsupportedMapping, match="not a box"):
        local_box((4,), (Partial(),), (2,), (0,), "w")
    with pytest.raises(UnsupportedMapping, match="split factor"):
        local_box((4,), (_StridedShard(0, split_factor=3), Shard(0)), (2, 2), (0, 0), "w")


def test_plain_tensors_are_whole_and_keep_their_dtype() -> None:
    """B9: an FP32 buffer of a BF16 model stays FP32; an FP32 master of a BF16 tensor reads as BF16."""
    bias, master = torch.tensor([6.817001, 7.063000]), torch.tensor([1.0, 1.0 + 2**-9])
    tasks = dtensor_tasks([(TensorMeta("bias", (2,), "F32"), bias), (TensorMeta("w", (2,), "BF16"), lambda: master)])
    assert [task.map.domain for task in tasks] == [2, 2]
    assert tasks[0].words().tolist() == bias.view(torch.int32).tolist()
    assert tasks[1].words().tolist() == [0x3F80, 0x3F80]
    assert all(task.projection.preserves_bits for task in tasks)


def test_tied_parameters_and_foreign_dtypes_or_shapes_are_refused() -> None:
    """B3, B8: one storage under two names, and a table that does not describe the parameter."""
    weight = torch.zeros(4, 2, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedMapping, match="same parameter as 'embed'"):
        dtensor_tasks([(TensorMeta("embed", (4, 2), "BF16"), weight), (TensorMeta("head", (4, 2), "BF16"), weight)])
    with pytest.raises(UnsupportedMapping, match="Cast projection"):
        dtensor_tasks([(TensorMeta("w", (4, 2), "F16"), weight)])
    with pytest.raises(UnsupportedMapping, match="SC5"):
        dtensor_map(TensorMeta("w", (2, 4), "BF16"), weight)
