"""Piecewise-affine maps say where torch puts every element, whatever was done to the canonical tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.piecewise import IndexMap

PADDING = -1


class Twin:
    """A map, and a torch tensor that went through the same operations: number of its tensor times BASE plus element."""

    def __init__(self, index_map: IndexMap, values: torch.Tensor) -> None:
        self.map, self.values = index_map, values


BASE = 1 << 20


def leaf(number: int, shape: tuple[int, ...]) -> Twin:
    tensor = TensorMeta(f"t{number}", shape, "BF16")
    values = torch.arange(tensor.numel, dtype=torch.int64).reshape(shape) + number * BASE
    return Twin(IndexMap.of(tensor), values)


def said(index_map: IndexMap) -> NDArray[np.int64]:
    """What a map says of every element, in the numbers of the torch tensor."""
    which, flat = index_map.destinations(np.arange(int(np.prod(index_map.shape)), dtype=np.int64))
    numbers = np.array([int(tensor.name[1:]) for tensor in index_map.tensors] or [0], dtype=np.int64)
    return np.where(which < 0, PADDING, numbers[which] * BASE + flat)


def assert_same(twin: Twin) -> None:
    assert twin.map.shape == tuple(twin.values.shape)
    expected = twin.values.reshape(-1).numpy()
    assert said(twin.map).tolist() == expected.tolist()
    assert twin.map.domain == int((expected != PADDING).sum())


@st.composite
def twins(draw: st.DrawFn) -> Twin:
    """Up to three canonical tensors and up to six operations."""
    twin = leaf(0, tuple(draw(st.lists(st.integers(1, 6), max_size=3))))
    for number in range(1, draw(st.integers(1, 7))):
        twin = draw(st.sampled_from(OPERATIONS))(draw, twin, number)
        if twin.values.numel() > 4000:
            break
    return twin


def _narrow(draw: st.DrawFn, twin: Twin, number: int) -> Twin:
    if not twin.map.shape:
        return twin
    axis = draw(st.integers(0, len(twin.map.shape) - 1))
    start = draw(st.integers(0, twin.map.shape[axis]))
    length = draw(st.integers(0, twin.map.shape[axis] - start))
    return Twin(twin.map.narrow(axis, start, length), twin.values.narrow(axis, start, length))


def _permute(draw: st.DrawFn, twin: Twin, number: int) -> Twin:
    axes = draw(st.permutations(range(len(twin.map.shape))))
    return Twin(twin.map.permute(axes), twin.values.permute(axes))


def _reshape(draw: st.DrawFn, twin: Twin, number: int) -> Twin:
    left, shape = twin.values.numel(), list[int]()
    while left > 1 and len(shape) < 4:
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        shape.append(size)
        left //= size
    new = tuple(draw(st.permutations([*shape, left])))
    return Twin(twin.map.reshape(new), twin.values.reshape(new))


def _join(draw: st.DrawFn, twin: Twin, number: int) -> Twin:
    if not twin.map.shape:
        return twin
    axis = draw(st.integers(0, len(twin.map.shape) - 1))
    shape = list(twin.map.shape)
    shape[axis] = draw(st.integers(1, 4))
    parts = draw(st.permutations([twin, leaf(number, tuple(shape))]))
    joined = torch.cat([part.values for part in parts], axis)
    return Twin(IndexMap.concatenate([part.map for part in parts], axis), joined)


def _stack(draw: st.DrawFn, twin: Twin, number: int) -> Twin:
    axis = draw(st.integers(0, len(twin.map.shape)))
    parts = draw(st.permutations([twin, leaf(number, twin.map.shape)]))
    return Twin(IndexMap.stack([p.map for p in parts], axis), torch.stack([p.values for p in parts], axis))


def _pad(draw: st.DrawFn, twin: Twin, number: int) -> Twin:
    if not twin.map.shape:
        return twin
    axis = draw(st.integers(0, len(twin.map.shape) - 1))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))

    def filled(count: int) -> torch.Tensor:
        return torch.full((*twin.values.shape[:axis], count, *twin.values.shape[axis + 1 :]), PADDING)

    values = torch.cat([filled(before), twin.values, filled(after)], axis)
    return Twin(twin.map.pad(axis, before, after), values)


OPERATIONS: list[Callable[[st.DrawFn, Twin, int], Twin]] = [_narrow, _permute, _reshape, _join, _stack, _pad]


@settings(max_examples=400)
@given(twins())
def test_a_map_says_where_torch_puts_each_element(twin: Twin) -> None:
    assert_same(twin)
    twin.map.check()


@given(twins())
def test_elements_undo_destinations_and_tell_what_is_elsewhere(twin: Twin) -> None:
    values = twin.values.reshape(-1).tolist()
    for tensor in twin.map.tensors:
        number = int(tensor.name[1:])
        place = {value - number * BASE: p for p, value in enumerate(values) if value // BASE == number}
        found = twin.map.elements(tensor, np.arange(tensor.numel, dtype=np.int64))
        assert found.tolist() == [place.get(k, -1) for k in range(tensor.numel)]


@given(twins())
@example(Twin(IndexMap.of(TensorMeta("t0", (4, 3), "BF16")).narrow(0, 1, 2), leaf(0, (4, 3)).values.narrow(0, 1, 2)))
def test_boxes_and_strides_of_pieces_are_those_of_the_array(twin: Twin) -> None:
    """Read through strides and written through boxes, each canonical element gets what the array has of it."""
    flat = twin.values.reshape(-1)
    written = dict[int, int]()
    for piece in twin.map.pieces:
        number = int(piece.tensor.name[1:])
        for part, box in piece.boxes():
            offset, sizes, strides = part.strided()
            # torch counts the offset from the begin of the storage, of which a narrowed array is a part.
            read = torch.as_strided(flat, sizes, strides, flat.storage_offset() + offset).reshape(-1)
            assert len(read) == part.count == box.domain
            for value, destination in zip(read.tolist(), box.all_destinations().tolist(), strict=True):
                assert value not in written
                written[value] = number * BASE + destination
    assert {value: value for value in flat.tolist() if value != PADDING} == written


def test_an_element_that_is_put_in_twice_is_refused() -> None:
    tensor = TensorMeta("tied", (4, 3), "BF16")
    one = IndexMap.of(tensor)
    with pytest.raises(UnsupportedMapping, match="put into the parameter twice"):
        IndexMap.concatenate([one, one.permute((1, 0)).reshape((4, 3)).narrow(0, 1, 2)], 0).check()
    IndexMap.concatenate([one.narrow(0, 0, 1), one.narrow(0, 1, 3)], 0).check()


def test_what_is_no_array_is_refused() -> None:
    one = IndexMap.of(TensorMeta("w", (4, 3), "BF16"))
    for wrong in (
        lambda: one.narrow(0, 2, 3),
        lambda: one.narrow(2, 0, 1),
        lambda: one.split(0, (1, 2)),
        lambda: one.pad(0, -1, 0),
        lambda: one.permute((0, 0)),
        lambda: one.reshape((5, 2)),
        lambda: IndexMap.concatenate([], 0),
        lambda: IndexMap.concatenate([one, one.reshape((2, 6))], 0),
    ):
        with pytest.raises(UnsupportedMapping, match="SC5"):
            wrong()


def test_too_many_pieces_are_refused_and_not_made() -> None:
    comb = IndexMap.of(TensorMeta("w", (1 << 17, 5), "BF16")).narrow(1, 0, 3)
    assert len(comb.pieces) == 1
    with pytest.raises(UnsupportedMapping, match="more than 65536 pieces"):
        comb.reshape((3, 1 << 17))
