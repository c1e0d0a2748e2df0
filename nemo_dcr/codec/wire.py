"""Wire format v1: the fixed header and the metadata row of an item.

docs/wire-format.md describes every byte. All integers of the header are little-endian. The metadata is msgpack, decoded
against `ItemRow` with strict types and ranges; nothing on the wire can name code to run.
Not handled: the meaning of offsets (codec/layout.py), the digest and the body (codec/payload.py).

Paper: Appendix D (payload format), Figure D.3
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import PayloadCorrupt, PayloadUnsupported
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey

MAGIC = b"DCRP"
FORMAT_VERSION = 1
DIGEST_BLAKE2B_128 = 1
DIGEST_BYTES = 16
BODY_ZSTD = 1
"""The body is one zstd frame that declares its content size and uses no dictionary."""
CRITICAL_FLAGS = 0xFFFF_0000
"""A reader refuses a payload with a bit set here that it does not know; version 1 knows none. It ignores the others."""
MAX_EXTENSION_BYTES = 1 << 16

_HEADER = struct.Struct("<4sHBBIIQIIIIQQ")
HEADER_BYTES = _HEADER.size

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Code = Annotated[int, msgspec.Meta(ge=0, le=255)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The fixed part of a payload."""

    key: PayloadKey
    items: int
    """Number of metadata rows."""
    metadata_bytes: int
    """Metadata at the start of the body."""
    body_bytes: int
    """Body before compression, metadata included."""
    frame_bytes: int
    """Body after compression."""
    flags: int = 0
    extension_bytes: int = 0
    """Reserved area between header and frame: covered by the digest, not read by version 1."""

    def pack(self) -> bytes:
        """The 56 header bytes. Raises: ValueError when an integer does not fit its field."""
        key = self.key
        try:
            return _HEADER.pack(
                MAGIC,
                FORMAT_VERSION,
                DIGEST_BLAKE2B_128,
                BODY_ZSTD,
                self.flags,
                self.extension_bytes,
                key.attempt,
                key.owner,
                key.payload,
                self.items,
                self.metadata_bytes,
                self.body_bytes,
                self.frame_bytes,
            )
        except struct.error as error:
            raise ValueError(f"payload {key}: a header field is out of range ({error})") from None

    @property
    def frame_start(self) -> int:
        """Offset of the compressed body."""
        return HEADER_BYTES + self.extension_bytes

    @property
    def digest_start(self) -> int:
        """Offset of the trailer, and the number of bytes under the digest."""
        return self.frame_start + self.frame_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole payload."""
        return self.digest_start + DIGEST_BYTES


def read_header(data: bytes | bytearray | memoryview, limits: CodecConfig) -> Header:
    """Parse and check the header against `limits` and the payload's real size.

    Raises: PayloadUnsupported for a version, digest, body coding or critical flag that this reader does not know;
    PayloadCorrupt for anything else.
    """
    if len(data) < HEADER_BYTES + DIGEST_BYTES:
        raise PayloadCorrupt("with unreadable header", f"{len(data)} bytes are too few")
    (magic, version, digest, body, flags, extension, attempt, owner, payload, items, metadata, body_bytes, frame) = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise PayloadCorrupt("with unreadable header", "it does not begin with the magic bytes")
    if version != FORMAT_VERSION:
        raise PayloadUnsupported("with unreadable header", f"format version {version}; this reader knows version 1")
    key = PayloadKey(AttemptId(attempt), OwnerId(owner), payload)
    name = str(key)
    if digest != DIGEST_BLAKE2B_128 or body != BODY_ZSTD:
        raise PayloadUnsupported(name, f"digest algorithm {digest}, body coding {body}; upgrade this receiver")
    if flags & CRITICAL_FLAGS:
        raise PayloadUnsupported(name, f"critical flags {flags & CRITICAL_FLAGS:#010x}; upgrade this receiver")
    header = Header(
        key=key,
        items=items,
        metadata_bytes=metadata,
        body_bytes=body_bytes,
        frame_bytes=frame,
        flags=flags,
        extension_bytes=extension,
    )
    if extension > MAX_EXTENSION_BYTES:
        raise PayloadCorrupt(name, f"an extension area of {extension} bytes")
    if header.payload_bytes != len(data):
        raise PayloadCorrupt(name, f"the header declares {header.payload_bytes} bytes, {len(data)} are here")
    if metadata > limits.max_metadata_bytes or body_bytes > limits.max_payload_bytes:
        raise PayloadCorrupt(
            name, f"{metadata} bytes of metadata in a body of {body_bytes} bytes are over this reader's limits"
        )
    if metadata > body_bytes or items > metadata:
        raise PayloadCorrupt(name, f"{items} items in {metadata} bytes of metadata in a body of {body_bytes} bytes")
    return header


class ItemRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """Metadata of one item, on the wire as a msgpack array in this order."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    """The product is the number of elements."""
    dtype: str
    """safetensors name."""
    encoding: _Code
    """`Encoding`; 2 to 255 are not assigned."""
    location: _Code
    """`LocationType`; 6 to 255 are not assigned."""
    count: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    """Number of entries."""
    start: _Count
    """First flat index."""
    location_offset: _Count
    """First unit in the stream of its location type."""
    location_units: _Count
    """Chain bytes, gaps or bitmap bytes; 0 for a run."""
    value_offset: _Count
    """First value in the stream of its encoding and width."""


_ROWS = msgspec.msgpack.Decoder(list[ItemRow])


def pack_rows(rows: list[ItemRow]) -> bytes:
    """The metadata bytes of `rows`."""
    return msgspec.msgpack.encode(rows)


def read_rows(metadata: bytes | memoryview) -> list[ItemRow]:
    """Parse metadata bytes.

    Raises: ValueError when they do not follow the schema or have bytes left over.
    """
    return _ROWS.decode(metadata)
