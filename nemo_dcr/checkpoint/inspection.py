"""What is in a delta or in one payload file, item by item.

Sizes of locations and values are bytes before compression; the frame compresses them together, so a share of it cannot
be given to an item. A payload is decoded whole, so a file that can be shown can also be applied.
Not handled: a checkpoint; compare two of them with `verify`.

Paper: Appendix D (payload format)
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_dcr import bits
from nemo_dcr.checkpoint.delta import Delta
from nemo_dcr.checkpoint.manifest import payload_file
from nemo_dcr.checkpoint.progress import SILENT, Progress
from nemo_dcr.codec.locations import LocationType
from nemo_dcr.codec.payload import VerifiedPayload, verify_payload
from nemo_dcr.codec.records import Encoding
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import DeltaInvalid, InvalidConfig, PayloadCorrupt


@dataclass(frozen=True, slots=True)
class ItemView:
    """One item."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """As the codec sees it; a packed dtype counts bytes."""
    encoding: str
    location: str
    entries: int
    changed: int
    """Entries that change a bit; all entries of an overwrite, whose old bits are not known here."""
    rate: float
    """changed / elements of the tensor."""
    location_bytes: int
    value_bytes: int


@dataclass(frozen=True, slots=True)
class PayloadView:
    """One payload file."""

    file: str
    key: str
    """attempt/owner/payload."""
    digest: str
    nbytes: int
    items: tuple[ItemView, ...]


@dataclass(frozen=True, slots=True)
class DeltaView:
    """The manifest of a delta."""

    base: str
    target: str
    tensors: int
    unchanged_tensors: int
    changed_tensors: int
    dense_tensors: int
    removed_tensors: tuple[str, ...]
    changed_elements: int
    """Of tensors that keep shape and dtype."""
    total_elements: int
    checkpoint_bytes: int
    """All files of the target."""
    carried_files: tuple[str, ...]
    kept_files: tuple[str, ...]
    removed_files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """A delta with its payloads, or one payload alone."""

    delta: DeltaView | None
    payloads: tuple[PayloadView, ...]
    nbytes: int
    """All files: manifest, payloads, carried files."""
    encodings: dict[str, int]
    """Items by encoding."""
    locations: dict[str, int]
    """Items by location type."""


def inspect(path: Path, *, progress: Progress = SILENT) -> Inspection:
    """Read a delta directory or a payload file, check every digest in it, and list what it holds.

    Raises: InvalidConfig when there is neither; DeltaInvalid when something in it is damaged.
    """
    path = Path(path)
    if path.is_dir():
        delta = Delta(path)
        progress.stage("check the delta", 2 * delta.nbytes)
        delta.check(progress)
        views = []
        for number, row in enumerate(delta.manifest.payloads):
            views.append(_payload_view(path / payload_file(number), delta.payload(number)))
            progress.advance(row.nbytes)
        sizes = (os.path.getsize(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)
        return _inspection(_delta_view(delta), views, sum(sizes))
    if not path.is_file():
        raise InvalidConfig("PATH", f"{path} does not exist; name a delta directory or a payload file")
    progress.stage("check the payload", 1)
    try:
        payload = verify_payload(path.read_bytes(), limits=CodecConfig())
    except OSError as error:
        raise DeltaInvalid(str(path), f"it cannot be read ({error.strerror})") from None
    except PayloadCorrupt as error:
        raise DeltaInvalid(str(path), str(error)) from None
    return _inspection(None, [_payload_view(path, payload)], payload.nbytes)


def _payload_view(path: Path, payload: VerifiedPayload) -> PayloadView:
    try:
        rows, items = payload.rows(), payload.decode()
    except PayloadCorrupt as error:
        raise DeltaInvalid(str(path), str(error)) from None
    views = []
    for row, item in zip(rows, items, strict=True):
        kind = LocationType(row.location)
        xor = item.encoding is Encoding.XOR
        changed = int(np.count_nonzero(item.values)) if xor else row.count
        views.append(
            ItemView(
                tensor=row.name,
                dtype=row.dtype,
                shape=row.shape,
                encoding=item.encoding.name.lower(),
                location=kind.name.lower(),
                entries=row.count,
                changed=changed,
                rate=changed / item.tensor.numel,
                location_bytes=row.location_units * kind.planes,
                value_bytes=row.count * bits.width(row.dtype),
            )
        )
    return PayloadView(path.name, str(payload.key), payload.digest.hex(), payload.nbytes, tuple(views))


def _delta_view(delta: Delta) -> DeltaView:
    manifest = delta.manifest
    kept = [row for row in manifest.tensors if row.target is not None]
    changed = [row for row in kept if row.changed and not row.dense]
    dense = sum(row.dense for row in kept)
    return DeltaView(
        base=manifest.base.hex(),
        target=manifest.target.hex(),
        tensors=len(kept),
        unchanged_tensors=len(kept) - len(changed) - dense,
        changed_tensors=len(changed),
        dense_tensors=dense,
        removed_tensors=tuple(row.name for row in manifest.tensors if row.target is None),
        changed_elements=sum(row.changed for row in changed),
        total_elements=sum(tensor.stored.numel for tensor in manifest.layout.values()),
        checkpoint_bytes=manifest.target_bytes,
        carried_files=tuple(row.path for row in manifest.files if row.carried),
        kept_files=tuple(row.path for row in manifest.files if not row.carried),
        removed_files=manifest.removed_files,
    )


def _inspection(delta: DeltaView | None, payloads: list[PayloadView], nbytes: int) -> Inspection:
    items = [item for payload in payloads for item in payload.items]
    return Inspection(
        delta=delta,
        payloads=tuple(payloads),
        nbytes=nbytes,
        encodings=dict(sorted(Counter(item.encoding for item in items).items())),
        locations=dict(sorted(Counter(item.location for item in items).items())),
    )
