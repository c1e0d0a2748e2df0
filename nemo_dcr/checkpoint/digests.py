"""Digests that bind a delta to two checkpoints.

The digest of a tensor is BLAKE2b-128 over its name, dtype, shape and stored words; that of a checkpoint is BLAKE2b-128
over the digests of its tensors, names sorted. So a checkpoint is its tensors: file layout and other files do not enter,
they are bound file by file. Digests detect damage and mistakes; they are no signatures.

Paper: Appendix D (digest), Section 5 (stored bit pattern)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.directory import Checkpoint
from nemo_dcr.checkpoint.progress import Progress
from nemo_dcr.errors import CheckpointInvalid

DIGEST_BYTES = 16
_BLOCK = 1 << 20
_THREADS_MOST = 4


def hash_threads() -> int:
    """Threads that hash at once: one for each usable core, at most four; each holds one tensor mapped."""
    return min(_THREADS_MOST, len(os.sched_getaffinity(0)))


def tensor_digest(meta: TensorMeta, words: Words) -> bytes:
    """The digest of one tensor; `words` are all its stored words in row-major order."""
    state = hashlib.blake2b(msgspec.msgpack.encode((meta.name, meta.dtype, meta.shape)), digest_size=DIGEST_BYTES)
    state.update(words.data)
    return state.digest()


def content_digest(tensors: Mapping[str, bytes]) -> bytes:
    """The digest of a checkpoint out of those of its tensors."""
    rows = [(name, tensors[name]) for name in sorted(tensors)]
    return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=DIGEST_BYTES).digest()


def tensor_digests(checkpoint: Checkpoint, progress: Progress, names: list[str] | None = None) -> dict[str, bytes]:
    """The digest of every tensor, or of those in `names`, by name; several tensors are hashed at once."""
    wanted = list(checkpoint.tensors) if names is None else names

    def digest(name: str) -> bytes:
        return tensor_digest(checkpoint.tensors[name].meta, checkpoint.words(name))

    found = {}
    with ThreadPoolExecutor(hash_threads()) as pool:
        for name, value in zip(wanted, pool.map(digest, wanted), strict=True):
            found[name] = value
            progress.advance(checkpoint.tensors[name].nbytes)
    return found


def file_digest(path: Path) -> bytes:
    """The digest of the bytes of a file. Raises: CheckpointInvalid when it cannot be read."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        for block in _blocks(path):
            state.update(block)
    except OSError as error:
        raise CheckpointInvalid(str(path), f"it cannot be read ({error.strerror})") from None
    return state.digest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            yield block
