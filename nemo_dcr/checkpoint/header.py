"""The header of a safetensors file: which tensors it holds, where, and its bytes as they are.

A file is eight bytes of length, a JSON header and the tensors without holes. The header is kept verbatim, so that a
file can be written again byte for byte. A reader trusts nothing: length, encoding, schema, unique names, and tensors
that fill the file exactly and have the size that dtype and shape give.
Dtypes of less than a byte (`F4`, `F6_*`) are stored bytes to everything here; an index into them counts bytes.
Not handled: dtypes that safetensors 0.8 does not know (complex of 16 bytes, packed integers).

Paper: Section 3 (canonical tensors)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import CheckpointInvalid

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
MAX_DIMENSIONS = 64
METADATA = "__metadata__"

PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of one element of the dtypes that are smaller than a byte."""
ELEMENT_BITS = {name: 8 * size for name, size in bits.WIDTHS.items() if name != "C32"} | PACKED_BITS
"""Bits of one element of every dtype that safetensors knows."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor and the place of its bytes."""

    meta: TensorMeta
    """As the header says it; a packed dtype counts its elements."""
    file: str
    """Name of the safetensors file."""
    offset: int
    """First byte in the file."""
    nbytes: int

    @property
    def stored(self) -> TensorMeta:
        """The tensor as the codec sees it: of a packed dtype, its bytes."""
        if self.meta.dtype in PACKED_BITS:
            return TensorMeta(self.meta.name, (self.nbytes,), "U8")
        return self.meta


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The header of one safetensors file."""

    file: str
    raw: bytes
    """The JSON text as it stands in the file, padding included."""
    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes."""
    metadata: Mapping[str, str]
    """The entry `__metadata__`; empty when there is none."""

    @property
    def data_start(self) -> int:
        """First byte after the header."""
        return LENGTH_BYTES + len(self.raw)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_start + sum(tensor.nbytes for tensor in self.tensors)

    def prefix(self) -> bytes:
        """The bytes before the first tensor."""
        return len(self.raw).to_bytes(LENGTH_BYTES, "little") + self.raw


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of a safetensors file against the size of the file.

    Raises: CheckpointInvalid.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > size - LENGTH_BYTES or length > MAX_HEADER_BYTES:
                raise CheckpointInvalid(str(path), f"{size} bytes cannot hold a header of {length} bytes")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointInvalid(str(path), f"it cannot be read ({error.strerror})") from None
    header = parse_header(path.name, raw, where=str(path))
    if header.file_bytes != size:
        raise CheckpointInvalid(str(path), f"the header describes {header.file_bytes} bytes, the file has {size}")
    return header


def parse_header(file: str, raw: bytes, *, where: str) -> ShardHeader:
    """Check the JSON text `raw` as the header of `file`; `where` names it in errors.

    Raises: CheckpointInvalid.
    """
    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        metadata = msgspec.convert(fields.pop(METADATA, {}), dict[str, str])
        entries = msgspec.convert(fields, dict[Annotated[str, msgspec.Meta(min_length=1)], _Entry])
        for name in entries:
            name.encode("utf-8")
    except (ValueError, RecursionError) as error:
        detail = str(error) or type(error).__name__
        raise CheckpointInvalid(where, f"the header is not that of a safetensors file ({detail})") from None
    start = LENGTH_BYTES + len(raw)
    tensors, end = [], 0
    for name, entry in sorted(entries.items(), key=lambda row: row[1].data_offsets):
        first, last = entry.data_offsets
        if first != end or last - first != _stored_bytes(name, entry, where):
            raise CheckpointInvalid(where, f"tensor {name!r}: bytes {first} to {last} leave a hole or do not fit")
        meta = TensorMeta(name, entry.shape, entry.dtype)
        tensors.append(StoredTensor(meta, file, start + first, last - first))
        end = last
    return ShardHeader(file, raw, tuple(tensors), metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name comes twice")
    return fields


def _stored_bytes(name: str, entry: _Entry, where: str) -> int:
    width = ELEMENT_BITS.get(entry.dtype)
    if width is None:
        raise CheckpointInvalid(where, f"tensor {name!r} has dtype {entry.dtype!r}, which this version does not know")
    size = prod(entry.shape) * width
    if size % 8:
        raise CheckpointInvalid(where, f"tensor {name!r}: {list(entry.shape)} of {entry.dtype} are not whole bytes")
    return size // 8
