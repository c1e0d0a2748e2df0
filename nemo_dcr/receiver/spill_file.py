"""A file without a name that takes what does not fit into memory, and gives it back.

The file is unlinked as soon as it exists, so its space is free again once it is closed or the process ends, however it
ends. Chunks are appended and read back by their place; it is closed when the last chunk was read or given up. A close
while another thread reads or writes waits for nothing: the last user closes.
Not handled: what the bytes mean, and whether they are still the ones that were written (the caller has their digest).

Paper: Section 6.3 (host staging area)
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_dcr.errors import AttemptFailed


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies in the file."""

    offset: int
    nbytes: int


class SpillFile:
    """One spill file; its methods may be called from several threads."""

    def __init__(self, directory: str = "") -> None:
        """Nothing is made before the first write. `directory`: where; empty for the system's temporary one."""
        self._directory = directory
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._users = 0
        self._closed = False
        self._end = 0

    def write(self, data: memoryview) -> Place:
        """Append a chunk. Raises: AttemptFailed when the disk does not take it, or the file was closed."""
        with self._lock:
            place = Place(self._end, data.nbytes)
            self._end += data.nbytes
        with self._failing(), self._using() as descriptor:
            written = 0
            while written < data.nbytes:
                written += os.pwrite(descriptor, data[written:], place.offset + written)
        return place

    def read(self, place: Place) -> bytearray:
        """A chunk as written. Raises: AttemptFailed when the disk does not give it back, or the file was closed."""
        data = bytearray(place.nbytes)
        view, done = memoryview(data), 0
        with self._failing(), self._using() as descriptor:
            while done < place.nbytes:
                got = os.preadv(descriptor, [view[done:]], place.offset + done)
                if got == 0:
                    raise OSError("the spill file ends early")
                done += got
        return data

    def close(self) -> None:
        """Free the space, at once or when the last user is done; later calls fail."""
        with self._lock:
            self._closed = True
            self._close_unused()

    @contextmanager
    def _using(self) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise OSError("the staging area was closed")
            if self._descriptor is None:
                with tempfile.TemporaryFile(prefix="nemo-dcr-spill-", dir=self._directory or None, buffering=0) as file:
                    self._descriptor = os.dup(file.fileno())
            descriptor = self._descriptor
            self._users += 1
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and not self._users and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = self._directory or tempfile.gettempdir()
            detail = f"free space in {where}, or raise queue.staging_bytes"
            raise AttemptFailed(f"payloads cannot be spilled to disk ({error}); {detail}") from error
