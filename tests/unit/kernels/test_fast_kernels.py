"""kernels.fast gives the bits and the errors of kernels.plain, which is the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_dcr.kernels import fast, loops, plain

WORDS = [np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")]
SPAN = 8 * loops.BLOCK
"""Bytes that the scan lists before it takes lanes apart."""
gap_lists = st.lists(
    st.one_of(st.integers(1, 300), st.sampled_from([1, 254, 255, 256, 509, 510, 511, 765, 65535, 65536])), max_size=80
)


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a call gives: the arrays with their types, or the error with its words."""
    try:
        result = call()
    except (ValueError, IndexError) as problem:
        return type(problem).__name__, str(problem)
    parts = result if isinstance(result, tuple) else (result,)
    return "result", [(part.dtype.str, part.shape, part.tobytes()) for part in map(np.asarray, parts)]


def agree(name: str, *args: Any, **options: Any) -> tuple[str, Any]:
    """Both outcomes are the same; returns it."""
    definition = outcome(lambda: getattr(plain, name)(*args, **options))
    assert outcome(lambda: getattr(fast, name)(*args, **options)) == definition
    return definition


@st.composite
def compared(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one width that begin anywhere, end anywhere and differ in none, some or all words."""
    dtype = draw(st.sampled_from(WORDS))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    length = draw(
        st.one_of(st.integers(0, 70), st.integers(SPAN // dtype.itemsize - 9, 2 * SPAN // dtype.itemsize + 9))
    )
    first, second = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    step = draw(st.sampled_from([1, 1, 1, 2, -1]))
    top = 256**dtype.itemsize - 1
    old = rng.integers(0, top, length * abs(step) + first, dtype=dtype, endpoint=True)[first:][::step]
    new = np.zeros(length * abs(step) + second, dtype=dtype)[second:][::step]
    old, new = old[:length], new[:length]
    new[:] = old
    changed = rng.random(length) < draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    flips = rng.integers(1, top, length, dtype=dtype, endpoint=True)
    if draw(st.booleans()):
        flips = dtype.type(1) << rng.integers(0, 8 * dtype.itemsize, length).astype(dtype)
    new[changed] ^= flips[changed]
    return new, old


@given(compared(), st.booleans())
@settings(deadline=None)
def test_a_comparison_finds_the_same_words(pair: tuple[np.ndarray, np.ndarray], masks: bool) -> None:
    new, old = pair
    before = new.tobytes(), old.tobytes()
    agree("changes", new, old, masks=masks)
    agree("changed_indices", new, old)
    assert (new.tobytes(), old.tobytes()) == before
    if new.flags.c_contiguous and old.flags.c_contiguous:
        for array in (new, old):
            array.flags.writeable = False
        agree("changes", new, old, masks=masks)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_words_that_lie_off_their_alignment_are_compared(dtype: np.dtype) -> None:
    rng = np.random.default_rng(1)
    old = rng.bytes(50 * dtype.itemsize + 3)
    new = bytearray(old)
    new[3 + 7 * dtype.itemsize] ^= 1
    skewed = [np.frombuffer(memoryview(data)[3:], dtype=dtype) for data in (bytes(new), old)]
    agree("changes", *skewed, masks=True)
    assert fast.changed_indices(*skewed).tolist() == [7]


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_more_changes_than_the_buffer_holds_are_all_found(dtype: np.dtype) -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 256**dtype.itemsize - 1, 3 * 8 * loops.ENTRIES + 5, dtype=dtype, endpoint=True)
    for masks in (True, False):
        status, _ = agree("changes", ~old, old, masks=masks)
        assert status == "result"
    assert len(fast.changed_indices(~old, old)) == len(old)


def test_a_result_is_not_overwritten_by_the_next_comparison() -> None:
    old = np.zeros(100, "<u2")
    first = fast.changes(old + 5, old, masks=True)
    fast.changes(old + 7, old, masks=True)
    assert set(first[1].tolist()) == {5}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (np.zeros(3, "<u2"), np.zeros(4, "<u2")),
        (np.zeros(3, "<u2"), np.zeros(3, "<u4")),
        (np.zeros((1, 3), "<u2"), np.zeros((1, 3), "<u2")),
        (np.zeros(3, ">u2"), np.ones(3, ">u2")),
    ],
    ids=["length", "width", "rank", "byte-order"],
)
def test_unlike_and_foreign_operands_end_as_in_plain(new: np.ndarray, old: np.ndarray) -> None:
    agree("changes", new, old, masks=False)
    agree("changed_indices", new, old)


@given(compared(), st.data())
@settings(deadline=None)
def test_scatters_write_the_same_words(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    values, resident = pair
    chosen = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(len(resident))
    at = chosen[: data.draw(st.integers(0, len(resident)))].astype(np.int64)
    if data.draw(st.booleans()):
        at.sort()
    entries = values[: len(at)]
    for name in ("xor_scatter", "overwrite_scatter"):
        left, right = resident.copy(), resident.copy()
        getattr(plain, name)(left, at, entries)
        getattr(fast, name)(right, at, entries)
        assert left.tobytes() == right.tobytes()
        run = slice(0, len(at))
        getattr(plain, name)(left, run, entries)
        getattr(fast, name)(right, run, entries)
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("name", ["xor_scatter", "overwrite_scatter"])
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_a_location_outside_ends_as_in_plain(name: str, dtype: np.dtype) -> None:
    for at in ([2, 9], [-1, 3], [-9, 3], [9]):
        places = np.array(at, dtype=np.int64)
        left, right = (np.arange(9, dtype=dtype) for _ in range(2))
        values = np.full(len(at), 5, dtype=dtype)
        definition = outcome(lambda: getattr(plain, name)(left, places, values) or np.empty(0))  # noqa: B023
        assert outcome(lambda: getattr(fast, name)(right, places, values) or np.empty(0)) == definition  # noqa: B023
        assert left.tobytes() == right.tobytes()
    short = np.ones(3, dtype=dtype)
    agree(name, np.arange(9, dtype=dtype), np.array([1, 2], dtype=np.int64), short)
    shared = np.arange(9, dtype=dtype)
    other = shared.copy()
    getattr(plain, name)(shared, np.array([1, 2, 3]), shared[:3])
    getattr(fast, name)(other, np.array([1, 2, 3]), other[:3])
    assert shared.tobytes() == other.tobytes()


@given(gap_lists, st.integers(0, 1 << 40))
@settings(deadline=None)
def test_gaps_become_the_same_chain_and_the_same_bounds(gaps: list[int], start: int) -> None:
    indices = np.cumsum([start, *gaps], dtype=np.int64)
    agree("gap_bounds", indices)
    agree("chain_of", indices)
    chain = plain.chain_of(indices)
    for count in (len(indices), len(indices) + 1, len(indices) - 1):
        agree("chain_locations", chain, start, count)
    assert fast.chain_locations(chain, start, len(indices)).tolist() == indices.tolist()
    if int(indices[-1]) - start < 1 << 20:
        agree("bitmap_of", indices)


@given(st.lists(st.integers(0, 9), max_size=9))
def test_indices_in_any_order_have_the_same_bounds_and_chain(indices: list[int]) -> None:
    agree("gap_bounds", np.array(indices, dtype=np.int64))
    agree("gap_bounds", np.repeat(np.array(indices, dtype=np.int64), 2)[::2])
    agree("chain_of", np.array(indices, dtype=np.int64))
    if indices:
        agree("bitmap_of", np.array(indices, dtype=np.int64))


@given(st.lists(st.sampled_from([0, 1, 2, 254, 255]), max_size=12), st.integers(1, 12))
def test_a_chain_of_any_bytes_ends_as_in_plain(chain: list[int], count: int) -> None:
    agree("chain_locations", np.array(chain, dtype=np.uint8), 5, count)
    agree("chain_locations", np.repeat(np.array(chain, dtype=np.uint8), 2)[::2], 5, count)


@given(st.binary(max_size=40), st.integers(0, 99), st.integers(0, 1 << 40))
def test_a_bitmap_of_any_bytes_ends_as_in_plain(data: bytes, count: int, start: int) -> None:
    bitmap = np.frombuffer(data, dtype=np.uint8)
    ones = sum(byte.bit_count() for byte in data)
    for each in (count, ones, max(0, ones - 1)):
        agree("bitmap_locations", bitmap, start, each)


def test_long_chains_and_bitmaps_are_the_same() -> None:
    rng = np.random.default_rng(3)
    indices = np.cumsum(rng.integers(1, 600, 300_000))
    agree("chain_of", indices)
    agree("chain_locations", plain.chain_of(indices), int(indices[0]), len(indices))
    dense = np.flatnonzero(rng.random(1 << 20) < 0.4)
    agree("bitmap_of", dense)
    agree("bitmap_locations", plain.bitmap_of(dense), int(dense[0]), len(dense))


@given(compared(), st.integers(0, 3))
@settings(deadline=None)
def test_planes_are_the_same(pair: tuple[np.ndarray, np.ndarray], gap: int) -> None:
    words, width = pair[0], pair[0].itemsize
    left, right = (np.full(width * (len(words) + gap), 7, dtype=np.uint8) for _ in range(2))
    for kernels, arena in ((plain, left), (fast, right)):
        planes = [arena[byte * (len(words) + gap) :][: len(words)] for byte in range(width)]
        kernels.split_planes(words, planes)
    assert left.tobytes() == right.tobytes()
    planes = [left[byte * (len(words) + gap) :][: len(words)] for byte in range(width)]
    agree("join_planes", planes, words.dtype)
    assert fast.join_planes(planes, words.dtype).flags.writeable


def test_planes_that_do_not_fit_end_as_in_plain() -> None:
    agree("join_planes", [np.zeros(3, np.uint8), np.zeros(4, np.uint8)], np.dtype("<u2"))
    agree("split_planes", np.zeros(3, "<u2"), [np.zeros(3, np.uint8), np.zeros(4, np.uint8)])
    sealed = np.zeros(3, np.uint8)
    sealed.flags.writeable = False
    agree("split_planes", np.zeros(3, "<u2"), [sealed, np.zeros(3, np.uint8)])


def test_every_compiled_loop_is_complete_before_its_first_call() -> None:
    compiled = [loop for name, loop in vars(loops).items() if hasattr(loop, "signatures") and not name.startswith("_")]
    assert len(compiled) == 9
    for loop in (*compiled, *loops.SCANS.values()):
        assert loop.signatures
        assert not loop._can_compile  # a call with other types raises; it never compiles inside a refit
