from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.errors import PayloadCorrupt
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement

KEYS = st.builds(PayloadKey, st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.integers(0, 2**64 - 2))
KEY = PayloadKey(AttemptId(7), OwnerId(3), 5)
ANNOUNCEMENT = Announcement(KEY, bytes(range(16)), 300)


def test_keys_carry_the_attempt_and_sort_as_numbers() -> None:
    assert objects.attempt_name(AttemptId(7)) == "attempt-00000000000000000007"
    assert objects.owner_name(OwnerId(3)) == "owner-00003"
    assert objects.payload_name(5) == "payload-00000005"
    numbers = [0, 9, 10, 99, 100, 99_999_999]
    assert sorted(map(objects.payload_name, numbers)) == [objects.payload_name(number) for number in numbers]


@pytest.mark.parametrize("name", ["payload-5", "payload-00000005 ", "payload-000000005", "payload-0000000x", ".tmp-1"])
def test_names_that_the_store_does_not_write_are_not_read(name: str) -> None:
    assert objects.payload_of(name) is None
    assert objects.payload_of("payload-00000005") == 5


@pytest.mark.parametrize("name", ["attempt-7", "attempt-000000000000000000070", "attempt-99999999999999999999x", "x"])
def test_directories_that_the_store_does_not_make_are_not_attempts(name: str) -> None:
    assert objects.attempt_of(name) is None
    assert objects.attempt_of("attempt-00000000000000000007") == 7


@given(key=KEYS, digest=st.binary(min_size=1, max_size=32), nbytes=st.integers(0, 2**40))
def test_a_frame_reads_back_as_the_announcement(key: PayloadKey, digest: bytes, nbytes: int) -> None:
    announcement = Announcement(key, digest, nbytes)
    head = objects.frame(announcement)
    assert len(head) == objects.FRAME_BYTES
    assert objects.read_frame(key, head, objects.FRAME_BYTES + nbytes) == announcement


@given(bit=st.integers(0, 8 * objects.FRAME_BYTES - 1))
def test_a_frame_with_one_altered_bit_is_not_read(bit: int) -> None:
    head = bytearray(objects.frame(ANNOUNCEMENT))
    head[bit // 8] ^= 1 << (bit % 8)
    assert objects.read_frame(KEY, bytes(head), objects.FRAME_BYTES + 300) is None


def test_an_object_of_another_size_or_key_is_not_read() -> None:
    head = objects.frame(ANNOUNCEMENT)
    assert objects.read_frame(KEY, head, objects.FRAME_BYTES + 299) is None
    assert objects.read_frame(KEY, head, objects.FRAME_BYTES + 301) is None
    assert objects.read_frame(KEY, head[:-1], objects.FRAME_BYTES + 300) is None
    assert objects.read_frame(KEY, b"", 0) is None
    for other in (PayloadKey(AttemptId(8), OwnerId(3), 5), PayloadKey(AttemptId(7), OwnerId(3), 6)):
        assert objects.read_frame(other, head, objects.FRAME_BYTES + 300) is None


def test_the_layout_of_a_frame_is_fixed() -> None:
    fields = (
        b"NDCROBJ1"
        + (7).to_bytes(8, "little")
        + (3).to_bytes(8, "little")
        + (5).to_bytes(8, "little")
        + (300).to_bytes(8, "little")
        + b"\x10"
        + bytes(7)
        + bytes(range(16))
        + bytes(16)
    )
    assert objects.frame(ANNOUNCEMENT) == fields + hashlib.blake2b(fields, digest_size=16).digest()


@given(numbers=st.sets(st.integers(0, 2**64 - 2), max_size=20), nbytes=st.integers(0, 2**40))
def test_a_manifest_reads_back_in_order(numbers: set[int], nbytes: int) -> None:
    payloads = [Announcement(PayloadKey(KEY.attempt, KEY.owner, n), bytes(16), nbytes) for n in numbers]
    manifest = objects.manifest_of(KEY.attempt, KEY.owner, payloads)
    assert [payload.key.payload for payload in manifest.payloads] == sorted(numbers)
    body = objects.encode_manifest(manifest)
    announcement = objects.manifest_announcement(manifest, body)
    assert objects.decode_manifest(KEY.attempt, KEY.owner, body, announcement.digest) == manifest


@pytest.mark.parametrize(
    "content",
    [
        [[1, b"d", 5], [1, b"d", 5]],
        [[2, b"d", 5], [1, b"d", 5]],
        [[-1, b"d", 5]],
        [[1, b"d", -5]],
        [[1, "text", 5]],
        [[1, b"d"]],
        [[1, b"d", 5, 6]],
        {"payloads": 1},
        7,
    ],
)
def test_a_manifest_that_breaks_the_schema_is_refused(content: object) -> None:
    body = msgspec.msgpack.encode(content)
    digest = hashlib.blake2b(body, digest_size=16).digest()
    with pytest.raises(PayloadCorrupt, match="7/3/manifest"):
        objects.decode_manifest(KEY.attempt, KEY.owner, body, digest)


@given(cut=st.integers(0, 60), bit=st.integers(0, 300))
def test_a_damaged_manifest_is_refused(cut: int, bit: int) -> None:
    manifest = objects.manifest_of(KEY.attempt, KEY.owner, [ANNOUNCEMENT])
    body = objects.encode_manifest(manifest)
    digest = objects.manifest_announcement(manifest, body).digest
    altered = bytearray(body)
    altered[bit // 8 % len(body)] ^= 1 << (bit % 8)
    for damaged in (bytes(altered), body[: cut % len(body)], body + b"\0"):
        with pytest.raises(PayloadCorrupt):
            objects.decode_manifest(KEY.attempt, KEY.owner, damaged, digest)
