"""A file of JSON lines that a process appends to and that never ends the process.

Each line reaches the system before the caller goes on, so a killed process leaves every line that it wrote; the last
one may be torn, and who reads drops what follows the last line end. A disk that is full ends the file and not the
process: one warning says so.
Not handled: files of more than one process; files that may not lose a line (see trace_file).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)


class LineFile:
    """Appends JSON lines. Thread safe."""

    def __init__(self, path: Path, what: str) -> None:
        """Make `path` and its directory; `what` names the lines in the warning."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._what = what
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)

    def append(self, line: object) -> None:
        """Write one line, unless the file ended."""
        encoded = msgspec.json.encode(line) + b"\n"
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(encoded)
            except OSError as problem:
                logger.warning("%s: no further %s are written: %s", self._file.name, self._what, problem)
                self._file.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._file.close()


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their ends; what follows the last line end is torn, or nothing."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]
