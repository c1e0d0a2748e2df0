"""Index maps of drawn views: entries end up where the dense scratch would have put them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.kernels import placement
from nemo_dcr.receiver.index_map import IndexMap, index_map

LENGTH = 240


@pytest.fixture(autouse=True, params=["plain", "fast"], scope="module")
def _loops(request: pytest.FixtureRequest) -> Iterator[None]:
    placement.cool()
    if request.param == "fast":
        assert placement.warm(placement.WORTH_BYTES, {2}) == ""
    yield
    placement.cool()


def map_of(source: Tensor, target: Tensor) -> IndexMap | None:
    source = source.expand(target.shape)
    return index_map(tuple(target.shape), source.stride(), target.stride())


@st.composite
def view_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A view of a canonical tensor of 240 words, and a resident view of the same shape that repeats no word."""
    shape = draw(st.sampled_from([(240,), (15, 16), (4, 5, 12), (2, 3, 4, 10), (1, 240), (240, 1)]))
    source = torch.zeros(LENGTH, dtype=torch.int16).view(shape)
    for act in draw(st.lists(st.sampled_from(["narrow", "step", "transpose", "select", "new axis"]), max_size=4)):
        if source.dim() == 0:
            break
        axis = draw(st.integers(0, source.dim() - 1))
        if act == "narrow":
            start = draw(st.integers(0, source.shape[axis]))
            source = source.narrow(axis, start, draw(st.integers(0, source.shape[axis] - start)))
        elif act == "step":
            source = source[(slice(None),) * axis + (slice(None, None, draw(st.integers(1, 3))),)]
        elif act == "transpose":
            source = source.transpose(axis, draw(st.integers(0, source.dim() - 1)))
        elif act == "select" and source.shape[axis]:
            source = source.select(axis, draw(st.integers(0, source.shape[axis] - 1)))
        elif act == "new axis":
            source = source.unsqueeze(axis)
    if draw(st.booleans()):
        source = source.expand(draw(st.integers(1, 3)), *source.shape)
    order = draw(st.permutations(range(source.dim())))
    padded = [source.shape[axis] + draw(st.integers(0, 2)) for axis in order]
    whole = torch.zeros(int(np.prod(padded)) + 9, dtype=torch.int16)
    target = whole[3 : 3 + int(np.prod(padded))].view(padded)
    for position, axis in enumerate(order):
        target = target.narrow(position, 0, source.shape[axis])
    return source, target.permute(tuple(np.argsort(order)))


@st.composite
def items(draw: st.DrawFn) -> Item:
    meta, encoding = TensorMeta("t", (LENGTH,), "I16"), draw(st.sampled_from(list(Encoding)))
    if draw(st.booleans()):
        start = draw(st.integers(0, LENGTH - 1))
        count = draw(st.integers(1, LENGTH - start))
        return Item.run(meta, encoding, start, np.arange(1, count + 1, dtype="<u2"))
    indices = np.array(sorted(draw(st.sets(st.integers(0, LENGTH - 1), min_size=1))), dtype=np.int64)
    return Item.of(meta, encoding, indices, np.arange(len(indices), dtype="<u2") + 0x7FF0)


def storage_words(tensor: Tensor) -> np.ndarray:
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.numpy().view("<u2")


@given(view_pairs(), items())
def test_entries_go_where_the_dense_scratch_puts_them(pair: tuple[Tensor, Tensor], item: Item) -> None:
    source, target = pair
    found = map_of(source, target)
    assert found is not None
    words = storage_words(target)
    words[:] = np.arange(len(words))
    dense = target.clone()
    scratch = storage_words(source)
    scratch[:] = 0
    scratch[item.flat_indices()] = 1
    taken = integer_view(source).clone().bool()
    scratch[item.flat_indices()] = item.values
    dense = target ^ source if item.encoding is Encoding.XOR else torch.where(taken, source, target)
    expected = words.copy()
    at = torch.empty(0, dtype=torch.int64).set_(
        torch.arange(len(words)).untyped_storage(), target.storage_offset(), target.shape, target.stride()
    )
    expected[at.numpy().reshape(-1)] = dense.numpy().reshape(-1).view("<u2")
    scratch[:] = 0xFFFF  # nothing is read from it
    distinct = source.storage_offset() + np.unique(_offsets(source))
    assert found.elements == (len(distinct) if target.numel() else 0)
    met = found.write(item, words, source.storage_offset(), target.storage_offset())
    assert words.tolist() == expected.tolist()
    assert met == (len(np.intersect1d(item.flat_indices(), distinct)) if target.numel() else 0)


def _offsets(tensor: Tensor) -> np.ndarray:
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.int64)
    tensor = tensor.unsqueeze(0)
    grids = np.indices(tuple(tensor.shape)).reshape(tensor.dim(), -1)
    return (grids * np.array(tensor.stride()).reshape(-1, 1)).sum(axis=0)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 3), (2, 1)), ((3, 3), (1, 1)), ((2, 2, 2), (3, 2, 1)), ((3, 2), (2, 3)), ((5, 5), (3, 1))],
)
def test_a_source_that_may_repeat_an_element_has_no_map(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Windows that overlap; the last but one repeats nothing, but nesting does not prove it."""
    assert index_map(shape, strides, tuple(np.cumprod((1, *shape[:0:-1])))[::-1]) is None


def test_repeats_are_listed_up_to_a_bound() -> None:
    few = index_map((2, 3, 4), (0, 4, 1), (12, 4, 1))
    assert few is not None
    assert few.repeats == (0, 12)
    assert index_map((5000, 4), (0, 1), (4, 1)) is None


def test_adjacent_axes_that_are_contiguous_on_both_sides_are_a_block() -> None:
    whole = index_map((4, 1, 6), (6, 99, 1), (6, 7, 1))
    columns = index_map((4, 6), (8, 1), (6, 1))
    assert whole is not None
    assert columns is not None
    assert whole.is_block
    assert not columns.is_block
