"""The staging area: verified payloads, still compressed, that wait for decoding.

They are given out owner by owner in the order in which the owners' payloads came, and for each owner in declared order:
the lowest number that is there. Up to a budget of bytes they stay in memory; `spill` moves the latest to a spill file
until they fit, and what is given out is read back and verified again.
Not handled: duplicates, and when decoding may begin (see ingest).

Paper: Section 6.3; Appendix C (host staging area, declared order), Figure C.2
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from dataclasses import dataclass

from nemo_dcr.codec.payload import VerifiedPayload, verify_payload
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import AttemptFailed, InternalError, PayloadCorrupt
from nemo_dcr.ids import OwnerId, PayloadKey
from nemo_dcr.receiver.spill_file import Place, SpillFile


@dataclass(slots=True, eq=False)
class _Entry:
    """One payload: its bytes in memory, or its place on disk."""

    key: PayloadKey
    digest: bytes
    nbytes: int
    payload: VerifiedPayload | None
    place: Place | None = None


class StagingArea:
    """Payloads of one attempt; its methods may be called from several threads."""

    def __init__(self, codec: CodecConfig, *, budget_bytes: int, directory: str = "") -> None:
        """`budget_bytes` of compressed payloads stay in memory; the spill file is made in `directory`."""
        self._codec = codec
        self._budget = budget_bytes
        self._directory = directory
        self._lock = threading.Lock()
        self._turns: deque[OwnerId] = deque()
        """Owners, once for each waiting payload, in the order of arrival."""
        self._waiting: dict[OwnerId, list[tuple[int, int, _Entry]]] = {}
        self._arrivals = itertools.count()
        """Heap of (number, entry) by owner."""
        self._in_memory: dict[PayloadKey, _Entry] = {}
        """Entries with bytes in memory, in the order of arrival."""
        self._memory_bytes = 0
        self._spilled = 0
        self._file: SpillFile | None = None
        self._closed = False

    def __len__(self) -> int:
        """Payloads that wait."""
        with self._lock:
            return len(self._turns)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the payloads that wait in memory."""
        with self._lock:
            return self._memory_bytes

    @property
    def spilled(self) -> int:
        """Payloads that wait on disk or are on the way to it."""
        with self._lock:
            return self._spilled

    @property
    def is_full(self) -> bool:
        """True when the budget is used up; one more payload may be over it."""
        with self._lock:
            return self._memory_bytes >= self._budget

    def add(self, payload: VerifiedPayload) -> None:
        """Let one payload wait, in memory. Nothing waits in a closed area."""
        entry = _Entry(payload.key, payload.digest, payload.nbytes, payload)
        with self._lock:
            if self._closed:
                return
            self._turns.append(payload.key.owner)
            heapq.heappush(
                self._waiting.setdefault(payload.key.owner, []), (payload.key.payload, next(self._arrivals), entry)
            )
            self._in_memory[payload.key] = entry
            self._memory_bytes += payload.nbytes

    def spill(self) -> int:
        """Move the latest payloads to disk until the rest is within the budget; returns how many were moved.

        Raises: AttemptFailed when the disk does not take them.
        """
        moved = 0
        while (found := self._over_budget()) is not None:
            entry, payload, file = found
            try:
                place = file.write(payload.data)
            except AttemptFailed:
                self._leave_file()
                if self._closed:
                    break  # the attempt ended meanwhile
                raise
            if self._is_moved(entry, place):
                moved += 1
        return moved

    def _is_moved(self, entry: _Entry, place: Place) -> bool:
        with self._lock:
            if self._in_memory.pop(entry.key, None) is not None:
                entry.payload, entry.place = None, place
                self._memory_bytes -= entry.nbytes
                return True
        self._leave_file()  # it was given out, or everything was dropped, while it was written
        return False

    def take(self) -> VerifiedPayload | None:
        """The next payload, which then waits no more; None when none does.

        Raises: AttemptFailed when it cannot be read back; PayloadCorrupt when it reads back altered.
        """
        with self._lock:
            if not self._turns:
                return None
            _, _, entry = heapq.heappop(self._waiting[self._turns.popleft()])
            if self._in_memory.pop(entry.key, None) is not None:
                self._memory_bytes -= entry.nbytes
                return entry.payload
            file, place = self._file, entry.place
        if file is None or place is None:
            return None
        try:
            payload = verify_payload(file.read(place), limits=self._codec)
        finally:
            self._leave_file()
        if (payload.key, payload.digest) != (entry.key, entry.digest):
            raise PayloadCorrupt(str(entry.key), "the spill file gave back another payload")
        return payload

    def close(self) -> None:
        """Drop everything that waits, for good, and free the spill file."""
        with self._lock:
            self._closed = True
            self._turns.clear()
            self._waiting.clear()
            self._in_memory.clear()
            self._memory_bytes = self._spilled = 0
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def _over_budget(self) -> tuple[_Entry, VerifiedPayload, SpillFile] | None:
        """The payload that goes to disk next, and the file, which stays open for it; None while the budget holds."""
        with self._lock:
            if self._memory_bytes <= self._budget or self._closed:
                return None
            entry = self._in_memory[next(reversed(self._in_memory))]
            if entry.payload is None:
                raise InternalError(f"payload {entry.key} is counted in memory and is not there")
            if self._file is None:
                self._file = SpillFile(self._directory)
            self._spilled += 1
            return entry, entry.payload, self._file

    def _leave_file(self) -> None:
        """One payload less on disk; without any the file goes."""
        with self._lock:
            if self._closed:
                return
            self._spilled -= 1
            file = None
            if not self._spilled:
                file, self._file = self._file, None
        if file is not None:
            file.close()
