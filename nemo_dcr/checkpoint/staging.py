"""How files come into being: beside their place, whole, on the disk, and then by a rename.

A work area is a directory with a lock that dies with its process, a folder `new` for what is being written, and perhaps
a journal. What a killed run left is removed by the next run that gets the lock. A full disk, a quota or a size limit is
an `OperatorNeeded` that names the file; what can be known before the first byte is checked before it.
Not handled: file systems without advisory locks or atomic renames.

Paper: Section 7 (object storage)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nemo_dcr.checkpoint.directory import JOURNAL
from nemo_dcr.errors import InvalidConfig, OperatorNeeded

LOCK = "lock"
NEW = "new"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SPARE_BYTES = 1 << 20
"""Directories, journal and block rounding."""


@dataclass(frozen=True, slots=True)
class WorkArea:
    """A locked work directory."""

    directory: Path

    @property
    def new(self) -> Path:
        """Folder of the files that are being written."""
        return self.directory / NEW


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into one clear line.

    Raises: OperatorNeeded when the disk is full or `path` cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OperatorNeeded(f"no space is left for {path}", "make room and run the command again") from None
        raise OperatorNeeded(f"{path} cannot be written ({error.strerror})", "repair that and run it again") from None


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[WorkArea]:
    """Make and lock a work area; on leaving, remove it unless a journal is in it.

    Raises: OperatorNeeded when another process holds it, or it cannot be made.
    """
    with writing(directory):
        lock = _lock(directory)
    try:
        yield WorkArea(directory)
    finally:
        if not (directory / JOURNAL).exists():
            shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def new_directory(out: Path, *, sync: bool) -> Iterator[Path]:
    """An empty directory that becomes `out` on leaving without an error; until then nothing is to be seen there.

    Raises: OperatorNeeded, see `writing` and `claimed`.
    """
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with claimed(_partial(out)) as area:
        with writing(out):
            shutil.rmtree(area.new, ignore_errors=True)
            area.new.mkdir()
        yield area.new
        with writing(out):
            if sync:
                sync_folders(area.new)
            os.replace(area.new, out)
            if sync:
                sync_directory(out.parent)


def require_new(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse an output directory that holds something or lies inside an input; remove what a killed run left beside it.

    Raises: InvalidConfig; OperatorNeeded when another process is writing it.
    """
    if _partial(out).is_dir():
        with claimed(_partial(out)):
            pass
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InvalidConfig("--out", f"{out} exists and is not an empty directory; name another one")
    for given in inputs:
        if out.resolve().is_relative_to(given.resolve()):
            raise InvalidConfig("--out", f"{out} lies inside {given}; name a directory outside of it")


def require_space(directory: Path, nbytes: int) -> None:
    """Refuse to begin when `nbytes` more do not fit below `directory`, or below the parent that exists.

    Raises: OperatorNeeded.
    """
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < nbytes + _SPARE_BYTES:
        reason = f"{directory} has {free} bytes of space left, {nbytes + _SPARE_BYTES} are needed"
        raise OperatorNeeded(reason, "make room and run the command again")


@contextlib.contextmanager
def new_file(path: Path, *, sync: bool) -> Iterator[BinaryIO]:
    """Write a new file with the folders above it. Raises: OperatorNeeded, see `writing`."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as stream:
            yield stream
            stream.flush()
            if sync:
                os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Force the entries of a directory to the disk. Raises: OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folders(directory: Path) -> None:
    """Force the entries of a directory and of all folders below it to the disk. Raises: OSError."""
    for folder, _, _ in os.walk(directory):
        sync_directory(Path(folder))


def _partial(out: Path) -> Path:
    return out.parent / f".{out.name}.nemo-dcr-partial"


def _lock(directory: Path) -> int:
    path = directory / LOCK
    while True:
        directory.mkdir(exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed the file between our open and our lock.
            if _names(path, handle):
                return handle
        except BlockingIOError:
            os.close(handle)
            reason = f"another process is writing in {directory}"
            raise OperatorNeeded(reason, "wait for it, then run the command again") from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
