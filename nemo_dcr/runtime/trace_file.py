"""Writes stamped trace events as lines of JSON, one file for each process life.

A line is written and flushed before the caller goes on, so a killed process leaves every event that took effect; its
last line may be torn and `read_trace` then drops it. Sequence numbers are gapless, which is how a lost line shows. The
last line of a closed trace counts them, so a tail that was cut off shows too; a killed process has none, and who killed
it declares that next to the traces.

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nemo_dcr.errors import InternalError
from nemo_dcr.ids import Incarnation
from nemo_dcr.record import JournalEntry
from nemo_dcr.trace import TRACE_VERSION, Emit, Event, LamportClock

KILLED = "killed.ndjson"
"""Which processes were killed, in the directory of their traces."""


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a trace that was closed."""

    version: int
    node: str
    incarnation: Incarnation
    end: int
    """Number of events before it."""


@dataclass(frozen=True, slots=True)
class Killed:
    """A process life that was ended from outside, so that its trace has no end."""

    node: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class TraceLog:
    """One process life as its trace tells it."""

    events: tuple[Event, ...]
    ended: bool
    """The trace was closed, and nothing of it is missing."""


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
        """Write the end and close the file; nothing may be emitted any more. Idempotent."""
        with self._lock:
            if not self._file.closed:
                self._file.write(_end(self._node, self._incarnation, self._seq))
                self._file.close()


def _end(node: str, incarnation: Incarnation, count: int) -> bytes:
    return msgspec.json.encode(End(TRACE_VERSION, node, incarnation, count)) + b"\n"


def declare_killed(directory: Path, node: str, incarnation: Incarnation) -> None:
    """Note next to the traces in `directory` that this life was killed."""
    with (directory / KILLED).open("ab") as file:
        file.write(msgspec.json.encode(Killed(node, incarnation)) + b"\n")


def read_killed(directory: Path) -> frozenset[Killed]:
    """The lives that were declared killed."""
    path = directory / KILLED
    lines = path.read_bytes().splitlines() if path.exists() else []
    return frozenset(msgspec.json.decode(line, type=Killed) for line in lines)


def write_journal(path: Path, journal: Iterable[JournalEntry]) -> None:
    """Write the control plane's journal as the trace of node `control`; its clocks are those of its own steps."""
    entries = tuple(journal)
    with path.open("wb") as file:
        for entry in entries:
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
        file.write(_end("control", Incarnation(0), len(entries)))


def read_trace(path: Path) -> list[Event]:
    """All complete events of one process life, in order.

    Raises: InternalError when a sequence number is missing or a line other than the last is unreadable.
    """
    return list(read_log(path).events)


def _decoded(line: bytes) -> Event | End:
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.ValidationError:
        return msgspec.json.decode(line, type=End)


def read_log(path: Path) -> TraceLog:
    """The same, and whether the trace was closed.

    Raises: InternalError as `read_trace`, and when something follows the end or the end counts other events.
    """
    lines = path.read_bytes().split(b"\n")
    events: list[Event] = []
    ended = False
    for number, line in enumerate(lines):
        if not line:
            continue
        if ended:
            raise InternalError(f"{path}: line {number + 1} follows the end")
        try:
            event = _decoded(line)
        except msgspec.DecodeError as problem:
            if number == len(lines) - 1:
                break  # torn by a kill
            raise InternalError(f"{path}: line {number + 1} is not a trace event: {problem}") from problem
        if isinstance(event, End):
            ended = True
            if event.end != len(events):
                raise InternalError(f"{path}: {event.end} events were written, {len(events)} are there")
            continue
        if event.seq != len(events):
            raise InternalError(f"{path}: event {len(events)} is missing")
        events.append(event)
    return TraceLog(tuple(events), ended)
