"""Payloads that a reader must refuse by type. Each stored file is built here, so that it says what is wrong with it.

Unless a case is about the trailer, its digest is right: the structural checks have to stand on their own.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nemo_dcr.codec.payload import verify_payload
from nemo_dcr.config import MIB, CodecConfig
from nemo_dcr.errors import PayloadCorrupt, PayloadUnsupported

HOSTILE = Path(__file__).parent / "hostile"
LIMITS = CodecConfig(max_payload_bytes=MIB, max_metadata_bytes=MIB // 2)

RUN, CHAIN, U16, U32, U64, BITMAP = range(6)
ROW: dict[str, Any] = {
    "name": "w",
    "shape": [4, 8],
    "dtype": "BF16",
    "encoding": 0,
    "location": RUN,
    "count": 2,
    "start": 3,
    "location_offset": 0,
    "location_units": 0,
    "value_offset": 0,
}
VALUES = bytes([1, 2, 0, 0])


def raw_frame(body: bytes, *, content_size: int | None = None, descriptor: int = 0xE0, extra: bytes = b"") -> bytes:
    """A zstd frame of one raw block that declares `content_size` in eight bytes."""
    size = len(body) if content_size is None else content_size
    block = struct.pack("<I", len(body) << 3 | 1)[:3]
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + extra + struct.pack("<Q", size) + block + body


def rle_frame(blocks: int, content_size: int) -> bytes:
    """A zstd frame of `blocks` run-length blocks of 128 KiB of zeros: four bytes each."""
    block = struct.pack("<I", 131072 << 3 | 2)[:3] + b"\0"
    last = struct.pack("<I", 131072 << 3 | 3)[:3] + b"\0"
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", content_size) + block * (blocks - 1) + last


def seal(data: bytes) -> bytes:
    return data + hashlib.blake2b(data, digest_size=16).digest()


def build(
    rows: list[Any] | bytes = (ROW,),  # type: ignore[assignment]
    planes: bytes = VALUES,
    *,
    frame: bytes | None = None,
    magic: bytes = b"DCRP",
    version: int = 1,
    digest: int = 1,
    coding: int = 1,
    flags: int = 0,
    extension: int = 0,
    items: int | None = None,
    metadata_bytes: int | None = None,
    body_bytes: int | None = None,
    frame_bytes: int | None = None,
) -> bytes:
    """A payload whose every field can be told to lie."""
    if isinstance(rows, bytes):
        metadata = rows
    else:
        metadata = msgspec.msgpack.encode([list(row.values()) if isinstance(row, dict) else row for row in rows])
    body = metadata + planes
    frame = raw_frame(body) if frame is None else frame
    header = struct.pack(
        "<4sHBBIIQIIIIQQ",
        magic,
        version,
        digest,
        coding,
        flags,
        extension,
        7,
        3,
        2,
        len(rows) if items is None else items,
        len(metadata) if metadata_bytes is None else metadata_bytes,
        len(body) if body_bytes is None else body_bytes,
        len(frame) if frame_bytes is None else frame_bytes,
    )
    return seal(header + frame)


def row(**changes: Any) -> dict[str, Any]:
    return ROW | changes


def scattered(location: int, planes: bytes, count: int, units: int, **changes: Any) -> bytes:
    """One item with coded locations; its values are `count` zero words."""
    changed = row(location=location, count=count, location_units=units, start=0, **changes)
    return build([changed], planes + bytes(2 * count))


GOOD = build()
BODY = msgspec.msgpack.encode([list(ROW.values())]) + VALUES
SWAPPED = GOOD[:-20] + GOOD[-18:-16] + GOOD[-20:-18] + GOOD[-16:]

CASES: dict[str, tuple[Callable[[], bytes], type[PayloadCorrupt], str]] = {
    # trailer and length
    "empty": (lambda: b"", PayloadCorrupt, "too few"),
    "truncated_header": (lambda: GOOD[:40], PayloadCorrupt, "too few"),
    "truncated_frame": (lambda: GOOD[:-20], PayloadCorrupt, "the header declares"),
    "appended_zeros": (lambda: GOOD + bytes(8), PayloadCorrupt, "the header declares"),
    "wrong_digest": (lambda: GOOD[:-1] + bytes([GOOD[-1] ^ 1]), PayloadCorrupt, "digest does not match"),
    "swapped_words": (lambda: SWAPPED, PayloadCorrupt, "digest does not match"),
    "other_attempt": (lambda: GOOD[:16] + b"\x08" + GOOD[17:], PayloadCorrupt, "digest does not match"),
    "other_dtype": (lambda: GOOD.replace(b"BF16", b"BF17"), PayloadCorrupt, "digest does not match"),
    # header
    "wrong_magic": (lambda: build(magic=b"DCRQ"), PayloadCorrupt, "magic"),
    "pickle": (lambda: pickle.dumps({"w": list(range(100))}, protocol=2), PayloadCorrupt, "magic"),
    "version_2": (lambda: build(version=2), PayloadUnsupported, "format version 2"),
    "unknown_digest": (lambda: build(digest=2), PayloadUnsupported, "digest algorithm 2"),
    "unknown_body_coding": (lambda: build(coding=0), PayloadUnsupported, "body coding 0"),
    "critical_flag": (lambda: build(flags=0x0001_0000), PayloadUnsupported, "critical flags 0x00010000"),
    "highest_critical_flag": (lambda: build(flags=0x8000_0000), PayloadUnsupported, "critical flags 0x80000000"),
    "extension_over_limit": (lambda: build(extension=65537), PayloadCorrupt, "extension area"),
    "extension_over_frame": (lambda: build(extension=8), PayloadCorrupt, "the header declares"),
    "frame_size_overflow": (lambda: build(frame_bytes=(1 << 64) - 1), PayloadCorrupt, "the header declares"),
    "body_over_limit": (lambda: build(body_bytes=MIB + 1), PayloadCorrupt, "over this reader's limits"),
    "metadata_over_limit": (
        lambda: build(metadata_bytes=MIB // 2 + 1, body_bytes=MIB),
        PayloadCorrupt,
        "over this reader's limits",
    ),
    "metadata_over_body": (lambda: build(metadata_bytes=len(BODY) + 1), PayloadCorrupt, "bytes of metadata"),
    "items_over_metadata": (lambda: build(items=1 << 31), PayloadCorrupt, "bytes of metadata"),
    # frame
    "not_zstd": (lambda: build(frame=BODY), PayloadCorrupt, "not a zstd frame"),
    "skippable_frame": (lambda: build(frame=b"\x50\x2a\x4d\x18\x04\0\0\0abcd"), PayloadCorrupt, "not a zstd frame"),
    "empty_frame": (lambda: build(frame=b""), PayloadCorrupt, "not a zstd frame"),
    "frame_header_only": (lambda: build(frame=b"\x28\xb5\x2f\xfd"), PayloadCorrupt, "does not decompress"),
    "frame_declares_10_gb": (
        lambda: build(frame=raw_frame(BODY, content_size=10 << 30)),
        PayloadCorrupt,
        "the frame declares 10737418240",
    ),
    "frame_declares_fewer": (lambda: build(frame=raw_frame(BODY, content_size=8)), PayloadCorrupt, "declares 8 bytes"),
    "frame_holds_fewer": (
        lambda: build(frame=raw_frame(BODY[:-1], content_size=len(BODY))),
        PayloadCorrupt,
        "does not decompress",
    ),
    "frame_holds_more": (
        lambda: build(frame=raw_frame(BODY + b"\0", content_size=len(BODY))),
        PayloadCorrupt,
        "does not decompress",
    ),
    "bomb_with_small_size": (lambda: build(frame=rle_frame(256, len(BODY))), PayloadCorrupt, "does not decompress"),
    "bomb_with_true_size": (
        lambda: build(frame=rle_frame(256, 256 * 131072), body_bytes=256 * 131072),
        PayloadCorrupt,
        "over this reader's limits",
    ),
    "two_frames": (
        lambda: build(frame=raw_frame(BODY) + raw_frame(b"")),
        PayloadCorrupt,
        "does not decompress",
    ),
    "bytes_after_frame": (lambda: build(frame=raw_frame(BODY) + b"\0"), PayloadCorrupt, "does not decompress"),
    "frame_without_size": (
        lambda: build(frame=b"\x28\xb5\x2f\xfd\x00\x38" + raw_frame(BODY)[13:]),
        PayloadCorrupt,
        "the frame declares",
    ),
    "frame_with_dictionary": (
        lambda: build(frame=raw_frame(BODY, descriptor=0xE1, extra=b"\x05")),
        PayloadCorrupt,
        "dictionary",
    ),
    # metadata
    "metadata_is_pickle": (lambda: build(pickle.dumps([1]), items=1), PayloadCorrupt, "metadata"),
    "metadata_is_a_map": (lambda: build(msgspec.msgpack.encode(ROW), items=1), PayloadCorrupt, "metadata"),
    "metadata_claims_2_32_rows": (lambda: build(b"\xdd\xff\xff\xff\xff", items=1), PayloadCorrupt, "metadata"),
    "metadata_is_deep": (lambda: build(b"\x91" * 5000, items=1), PayloadCorrupt, "metadata"),
    "metadata_has_bytes_left": (
        lambda: build(msgspec.msgpack.encode([list(ROW.values())]) + b"\0", items=1),
        PayloadCorrupt,
        "metadata",
    ),
    "nine_fields": (lambda: build([list(ROW.values())[:-1]]), PayloadCorrupt, "metadata"),
    "eleven_fields": (lambda: build([[*ROW.values(), 0]]), PayloadCorrupt, "metadata"),
    "boolean_count": (lambda: build([row(count=True)]), PayloadCorrupt, "metadata"),
    "float_start": (lambda: build([row(start=3.0)]), PayloadCorrupt, "metadata"),
    "negative_start": (lambda: build([row(start=-1)]), PayloadCorrupt, "metadata"),
    "negative_dimension": (lambda: build([row(shape=[-4, -8])]), PayloadCorrupt, "metadata"),
    "count_of_2_63": (lambda: build([row(count=1 << 63)]), PayloadCorrupt, "metadata"),
    "count_of_0": (lambda: build([row(count=0)], b""), PayloadCorrupt, "metadata"),
    "encoding_of_256": (lambda: build([row(encoding=256)]), PayloadCorrupt, "metadata"),
    "empty_name": (lambda: build([row(name="")]), PayloadCorrupt, "metadata"),
    "name_is_not_utf_8": (
        lambda: build(msgspec.msgpack.encode([list(ROW.values())]).replace(b"\xa1w", b"\xa1\xff"), items=1),
        PayloadCorrupt,
        "metadata",
    ),
    "fewer_rows_than_declared": (lambda: build(items=2), PayloadCorrupt, "2, or a name comes twice"),
    "duplicate_name": (
        lambda: build([row(), row(start=20, value_offset=2)], bytes(8)),
        PayloadCorrupt,
        "a name comes twice",
    ),
    # rows
    "unknown_dtype": (lambda: build([row(dtype="BF17")]), PayloadUnsupported, "BF17"),
    "third_encoding": (lambda: build([row(encoding=2)]), PayloadUnsupported, "encoding 2"),
    "unknown_location_type": (lambda: build([row(location=6)]), PayloadUnsupported, "location type 6"),
    "dimensions_over_64": (lambda: build([row(shape=[32] + [1] * 64)]), PayloadCorrupt, "metadata"),
    "elements_over_limit": (lambda: build([row(shape=[1 << 24, 1 << 25])]), PayloadCorrupt, "elements are over"),
    "elements_over_2_64": (lambda: build([row(shape=[1 << 33, 1 << 33])]), PayloadCorrupt, "elements are over"),
    "entries_in_an_empty_tensor": (lambda: build([row(shape=[0, 8], start=0)]), PayloadCorrupt, "in 0 elements"),
    "entries_past_the_end": (lambda: build([row(start=31)]), PayloadCorrupt, "2 entries from 31 in 32"),
    "start_past_the_end": (lambda: build([row(start=1 << 62)]), PayloadCorrupt, "in 32 elements"),
    "count_past_the_body": (lambda: build([row(shape=[1 << 40], count=1 << 39)]), PayloadCorrupt, "planes"),
    "run_with_units": (lambda: build([row(location_units=1)], b"\0" + VALUES), PayloadCorrupt, "1 RUN units"),
    "location_offset_hole": (lambda: build([row(location_offset=1)]), PayloadCorrupt, "hole or overlap"),
    "value_offset_hole": (lambda: build([row(value_offset=1)]), PayloadCorrupt, "hole or overlap"),
    "values_overlap": (
        lambda: build([row(), row(name="x", value_offset=1)], bytes(6)),
        PayloadCorrupt,
        "hole or overlap",
    ),
    "planes_too_short": (lambda: build(planes=VALUES[:-1]), PayloadCorrupt, "planes"),
    "planes_left_over": (lambda: build(planes=VALUES + b"\0"), PayloadCorrupt, "planes"),
    # locations
    "chain_too_long": (lambda: scattered(CHAIN, b"\xff\xff\x05", 2, 3), PayloadCorrupt, "3 CHAIN_U8 units"),
    "chain_too_short": (lambda: scattered(CHAIN, b"\x05", 3, 1), PayloadCorrupt, "1 CHAIN_U8 units"),
    "chain_ends_in_escape": (lambda: scattered(CHAIN, b"\xff", 2, 1, shape=[999]), PayloadCorrupt, "inside a gap"),
    "chain_repeats": (lambda: scattered(CHAIN, b"\x05\x00", 3, 2), PayloadCorrupt, "repeats"),
    "chain_past_the_end": (lambda: scattered(CHAIN, b"\x20", 2, 1), PayloadCorrupt, "outside 32"),
    "gaps_too_few": (lambda: scattered(U16, b"\x05\x00", 3, 1), PayloadCorrupt, "1 GAPS_U16 units"),
    "gap_of_zero": (lambda: scattered(U16, b"\x00\x00", 2, 1), PayloadCorrupt, "zero or larger"),
    "gaps_past_the_end": (lambda: scattered(U32, b"\x10\x10" + bytes(6), 3, 2), PayloadCorrupt, "outside 32"),
    "gaps_that_wrap": (
        lambda: scattered(U64, b"\xff" * 8 + b"\x01" + bytes(7), 3, 2, shape=[999]),
        PayloadCorrupt,
        "zero or larger",
    ),
    "bitmap_without_start": (lambda: scattered(BITMAP, b"\x06", 2, 1), PayloadCorrupt, "start index"),
    "bitmap_left_over": (lambda: scattered(BITMAP, b"\x03\x00", 2, 2), PayloadCorrupt, "left over"),
    "bitmap_count_differs": (lambda: scattered(BITMAP, b"\x07", 2, 1), PayloadCorrupt, "more than 2"),
    "bitmap_past_the_end": (
        lambda: scattered(BITMAP, b"\x01\x00\x00\x80", 2, 4, shape=[31]),
        PayloadCorrupt,
        "outside 31",
    ),
}


def read(data: bytes) -> Any:
    return verify_payload(data, limits=LIMITS).decode()


def test_the_payload_that_the_cases_change_is_valid() -> None:
    (item,) = read(GOOD)
    assert item.flat_indices().tolist() == [3, 4]
    assert item.values.tolist() == [1, 2]
    assert len(read(scattered(CHAIN, b"\x1f", 2, 1))) == 1
    assert len(read(build([row(), row(name="x", value_offset=2)], bytes(8)))) == 2


def test_every_stored_file_is_a_case() -> None:
    assert {path.stem for path in HOSTILE.glob("*.dcrp")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_payload_is_refused_by_type(name: str) -> None:
    make, error, message = CASES[name]
    stored = (HOSTILE / f"{name}.dcrp").read_bytes()
    assert stored == make()
    tracemalloc.start()
    try:
        with pytest.raises(PayloadCorrupt, match=message) as caught:
            read(stored)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is error
    assert peak < MIB
