"""Whole objects of a bucket: read into one buffer of the announced size, or compared with bytes at hand.

The frame in front of the body says whether the object is the one of its key, and how large it is; the size is checked
before memory is reserved. A download that breaks off goes on where it stopped, and only with the same ETag.
Not handled: the digest of the body, which the caller computes.

Paper: Section 7 (object storage)   Spec: Channel
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError
from urllib3.exceptions import HTTPError

from nemo_dcr.errors import PayloadCorrupt, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Manifest
from nemo_dcr.transport.s3_bucket import BLOCK_BYTES, Check, S3Bucket, jitter
from nemo_dcr.transport.s3_client import MANIFEST_BYTES

MANIFEST_NAME = "set-manifest"
"""Sorts after the payloads, so that one listing that begins at the next payload shows it too."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What lies under a key."""

    announcement: Announcement | None
    """What its frame says; None when it is not the whole object of that key."""
    body: bytes = b""
    """Empty when only the frame was read, or when the object is not the wanted one."""


def read_announcement(bucket: S3Bucket, key: PayloadKey, name: str, check: Check) -> StoredObject | None:
    """The frame of a stored object; None when it is absent. Raises: TransportFailed; whatever `check` raises."""
    with _reading(bucket, name, check, end=objects.FRAME_BYTES) as reader:
        head = reader.read(min(objects.FRAME_BYTES, reader.size)) if reader is not None else None
        return None if reader is None or head is None else StoredObject(objects.read_frame(key, head, reader.size))


def read_object(
    bucket: S3Bucket, key: PayloadKey, name: str, check: Check, *, limit: int, wanted: Announcement | None = None
) -> StoredObject | None:
    """A stored object, without its body when it is not `wanted`; None when it is absent or changed while it was read.

    Raises: PayloadCorrupt when it declares more than `limit` bytes; TransportFailed; whatever `check` raises.
    """
    with _reading(bucket, name, check) as reader:
        head = reader.read(min(objects.FRAME_BYTES, reader.size)) if reader is not None else None
        if reader is None or head is None:
            return None
        found = objects.read_frame(key, head, reader.size)
        if found is None or (wanted is not None and found != wanted):
            return StoredObject(found)
        if found.nbytes > limit:
            raise PayloadCorrupt(str(key), f"it declares {found.nbytes} bytes, more than the limit of {limit}")
        body = reader.read(found.nbytes)
        return None if body is None else StoredObject(found, body)


def set_name(attempt: AttemptId, owner: OwnerId) -> str:
    """What the names of an owner's objects in an attempt begin with."""
    return f"{objects.attempt_name(attempt)}/{objects.owner_name(owner)}"


def stored_manifest(bucket: S3Bucket, attempt: AttemptId, owner: OwnerId, check: Check) -> Manifest | None:
    """The manifest of a set, None when there is none. Raises: PayloadCorrupt when it is damaged; TransportFailed."""
    name = f"{set_name(attempt, owner)}/{MANIFEST_NAME}"
    found = read_object(bucket, objects.manifest_key(attempt, owner), name, check, limit=MANIFEST_BYTES)
    if found is None:
        return None
    if found.announcement is None:
        raise PayloadCorrupt(f"{attempt}/{owner}/{MANIFEST_NAME}", f"{bucket.key(name)} is truncated or foreign")
    return objects.decode_manifest(attempt, owner, found.body, found.announcement.digest)


def holds_bytes(bucket: S3Bucket, name: str, head: bytes, body: memoryview, check: Check) -> str | None:
    """The ETag of an object that is exactly `head` and `body`; empty when it has other bytes, None when it is absent.

    Raises: TransportFailed; whatever `check` raises.
    """
    with _reading(bucket, name, check) as reader:
        if reader is None:
            return None
        if reader.size != len(head) + len(body) or reader.read(len(head)) != head:
            return ""
        for begin in range(0, len(body), BLOCK_BYTES):
            block = bytes(body[begin : begin + BLOCK_BYTES])
            if reader.read(len(block)) != block:
                return ""
        return reader.etag


class _Reader:
    """One object from front to back."""

    def __init__(self, bucket: S3Bucket, name: str, check: Check, answer: dict[str, Any]) -> None:
        self.etag = str(answer["ETag"])
        self.size = _size(answer)
        self._bucket = bucket
        self._name = name
        self._check = check
        self._stream = answer["Body"]
        self._at = 0
        self._breaks = 0

    def close(self) -> None:
        """Give the connection back, or close it when the object was not read to its end."""
        self._stream.close()

    def read(self, nbytes: int) -> bytes | None:
        """The next bytes, in a buffer that is made once; None when the object is not the same any more."""
        # CPython hands out the buffer itself: it was given away whole, is filled in place and taken back whole.
        holder = io.BytesIO(bytes(nbytes))
        with holder.getbuffer() as view:
            done = 0
            while done < nbytes:
                self._check()
                got = self._read_into(view[done : done + BLOCK_BYTES])
                if got == 0 and not self._resume():
                    return None
                done += got
        return holder.getvalue()

    def _read_into(self, view: memoryview) -> int:
        try:
            got = int(self._stream.readinto(view))
        except (BotoCoreError, HTTPError, OSError):
            got = 0
        self._at += got
        return got

    def _resume(self) -> bool:
        """Ask for the rest of the same object."""
        self._breaks += 1
        if self._breaks >= self._bucket.config.attempts:
            detail = f"cannot read {self._name}: it broke off {self._breaks} times, at byte {self._at} of {self.size}"
            raise TransportFailed(self._bucket.config.where, f"{detail}; look at the network and at the server")
        self.close()
        time.sleep(jitter(self._breaks))
        answer = self._bucket.open(self._name, begin=self._at, etag=self.etag)
        if answer is None:
            return False
        self._stream = answer["Body"]
        return _begin(answer) == self._at and _size(answer) == self.size


@contextlib.contextmanager
def _reading(bucket: S3Bucket, name: str, check: Check, *, end: int | None = None) -> Iterator[_Reader | None]:
    answer = bucket.open(name, end=end)
    if answer is None:
        yield None
        return
    reader = _Reader(bucket, name, check, answer)
    try:
        yield reader
    finally:
        reader.close()


def _size(answer: dict[str, Any]) -> int:
    """Bytes of the whole object, also when a range of it was asked for."""
    total = str(answer.get("ContentRange", "")).rpartition("/")[2]
    return int(total) if total.isdigit() else int(answer["ContentLength"])


def _begin(answer: dict[str, Any]) -> int:
    """Where the bytes of an answer begin; a server that ignores ranges begins at 0."""
    place = str(answer.get("ContentRange", "")).removeprefix("bytes ").partition("-")[0]
    return int(place) if place.isdigit() else 0
