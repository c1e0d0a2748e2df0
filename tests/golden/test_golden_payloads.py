"""Payloads written out by hand, byte by byte, from docs/wire-format.md: what they decode to must never change.

The compressed body is a zstd frame of one raw block, so that it can be written by hand too. The trailers were computed
with `b2sum -l 128`.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import zstandard

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.locations import choose_location
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import CodecConfig
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey

HERE = Path(__file__).parent
LIMITS = CodecConfig()
KEY = PayloadKey(AttemptId(7), OwnerId(3), 2)


def spelled(text: str) -> bytes:
    """Bytes of a hex text; everything after `#` is a remark."""
    return bytes.fromhex(re.sub(r"#.*", "", text))


# Two tensors, as in Figure D.3: `a` has a run of changes, `b` scattered ones.
TWO_TENSORS = """
44 43 52 50              #  0 magic
01 00                    #  4 format version 1
01 01                    #  6 digest algorithm 1, body coding 1
00 00 00 00              #  8 flags
00 00 00 00              # 12 no extension area
07 00 00 00 00 00 00 00  # 16 attempt 7
03 00 00 00              # 24 owner 3
02 00 00 00              # 28 payload 2
02 00 00 00              # 32 two items
26 00 00 00              # 36 38 bytes of metadata
35 00 00 00 00 00 00 00  # 40 53 bytes of body
3e 00 00 00 00 00 00 00  # 48 62 bytes of frame

28 b5 2f fd              # zstd magic
20 35                    # single segment, 53 bytes of content
a9 01 00                 # last block, raw, 53 bytes

92                       # metadata: two rows
9a a1 61                 # ten fields; name "a"
92 04 08                 # shape [4, 8]
a4 42 46 31 36           # BF16
00 00                    # XOR, run
03 09                    # 3 entries from index 9
00 00                    # no location units
00                       # values from 0
9a a1 62                 # name "b"
91 cd 03 e8              # shape [1000]
a4 42 46 31 36           # BF16
00 01                    # XOR, chain of u8 gaps
03 0a                    # 3 entries from index 10
00 03                    # location units 0 to 2
03                       # values from 3

05 ff 2d                 # chain: +5, +(255 + 45)
01 00 c1 02 03 00        # XOR masks, low bytes
00 80 7f 00 00 01        # XOR masks, high bytes

06 ff 50 e7 d6 8f ae 8f f3 38 d8 60 38 f0 14 6d  # BLAKE2b-128 of all of the above
"""

# Every location type and every width, both encodings, 0-d, indices beyond 32 bits, NaN payloads, -0.0, subnormals.
EVERY_KIND = """
44 43 52 50 01 00 01 01 00 00 00 00 00 00 00 00
07 00 00 00 00 00 00 00 03 00 00 00 02 00 00 00
06 00 00 00              # six items
74 00 00 00              # 116 bytes of metadata
ac 00 00 00 00 00 00 00  # 172 bytes of body
b5 00 00 00 00 00 00 00  # 181 bytes of frame

28 b5 2f fd
20 ac
61 05 00                 # last block, raw, 172 bytes

96
9a a1 72 90                            a2 55 38                01 00 01 00 00 00 00  # r [] U8 overwrite run
9a a1 6d 92 02 03                      a4 42 4f 4f 4c          00 05 03 00 00 01 00  # m [2,3] BOOL XOR bitmap
9a a1 68 91 ce 00 02 00 00             a4 42 46 31 36          01 02 02 01 00 01 00  # h [131072] BF16 u16 gaps
9a a1 66 91 ce 00 01 00 02             a3 46 33 32             01 03 02 00 00 01 00  # f [65538] F32 u32 gaps
9a a1 64 91 cf 00 00 00 02 00 00 00 00 a3 46 36 34             01 04 02 00 00 01 00  # d [2**33] F64 u64 gaps
9a a1 63 91 cd 03 e8                   a3 49 31 36             00 01 03 0a 00 03 00  # c [1000] I16 XOR chain

05 ff 2d                 # chain: c
ff ff                    # u16 gaps: h 65535
00 00 01 00              # u32 gaps: f 65536
00 00 00 00 01 00 00 00  # u64 gaps: d 2**32
25                       # bitmaps: m 0, 2, 5
01 01 01                 # XOR, width 1: m
01 ff 00                 # XOR, width 2: c 0x0001, 0xffff, 0x0100
00 ff 01
7f                       # overwrite, width 1: r
c1 00                    # overwrite, width 2: h 0x7fc1 (NaN), 0x8000 (-0.0)
7f 80
01 01                    # overwrite, width 4: f 0x00000001 (subnormal), 0xff800001 (NaN)
00 00
00 80
00 ff
00 01                    # overwrite, width 8: d 0x8000000000000000 (-0.0), 0x7ff0000000000001 (NaN)
00 00
00 00
00 00
00 00
00 00
00 f0
80 7f

8f 0f 7b 94 c0 a0 d4 27 57 d7 05 73 97 bf 27 12
"""


def item(name: str, shape: tuple[int, ...], dtype: str, encoding: Encoding, at: list[int], values: list[int]) -> Item:
    return Item.of(TensorMeta(name, shape, dtype), encoding, np.array(at), np.array(values, dtype=bits.unsigned(dtype)))


GOLDEN = {
    "two_tensors": (
        TWO_TENSORS,
        [
            item("a", (4, 8), "BF16", Encoding.XOR, [9, 10, 11], [0x0001, 0x8000, 0x7FC1]),
            item("b", (1000,), "BF16", Encoding.XOR, [10, 15, 315], [0x0002, 0x0003, 0x0100]),
        ],
    ),
    "every_kind": (
        EVERY_KIND,
        [
            item("r", (), "U8", Encoding.OVERWRITE, [0], [0x7F]),
            item("m", (2, 3), "BOOL", Encoding.XOR, [0, 2, 5], [1, 1, 1]),
            item("h", (131072,), "BF16", Encoding.OVERWRITE, [1, 65536], [0x7FC1, 0x8000]),
            item("f", (65538,), "F32", Encoding.OVERWRITE, [0, 65536], [0x00000001, 0xFF800001]),
            item("d", (1 << 33,), "F64", Encoding.OVERWRITE, [0, 1 << 32], [1 << 63, 0x7FF0000000000001]),
            item("c", (1000,), "I16", Encoding.XOR, [10, 15, 315], [0x0001, 0xFFFF, 0x0100]),
        ],
    ),
}


def parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Header without the frame size, decompressed body, trailer; without help from the package."""
    return data[:48], zstandard.ZstdDecompressor().decompress(data[56:-16]), data[-16:]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_stored_payload_is_the_spelled_one(name: str) -> None:
    assert (HERE / f"{name}.dcrp").read_bytes() == spelled(GOLDEN[name][0])


@pytest.mark.parametrize("name", GOLDEN)
def test_a_hand_written_payload_decodes_to_its_items(name: str) -> None:
    text, expected = GOLDEN[name]
    verified = verify_payload(spelled(text), limits=LIMITS)
    assert verified.key == KEY
    assert verified.digest == spelled(text)[-16:]
    assert verified.nbytes == len(spelled(text))
    decoded = verified.decode({record.tensor.name: record.tensor for record in expected})
    for got, wanted in zip(decoded, expected, strict=True):
        assert (got.tensor, got.encoding, got.start) == (wanted.tensor, wanted.encoding, wanted.start)
        assert (got.indices is None) == (wanted.indices is None)
        assert got.flat_indices().tolist() == wanted.flat_indices().tolist()
        assert bits.equal_words(got.values, wanted.values)


@pytest.mark.parametrize("name", GOLDEN)
def test_an_encoder_writes_the_hand_written_body(name: str) -> None:
    text, items = GOLDEN[name]
    encoded = encode_payload(KEY, items)
    assert parts(encoded.data)[:2] == parts(spelled(text))[:2]
    assert encoded.digest == encoded.data[-16:]
    assert encoded.data == encode_payload(KEY, items).data


def test_every_kind_holds_every_location_type() -> None:
    assert {int(choose_location(record)) for record in GOLDEN["every_kind"][1]} == {0, 1, 2, 3, 4, 5}


def test_flags_that_are_not_critical_and_the_extension_area_are_read_over() -> None:
    data = (HERE / "extended.dcrp").read_bytes()
    plain = spelled(TWO_TENSORS)
    assert data[8:16] == spelled("ff ff 00 00  05 00 00 00")
    assert data[:8] + bytes(8) + data[16:56] + data[61:-16] == plain[:-16]
    items = verify_payload(data, limits=LIMITS).decode()
    assert [record.tensor.name for record in items] == ["a", "b"]


def test_the_example_in_the_wire_format_document_is_the_golden_payload() -> None:
    document = (HERE.parents[1] / "docs" / "wire-format.md").read_text()
    blocks = re.findall(r"```hex\n(.*?)```", document, flags=re.DOTALL)
    assert [spelled(block) for block in blocks] == [spelled(TWO_TENSORS)]
