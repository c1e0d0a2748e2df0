"""A base and its deltas in the base's own directory, safe against a kill at any moment.

Files that change are written into a work directory, read again and forced to the disk. Then a journal appears there by
one rename: before it the base is whole, after it the new files are. From then on the new files are renamed into place
one by one and old ones removed; a run that finds a journal first finishes that. A checkpoint with a journal is refused
by every other command, because it may be a mixture.
A base that already is the target is accepted, so a killed run can always be repeated.
Not handled: readers that open several files while they are renamed; a checkpoint of one file has no such moment.

Paper: Section 6.1 (XOR and overwrite), Section 8 (bit-exactness)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nemo_dcr.checkpoint.apply import ApplyReport
from nemo_dcr.checkpoint.delta import open_chain
from nemo_dcr.checkpoint.digests import DIGEST_BYTES, content_digest, tensor_digests
from nemo_dcr.checkpoint.directory import JOURNAL, WORK_DIRECTORY, open_checkpoint, safe_path
from nemo_dcr.checkpoint.progress import SILENT, Progress
from nemo_dcr.checkpoint.staging import (
    WorkArea,
    claimed,
    new_file,
    require_space,
    sync_directory,
    sync_folders,
    writing,
)
from nemo_dcr.checkpoint.target import Target
from nemo_dcr.errors import CheckpointInvalid, InvalidConfig

_DRAFT = "journal.draft"


class Journal(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is left to do once every new file lies in the work directory."""

    version: int
    remove: tuple[str, ...]
    """Files to remove from the checkpoint."""
    replace: tuple[str, ...]
    """Files to rename from the work directory into the checkpoint."""


def apply_in_place(base: Path, deltas: Sequence[Path], *, progress: Progress = SILENT) -> ApplyReport:
    """Turn the checkpoint `base` into the one that `deltas`, in this order, give on it.

    A run that fails before its journal leaves the base as it was. A later run finishes what a killed one began.

    Raises: InvalidConfig for unusable directories; DeltaInvalid, BaseMismatch and CheckpointInvalid before the base is
    touched; OperatorNeeded when it cannot be written or another process writes in it.
    """
    base = Path(base)
    if not base.is_dir():
        raise InvalidConfig("checkpoint", f"{base} is not a directory; name a Hugging Face model directory")
    with claimed(base / WORK_DIRECTORY) as area:
        if (area.directory / JOURNAL).exists():
            _finish(base, area)
        chain = open_chain(deltas, progress)
        target = Target(open_checkpoint(base), chain)
        if chain.base != chain.target.target and _is_target(target, progress):
            return _report(target, written=0, nbytes=0, removed=0, already=True)
        shards, files = target.changed_shards(), target.changed_files()
        nbytes = target.nbytes(shards, files)
        require_space(base, nbytes)
        _require_free_paths(target, [*shards, *(row.path for row in files)])
        target.check_base(progress)
        with writing(base):
            shutil.rmtree(area.new, ignore_errors=True)
            area.new.mkdir()
        target.write(area.new, shards, files, sync=True, progress=progress)
        journal = Journal(1, tuple(_removed(target)), (*shards, *(row.path for row in files)))
        _commit(area, journal)
        _finish(base, area)
        return _report(target, written=len(journal.replace), nbytes=nbytes, removed=len(journal.remove), already=False)


def _is_target(target: Target, progress: Progress) -> bool:
    """True iff the base is the result already, as after a run that was killed in its last moment."""
    manifest, base = target.chain.target, target.base
    if {name: tensor.meta for name, tensor in base.tensors.items()} != {
        name: tensor.meta for name, tensor in manifest.layout.items()
    } or not target.is_present():
        return False
    # Most often one tensor tells base and target apart; only a base that passes it is hashed whole.
    changed = next((row for row in manifest.tensors if row.changed), None)
    if changed is not None and tensor_digests(base, SILENT, [changed.name])[changed.name] != changed.target:
        return False
    progress.stage("compare with the target", base.nbytes)
    return content_digest(tensor_digests(base, progress)) == manifest.target


def _removed(target: Target) -> list[str]:
    """Files of the base that the target does not have; files that no delta knows stay."""
    manifest, base = target.chain.target, target.base
    kept = {row.path for row in manifest.files} | set(manifest.headers)
    return sorted((target.chain.removed_files & set(base.files)) | (set(base.shards) - kept))


def _require_free_paths(target: Target, paths: Sequence[str]) -> None:
    """Refuse a new file whose place is a directory, or lies below a file."""
    base = target.base.directory
    taken = set(_removed(target))
    for path in paths:
        above = (parent.as_posix() for parent in Path(path).parents if parent != Path())
        blocked = [name for name in above if (base / name).is_file() or (base / name).is_symlink()]
        if (base / path).is_dir() or any(name not in taken for name in blocked):
            raise InvalidConfig("--in-place", f"{base / path} cannot be a file there; use --out instead")


def _commit(area: WorkArea, journal: Journal) -> None:
    body = msgspec.json.encode(journal)
    draft = area.directory / _DRAFT
    with writing(draft):
        draft.unlink(missing_ok=True)
    with new_file(draft, sync=True) as stream:
        stream.write(hashlib.blake2b(body, digest_size=DIGEST_BYTES).hexdigest().encode() + b"\n" + body)
    with writing(area.directory):
        sync_folders(area.new)
        sync_directory(area.directory.parent)
        os.replace(draft, area.directory / JOURNAL)
        sync_directory(area.directory)


def _finish(base: Path, area: WorkArea) -> None:
    """Do what the journal says, from wherever an earlier run stopped; then remove the journal."""
    path = area.directory / JOURNAL
    journal = _read_journal(path)
    with writing(base):
        for name in journal.remove:
            (base / name).unlink(missing_ok=True)
            _remove_empty_folders(base, base / name)
        for name in journal.replace:
            if (area.new / name).exists():
                (base / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(area.new / name, base / name)
            elif not (base / name).exists():
                raise CheckpointInvalid(str(base / name), "an interrupted apply lost it; restore the checkpoint")
        for folder in {(base / name).parent for name in (*journal.remove, *journal.replace)}:
            if folder.is_dir():
                sync_directory(folder)
        sync_directory(base)
        path.unlink()
        sync_directory(area.directory)


def _read_journal(path: Path) -> Journal:
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if hashlib.blake2b(body, digest_size=DIGEST_BYTES).hexdigest().encode() != digest:
            raise ValueError("its digest does not match its bytes")
        journal = msgspec.json.decode(body, type=Journal)
        if journal.version != 1 or not all(safe_path(name) for name in (*journal.remove, *journal.replace)):
            raise ValueError("a version or a path that this program does not accept")
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"{error}; restore the checkpoint from a copy") from None
    return journal


def _remove_empty_folders(base: Path, file: Path) -> None:
    with contextlib.suppress(OSError):
        for folder in file.parents:
            if folder == base:
                break
            folder.rmdir()


def _report(target: Target, *, written: int, nbytes: int, removed: int, already: bool) -> ApplyReport:
    return ApplyReport(
        deltas=len(target.chain.links),
        tensors=len(target.chain.target.layout),
        written_files=written,
        written_bytes=nbytes,
        removed_files=removed,
        already_applied=already,
        digest=target.chain.target.target.hex(),
    )
