"""From two checkpoints to a delta directory.

Tensors of the new checkpoint are compared in layout order. Same shape and dtype: the XOR of the elements whose stored
bits differ, or of all its elements where a list of the places, at eight bytes each, would be twice as large as the
tensor (half of a BF16 tensor). New, reshaped or re-typed: all elements, as an overwrite. Items fill a payload until the
tensors behind them reach the bucket target, or a quarter of it in bytes of items, which are held several times then.
Other files travel when the old checkpoint has not the same bytes there.
Memory: a few times the largest tensor, and the items of one bucket.
Not handled: renamed tensors, which travel whole.

Paper: Section 5 (compare step), Appendix C (buckets)   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_dcr.checkpoint.compare import count_changes
from nemo_dcr.checkpoint.digests import content_digest, file_digest, tensor_digest
from nemo_dcr.checkpoint.directory import Checkpoint, open_checkpoint
from nemo_dcr.checkpoint.files import copy_file
from nemo_dcr.checkpoint.header import StoredTensor
from nemo_dcr.checkpoint.manifest import (
    FILES,
    MANIFEST,
    FileRow,
    Manifest,
    PayloadRow,
    ShardRow,
    TensorRow,
    encode_manifest,
    payload_file,
    payload_key,
)
from nemo_dcr.checkpoint.progress import SILENT, Progress
from nemo_dcr.checkpoint.staging import new_directory, new_file, require_new
from nemo_dcr.codec.buckets import Chunk, pack_buckets
from nemo_dcr.codec.payload import encode_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import MIB, CodecConfig
from nemo_dcr.kernels import plain

DIFF_CODEC = CodecConfig(bucket_target_bytes=64 * MIB)
"""64 MiB of tensors behind one payload bound the memory of both commands."""
INDEX_SHARE = 2
"""All elements of a tensor travel as one XOR run iff the indices of the changed ones exceed so many times its bytes."""
_INDEX_BYTES = 8
COPIES = 4
"""Times that an item is held while its payload is made; so many times its own bytes count towards the bucket."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What `diff` wrote."""

    tensors: int
    """Tensors of the new checkpoint."""
    changed_tensors: int
    """Same shape and dtype, other bits."""
    dense_tensors: int
    """New, reshaped or re-typed."""
    removed_tensors: int
    changed_elements: int
    """In the changed tensors; dense ones are not counted."""
    total_elements: int
    """Of the new checkpoint."""
    payloads: int
    payload_bytes: int
    carried_files: int
    carried_bytes: int
    delta_bytes: int
    """All files of the delta."""
    checkpoint_bytes: int
    """All tensors of the new checkpoint."""
    base: str
    """Digest of the old tensors, hexadecimal."""
    target: str
    """Digest of the new tensors, hexadecimal."""


def diff(
    old: Path, new: Path, out: Path, *, codec: CodecConfig = DIFF_CODEC, sync: bool = True, progress: Progress = SILENT
) -> DiffReport:
    """Write the delta from checkpoint `old` to checkpoint `new` as the directory `out`.

    `sync` forces it to the disk before it appears under its name.

    Raises: InvalidConfig for unusable directories; CheckpointInvalid for damaged ones; OperatorNeeded when `out` cannot
    be written.
    """
    require_new(out, (old, new))
    before, after = open_checkpoint(old), open_checkpoint(new)
    with new_directory(out, sync=sync) as directory, ThreadPoolExecutor(2) as pool:
        comparison = _Comparison(before, after, pool, progress)
        payloads = []
        for number, bucket in enumerate(pack_buckets(comparison.chunks(), codec.bucket_target_bytes)):
            payload = encode_payload(payload_key(number), bucket.items, zstd_level=codec.zstd_level)
            with new_file(directory / payload_file(number), sync=sync) as stream:
                stream.write(payload.data)
            payloads.append(PayloadRow(payload.digest, len(payload.data)))
            comparison.packed(number, [item.tensor.name for item in bucket.items])
            del payload, bucket
        files = _carry_files(before, after, directory, sync, progress)
        manifest = comparison.manifest(payloads, files)
        data = encode_manifest(manifest)
        with new_file(directory / MANIFEST, sync=sync) as stream:
            stream.write(data)
    return _report(manifest, after, len(data))


class _Comparison:
    """Both checkpoints, tensor by tensor; the rows of the manifest grow on the way."""

    def __init__(self, old: Checkpoint, new: Checkpoint, pool: ThreadPoolExecutor, progress: Progress) -> None:
        self._old, self._new, self._pool, self._progress = old, new, pool, progress
        self._rows: dict[str, TensorRow] = {}

    def chunks(self) -> Iterator[Chunk]:
        """One chunk for each tensor of the new checkpoint, in layout order."""
        self._progress.stage("compare", self._new.nbytes)
        for name, tensor in self._new.tensors.items():
            item = self._compare(name, tensor)
            yield Chunk((), 0) if item is None else Chunk((item,), max(tensor.nbytes, COPIES * _held_bytes(item)))
            del item
            self._progress.advance(tensor.nbytes)

    def packed(self, number: int, names: list[str]) -> None:
        """Note that the items of `names` are in payload `number`."""
        for name in names:
            row = self._rows[name]
            self._rows[name] = TensorRow(name, row.base, row.target, number, row.dense, row.changed)

    def manifest(self, payloads: list[PayloadRow], files: list[FileRow]) -> Manifest:
        """The manifest, once every tensor was compared."""
        removed = [name for name in self._old.tensors if name not in self._new.tensors]
        rows = [*self._rows.values()]
        rows += [TensorRow(name, self._digest(self._old, name), None, None, False, 0) for name in removed]
        new_paths = {*self._new.files, *self._new.shards}
        return Manifest(
            base=content_digest({row.name: row.base for row in rows if row.base is not None}),
            target=content_digest({row.name: row.target for row in rows if row.target is not None}),
            tensors=tuple(rows),
            shards=tuple(ShardRow(file, header.raw) for file, header in self._new.shards.items()),
            files=tuple(files),
            removed_files=tuple(path for path in self._old.files if path not in new_paths),
            payloads=tuple(payloads),
        )

    def _compare(self, name: str, tensor: StoredTensor) -> Item | None:
        held = self._old.tensors.get(name)
        words, stored = self._new.words(name), tensor.stored
        target = self._pool.submit(tensor_digest, tensor.meta, words)
        if held is None or held.meta != tensor.meta:
            base = None if held is None else self._digest(self._old, name)
            self._rows[name] = TensorRow(name, base, target.result(), None, True, stored.numel)
            return Item.run(stored, Encoding.OVERWRITE, 0, np.array(words)) if len(words) else None
        old = self._old.words(name)
        changed, _ = count_changes(words, old)
        if not changed:
            self._rows[name] = TensorRow(name, target.result(), target.result(), None, False, 0)
            return None
        base_digest = self._pool.submit(tensor_digest, held.meta, old)
        if changed * _INDEX_BYTES > INDEX_SHARE * tensor.nbytes:
            item = Item.run(stored, Encoding.XOR, 0, plain.xor_masks(words, old, slice(None)))
        else:
            indices = plain.changed_indices(words, old)
            item = Item.of(stored, Encoding.XOR, indices, plain.xor_masks(words, old, indices))
        self._rows[name] = TensorRow(name, base_digest.result(), target.result(), None, False, changed)
        return item

    @staticmethod
    def _digest(checkpoint: Checkpoint, name: str) -> bytes:
        return tensor_digest(checkpoint.tensors[name].meta, checkpoint.words(name))


def _held_bytes(item: Item) -> int:
    return item.values.nbytes + (0 if item.indices is None else item.indices.nbytes)


def _carry_files(old: Checkpoint, new: Checkpoint, directory: Path, sync: bool, progress: Progress) -> list[FileRow]:
    progress.stage("other files", sum((new.directory / path).stat().st_size for path in new.files))
    rows = []
    for path in new.files:
        source = new.directory / path
        digest, size = file_digest(source), source.stat().st_size
        carried = path not in old.files or file_digest(old.directory / path) != digest
        if carried:
            copy_file(source, directory / FILES / path, digest, sync=sync)
        rows.append(FileRow(path, size, digest, carried))
        progress.advance(size)
    return rows


def _report(manifest: Manifest, new: Checkpoint, manifest_bytes: int) -> DiffReport:
    kept = [row for row in manifest.tensors if row.target is not None]
    changed = [row for row in kept if row.changed and not row.dense]
    carried = [row.nbytes for row in manifest.files if row.carried]
    payload_bytes = sum(row.nbytes for row in manifest.payloads)
    return DiffReport(
        tensors=len(kept),
        changed_tensors=len(changed),
        dense_tensors=sum(row.dense for row in kept),
        removed_tensors=len(manifest.tensors) - len(kept),
        changed_elements=sum(row.changed for row in changed),
        total_elements=sum(tensor.stored.numel for tensor in new.tensors.values()),
        payloads=len(manifest.payloads),
        payload_bytes=payload_bytes,
        carried_files=len(carried),
        carried_bytes=sum(carried),
        delta_bytes=payload_bytes + sum(carried) + manifest_bytes,
        checkpoint_bytes=new.nbytes,
        base=manifest.base.hex(),
        target=manifest.target.hex(),
    )
