"""kernels.plain against definitions that a reader can check by eye."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.kernels import plain

WORDS = [np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")]
gap_lists = st.lists(
    st.one_of(st.integers(1, 300), st.sampled_from([1, 254, 255, 256, 509, 510, 511, 765, 65535, 65536])), max_size=60
)


def words_of(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
    top = 256**dtype.itemsize - 1
    return st.lists(st.one_of(st.integers(0, top), st.sampled_from([0, top, top >> 1, 1])), max_size=40).map(
        lambda values: np.array(values, dtype=dtype)
    )


@given(st.sampled_from(WORDS).flatmap(words_of), st.data())
def test_changed_indices_are_exactly_the_words_that_differ(old: np.ndarray, data: st.DataObject) -> None:
    new = old.copy()
    flips = data.draw(st.lists(st.integers(0, len(old) - 1), unique=True)) if len(old) else []
    for position in flips:
        new[position] ^= old.dtype.type(1 << data.draw(st.integers(0, 8 * old.itemsize - 1)))
    found = plain.changed_indices(new, old)
    assert found.dtype == np.int64
    assert found.tolist() == sorted(flips)


def test_negative_zero_changes_and_an_unchanged_nan_does_not() -> None:
    old = np.array([0x0000, 0x3F80, 0x4000, 0x7FC1, 0x7FC0], "<u2")
    new = np.array([0x8000, 0x3F80, 0x4000, 0x7FC1, 0x7FC1], "<u2")
    assert plain.changed_indices(new, old).tolist() == [0, 4]


def test_a_change_of_the_high_byte_alone_is_found() -> None:
    assert plain.changed_indices(np.array([0x4080], "<u2"), np.array([0x3F80], "<u2")).tolist() == [0]


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_changes_at_every_block_border_are_found(dtype: np.dtype) -> None:
    step = plain.BLOCK_BYTES // dtype.itemsize
    old = np.zeros(2 * step + 3, dtype=dtype)
    new = old.copy()
    expected = [0, step - 1, step, 2 * step - 1, 2 * step, 2 * step + 2]
    new[expected] = 1
    assert plain.changed_indices(new, old).tolist() == expected


def test_strided_operands_are_compared_by_value_order() -> None:
    base = np.arange(12, dtype="<u2").reshape(3, 4)
    column = base[:, 1]
    changed = column.copy()
    changed[2] = 99
    assert plain.changed_indices(changed, column).tolist() == [2]
    assert plain.gather(column, np.array([0, 2])).tolist() == [1, 9]
    assert plain.xor_masks(changed, column, np.array([2])).tolist() == [99 ^ 9]


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (np.zeros(3, "<u2"), np.zeros(4, "<u2")),
        (np.zeros(3, "<u2"), np.zeros(3, "<u4")),
        (np.zeros((1, 3), "<u2"), np.zeros((1, 3), "<u2")),
    ],
    ids=["length", "width", "rank"],
)
def test_unlike_operands_are_refused(new: np.ndarray, old: np.ndarray) -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        plain.changed_indices(new, old)


def test_comparison_needs_no_temporary_of_the_tensors_size() -> None:
    old = np.zeros(16 << 20, dtype="<u2")
    new = old.copy()
    new[12345] = 1
    tracemalloc.start()
    assert plain.changed_indices(new, old).tolist() == [12345]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * plain.BLOCK_BYTES < old.nbytes // 8


@given(st.sampled_from(WORDS).flatmap(words_of), st.data())
def test_scatters_touch_the_given_locations_and_nothing_else(old: np.ndarray, data: st.DataObject) -> None:
    positions = sorted(data.draw(st.lists(st.integers(0, len(old) - 1), unique=True)) if len(old) else [])
    at = np.array(positions, dtype=np.int64)
    values = old[::-1][: len(at)].copy() ^ old.dtype.type(3)
    expected = dict(zip(positions, values.tolist(), strict=True))
    resident = old.copy()
    plain.overwrite_scatter(resident, at, values)
    assert resident.tolist() == [expected.get(i, word) for i, word in enumerate(old.tolist())]
    plain.xor_scatter(resident, at, plain.xor_masks(old, resident, at))
    assert resident.tolist() == old.tolist()


def test_a_slice_is_a_run_of_locations() -> None:
    resident = np.array([1, 2, 3, 4], "<u2")
    plain.xor_scatter(resident, slice(1, 3), np.array([2, 1], "<u2"))
    assert resident.tolist() == [1, 0, 2, 4]
    plain.overwrite_scatter(resident, slice(2, 4), np.array([8, 9], "<u2"))
    assert resident.tolist() == [1, 0, 8, 9]
    taken = plain.gather(resident, slice(0, 2))
    taken[0] = 7
    assert resident.tolist() == [1, 0, 8, 9]


@pytest.mark.parametrize(
    ("gap", "chain"),
    [
        (1, "01"),
        (254, "fe"),
        (255, "ff00"),
        (256, "ff01"),
        (509, "fffe"),
        (510, "ffff00"),
        (765, "ffffff00"),
    ],
)
def test_a_gap_becomes_escapes_and_one_ending_byte(gap: int, chain: str) -> None:
    assert plain.encode_chain(np.array([gap])).tobytes().hex() == chain
    assert plain.decode_chain(np.frombuffer(bytes.fromhex(chain), np.uint8), 1).tolist() == [gap]


@given(gap_lists)
def test_chain_decodes_to_the_running_sums_of_its_gaps(gaps: list[int]) -> None:
    chain = plain.encode_chain(np.array(gaps, dtype=np.int64))
    assert plain.decode_chain(chain, len(gaps)).tolist() == np.cumsum(gaps, dtype=np.int64).tolist()
    assert len(chain) == sum(gap // 255 + 1 for gap in gaps)


def test_chain_and_bitmap_work_across_blocks() -> None:
    rng = np.random.default_rng(3)
    gaps = rng.integers(1, 600, plain.BLOCK_BYTES + 77)
    distances = np.cumsum(gaps)
    assert np.array_equal(plain.decode_chain(plain.encode_chain(gaps), len(gaps)), distances)
    dense = np.flatnonzero(rng.random(3 * plain.BLOCK_BYTES + 5) < 0.4)
    bitmap = plain.encode_bitmap(dense, int(dense[-1]) + 1)
    assert np.array_equal(plain.decode_bitmap(bitmap, len(dense)), dense)


@pytest.mark.parametrize(
    ("chain", "count", "message"),
    [
        ("05ff", 1, "inside a gap"),
        ("ff", 0, "inside a gap"),
        ("00", 1, "repeats"),
        ("0500", 2, "repeats"),
        ("ff0000", 2, "repeats"),
        ("0505", 1, "more than 1"),
        ("05", 2, "1 gaps, not 2"),
        ("", 1, "0 gaps, not 1"),
        ("05", 0, "more than 0"),
    ],
)
def test_a_chain_that_is_not_exactly_its_gaps_is_refused(chain: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain.decode_chain(np.frombuffer(bytes.fromhex(chain), np.uint8), count)


@given(st.lists(st.integers(0, 200), unique=True, min_size=1))
def test_bitmap_has_one_bit_for_each_location(positions: list[int]) -> None:
    positions.sort()
    bitmap = plain.encode_bitmap(np.array(positions), positions[-1] + 1)
    assert int.from_bytes(bitmap.tobytes(), "little") == sum(1 << position for position in positions)
    assert plain.decode_bitmap(bitmap, len(positions)).tolist() == positions
    with pytest.raises(ValueError, match="more than"):
        plain.decode_bitmap(bitmap, len(positions) - 1)
    with pytest.raises(ValueError, match="locations, not"):
        plain.decode_bitmap(bitmap, len(positions) + 1)


@given(st.sampled_from(WORDS).flatmap(words_of))
def test_planes_hold_the_bytes_from_least_to_most_significant(words: np.ndarray) -> None:
    width = words.itemsize
    arena = np.zeros((width, len(words)), dtype=np.uint8)
    plain.split_planes(words, list(arena))
    for byte in range(width):
        assert arena[byte].tolist() == [(value >> (8 * byte)) & 255 for value in words.tolist()]
    joined = plain.join_planes(list(arena), words.dtype)
    assert joined.dtype == words.dtype
    assert joined.tolist() == words.tolist()
    assert joined.flags.writeable


def test_planes_of_strided_words_are_those_of_their_copy() -> None:
    base = np.arange(40, dtype="<u4").reshape(10, 4) * 0x01010301
    arena = np.zeros((4, 10), dtype=np.uint8)
    plain.split_planes(base[:, 2], list(arena))
    assert plain.join_planes(list(arena), base.dtype).tolist() == base[:, 2].tolist()
