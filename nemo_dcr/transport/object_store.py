"""The file object store: payloads as files that appear whole or not at all, under keys that carry the attempt.

A linked file is its own announcement: readers scan the owner's directory, and the `manifest` object closes the set. The
same bytes under the same key are accepted again; other bytes are a conflict. What a killed writer leaves is never read,
and cleanup deletes whole attempts.
Not handled: hosts that share no file system; power loss, unless `fsync` is on (the frame shows a truncated file, and
the attempt is retried). Attempt identifiers are unique within one commit record only, so a root belongs to one run:
give every run its own root (`fresh_root`) or name the run, and a second run in the same root is refused.

Paper: Section 7 (object storage)   Spec: Channel   Conditions: SC4
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_dcr.errors import (
    AttemptStopped,
    InvalidConfig,
    PayloadConflict,
    PayloadCorrupt,
    PayloadMissing,
    TransportFailed,
)
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport import files, objects
from nemo_dcr.transport.base import Announcement, Buffer, Manifest

_POLL_FIRST_S = 0.001
_POLL_MOST_S = 0.05
_DELETED = ".deleted-"
_MARK = "nemo-dcr-store"
_MARK_LINE = "nemo-dcr file object store, version 1, run "


def fresh_root(parent: Path | str) -> Path:
    """Make a new directory under `parent` that no other run has or gets. Raises: TransportFailed."""
    with files.failing_as(f"{parent} cannot be written"):
        Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="nemo-dcr-store-", dir=parent))


class FileObjectStore:
    """A transport over one directory that all processes of a run can reach.

    Raises: InvalidConfig when `root` holds foreign files or belongs to another run; TransportFailed when it cannot be
    written.
    """

    def __init__(
        self, root: Path | str, *, run: str | None = None, fsync: bool = False, missing_after_s: float = 1.0
    ) -> None:
        """Open `root`, or make it.

        Args:
            root: directory of one run.
            run: name of the run, the same in all its processes; None accepts the name that the root already has.
            fsync: force every object to the disk before it is announced; about half as fast.
            missing_after_s: how long a fetch waits for an object that is announced and absent.
        """
        self._root = Path(root)
        self._fsync = fsync
        self._missing_after_s = missing_after_s
        with files.failing_as(f"{root} cannot be written"):
            self._claim(run)

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> FilePublisher:
        """Open the owner's side of an attempt. Raises: TransportFailed; PayloadCorrupt for a damaged manifest."""
        return FilePublisher(self._directory(attempt, owner), attempt, owner, fsync=self._fsync)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> FileSubscription:
        """Open the receiver's side of an attempt; sees everything published before and after."""
        directories = {owner: self._directory(attempt, owner) for owner in owners}
        return FileSubscription(directories, attempt, missing_after_s=self._missing_after_s)

    def cleanup(self, through: AttemptId) -> None:
        """Delete every attempt up to and including `through`, and what an interrupted cleanup left. Idempotent.

        An attempt disappears in one step; a payload that is being read stays readable. Raises: TransportFailed.
        """
        with files.failing_as(f"cannot clean up {self._root}"):
            for name in sorted(os.listdir(self._root)):
                attempt = objects.attempt_of(name)
                if attempt is not None and attempt <= through:
                    gone = self._root / f"{_DELETED}{uuid.uuid4().hex}"
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(self._root / name, gone)
                        shutil.rmtree(gone, ignore_errors=True)
                elif name.startswith(_DELETED):
                    shutil.rmtree(self._root / name, ignore_errors=True)

    def close(self) -> None:
        """There is nothing to let go of: files are open only while they are read or written."""

    def _directory(self, attempt: AttemptId, owner: OwnerId) -> Path:
        return self._root / objects.attempt_name(attempt) / objects.owner_name(owner)

    def _claim(self, run: str | None) -> None:
        mark = self._root / _MARK
        self._root.mkdir(parents=True, exist_ok=True)
        if not mark.exists():
            foreign = [name for name in sorted(os.listdir(self._root)) if not name.startswith(".") and name != _MARK]
            # Another process may have written the mark and begun to publish since the first look.
            if foreign and not mark.exists():
                detail = f"{self._root} holds other files ({foreign[0]}); give a new or an empty directory"
                raise InvalidConfig("object_store.root", detail)
            files.create_once(mark, f"{_MARK_LINE}{run or uuid.uuid4().hex}\n".encode(), fsync=self._fsync)
        found = mark.read_text(encoding="utf-8", errors="replace")
        if not found.startswith(_MARK_LINE):
            raise InvalidConfig("object_store.root", f"{mark} is not the mark of a store that this version can read")
        if run is not None and found != f"{_MARK_LINE}{run}\n":
            holder = found[len(_MARK_LINE) :].strip()
            raise InvalidConfig("object_store.root", f"{self._root} belongs to run {holder!r}, not to {run!r}")


class FilePublisher:
    """Owner side of one attempt in a `FileObjectStore`; its methods may be called from several threads."""

    def __init__(self, directory: Path, attempt: AttemptId, owner: OwnerId, *, fsync: bool) -> None:
        self._directory = directory
        self._attempt = attempt
        self._owner = owner
        self._fsync = fsync
        self._lock = threading.Lock()
        self._stopped = False
        self._published: dict[int, Announcement] = {}
        with files.failing_as(f"{directory} cannot be written"):
            directory.mkdir(parents=True, exist_ok=True)
        self._closed = _stored_manifest(directory, attempt, owner)
        """The manifest that is stored, also when an earlier start of this owner stored it."""

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        """Store one payload; see `Publisher.publish`. Returns when the file is complete and visible."""
        objects.check_publish(self._attempt, self._owner, key, digest)
        with memoryview(data) as view, view.cast("B") as body, self._failures(key):
            announcement = Announcement(key, digest, len(body))
            parts = (memoryview(objects.frame(announcement)), body)
            path = self._directory / objects.payload_name(key.payload)
            self._check_running()
            with (
                files.temporary_file(self._directory, parts, fsync=self._fsync, check=self._check_running) as temporary,
                self._lock,
            ):
                self._check_running()
                if self._closed is not None and announcement not in self._closed.payloads:
                    raise PayloadConflict(str(key), "the set is closed without it")
                linked = files.link_once(temporary, path, fsync=self._fsync)
                if not linked and not files.same_bytes(temporary, path):
                    raise PayloadConflict(str(key), f"{path} already holds other bytes")
                self._published[key.payload] = announcement
        return announcement

    def close_set(self) -> Manifest:
        """Store the manifest; see `Publisher.close_set`. A second call returns the same manifest."""
        name = f"{self._attempt}/{self._owner}/{objects.MANIFEST_NAME}"
        manifest = objects.manifest_of(self._attempt, self._owner, ())
        with self._failures(objects.manifest_key(self._attempt, self._owner)), self._lock:
            self._check_running()
            stored = {number for n in os.listdir(self._directory) if (number := objects.payload_of(n)) is not None}
            if others := sorted(stored - self._published.keys()):
                detail = f"an earlier start of this owner left it, and {len(others) - 1} more"
                raise PayloadConflict(f"{self._attempt}/{self._owner}/{others[0]}", detail)
            manifest = objects.manifest_of(self._attempt, self._owner, self._published.values())
            if self._closed is None:
                body = objects.encode_manifest(manifest)
                content = objects.frame(objects.manifest_announcement(manifest, body)) + body
                if files.create_once(self._directory / objects.MANIFEST_NAME, content, fsync=self._fsync):
                    self._closed = manifest
                else:
                    self._closed = _stored_manifest(self._directory, self._attempt, self._owner)
            if self._closed != manifest:
                raise PayloadConflict(name, "another manifest already closes this set")
        return manifest

    def stop(self) -> None:
        """End this attempt: when it returns, nothing more becomes visible."""
        with self._lock:
            self._stopped = True

    def _check_running(self) -> None:
        if self._stopped:
            raise AttemptStopped(self._attempt, "its publisher was stopped")

    @contextlib.contextmanager
    def _failures(self, key: PayloadKey) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise AttemptStopped(self._attempt, f"{self._directory} was cleaned up") from error
        except OSError as error:
            raise TransportFailed(files.STORE, f"cannot store payload {key}: {error}") from error


class FileSubscription:
    """Receiver side of one attempt in a `FileObjectStore`. One thread polls; any thread may fetch or stop."""

    def __init__(self, directories: dict[OwnerId, Path], attempt: AttemptId, *, missing_after_s: float) -> None:
        self._directories = directories
        self._attempt = attempt
        self._missing_after_s = missing_after_s
        self._open = dict.fromkeys(directories)
        self._announced: dict[OwnerId, set[int]] = {owner: set() for owner in directories}
        self._ready: deque[Announcement | Manifest] = deque()
        self._stopped = threading.Event()

    def poll(self, timeout_s: float) -> Announcement | Manifest | None:
        """The next announcement or manifest; an owner's manifest comes after all its announcements.

        Raises: PayloadCorrupt when a manifest is damaged; TransportFailed when the store cannot be read.
        """
        deadline = time.monotonic() + timeout_s
        wait_s = _POLL_FIRST_S
        while not self._stopped.is_set():
            if not self._ready:
                for owner in list(self._open):
                    self._scan(owner)
            if self._ready:
                return self._ready.popleft()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self._stopped.wait(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _POLL_MOST_S)
        return None

    def fetch(self, announcement: Announcement) -> bytes:
        """The payload's bytes as stored; waits up to `missing_after_s` for an object that is absent or not whole.

        Raises: PayloadMissing when it stays so, when the subscription is stopped, or when the stored object has another
        size or digest than the announcement; TransportFailed when the store cannot be read.
        """
        key = announcement.key
        if key.attempt != self._attempt or key.owner not in self._directories:
            raise PayloadMissing(str(key), f"this subscription reads attempt {self._attempt} of other owners")
        path = self._directories[key.owner] / objects.payload_name(key.payload)
        deadline = time.monotonic() + self._missing_after_s
        wait_s = _POLL_FIRST_S
        while True:
            what = "is absent"
            with contextlib.suppress(FileNotFoundError):
                found = files.read_object(key, path)
                if found is not None and found[0] == announcement:
                    return found[1]
                what = "is truncated or foreign" if found is None else "has another size or digest"
            if self._stopped.is_set():
                raise PayloadMissing(str(key), "the subscription was stopped")
            if time.monotonic() >= deadline:
                raise PayloadMissing(str(key), f"{path} {what}")
            self._stopped.wait(wait_s)
            wait_s = min(2 * wait_s, _POLL_MOST_S)

    def stop(self) -> None:
        """Stop delivery; a blocked poll or fetch returns promptly."""
        self._stopped.set()

    def _scan(self, owner: OwnerId) -> None:
        directory = self._directories[owner]
        names = files.list_names(directory)
        announced = self._announced[owner]
        numbers = {number for name in names if (number := objects.payload_of(name)) is not None}
        for number in sorted(numbers - announced):
            key = PayloadKey(self._attempt, owner, number)
            with contextlib.suppress(FileNotFoundError):
                self._announce(announced, files.read_announcement(key, directory / objects.payload_name(number)))
        if objects.MANIFEST_NAME in names:
            manifest = _stored_manifest(directory, self._attempt, owner)
            # A listing is not one instant: it may show the manifest and miss a payload that was linked before it.
            for payload in manifest.payloads if manifest is not None else ():
                self._announce(announced, payload)
            if manifest is not None:
                self._ready.append(manifest)
                del self._open[owner]

    def _announce(self, announced: set[int], payload: Announcement | None) -> None:
        if payload is not None and payload.key.payload not in announced:
            announced.add(payload.key.payload)
            self._ready.append(payload)


def _stored_manifest(directory: Path, attempt: AttemptId, owner: OwnerId) -> Manifest | None:
    """The manifest of a set, None when there is none. Raises: PayloadCorrupt when it is damaged."""
    path = directory / objects.MANIFEST_NAME
    try:
        found = files.read_object(objects.manifest_key(attempt, owner), path)
    except FileNotFoundError:
        return None
    if found is None:
        raise PayloadCorrupt(f"{attempt}/{owner}/{objects.MANIFEST_NAME}", f"{path} is truncated or foreign")
    return objects.decode_manifest(attempt, owner, found[1], found[0].digest)
