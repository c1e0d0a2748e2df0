"""Placeholders by search, and a scratch that is at rest between items."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.bits import WIDTHS, Words, unsigned
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.receiver.scratch import Scratch, free_pattern, signed
from nemo_dcr.testing.strategies import ANY_DTYPE, words


@given(
    st.sampled_from(ANY_DTYPE).flatmap(
        lambda d: st.tuples(st.just(d), st.integers(1, 40).flatmap(lambda n: words(d, n)))
    )
)
def test_a_placeholder_differs_from_every_value(drawn: tuple[str, Words]) -> None:
    dtype, values = drawn
    found = free_pattern(values, dtype)
    assert found is not None
    assert found not in values.tolist()
    assert 0 <= found < 1 << (8 * WIDTHS[dtype])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BOOL", "U8"])
def test_a_one_byte_item_with_every_pattern_has_no_placeholder(dtype: str) -> None:
    values = np.arange(256, dtype="<u1")
    assert free_pattern(values, dtype) is None
    for missing in (0, 1, 0x7F, 0xFF):
        assert free_pattern(np.delete(values, missing), dtype) == missing


def test_a_two_byte_item_with_all_patterns_but_one_still_has_a_placeholder() -> None:
    values = np.arange(1 << 16, dtype="<u2")
    assert free_pattern(values, "BF16") is None
    assert free_pattern(np.delete(values, 0x1234), "BF16") == 0x1234


@pytest.mark.parametrize("dtype", ["F32", "F64", "I64", "U32"])
def test_the_search_is_complete_for_wide_words_too(dtype: str) -> None:
    kind = unsigned(dtype)
    largest = np.iinfo(kind).max
    common = {0, 0x7FC00001, 0xFFC00001, 0x7FF8000000000001, 0xFFF8000000000001}
    values = np.array([word for word in sorted(common) if word <= largest] + [largest, largest - 1], dtype=kind)
    assert free_pattern(values, dtype) == largest - 2
    assert free_pattern(np.append(values[:-2], kind.type(largest - 1)), dtype) == largest


@pytest.mark.parametrize(
    ("word", "width", "value"), [(255, 1, 255), (0x8000, 2, -32768), (1, 4, 1), (1 << 63, 8, -(1 << 63))]
)
def test_a_word_is_compared_as_torch_shows_it(word: int, width: int, value: int) -> None:
    assert signed(word, width) == value


@pytest.mark.parametrize("placeholder", [0, 0x7FC1])
@pytest.mark.parametrize("indices", [[0, 3, 5], [2, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_the_scratch_holds_the_item_and_returns_to_rest(placeholder: int, indices: list[int]) -> None:
    meta = TensorMeta("w", (2, 3), "BF16")
    scratch = Scratch(64)
    item = Item.of(meta, Encoding.OVERWRITE, np.array(indices), np.arange(1, len(indices) + 1).astype("<u2"))
    scratch.load(item, placeholder)
    expected = np.full(6, placeholder, dtype="<u2")
    expected[indices] = item.values
    assert scratch.words(meta).tolist() == expected.tolist()
    assert scratch.tensor(meta).shape == (2, 3)
    scratch.clear()
    assert not scratch._bytes.any()


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0, 2), (3,)])
@pytest.mark.parametrize("dtype", ANY_DTYPE)
def test_the_scratch_poses_as_any_tensor_and_keeps_one_storage(dtype: str, shape: tuple[int, ...]) -> None:
    scratch = Scratch(64)
    tensor = scratch.tensor(TensorMeta("w", shape, dtype))
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    assert tensor.untyped_storage()._cdata == scratch.key
