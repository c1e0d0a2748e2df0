"""The manifest of a delta: which checkpoint it needs, which one it gives, and every file it consists of.

On disk: magic, version, size, one zstd frame of msgpack, and BLAKE2b-128 over everything before it. The reader checks
the digest, sizes before it reserves memory, the schema, and that the parts agree: rows follow the headers of the
target, digests of the checkpoints follow from those of their tensors, payloads are used in order, paths stay inside.
The headers of the target's safetensors files stand in it verbatim, so those files come out byte for byte.
Not handled: what the payloads hold (checkpoint/delta.py); signatures.

Paper: Appendix D (payload format, digest)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import zstandard

from nemo_dcr.checkpoint.digests import DIGEST_BYTES, content_digest
from nemo_dcr.checkpoint.directory import safe_path, tensors_of
from nemo_dcr.checkpoint.header import ShardHeader, StoredTensor, parse_header
from nemo_dcr.errors import CheckpointInvalid, DeltaInvalid
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey

MANIFEST = "manifest.dcrm"
FILES = "files"
"""Folder of the carried files."""
VERSION = 1
MAGIC = b"DCRM"
MAX_MANIFEST_BYTES = 1 << 28
"""A reader refuses a larger body before it reserves memory; 200 bytes and the header's text for each tensor."""
_PREFIX = struct.Struct("<4sHHQ")
_LEVEL = 3

_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TensorRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """What happens to one tensor."""

    name: str
    base: _Digest | None
    """Digest in the base; None when the base lacks it."""
    target: _Digest | None
    """Digest in the target; None when it is removed."""
    payload: _Count | None
    """Number of the payload that holds its item; None when no byte of it travels."""
    dense: bool
    """True: it is new, or shape or dtype changed, and all its elements travel. False: XOR, or unchanged."""
    changed: _Count
    """Elements whose stored bits differ; all of them for a dense tensor."""


class PayloadRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """One payload file."""

    digest: _Digest
    """Its trailer."""
    nbytes: _Count


class FileRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """One file of the target that is no safetensors file of the checkpoint."""

    path: str
    nbytes: _Count
    digest: _Digest
    carried: bool
    """True: its bytes are in the delta. False: they are those of the base."""


class ShardRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """One safetensors file of the target."""

    file: str
    header: bytes
    """Its JSON header, verbatim."""


class Manifest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, dict=True):
    """The content of `manifest.dcrm`."""

    base: _Digest
    """Digest of the base's tensors."""
    target: _Digest
    """Digest of the target's tensors."""
    tensors: tuple[TensorRow, ...]
    """Those of the target in layout order, then the removed ones."""
    shards: tuple[ShardRow, ...]
    """Sorted by file name."""
    files: tuple[FileRow, ...]
    """Sorted by path."""
    removed_files: tuple[str, ...]
    """Other files of the base that the target lacks, sorted."""
    payloads: tuple[PayloadRow, ...]

    @cached_property
    def headers(self) -> Mapping[str, ShardHeader]:
        """The parsed headers by file name. Raises: CheckpointInvalid."""
        return {row.file: parse_header(row.file, row.header, where=MANIFEST) for row in self.shards}

    @cached_property
    def layout(self) -> Mapping[str, StoredTensor]:
        """The target's tensors in layout order. Raises: CheckpointInvalid."""
        return tensors_of(self.headers, where=MANIFEST)

    @cached_property
    def rows(self) -> Mapping[str, TensorRow]:
        """The row of each tensor of base or target."""
        return {row.name: row for row in self.tensors}

    @property
    def target_bytes(self) -> int:
        """Bytes of all files of the target."""
        return sum(header.file_bytes for header in self.headers.values()) + sum(row.nbytes for row in self.files)


def payload_key(number: int) -> PayloadKey:
    """The key inside payload `number` of a delta: no control plane gave an attempt, so it is 1, and the owner is 0."""
    return PayloadKey(AttemptId(1), OwnerId(0), number)


def payload_file(number: int) -> str:
    """File name of payload `number`."""
    return f"payload-{number:06}.dcrp"


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.dcrm`."""
    body = msgspec.msgpack.encode(manifest)
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    data = _PREFIX.pack(MAGIC, VERSION, 0, len(body)) + frame
    return data + hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises: DeltaInvalid."""
    where = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DeltaInvalid(where, f"it cannot be read ({error.strerror}); name a directory made by diff") from None
    if len(data) < _PREFIX.size + DIGEST_BYTES or data[:4] != MAGIC:
        raise DeltaInvalid(where, "it does not begin like a manifest")
    _, version, _, size = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise DeltaInvalid(where, f"version {version}; this program knows version {VERSION}, upgrade it")
    if hashlib.blake2b(data[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest() != data[-DIGEST_BYTES:]:
        raise DeltaInvalid(where, "its digest does not match its bytes")
    try:
        manifest = msgspec.msgpack.decode(_body(data[_PREFIX.size : -DIGEST_BYTES], size), type=Manifest)
        _check(manifest)
    except (ValueError, zstandard.ZstdError, CheckpointInvalid, RecursionError) as error:
        raise DeltaInvalid(where, f"it contradicts itself or the format ({error})") from None
    return manifest


def _body(frame: bytes, size: int) -> bytes:
    # The library reserves what the frame declares, so this check comes first.
    if size > MAX_MANIFEST_BYTES or zstandard.get_frame_parameters(frame).content_size != size:
        raise ValueError(f"a body of {size} bytes")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)


def _check(manifest: Manifest) -> None:
    rows = manifest.tensors
    kept = [row for row in rows if row.target is not None]
    removed = [row for row in rows if row.target is None]
    if len(manifest.rows) != len(rows) or [row.name for row in kept] != list(manifest.layout):
        raise ValueError("its tensors are not those of its headers")
    if content_digest({row.name: row.base for row in rows if row.base is not None}) != manifest.base:
        raise ValueError("the digest of the base does not follow from its tensors")
    if content_digest({row.name: row.target for row in kept if row.target is not None}) != manifest.target:
        raise ValueError("the digest of the target does not follow from its tensors")
    for row in kept:
        numel = manifest.layout[row.name].stored.numel
        travels = bool(numel) if row.dense else row.base != row.target
        if (row.payload is not None) != travels or (row.base is None and not row.dense):
            raise ValueError(f"tensor {row.name!r} does not say how it changes")
        if row.changed > numel or (row.changed != numel if row.dense else bool(row.changed) != travels):
            raise ValueError(f"tensor {row.name!r}: {row.changed} changes in {numel} elements")
    if any(row.base is None or row.payload is not None or row.dense or row.changed for row in removed):
        raise ValueError("a removed tensor has content")
    used = [row.payload for row in kept if row.payload is not None]
    if used != sorted(used) or sorted(set(used)) != list(range(len(manifest.payloads))):
        raise ValueError("its payloads are not used in order")
    _check_paths(manifest)


def _check_paths(manifest: Manifest) -> None:
    shards = [row.file for row in manifest.shards]
    files = [row.path for row in manifest.files]
    every = [*shards, *files, *manifest.removed_files]
    if len(set(every)) != len(every):
        raise ValueError("a file comes twice")
    if shards != sorted(shards) or files != sorted(files) or not shards:
        raise ValueError("its files are not in order")
    folders = {"/".join(path.split("/")[:depth]) for path in files + shards for depth in range(1, path.count("/") + 1)}
    for path in every:
        if not safe_path(path) or (path in folders and path not in manifest.removed_files):
            raise ValueError(f"path {path!r} is not a file inside a checkpoint")
    if any("/" in file for file in shards):
        raise ValueError("a safetensors file of the checkpoint lies in a folder")
