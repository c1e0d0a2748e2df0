"""Headers: every dtype that safetensors holds, and no file that is not what it says."""

from __future__ import annotations

import json

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_dcr.checkpoint.header import ELEMENT_BITS, parse_header, read_header
from nemo_dcr.errors import CheckpointInvalid
from tests.unit.checkpoint.checkpoints import BITS, safetensors_bytes, tensor

ENTRY = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
NAMED = {"a": ENTRY}
HOSTILE = {
    "not_json": b"{",
    "not_utf8": b'{"\xff": 1}',
    "not_an_object": b"[]",
    "number": b"7",
    "name_twice": b'{"a":' + json.dumps(ENTRY).encode() + b',"a":' + json.dumps(ENTRY).encode() + b"}",
    "field_twice": b'{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
    "deep_nesting": b'{"a":' + b"[" * 100_000,
    "no_shape": json.dumps({"a": {"dtype": "U8", "data_offsets": [0, 2]}}).encode(),
    "unknown_field": json.dumps({"a": {**ENTRY, "stride": [1]}}).encode(),
    "unknown_dtype": json.dumps({"a": {**ENTRY, "dtype": "F8"}}).encode(),
    "negative_size": json.dumps({"a": {**ENTRY, "shape": [-2]}}).encode(),
    "boolean_size": json.dumps({"a": {**ENTRY, "shape": [True, 2]}}).encode(),
    "fractional_size": json.dumps({"a": {**ENTRY, "shape": [2.5]}}).encode(),
    "too_many_dimensions": json.dumps({"a": {**ENTRY, "shape": [2] + [1] * 64}}).encode(),
    "shape_does_not_fit": json.dumps({"a": {**ENTRY, "shape": [3]}}).encode(),
    "enormous_shape": json.dumps({"a": {**ENTRY, "shape": [1 << 62, 1 << 62]}}).encode(),
    "enormous_integer": b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,2]}}',
    "half_a_byte": json.dumps({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}).encode(),
    "hole": json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [3, 5]}}).encode(),
    "overlap": json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [1, 3]}}).encode(),
    "starts_late": json.dumps({"a": {**ENTRY, "data_offsets": [1, 3]}}).encode(),
    "backwards": json.dumps({"a": {**ENTRY, "data_offsets": [2, 0]}}).encode(),
    "no_name": json.dumps({"": ENTRY}).encode(),
    "lone_surrogate": json.dumps({"\ud800": ENTRY}).encode(),
    "metadata_not_text": json.dumps({"__metadata__": {"a": 1}, **NAMED}).encode(),
    "entry_is_null": b'{"a":null}',
}


def test_every_dtype_that_safetensors_accepts_is_known_with_its_size():
    for dtype, bits in ELEMENT_BITS.items():
        ((name, stored),) = safetensors.deserialize(safetensors_bytes({"a": (dtype, (8,), bytes(bits))}))
        assert (name, stored["dtype"], len(stored["data"])) == ("a", dtype, bits)
    # The library lists its dtypes when it refuses one; none of them may be missing here.
    with pytest.raises(safetensors.SafetensorError, match="expected one of") as refusal:
        safetensors.deserialize(safetensors_bytes({"a": ("NONE", (8,), bytes(8))}))
    listed = str(refusal.value).split("expected one of")[1].split("`")[1::2]
    assert set(listed) == set(ELEMENT_BITS) == set(BITS)


def test_header_gives_names_places_and_metadata_in_the_order_of_the_bytes(tmp_path):
    tensors = {"z": tensor("F8_E4M3", (3,)), "a": tensor("F32", ()), "e": tensor("BF16", (0, 4))}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    header = read_header(path)
    data = path.read_bytes()
    assert header.prefix() == data[: header.data_start]
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == len(data)
    for entry in header.tensors:
        assert (entry.meta.dtype, entry.meta.shape) == tensors[entry.meta.name][:2]
        assert data[entry.offset : entry.offset + entry.nbytes] == tensors[entry.meta.name][2]
    assert [entry.meta.name for entry in header.tensors if entry.nbytes] == ["z", "a"]


def test_packed_dtype_is_stored_bytes_to_the_codec():
    raw = safetensors_bytes({"a": tensor("F4", (2, 4)), "b": tensor("F6_E2M3", (8,))})
    header = parse_header("f", raw[8:-10], where="f")
    assert [(entry.stored.dtype, entry.stored.shape) for entry in header.tensors] == [("U8", (4,)), ("U8", (6,))]
    assert [entry.meta.shape for entry in header.tensors] == [(2, 4), (8,)]


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_a_typed_error(case, tmp_path):
    raw = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(2))
    with pytest.raises(CheckpointInvalid) as refusal:
        read_header(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_file_that_is_not_as_long_as_its_header_says_is_refused(tmp_path):
    data = safetensors_bytes({"a": tensor("U8", (2,))})
    path = tmp_path / "model.safetensors"
    for bad in (b"", data[:7], data[:20], data[:-1], data + b"x", (1 << 63).to_bytes(8, "little") + data[8:]):
        path.write_bytes(bad)
        with pytest.raises(CheckpointInvalid):
            read_header(path)
    path.write_bytes(data)
    assert [entry.meta.name for entry in read_header(path).tensors] == ["a"]
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        read_header(tmp_path)


@settings(max_examples=200)
@given(st.data())
def test_mutated_header_is_parsed_or_refused(data):
    raw = bytearray(safetensors_bytes({"a": tensor("BF16", (2, 3)), "b": tensor("F4", (4,))}, {"k": "v"})[8:-14])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = parse_header("f", bytes(raw), where="f")
    except CheckpointInvalid:
        return
    assert header.file_bytes == 8 + len(raw) + sum(entry.nbytes for entry in header.tensors)
