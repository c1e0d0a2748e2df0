"""codec.payload: what is encoded decodes to the same bits, for every dtype, encoding and location type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import PayloadCorrupt, UnsupportedDtype
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey

LIMITS = CodecConfig()
KEY = PayloadKey(AttemptId(1), OwnerId(0), 0)
PATTERNS = {
    1: [0x00, 0x80, 0x7F, 0xFF, 0x01],
    2: [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0x0001, 0x7E01],
    4: [0x00000000, 0x80000000, 0x7FC00001, 0xFF800001, 0x00000001],
    8: [0, 1 << 63, 0x7FF8000000000001, 0xFFF0000000000001, 1],
}


@st.composite
def items(draw: st.DrawFn, name: str) -> Item:
    dtype = draw(st.sampled_from(sorted(bits.WIDTHS)))
    spread = draw(st.sampled_from([1, 3, 50, 1000, 70000, 1 << 33]))
    gaps = draw(st.lists(st.integers(1, spread), max_size=30))
    start = draw(st.sampled_from([0, 1, (1 << 31) - 1, (1 << 32) - 2]))
    indices = start + np.cumsum([0, *gaps], dtype=np.int64)
    numel = int(indices[-1]) + 1 + draw(st.integers(0, 2))
    shape = draw(st.sampled_from([(numel,), (1, numel, 1)] + ([()] if numel == 1 else [])))
    width = bits.width(dtype)
    word = st.one_of(st.integers(0, 256**width - 1), st.sampled_from(PATTERNS[width]))
    values = draw(st.lists(word, min_size=len(indices), max_size=len(indices)))
    encoding = draw(st.sampled_from(Encoding))
    return Item.of(TensorMeta(name, shape, dtype), encoding, indices, np.array(values, dtype=bits.unsigned(dtype)))


@st.composite
def buckets(draw: st.DrawFn) -> list[Item]:
    text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
    names = draw(st.lists(text, unique=True, max_size=6))
    return [draw(items(name)) for name in names]


def assert_same(got: Item, wanted: Item) -> None:
    assert (got.tensor, got.encoding, got.start) == (wanted.tensor, wanted.encoding, wanted.start)
    assert (got.indices is None) == (wanted.indices is None)
    assert got.flat_indices().dtype == np.int64
    assert got.flat_indices().tolist() == wanted.flat_indices().tolist()
    assert bits.equal_words(got.values, wanted.values)


@given(
    buckets(),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
    st.sampled_from([1, 1, 3, 19]),
)
def test_a_bucket_decodes_to_its_items(bucket: list[Item], attempt: int, owner: int, payload: int, level: int) -> None:
    key = PayloadKey(AttemptId(attempt), OwnerId(owner), payload)
    encoded = encode_payload(key, bucket, zstd_level=level)
    verified = verify_payload(encoded.data, limits=LIMITS)
    assert (verified.key, verified.digest, verified.nbytes) == (key, encoded.digest, len(encoded.data))
    decoded = verified.decode({item.tensor.name: item.tensor for item in bucket})
    for got, wanted in zip(decoded, bucket, strict=True):
        assert_same(got, wanted)
    assert encode_payload(key, decoded, zstd_level=level).data == encoded.data


@pytest.mark.parametrize("dtype", sorted(bits.WIDTHS))
@pytest.mark.parametrize("encoding", Encoding)
def test_every_dtype_travels_in_both_encodings(dtype: str, encoding: Encoding) -> None:
    rng = np.random.default_rng(5)
    scattered = np.array([0, 3, 4, 999])
    whole = bits.words(rng.bytes(40 * bits.width(dtype)), dtype)
    bucket = [
        Item.of(TensorMeta("scattered", (1000,), dtype), encoding, scattered, whole[:4]),
        Item.run(TensorMeta("whole", (5, 8), dtype), encoding, 0, whole),
        Item.run(TensorMeta("scalar", (), dtype), encoding, 0, whole[:1]),
    ]
    decoded = verify_payload(encode_payload(KEY, bucket).data, limits=LIMITS).decode()
    for got, wanted in zip(decoded, bucket, strict=True):
        assert_same(got, wanted)


def test_values_and_indices_from_strided_memory_equal_their_contiguous_copies() -> None:
    table = np.arange(400, dtype="<u2").reshape(100, 4) ^ 0x8001
    column = table[:, 3]
    indices = np.arange(0, 4000, 20, dtype=np.int64)[::2]
    meta = TensorMeta("w", (64, 64), "BF16")
    strided = encode_payload(KEY, [Item.of(meta, Encoding.XOR, indices, column)])
    contiguous = encode_payload(KEY, [Item.of(meta, Encoding.XOR, indices.copy(), column.copy())])
    assert strided.data == contiguous.data
    (got,) = verify_payload(strided.data, limits=LIMITS).decode()
    assert got.values.tolist() == [int(row[3]) for row in table]


def test_decoded_arrays_are_writable_and_independent_of_the_payload() -> None:
    item = Item.run(TensorMeta("w", (3,), "U8"), Encoding.OVERWRITE, 0, np.array([1, 2, 3], "<u1"))
    verified = verify_payload(encode_payload(KEY, [item]).data, limits=LIMITS)
    (first,), (second,) = verified.decode(), verified.decode()
    first.values[0] = 9
    assert second.values.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_is_a_payload(kind: type) -> None:
    item = Item.run(TensorMeta("w", (3,), "U8"), Encoding.OVERWRITE, 0, np.array([1, 2, 3], "<u1"))
    verified = verify_payload(kind(encode_payload(KEY, [item]).data), limits=LIMITS)
    assert_same(verified.decode()[0], item)


def test_skipped_names_are_left_out_and_the_others_keep_their_bits() -> None:
    bucket = [
        Item.of(TensorMeta(name, (900,), "F32"), Encoding.XOR, np.array([1, 5, 700]) + k, np.full(3, k, "<u4"))
        for k, name in enumerate("abc")
    ]
    verified = verify_payload(encode_payload(KEY, bucket).data, limits=LIMITS)
    decoded = verified.decode(skip={"b", "unknown"})
    assert [item.tensor.name for item in decoded] == ["a", "c"]
    assert_same(decoded[1], bucket[2])


@pytest.mark.parametrize(
    "meta",
    [None, TensorMeta("w", (2, 6), "BF16"), TensorMeta("w", (12,), "F16"), TensorMeta("w", (13,), "BF16")],
    ids=["unknown name", "reshaped", "other dtype", "other size"],
)
def test_an_item_that_differs_from_the_tensor_table_is_refused(meta: TensorMeta | None) -> None:
    item = Item.run(TensorMeta("w", (12,), "BF16"), Encoding.XOR, 0, np.ones(2, "<u2"))
    verified = verify_payload(encode_payload(KEY, [item]).data, limits=LIMITS)
    table = {} if meta is None else {"w": meta}
    for skip in (set(), {"w"}):
        with pytest.raises(PayloadCorrupt, match="tensor table"):
            verified.decode(table, skip=skip)
    assert len(verified.decode({"w": item.tensor, "other": item.tensor})) == 1


def test_an_encoder_refuses_what_a_decoder_would_refuse() -> None:
    meta = TensorMeta("w", (12,), "BF16")
    item = Item.run(meta, Encoding.XOR, 0, np.ones(2, "<u2"))
    with pytest.raises(ValueError, match="same tensor name"):
        encode_payload(KEY, [item, item])
    with pytest.raises(ValueError, match="out of range"):
        encode_payload(PayloadKey(AttemptId(-1), OwnerId(0), 0), [item])
    with pytest.raises(ValueError, match="out of range"):
        encode_payload(PayloadKey(AttemptId(1), OwnerId(1 << 32), 0), [item])
    with pytest.raises(ValueError, match="of 12 elements"):
        encode_payload(KEY, [Item.run(meta, Encoding.XOR, 11, np.ones(2, "<u2"))])
    with pytest.raises(ValueError, match="of 0 elements"):
        encode_payload(KEY, [Item.run(TensorMeta("e", (0, 4), "BF16"), Encoding.XOR, 0, np.ones(0, "<u2"))])
    with pytest.raises(UnsupportedDtype):
        Item.run(TensorMeta("w", (12,), "C128"), Encoding.XOR, 0, np.ones(2, "<u2"))


def test_a_payload_of_no_items_is_valid() -> None:
    assert verify_payload(encode_payload(KEY, []).data, limits=LIMITS).decode() == ()


def test_a_dense_item_is_one_run_without_location_bytes() -> None:
    values = np.random.default_rng(1).integers(0, 1 << 16, 100_000, dtype="<u2")
    item = Item.of(TensorMeta("w", (100_000,), "BF16"), Encoding.OVERWRITE, np.arange(100_000), values)
    data = encode_payload(KEY, [item]).data
    assert len(data) < values.nbytes + 256
    assert_same(verify_payload(data, limits=LIMITS).decode()[0], item)
