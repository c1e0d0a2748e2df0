"""Stored objects: their keys, the frame around each, and the encoded manifest.

A key is `attempt-<20 digits>/owner-<5 digits>/payload-<8 digits>`, or `.../manifest` for the object that closes a set.
Keys sort as their numbers do, and they carry the attempt, so nothing of one attempt is ever read as another's. A frame
repeats the key, the size and the digest in front of the bytes: a truncated file, a foreign file and a file under the
wrong key all show without reading the body.
Not handled: the digest of the body, which the caller computes.

Frame, little endian, 96 bytes: magic `NDCROBJ1`, attempt u64, owner u64, number u64, body size u64, digest size u8,
7 zero bytes, digest padded to 32 bytes, BLAKE2b-128 of the 80 bytes before. A manifest has number 2**64 - 1.

Paper: Section 7 (object storage: per-attempt manifest)   Spec: Channel
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable

import msgspec

from nemo_dcr.errors import PayloadCorrupt
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport.base import Announcement, Manifest

FRAME_BYTES = 96
MAX_DIGEST_BYTES = 32
MANIFEST_NAME = "manifest"
MANIFEST_NUMBER = (1 << 64) - 1

_MAGIC = b"NDCROBJ1"
_FIELDS = struct.Struct("<8sQQQQB7x32s")
_ATTEMPT = re.compile(r"attempt-(\d{20})")
_PAYLOAD = re.compile(r"payload-(\d{8,20})")


def attempt_name(attempt: AttemptId) -> str:
    """Key part of an attempt."""
    return f"attempt-{attempt:020d}"


def owner_name(owner: OwnerId) -> str:
    """Key part of an owner."""
    return f"owner-{owner:05d}"


def payload_name(number: int) -> str:
    """Key part of a payload; numbers of more than 8 digits keep all their digits."""
    return f"payload-{number:08d}"


def attempt_of(name: str) -> AttemptId | None:
    """The attempt that a key part names, or None when it is not exactly what `attempt_name` writes."""
    match = _ATTEMPT.fullmatch(name)
    return AttemptId(int(match[1])) if match and attempt_name(AttemptId(int(match[1]))) == name else None


def payload_of(name: str) -> int | None:
    """The payload number that a key part names, or None when it is not exactly what `payload_name` writes."""
    match = _PAYLOAD.fullmatch(name)
    return int(match[1]) if match and payload_name(int(match[1])) == name else None


def check_publish(attempt: AttemptId, owner: OwnerId, key: PayloadKey, digest: bytes) -> None:
    """Refuse a key of another set and a digest that a frame cannot carry.

    Raises: ValueError.
    """
    if (key.attempt, key.owner) != (attempt, owner) or not 0 <= key.payload < MANIFEST_NUMBER:
        raise ValueError(f"payload {key} does not belong to the set {attempt}/{owner}")
    if not 1 <= len(digest) <= MAX_DIGEST_BYTES:
        raise ValueError(f"payload {key}: a digest has 1 to {MAX_DIGEST_BYTES} bytes, not {len(digest)}")


def frame(announcement: Announcement) -> bytes:
    """The 96 bytes in front of the body."""
    key, digest = announcement.key, announcement.digest
    fields = _FIELDS.pack(_MAGIC, key.attempt, key.owner, key.payload, announcement.nbytes, len(digest), digest)
    return fields + hashlib.blake2b(fields, digest_size=16).digest()


def read_frame(key: PayloadKey, head: bytes, file_bytes: int) -> Announcement | None:
    """The announcement that a stored file carries, or None when it is not the complete object of `key`.

    `head` is the first 96 bytes of the file, `file_bytes` its size.
    """
    if len(head) != FRAME_BYTES or head != head[: _FIELDS.size] + _check(head):
        return None
    magic, attempt, owner, number, nbytes, digest_bytes, digest = _FIELDS.unpack(head[: _FIELDS.size])
    if magic != _MAGIC or (attempt, owner, number) != (key.attempt, key.owner, key.payload):
        return None
    if nbytes + FRAME_BYTES != file_bytes or not 1 <= digest_bytes <= MAX_DIGEST_BYTES:
        return None
    return Announcement(key, digest[:digest_bytes], nbytes)


def _check(head: bytes) -> bytes:
    return hashlib.blake2b(head[: _FIELDS.size], digest_size=16).digest()


def manifest_key(attempt: AttemptId, owner: OwnerId) -> PayloadKey:
    """The key in the frame of a manifest object."""
    return PayloadKey(attempt, owner, MANIFEST_NUMBER)


def manifest_of(attempt: AttemptId, owner: OwnerId, payloads: Iterable[Announcement]) -> Manifest:
    """The manifest of these payloads, ordered by payload number."""
    return Manifest(attempt, owner, tuple(sorted(payloads, key=lambda payload: payload.key.payload)))


class _Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    payload: int
    digest: bytes
    nbytes: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as MessagePack: a list of [payload number, digest, size in bytes]."""
    return msgspec.msgpack.encode([_Entry(p.key.payload, p.digest, p.nbytes) for p in manifest.payloads])


def decode_manifest(attempt: AttemptId, owner: OwnerId, body: bytes, digest: bytes) -> Manifest:
    """Check and decode a manifest body against the digest in its frame.

    Raises: PayloadCorrupt when the digest differs, the schema does not fit, or payload numbers do not increase.
    """
    name = f"{attempt}/{owner}/{MANIFEST_NAME}"
    if _body_digest(body) != digest:
        raise PayloadCorrupt(name, "the digest of the manifest does not fit its bytes")
    try:
        entries = msgspec.msgpack.decode(body, type=list[_Entry])
    except msgspec.MsgspecError as error:
        raise PayloadCorrupt(name, f"not a manifest: {error}") from error
    for before, entry in zip([-1, *(e.payload for e in entries)], entries, strict=False):
        if not before < entry.payload < MANIFEST_NUMBER or entry.nbytes < 0:
            raise PayloadCorrupt(name, f"payload number {entry.payload} after {before}, {entry.nbytes} bytes")
    payloads = tuple(Announcement(PayloadKey(attempt, owner, e.payload), e.digest, e.nbytes) for e in entries)
    return Manifest(attempt, owner, payloads)


def manifest_announcement(manifest: Manifest, body: bytes) -> Announcement:
    """What the frame of a manifest object says."""
    return Announcement(manifest_key(manifest.attempt, manifest.owner), _body_digest(body), len(body))


def _body_digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
