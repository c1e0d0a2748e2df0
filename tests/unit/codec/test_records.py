"""codec.records: items, and the rule that picks their encoding; canonical coordinates."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from nemo_dcr.canonical import Destination, TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass, choose_encoding, unite
from nemo_dcr.errors import UnsupportedDtype

META = TensorMeta("w", (4, 8), "BF16")


def words(*values: int) -> np.ndarray:
    return np.array(values, "<u2")


@pytest.mark.parametrize(
    ("shape", "numel"),
    [((), 1), ((0,), 0), ((3, 0, 5), 0), ((1 << 16, (1 << 16) + 1), (1 << 32) + (1 << 16)), ((1 << 40, 4), 1 << 42)],
    ids=str,
)
def test_numel_is_exact_for_any_shape(shape: tuple[int, ...], numel: int) -> None:
    assert TensorMeta("w", shape, "F32").numel == numel
    assert TensorMeta("w", shape, "F32").nbytes == 4 * numel
    assert Destination("w", numel).index == numel


def test_a_meta_of_an_unknown_dtype_has_no_width() -> None:
    with pytest.raises(UnsupportedDtype):
        _ = TensorMeta("w", (2,), "F6_E2M3").nbytes


def test_sorted_indices_without_holes_become_a_run() -> None:
    item = Item.of(META, Encoding.XOR, np.array([5, 6, 7]), words(1, 2, 3))
    assert item.indices is None
    assert (item.start, item.last, item.span, item.count) == (5, 7, 3, 3)
    assert item.flat_indices().tolist() == [5, 6, 7]


def test_one_entry_is_a_run() -> None:
    assert Item.of(META, Encoding.XOR, np.array([31]), words(1)).indices is None


def test_scattered_indices_keep_their_array() -> None:
    item = Item.of(META, Encoding.OVERWRITE, np.array([5, 7, 30]), words(1, 2, 3))
    assert (item.start, item.last, item.span, item.count) == (5, 30, 26, 3)
    assert item.flat_indices().tolist() == [5, 7, 30]


def test_an_item_needs_entries_of_matching_length_and_width() -> None:
    with pytest.raises(ValueError, match="0 indices"):
        Item.of(META, Encoding.XOR, np.array([], dtype=np.int64), words())
    with pytest.raises(ValueError, match="2 indices for 1"):
        Item.of(META, Encoding.XOR, np.array([1, 2]), words(1))
    with pytest.raises(ValueError, match="not words of BF16"):
        Item.run(META, Encoding.XOR, 0, np.array([1], "<u4"))


def test_encodings_keep_their_wire_numbers() -> None:
    assert {encoding.name: int(encoding) for encoding in Encoding} == {"XOR": 0, "OVERWRITE": 1}


def test_xor_needs_an_xor_attempt_kept_bits_and_an_xor_path() -> None:
    for overwrite_attempt in (False, True):
        for bits_preserved in (False, True):
            for path in PathClass:
                expected = (
                    Encoding.XOR
                    if (overwrite_attempt, bits_preserved, path) == (False, True, PathClass.XOR)
                    else Encoding.OVERWRITE
                )
                chosen = choose_encoding(overwrite_attempt=overwrite_attempt, bits_preserved=bits_preserved, path=path)
                assert chosen is expected


def test_the_union_of_path_classes_is_the_most_restrictive_one() -> None:
    rank = [PathClass.SKIPPED, PathClass.XOR, PathClass.OVERWRITE, PathClass.UNSUPPORTED]
    for size in range(1, 5):
        for chosen in permutations(rank, size):
            assert unite(chosen) is max(chosen, key=rank.index)
    assert unite([]) is PathClass.SKIPPED
