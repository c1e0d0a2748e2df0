"""A base and its deltas as a new directory.

Everything is checked first: deltas, chain, base, space. The result is written beside its place, read again and renamed,
so that it appears whole or not at all.

Paper: Section 6.1 (XOR and overwrite), Section 8 (bit-exactness)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_dcr.checkpoint.delta import open_chain
from nemo_dcr.checkpoint.directory import open_checkpoint
from nemo_dcr.checkpoint.progress import SILENT, Progress
from nemo_dcr.checkpoint.staging import new_directory, require_new, require_space
from nemo_dcr.checkpoint.target import Target


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """What `apply` did."""

    deltas: int
    """Deltas in the chain."""
    tensors: int
    """Tensors of the result."""
    written_files: int
    written_bytes: int
    removed_files: int
    """Files of the base that the result lacks; only an in-place application removes any."""
    already_applied: bool
    """An in-place application found the result in place."""
    digest: str
    """Digest of the result's tensors, hexadecimal."""


def apply(
    base: Path, deltas: Sequence[Path], out: Path, *, sync: bool = True, progress: Progress = SILENT
) -> ApplyReport:
    """Write the checkpoint that `deltas`, in this order, give on `base`, as the directory `out`.

    `sync` forces it to the disk before it appears under its name. A run that fails or is killed leaves nothing there.

    Raises: InvalidConfig for unusable directories; DeltaInvalid, BaseMismatch and CheckpointInvalid before anything is
    written; OperatorNeeded when `out` cannot be written.
    """
    require_new(out, (base, *deltas))
    chain = open_chain(deltas, progress)
    target = Target(open_checkpoint(base), chain)
    manifest = chain.target
    require_space(out.parent, manifest.target_bytes)
    target.check_base(progress)
    shards, files = list(manifest.headers), list(manifest.files)
    with new_directory(out, sync=sync) as directory:
        target.write(directory, shards, files, sync=sync, progress=progress)
    return ApplyReport(
        deltas=len(chain.links),
        tensors=len(manifest.layout),
        written_files=len(shards) + len(files),
        written_bytes=manifest.target_bytes,
        removed_files=0,
        already_applied=False,
        digest=manifest.target.hex(),
    )
