"""The bytes of payloads at one node: frames in memory up to a budget, spill files past it, and no more than both.

Room is reserved for a whole payload before its first frame is granted. A payload in memory is the list of the frames as
they came from the socket, so it is held once, also while it is forwarded. A spill file has no name: it is gone with the
process, however that ends.
Not handled: a payload larger than the whole budget; it can never be reserved, and the caller refuses it.

Paper: Section 7 (relay tree); Appendix C (queues)   Spec: Channel
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import zmq

from nemo_dcr.errors import TransportFailed
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.settings import FRAME_BYTES

_OWN_MEMORY_BYTES = 64 << 10


class Body:
    """A payload in memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.available = 0
        """Bytes that are here; always whole frames, or all."""
        self._frames: list[zmq.Frame | bytes] = []

    def append(self, frame: zmq.Frame) -> None:
        """Take the next frame. Raises: TransportFailed."""
        nbytes = len(frame.buffer)
        # A short message may share its memory with others that arrived together; keeping it would keep them all.
        self._frames.append(frame if nbytes >= _OWN_MEMORY_BYTES else bytes(frame.buffer))
        self.available += nbytes

    def chunk(self, offset: int) -> Any:
        """The frame that begins at `offset`. Raises: TransportFailed."""
        return self._frames[offset // FRAME_BYTES]

    def close(self) -> None:
        """Let the bytes go."""
        self._frames.clear()


class SpilledBody(Body):
    """A payload in a file without a name."""

    def __init__(self, nbytes: int, directory: Path) -> None:
        super().__init__(nbytes)
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(prefix="nemo-dcr-relay-", dir=directory, buffering=0)  # noqa: SIM115
        except OSError as problem:
            raise self._failed("open", problem) from problem

    def append(self, frame: zmq.Frame) -> None:
        """As `Body.append`."""
        rest = memoryview(frame.buffer)
        try:
            while len(rest):
                written = os.pwrite(self._file.fileno(), rest, self.available)
                self.available += written
                rest = rest[written:]
        except OSError as problem:
            raise self._failed("write", problem) from problem

    def chunk(self, offset: int) -> Any:
        """See `Body.chunk`."""
        wanted = min(FRAME_BYTES, self.nbytes - offset)
        try:
            found = os.pread(self._file.fileno(), wanted, offset)
        except OSError as problem:
            raise self._failed("read", problem) from problem
        if len(found) != wanted:
            raise TransportFailed("relay", f"a spill file in {self._directory} lost its end; check that disk")
        return found

    def close(self) -> None:
        """As `Body.close`."""
        self._file.close()

    def _failed(self, what: str, problem: OSError) -> TransportFailed:
        return TransportFailed("relay", f"cannot {what} a spill file in {self._directory}: {problem}; make room there")


class Store:
    """Reservations of one node."""

    def __init__(self, memory_bytes: int, spill_bytes: int, directory: Path | None, counters: NodeCounters) -> None:
        """`directory` is where spill files are made; None takes the system's temporary directory."""
        self._memory_bytes = memory_bytes
        self._spill_bytes = spill_bytes
        self._directory = directory or Path(tempfile.gettempdir())
        self._counters = counters

    @property
    def capacity(self) -> int:
        """Bytes of the largest payload that can ever be reserved."""
        return max(self._memory_bytes, self._spill_bytes)

    def reserve(self, nbytes: int) -> Body | None:
        """A body for `nbytes`, or None while there is no room. Raises: TransportFailed when no file can be made."""
        counters = self._counters
        if counters.memory_bytes + nbytes <= self._memory_bytes:
            counters.memory_bytes += nbytes
            counters.memory_peak_bytes = max(counters.memory_peak_bytes, counters.memory_bytes)
            return Body(nbytes)
        if counters.spilled_bytes + nbytes <= self._spill_bytes:
            body = SpilledBody(nbytes, self._directory)
            counters.spilled_bytes += nbytes
            counters.spilled_peak_bytes = max(counters.spilled_peak_bytes, counters.spilled_bytes)
            return body
        return None

    def release(self, body: Body) -> None:
        """Free a body."""
        body.close()
        if isinstance(body, SpilledBody):
            self._counters.spilled_bytes -= body.nbytes
        else:
            self._counters.memory_bytes -= body.nbytes
