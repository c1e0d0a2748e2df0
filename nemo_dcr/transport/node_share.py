"""Payloads that the receivers of one node share: whoever wants one first downloads it, the others read its file.

So a payload comes to a node once for each attempt, however many ranks and engines run there. A file carries the frame
of its object and appears whole or not at all. Who downloads holds a lock that the kernel takes back when the process
dies, and then the next one downloads. Sharing never fails an attempt: where it is impossible, each receiver downloads
for itself and a warning says why. Files of earlier attempts go when a later attempt begins, all of them when the last
receiver closes; what a crash leaves goes with the next attempt of the same run.
Not handled: a directory that several hosts reach (locks hold on one host), and the digest of the body, which the caller
computes.

Paper: Section 7 (each rollout node downloads every payload: (1 + N_node) V_payload)   Spec: Channel
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nemo_dcr.errors import TransportFailed
from nemo_dcr.ids import AttemptId, PayloadKey
from nemo_dcr.transport import files, objects
from nemo_dcr.transport.base import Announcement

logger = logging.getLogger(__name__)

_WAIT_S = 0.005
"""A receiver that waits for another's download looks so often for it."""


class NodeShare:
    """The shared payloads of one store on this node; any thread and any process of one user may call. Close it."""

    def __init__(self, directory: str, store: str, *, limit_bytes: int) -> None:
        """Nothing is touched before the first attempt.

        Args:
            directory: the same for all receivers of the node, on its own disk or memory.
            store: tells stores and runs apart.
            limit_bytes: of the files of one attempt; what is beyond is not shared.
        """
        self._root = Path(directory) / hashlib.blake2b(store.encode(), digest_size=16).hexdigest()
        self._limit_bytes = limit_bytes
        self._users: int | None = None
        """Descriptor with a shared lock: a receiver that closes and gets it alone is the last one."""
        self._lock = threading.Lock()

    def begin(self, attempt: AttemptId) -> bool:
        """Join, and delete what earlier attempts left. Idempotent. False when there is nobody to share with now."""
        with self._lock:
            try:
                alone = self._enter()
                for name in os.listdir(self._root):
                    found = objects.attempt_of(name)
                    if found is not None and found < attempt:
                        shutil.rmtree(self._root / name, ignore_errors=True)  # another receiver deletes it too
            except OSError as error:
                logger.warning("payloads are not shared on this node: %s", error)
                return False
            return not alone

    def close(self) -> None:
        """Leave; the last receiver deletes everything. Idempotent."""
        with self._lock:
            if self._users is None:
                return
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._users)
            self._users = None

    def _enter(self) -> bool:
        """Be counted among the receivers of the node; True when there is no other one."""
        if self._users is None:
            self._root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(self._root.parent, {os.geteuid(), 0})
            self._root.mkdir(mode=0o700, exist_ok=True)
            _require_own(self._root, {os.geteuid()})
            self._users = os.open(self._root / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        alone = True
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        fcntl.flock(self._users, fcntl.LOCK_SH)  # a lock that was not converted may be lost; nobody holds one for long
        return alone

    def take(self, announcement: Announcement, download: Callable[[], bytes], check: Callable[[], None]) -> bytes:
        """The payload's bytes: from the file, or by `download`, which then leaves a file for the others.

        `check` is called while another's download is waited for and may raise to give up. Raises: as `download`.
        """
        if self._users is None:
            return download()
        path = self._path(announcement.key)
        while (body := _stored(announcement, path)) is None:
            with _locked(path) as mine:
                if mine:
                    body = _stored(announcement, path)  # by whoever held the lock before
                    if body is None:
                        body = download()
                        self._store(announcement, path, body)
                    return body
            check()
            time.sleep(_WAIT_S)
        return body

    def _path(self, key: PayloadKey) -> Path:
        name = f"{objects.owner_name(key.owner)}-{objects.payload_name(key.payload)}"
        return self._root / objects.attempt_name(key.attempt) / name

    def _store(self, announcement: Announcement, path: Path, body: bytes) -> None:
        try:
            held = sum(_size(path.parent / name) for name in os.listdir(path.parent))
            if held + objects.FRAME_BYTES + len(body) > self._limit_bytes:
                logger.info("payload %s is not shared: the attempt's files have %d bytes", announcement.key, held)
                return
            parts = memoryview(objects.frame(announcement)), memoryview(body)
            with files.temporary_file(path.parent, parts, fsync=False) as temporary:
                os.replace(temporary, path)
        except FileNotFoundError:
            pass  # a later attempt began, and its receiver deleted the directory
        except OSError as error:
            logger.warning("payload %s is not shared: %s", announcement.key, error)


def _require_own(directory: Path, owners: set[int]) -> None:
    """Others must not be able to put links or directories of theirs in the place of ours.

    Raises: PermissionError.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
        raise PermissionError(f"{directory} is a link or belongs to another user; name another directory with share=")


def _stored(announcement: Announcement, path: Path) -> bytes | None:
    """The body in the file; None when there is none, or not the one that was announced."""
    try:
        found = files.read_object(announcement.key, path)
    except (FileNotFoundError, TransportFailed):
        return None
    return found[1] if found is not None and found[0] == announcement else None


def _size(path: Path) -> int:
    """0 for a file that is gone, such as the temporary one of another receiver."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a payload; False when another receiver has it. True also where there is nothing to lock."""
    descriptor, mine = None, True
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mine = False
    except OSError as error:
        logger.warning("payload %s is not shared: %s", path.name, error)
    try:
        yield mine
    finally:
        if descriptor is not None:
            os.close(descriptor)
