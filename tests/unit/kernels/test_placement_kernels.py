"""Places of entries: numpy against coordinates that are written out, the compiled loops against numpy."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.kernels import placement, placement_fast, placement_plain

WORDS = [np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")]
BOTH = pytest.mark.parametrize("kernels", [placement_plain, placement_fast], ids=["plain", "fast"])


@st.composite
def nested_axes(draw: st.DrawFn) -> np.ndarray:
    """Axes by falling canonical stride, each of which steps over everything inside it; any resident strides."""
    axes: list[tuple[int, int, int]] = []
    inside, resident = 1, 1
    for _ in range(draw(st.integers(0, 3))):
        size, stride = draw(st.integers(2, 4)), inside + draw(st.integers(0, 3))
        move = resident + draw(st.integers(0, 2))
        axes.insert(0, (size, stride, move))
        inside += (size - 1) * stride
        resident += (size - 1) * move
    moves = draw(st.permutations([(size, move) for size, _, move in axes])) if draw(st.booleans()) else None
    if moves is not None and sorted(size for size, _ in moves) == [size for size, _ in moves]:
        axes = [(size, stride, move) for (size, stride, _), (_, move) in zip(axes, moves, strict=True)]
    return np.array(axes, dtype=np.int64).reshape(-1, 3)


def written_out(axes: np.ndarray, first: int, target: int) -> dict[int, int]:
    """Canonical index to resident word, coordinate by coordinate."""
    found = {}
    for coordinates in itertools.product(*(range(size) for size, _, _ in axes.tolist())):
        at = sum(c * stride for c, (_, stride, _) in zip(coordinates, axes.tolist(), strict=True))
        to = sum(c * move for c, (_, _, move) in zip(coordinates, axes.tolist(), strict=True))
        assert first + at not in found
        found[first + at] = target + to
    return found


@BOTH
@given(nested_axes(), st.integers(0, 5), st.integers(0, 5), st.data())
def test_an_entry_is_located_where_its_coordinates_say_or_not_at_all(
    kernels: ModuleType, axes: np.ndarray, first: int, target: int, data: st.DataObject
) -> None:
    expected = written_out(axes, first, target)
    assert placement_plain.reach(axes) == max(expected) - first + 1
    chosen = data.draw(st.sets(st.integers(0, max(expected) + 4)))
    indices = np.array(sorted(chosen), dtype=np.int64)
    positions, at = kernels.locate(indices, axes, first, target)
    taken = [index for index in indices.tolist() if index in expected]
    assert indices[positions].tolist() == taken
    assert at.tolist() == [expected[index] for index in taken]


@BOTH
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_entries_of_a_block_are_written_and_nothing_else_is(kernels: ModuleType, dtype: np.dtype) -> None:
    top = np.iinfo(dtype).max
    indices = np.array([0, 4, 5, 9, 10, 11], dtype=np.int64)
    values = np.array([1, 2, top, 4, 5, 6], dtype=dtype)
    resident = np.full(9, 3, dtype=dtype)
    assert kernels.xor_block(resident, 2, indices, 5, 5, values) == 2
    assert resident.tolist() == [3, 3, top ^ 3, 3, 3, 3, 7, 3, 3]
    assert kernels.overwrite_block(resident, 1, indices, 4, 7, values) == 4
    assert resident.tolist() == [3, 2, top, 3, 3, 3, 4, 5, 3]
    assert kernels.overwrite_block(resident, 0, indices, 20, 5, values) == 0


@BOTH
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_places_with_a_shift_are_written_and_no_others(kernels: ModuleType, dtype: np.dtype) -> None:
    resident = np.arange(8, dtype=dtype)
    at = np.array([3, 0, 2], dtype=np.int64)
    kernels.xor_at(resident, at, 4, np.array([1, 2, 3], dtype=dtype))
    assert resident.tolist() == [0, 1, 2, 3, 6, 5, 5, 6]
    kernels.overwrite_at(resident, at, 0, np.array([9, 8, 7], dtype=dtype))
    assert resident.tolist() == [8, 1, 7, 9, 6, 5, 5, 6]


@BOTH
@given(st.sampled_from(WORDS), st.sets(st.integers(0, 40)), st.integers(0, 20), st.integers(1, 20), st.booleans())
def test_a_block_is_a_copy_of_one_axis(
    kernels: ModuleType, dtype: np.dtype, chosen: set[int], first: int, length: int, strided: bool
) -> None:
    indices = np.array(sorted(chosen), dtype=np.int64)
    values = np.arange(1, len(indices) + 1).astype(dtype)
    if strided:
        # A view that is neither contiguous nor writable is an input like any other.
        values = np.repeat(values, 2)[::2]
        values.flags.writeable = False
    axes = np.array([[length, 1, 1]], dtype=np.int64)
    positions, at = placement_plain.locate(indices, axes, first, 7)
    for block, single in ((kernels.xor_block, kernels.xor_at), (kernels.overwrite_block, kernels.overwrite_at)):
        left, right = (np.arange(30).astype(dtype) for _ in range(2))
        assert block(left, 7, indices, first, length, values) == len(at)
        single(right, at, 0, values[positions])
        assert left.tolist() == right.tolist()


@pytest.mark.parametrize("xor", [True, False])
def test_indices_out_of_order_cannot_write_outside_the_destination(xor: bool) -> None:
    """The compiled loops have no bounds of their own; an item that breaks its promise must not reach other memory."""
    memory = np.zeros(100, dtype="<u2")
    resident = memory[40:60]
    indices = np.array([5, 1 << 40, -(1 << 40), -7, 90, 6], dtype=np.int64)
    values = np.full(len(indices), 7, dtype="<u2")
    write = placement_fast.xor_block if xor else placement_fast.overwrite_block
    taken = write(resident, 2, indices, 5, 3, values)
    assert taken == np.count_nonzero(memory) <= 2
    assert not memory[:42].any()
    assert not memory[45:].any()


def test_large_strides_divide_as_small_ones_do() -> None:
    axes = np.array([[3, 1 << 33, 10], [4, 1 << 10, 2]], dtype=np.int64)
    indices = np.array(sorted(written_out(axes, 17, 1)), dtype=np.int64)
    for kernels in (placement_plain, placement_fast):
        positions, at = kernels.locate(indices, axes, 17, 1)
        assert positions.tolist() == list(range(12))
        assert at.tolist() == [1 + 10 * a + 2 * b for a in range(3) for b in range(4)]


def test_warm_leaves_nothing_to_compile() -> None:
    placement_fast.warm((2, 2, 4))
    compiled = {name: len(getattr(placement_fast, name).signatures) for name in ("_xor_block", "_locate", "_xor_at")}
    values = np.ones(1, dtype="<u2")
    placement_fast.xor_block(np.zeros(1, dtype="<u2"), 0, np.zeros(1, dtype=np.int64), 0, 1, values)
    placement_fast.locate(np.zeros(1, dtype=np.int64), np.array([[2, 3, 4]], dtype=np.int64), 0, 0)
    placement_fast.xor_at(np.zeros(1, dtype="<u2"), np.zeros(1, dtype=np.int64), 0, values)
    assert compiled == {name: len(getattr(placement_fast, name).signatures) for name in compiled}


@pytest.fixture
def cooled() -> Iterator[None]:
    placement.cool()
    yield
    placement.cool()


@pytest.mark.usefixtures("cooled")
def test_compiled_loops_are_loaded_only_where_they_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not worth" in placement.warm(placement.WORTH_BYTES - 1, {2})
    assert placement.loops() is placement_plain
    assert placement.warm(placement.WORTH_BYTES, {2}) == ""
    assert placement.loops() is placement_fast
    placement.cool()

    def missing(name: str) -> ModuleType:
        raise ImportError("No module named 'numba'")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "numba" in placement.warm(placement.WORTH_BYTES, {2})
    assert placement.loops() is placement_plain
