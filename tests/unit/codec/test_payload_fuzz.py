"""Damaged payloads: a typed error or a valid item, never another exception, never memory beyond the limits."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import MIB, CodecConfig
from nemo_dcr.errors import PayloadCorrupt, PayloadUnsupported
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey

LIMITS = CodecConfig(max_payload_bytes=4 * MIB, max_metadata_bytes=MIB)


def small_payload() -> bytes:
    spread = {"chain": [10, 15, 315], "bitmap": [0, 2, 3], "u16": [1, 900], "u32": [0, 65536], "u64": [0, 1 << 32]}
    bucket = [
        Item.of(
            TensorMeta(name, (at[-1] + 2,), "BF16" if k % 2 else "F32"),
            Encoding(k % 2),
            np.array(at),
            np.arange(1, len(at) + 1).astype("<u2" if k % 2 else "<u4"),
        )
        for k, (name, at) in enumerate(spread.items())
    ]
    bucket.append(Item.run(TensorMeta("run", (2, 3), "U8"), Encoding.XOR, 1, np.array([7, 8], "<u1")))
    return encode_payload(PayloadKey(AttemptId(7), OwnerId(3), 2), bucket).data


PAYLOAD = small_payload()
HEADER, FRAME = PAYLOAD[:56], PAYLOAD[56:-16]
BODY = zstandard.ZstdDecompressor().decompress(FRAME)
METADATA_BYTES = struct.unpack_from("<I", HEADER, 36)[0]
ROWS = msgspec.msgpack.decode(BODY[:METADATA_BYTES])


def seal(data: bytes) -> bytes:
    return data + hashlib.blake2b(data, digest_size=16).digest()


def sealed_body(body: bytes, metadata_bytes: int, items: int) -> bytes:
    """A payload whose digest, frame and declared sizes are right for any body."""
    block = struct.pack("<I", len(body) << 3 | 1)[:3]
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", len(body)) + block + body
    return seal(HEADER[:32] + struct.pack("<IIQQ", items, metadata_bytes, len(body), len(frame)) + frame)


def check(data: bytes) -> bool:
    """True when `data` decodes; what it decodes to obeys every rule of an item."""
    try:
        items = verify_payload(data, limits=LIMITS).decode()
    except PayloadCorrupt:
        return False
    assert len({item.tensor.name for item in items}) == len(items)
    for item in items:
        indices = item.flat_indices()
        assert len(indices) == item.count == len(item.values) > 0
        assert int(indices[0]) == item.start >= 0
        assert int(indices[-1]) < item.tensor.numel
        assert np.all(indices[1:] > indices[:-1])
        assert item.values.dtype == bits.unsigned(item.tensor.dtype)
    return True


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def test_the_payload_under_test_is_valid() -> None:
    assert check(PAYLOAD)
    assert check(sealed_body(BODY, METADATA_BYTES, len(ROWS)))


def test_every_truncation_and_every_appended_byte_is_refused() -> None:
    for length in range(len(PAYLOAD)):
        assert not check(PAYLOAD[:length])
    for byte in range(256):
        assert not check(PAYLOAD + bytes([byte]))


def test_every_flipped_bit_is_refused() -> None:
    for bit in range(8 * len(PAYLOAD)):
        assert not check(flipped(PAYLOAD, bit))


def test_every_flipped_bit_of_a_sealed_payload_is_refused_or_decodes_to_valid_items() -> None:
    for bit in range(8 * (len(PAYLOAD) - 16)):
        check(seal(flipped(PAYLOAD[:-16], bit)))


def test_every_truncation_of_a_sealed_payload_is_refused() -> None:
    for length in range(len(PAYLOAD) - 16):
        assert not check(seal(PAYLOAD[:length]))
    for length in range(len(BODY)):
        assert not check(sealed_body(BODY[:length], min(METADATA_BYTES, length), len(ROWS)))


def test_every_flipped_bit_of_a_sealed_body_is_refused_or_decodes_to_valid_items() -> None:
    outcomes = [check(sealed_body(flipped(BODY, bit), METADATA_BYTES, len(ROWS))) for bit in range(8 * len(BODY))]
    # Values and names carry no redundancy under a valid digest, so some flips are other valid payloads.
    assert 0 < sum(outcomes) < len(outcomes)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert not check(data)
    assert not check(HEADER + data)
    assert not check(seal(HEADER[:48] + struct.pack("<Q", len(data)) + data))


@given(st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_random_edits_of_a_sealed_body_are_refused_or_valid(edits: list[tuple[int, int]]) -> None:
    changed = bytearray(BODY)
    for position, byte in edits:
        changed[position] = byte
    check(sealed_body(bytes(changed), METADATA_BYTES, len(ROWS)))


edges = st.sampled_from([0, 1, 2, 3, 5, 31, 255, 256, 1 << 31, 1 << 32, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
numbers = st.one_of(edges, st.integers(0, 400), st.integers(-3, -1), st.booleans(), st.none(), st.floats())
fields = st.one_of(numbers, st.text(max_size=3), st.lists(edges, max_size=4), st.sampled_from(["BF16", "F64", "C128"]))


@given(st.lists(st.tuples(st.integers(0, len(ROWS) - 1), st.integers(0, 9), fields), min_size=1, max_size=4), st.data())
def test_random_metadata_fields_are_refused_or_valid(edits: list[tuple[int, int, Any]], data: st.DataObject) -> None:
    rows = [list(row) for row in ROWS]
    for row, field, value in edits:
        rows[row][field] = value
    if data.draw(st.booleans()):
        rows = data.draw(st.permutations(rows))[: data.draw(st.integers(0, len(rows)))]
    metadata = msgspec.msgpack.encode(rows)
    planes = BODY[METADATA_BYTES:] + data.draw(st.binary(max_size=3))
    check(sealed_body(metadata + planes, len(metadata), len(rows)))


def peak_of(data: bytes) -> tuple[bool, int]:
    tracemalloc.start()
    try:
        valid = check(data)
        return valid, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def hostile(location: int, count: int, units: bytes, numel: int = 1 << 40) -> bytes:
    """One U8 item: a few values, many location units."""
    row = ["w", [numel], "U8", 0, location, count, 0, 0, len(units), 0]
    metadata = msgspec.msgpack.encode([row])
    body = metadata + units + bytes(count)
    frame = zstandard.ZstdCompressor(level=1).compress(body)
    return seal(HEADER[:32] + struct.pack("<IIQQ", 1, len(metadata), len(body), len(frame)) + frame)


@pytest.mark.parametrize(
    ("data", "valid"),
    [
        (hostile(5, 2, b"\x01" + bytes(3 * MIB - 2) + b"\x80"), True),
        (hostile(5, 2, b"\xff" * (3 * MIB)), False),
        (hostile(1, 2, b"\xff" * (3 * MIB - 1) + b"\x00"), True),
        (hostile(1, 2, b"\xff" * (3 * MIB)), False),
        (hostile(1, 2, b"\x01" * (3 * MIB)), False),
        (hostile(4, 2, bytes(8)), False),
    ],
    ids=["sparse bitmap", "full bitmap", "one long gap", "no end", "too many gaps", "zero gap"],
)
def test_a_few_entries_with_many_location_bytes_need_memory_of_the_body_only(data: bytes, valid: bool) -> None:
    assert len(data) < 50_000
    outcome, peak = peak_of(data)
    assert outcome is valid
    # The body, byte-wide tests of it, and blocks: no expansion of 3 MiB to eight bytes a unit or a bit.
    assert peak < 6 * 3 * MIB


def test_decoding_needs_at_most_ten_times_the_body() -> None:
    count = MIB
    spread = np.arange(count) * 3
    item = Item.of(TensorMeta("w", (3 * count,), "U8"), Encoding.XOR, spread, np.zeros(count, "<u1"))
    data = encode_payload(PayloadKey(AttemptId(1), OwnerId(0), 0), [item]).data
    body_bytes = struct.unpack_from("<Q", data, 40)[0]
    tracemalloc.start()
    (decoded,) = verify_payload(data, limits=LIMITS).decode()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert decoded.count == count
    assert peak < 10 * body_bytes + 8 * MIB


@pytest.mark.parametrize(
    ("field", "limits"),
    [
        ("body", CodecConfig(max_payload_bytes=len(BODY) - 1)),
        ("metadata", CodecConfig(max_metadata_bytes=METADATA_BYTES - 1)),
        ("elements", CodecConfig(max_tensor_elements=(1 << 32) + 1)),
    ],
)
def test_a_readers_own_limits_refuse_a_valid_payload(field: str, limits: CodecConfig) -> None:
    with pytest.raises(PayloadCorrupt, match="limits" if field != "elements" else "elements") as caught:
        verify_payload(PAYLOAD, limits=limits).decode()
    assert not isinstance(caught.value, PayloadUnsupported)
    exact = CodecConfig(
        max_payload_bytes=len(BODY), max_metadata_bytes=METADATA_BYTES, max_tensor_elements=(1 << 32) + 2
    )
    assert len(verify_payload(PAYLOAD, limits=exact).decode()) == len(ROWS)
