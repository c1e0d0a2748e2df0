"""Files that appear whole or not at all, and objects read back from them.

A file is written under a temporary name beside its target and then linked to it. link(2) creates the name only if it is
absent, so of several writers one wins and none is torn. Temporary names begin with `.tmp-` and are never read.

Paper: Section 7 (object storage)   Spec: Channel
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from nemo_dcr.errors import TransportFailed
from nemo_dcr.ids import PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement

BLOCK_BYTES = 8 << 20
"""Bytes of one write or read call, and how often a writer looks whether it was stopped."""
STORE = "file object store"

_TEMPORARY = ".tmp-"


@contextlib.contextmanager
def temporary_file(
    directory: Path, parts: tuple[memoryview, ...], *, fsync: bool, check: Callable[[], None] | None = None
) -> Iterator[Path]:
    """Write `parts` to a new temporary file of `directory`; the file is gone when the context ends.

    `check` is called before every block and may raise to give up. Raises: OSError.
    """
    path = directory / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        with open(path, "xb", buffering=0) as file:
            for part in parts:
                for begin in range(0, len(part), BLOCK_BYTES):
                    if check is not None:
                        check()
                    _write(file.fileno(), part[begin : begin + BLOCK_BYTES])
            if fsync:
                os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def link_once(temporary: Path, path: Path, *, fsync: bool) -> bool:
    """Give a written file its name; False when the name is taken. Raises: OSError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    if fsync:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return True


def create_once(path: Path, content: bytes, *, fsync: bool) -> bool:
    """Create `path` with `content` in one step; False when it already exists. Raises: OSError."""
    with temporary_file(path.parent, (memoryview(content),), fsync=fsync) as temporary:
        return link_once(temporary, path, fsync=fsync)


def same_bytes(left: Path, right: Path) -> bool:
    """Compare two files byte by byte. Raises: OSError."""
    if left.stat().st_size != right.stat().st_size:
        return False
    with open(left, "rb") as one, open(right, "rb") as other:
        while block := one.read(BLOCK_BYTES):
            if block != other.read(BLOCK_BYTES):
                return False
    return True


def read_announcement(key: PayloadKey, path: Path) -> Announcement | None:
    """What the frame of a stored object says; None when the file is not the whole object of `key`.

    Raises: FileNotFoundError; TransportFailed when the file cannot be read.
    """
    with _reading(path), open(path, "rb", buffering=0) as file:
        return objects.read_frame(key, file.read(objects.FRAME_BYTES), os.fstat(file.fileno()).st_size)


def read_object(key: PayloadKey, path: Path) -> tuple[Announcement, bytes] | None:
    """A stored object's announcement and body; None when the file is not the whole object of `key`.

    Raises: FileNotFoundError; TransportFailed when the file cannot be read.
    """
    with _reading(path), open(path, "rb") as file:
        found = objects.read_frame(key, file.read(objects.FRAME_BYTES), os.fstat(file.fileno()).st_size)
        body = file.read(found.nbytes) if found is not None else b""
    return (found, body) if found is not None and len(body) == found.nbytes else None


def list_names(directory: Path) -> list[str]:
    """Names in a directory, none when it does not exist. Raises: TransportFailed."""
    try:
        with _reading(directory):
            return os.listdir(directory)
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def failing_as(detail: str) -> Iterator[None]:
    """Turn an OSError into the transport's typed error.

    Raises: TransportFailed.
    """
    try:
        yield
    except OSError as error:
        raise TransportFailed(STORE, f"{detail}: {error}") from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """An absent file is the reader's own business; any other failure is the transport's."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TransportFailed(STORE, f"cannot read {path}: {error}") from error


def _write(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]
