"""Writes stamped trace events as lines of JSON, one file for each process life.

A line is written and flushed before the caller goes on, so a killed process leaves every event that took effect; its
last line may be torn and `read_trace` then drops it. Sequence numbers are gapless, which is how a lost line shows.

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from nemo_dcr.errors import InternalError
from nemo_dcr.ids import Incarnation
from nemo_dcr.record import JournalEntry
from nemo_dcr.trace import TRACE_VERSION, Emit, Event, LamportClock


class FileTracer:
    """Stamps `Emit` effects of one process and appends them to a file. Thread safe."""

    def __init__(
        self,
        path: Path,
        node: str,
        incarnation: Incarnation,
        clock: LamportClock,
        watch: Callable[[Event], None] | None = None,
    ) -> None:
        """Create `path`; `watch` is called with every event after it was written."""
        self._node = node
        self._incarnation = incarnation
        self._clock = clock
        self._watch = watch
        self._lock = threading.Lock()
        self._seq = 0
        self._file = path.open("ab", buffering=0)

    def emit(self, emitted: Emit) -> None:
        """Stamp and append one event."""
        with self._lock:
            event = Event(
                TRACE_VERSION,
                self._node,
                self._incarnation,
                self._seq,
                self._clock.tick(),
                emitted.action.value,
                emitted.attempt,
                dict(emitted.args),
                dict(emitted.post),
            )
            self._seq += 1
            self._file.write(msgspec.json.encode(event) + b"\n")
        if self._watch is not None:
            self._watch(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_journal(path: Path, journal: Iterable[JournalEntry]) -> None:
    """Write the control plane's journal as the trace of node `control`; its clocks are those of its own steps."""
    with path.open("wb") as file:
        for entry in journal:
            event = Event(
                TRACE_VERSION,
                "control",
                Incarnation(0),
                entry.seq,
                entry.clock,
                entry.action.value,
                entry.attempt,
                dict(entry.args),
                dict(entry.post),
            )
            file.write(msgspec.json.encode(event) + b"\n")


def read_trace(path: Path) -> list[Event]:
    """All complete events of one process life, in order.

    Raises: InternalError when a sequence number is missing or a line other than the last is unreadable.
    """
    lines = path.read_bytes().split(b"\n")
    events: list[Event] = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError as problem:
            if number == len(lines) - 1:
                break  # torn by a kill
            raise InternalError(f"{path}: line {number + 1} is not a trace event: {problem}") from problem
        if event.seq != len(events):
            raise InternalError(f"{path}: event {len(events)} is missing")
        events.append(event)
    return events
