"""One bucket of items as payload bytes, and back.

A payload is a header, one zstd frame (metadata, location planes, value planes) and a BLAKE2b-128 trailer over
everything before it. The same items give the same bytes, on one version of the zstd library.
A receiver first verifies: header, sizes and digest, without decompressing. It then decodes: every declared size is
checked before memory is reserved for it, then every bound, order and name, and no byte may be left over. A payload that
fails a check yields nothing, so nothing of it can be applied. A body of n bytes decodes to at most about 10 n bytes.
Not handled: deduplication and attempts (receiver/); delivery (transport/).

Paper: Appendix D (payload format, digest), Figure D.3   Conditions: LC5
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec import wire
from nemo_dcr.codec.layout import Layout, location_stream, value_stream
from nemo_dcr.codec.locations import LocationType, choose_location, decode_locations, encode_locations, units_bound
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.codec.wire import Header, ItemRow
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import PayloadCorrupt, PayloadUnsupported, UnsupportedDtype
from nemo_dcr.ids import PayloadKey
from nemo_dcr.kernels import hot
from nemo_dcr.kernels.plain import Bytes

_ENCODINGS = {int(encoding): encoding for encoding in Encoding}
_LOCATIONS = {int(kind): kind for kind in LocationType}
_INDEX_MAX = (1 << 63) - 1
"""Indices are int64."""


@dataclass(frozen=True, slots=True)
class EncodedPayload:
    """A payload ready to publish."""

    key: PayloadKey
    data: bytes
    """All bytes, header to trailer."""
    digest: bytes
    """The 16 trailer bytes."""


def encode_payload(key: PayloadKey, items: Sequence[Item], *, zstd_level: int = 1) -> EncodedPayload:
    """Encode `items`, in this order, as the payload `key`. The same input gives the same bytes.

    Raises: ValueError when an item has no entry, breaks order or a bound, or repeats a name, and when an identifier
    does not fit its field; UnsupportedDtype.
    """
    layout = Layout()
    rows = []
    located = []
    for item in items:
        kind = choose_location(item)
        units = encode_locations(item, kind)
        located.append(units)
        rows.append(
            ItemRow(
                name=item.tensor.name,
                shape=item.tensor.shape,
                dtype=item.tensor.dtype,
                encoding=item.encoding,
                location=kind,
                count=item.count,
                start=item.start,
                location_offset=layout.reserve(location_stream(kind), len(units)),
                location_units=len(units),
                value_offset=layout.reserve(value_stream(item.encoding, item.tensor.width), item.count),
            )
        )
    if len({row.name for row in rows}) != len(rows):
        raise ValueError(f"payload {key}: two items have the same tensor name")
    metadata = wire.pack_rows(rows)
    body = np.empty(len(metadata) + layout.nbytes, dtype=np.uint8)
    body[: len(metadata)] = np.frombuffer(metadata, dtype=np.uint8)
    layout.place(len(metadata))
    for item, units, row in zip(items, located, rows, strict=True):
        stream = location_stream(LocationType(row.location))
        hot.loops().split_planes(units, layout.planes(body, stream, row.location_offset, row.location_units))
        stream = value_stream(item.encoding, item.tensor.width)
        hot.loops().split_planes(item.values, layout.planes(body, stream, row.value_offset, row.count))
    frame = _compress(body, [len(metadata), *layout.plane_ends()], zstd_level)
    header = Header(
        key=key, items=len(rows), metadata_bytes=len(metadata), body_bytes=len(body), frame_bytes=len(frame)
    ).pack()
    digest = _digest(header, frame)
    return EncodedPayload(key, b"".join((header, frame, digest)), digest)


def verify_payload(data: bytes | bytearray | memoryview, *, limits: CodecConfig) -> VerifiedPayload:
    """Check header, sizes and digest without decompressing. The caller must not change `data` afterwards.

    Raises: PayloadUnsupported for a version, digest, body coding or critical flag that this reader does not know;
    PayloadCorrupt for anything else.
    """
    view = memoryview(data).cast("B")
    header = wire.read_header(view, limits)
    digest = bytes(view[header.digest_start :])
    if _digest(view[: header.digest_start]) != digest:
        raise PayloadCorrupt(str(header.key), "the digest does not match the bytes")
    return VerifiedPayload(header.key, digest, len(view), header, view, limits)


@dataclass(frozen=True, eq=False, slots=True)
class VerifiedPayload:
    """A payload whose digest matches; its content is not checked until `decode`."""

    key: PayloadKey
    digest: bytes
    nbytes: int
    """Bytes of the whole payload."""
    _header: Header
    _data: memoryview
    _limits: CodecConfig

    @property
    def data(self) -> memoryview:
        """All bytes, header to trailer; not to be written."""
        return self._data

    def decode(
        self, table: Mapping[str, TensorMeta] | None = None, *, skip: Collection[str] = frozenset()
    ) -> tuple[Item, ...]:
        """The items in declared order; values and indices are new arrays. Items named in `skip` are left out.

        Raises: PayloadCorrupt, as `decode_some`.
        """
        return self.decode_some(table, skip=skip)[0]

    def decode_some(
        self, table: Mapping[str, TensorMeta] | None = None, *, skip: Collection[str] = frozenset()
    ) -> tuple[tuple[Item, ...], tuple[str, ...]]:
        """The items in declared order without those named in `skip`, and the names of these; otherwise as `decode`.

        With a `table`, a name that it lacks or a shape or dtype that differs from it is refused (skipped names too).

        Raises: PayloadUnsupported for an encoding, location type or dtype that this reader does not know;
        PayloadCorrupt for anything else.
        """
        body = self._decompress()
        header = self._header
        rows = self._read_rows(body)
        layout = Layout()
        metas = [self._check_row(row, layout, table) for row in rows]
        if header.metadata_bytes + layout.nbytes != header.body_bytes:
            raise self._corrupt(f"the items describe {layout.nbytes} bytes of planes, the body holds others")
        layout.place(header.metadata_bytes)
        items = tuple(
            self._decode_item(row, meta, layout, body)
            for row, meta in zip(rows, metas, strict=True)
            if row.name not in skip
        )
        return items, tuple(row.name for row in rows if row.name in skip)

    def rows(self) -> list[ItemRow]:
        """The metadata rows as they stand on the wire, for a reader that shows them; only their schema is checked.

        Raises: PayloadCorrupt.
        """
        return self._read_rows(self._decompress())

    def _read_rows(self, body: Bytes) -> list[ItemRow]:
        header = self._header
        try:
            rows = wire.read_rows(body[: header.metadata_bytes].data)
        except ValueError as error:
            raise self._corrupt(f"metadata: {error}") from None
        if len(rows) != header.items or len({row.name for row in rows}) != len(rows):
            raise self._corrupt(f"{len(rows)} items where the header says {header.items}, or a name comes twice")
        return rows

    def _decompress(self) -> Bytes:
        header = self._header
        frame = self._data[header.frame_start : header.digest_start]
        if frame[:4] != zstandard.FRAME_HEADER:
            raise self._corrupt("the body is not a zstd frame")
        try:
            declared = zstandard.get_frame_parameters(frame)
            # The library reserves what the frame declares, so this check comes first.
            if declared.dict_id != 0:
                raise self._corrupt(f"the frame needs dictionary {declared.dict_id}")
            if declared.content_size != header.body_bytes:
                raise self._corrupt(f"the frame declares {declared.content_size} bytes, the header {header.body_bytes}")
            body = zstandard.ZstdDecompressor().decompress(
                frame, max_output_size=header.body_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise self._corrupt(f"the body does not decompress: {error}") from None
        return np.frombuffer(body, dtype=np.uint8)

    def _check_row(self, row: ItemRow, layout: Layout, table: Mapping[str, TensorMeta] | None) -> TensorMeta:
        meta = TensorMeta(row.name, row.shape, row.dtype)
        if table is not None and table.get(row.name) != meta:
            raise self._corrupt(f"{meta} is not in the tensor table in this shape and dtype")
        encoding, kind = _ENCODINGS.get(row.encoding), _LOCATIONS.get(row.location)
        if encoding is None or kind is None:
            raise self._unsupported(f"{row.name!r}: encoding {row.encoding}, location type {row.location}")
        try:
            width = meta.width
        except UnsupportedDtype as error:
            raise self._unsupported(str(error)) from None
        numel = meta.numel
        if numel > min(self._limits.max_tensor_elements, _INDEX_MAX):
            raise self._corrupt(f"{row.name!r}: {numel} elements are over this reader's limits")
        fewest, most = units_bound(kind, row.count, numel)
        if row.count > numel - row.start or not fewest <= row.location_units <= most:
            raise self._corrupt(
                f"{row.name!r}: {row.count} entries from {row.start} in {numel} elements, "
                f"{row.location_units} {kind.name} units"
            )
        location_offset = layout.reserve(location_stream(kind), row.location_units)
        value_offset = layout.reserve(value_stream(encoding, width), row.count)
        if (row.location_offset, row.value_offset) != (location_offset, value_offset):
            raise self._corrupt(f"{row.name!r}: its offsets leave a hole or overlap another item")
        return meta

    def _decode_item(self, row: ItemRow, meta: TensorMeta, layout: Layout, body: Bytes) -> Item:
        encoding, kind = _ENCODINGS[row.encoding], _LOCATIONS[row.location]
        units = layout.planes(body, location_stream(kind), row.location_offset, row.location_units)
        try:
            indices = decode_locations(kind, row.start, row.count, meta.numel, units)
        except ValueError as error:
            raise self._corrupt(f"{row.name!r}: {error}") from None
        planes = layout.planes(body, value_stream(encoding, meta.width), row.value_offset, row.count)
        return Item(meta, encoding, row.start, indices, hot.loops().join_planes(planes, bits.unsigned(meta.dtype)))

    def _corrupt(self, detail: str) -> PayloadCorrupt:
        return PayloadCorrupt(str(self.key), detail)

    def _unsupported(self, detail: str) -> PayloadUnsupported:
        return PayloadUnsupported(str(self.key), f"{detail}; upgrade this receiver")


def _compress(body: Bytes, ends: Sequence[int], level: int) -> bytes:
    """One frame; a block ends at each offset of `ends`, so that no entropy table serves two unlike planes."""
    parameters = {"write_content_size": True, "source_size": len(body)}
    if level == 1:
        # Still level 1, but a coarser search: chance matches in gap and value planes cost more than they save.
        parameters |= {"min_match": 7, "hash_log": 8, "window_log": 17}
    settings = zstandard.ZstdCompressionParameters.from_level(level, **parameters)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj(size=len(body))
    parts, start = [], 0
    for end in ends:
        parts.append(stream.compress(body[start:end].data))
        parts.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        start = end
    parts.append(stream.flush())
    return b"".join(parts)


def _digest(*parts: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(digest_size=wire.DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()
