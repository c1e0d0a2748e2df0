"""Where a process can be struck: before and after each line of its trace, and around each call to the commit record.

A strike is carried out by the process itself, in the thread that is at the point, so it never depends on timing. Before
a line nothing of the step took effect; after it the step is told and its replies, calls and copies are still to come.
`kill` is SIGKILL. `stop` is SIGSTOP: the process is silent until somebody continues it, and then goes on as if nothing
had been, which makes it a zombie. `lost` is for calls to the commit record alone: the request, or the reply, is lost.
What was struck is written down first, in one file of the system, so that a point that was never reached shows.

Paper: Section 6.3; Appendix B   Spec: Next
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from nemo_dcr.errors import ControlPlaneUnavailable
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, Epoch
from nemo_dcr.record import (
    Acquired,
    CommitRequest,
    Committed,
    ControlPlane,
    ControlView,
    JournalEntry,
    Killed,
    Prepared,
    PrepareRequest,
    Record,
    Refused,
)
from nemo_dcr.trace import Emit, Tracer

T = TypeVar("T")


class Kind(StrEnum):
    """What a strike does."""

    KILL = "kill"
    STOP = "stop"
    LOST = "lost"
    CUT = "cut"
    """From outside: nobody reaches the process for a while."""
    SPLIT = "split"
    """From outside: two groups of processes do not reach each other for a while."""
    FULL = "full"
    """From outside: the payloads' file system is full for a while."""


class Edge(StrEnum):
    """On which side of its effect."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Strike:
    """Strike at the `nth` time (from 1) that a point is reached."""

    point: str
    """A trace action, or `record OPERATION`."""
    edge: Edge
    kind: Kind
    nth: int = 1
    hold_s: float = 0.0
    """A stopped process is continued after so long."""


@dataclass(frozen=True, slots=True)
class Struck:
    """One strike that took place."""

    name: str
    pid: int
    at: float
    """`time.monotonic`, which the processes of one machine share."""
    strike: Strike


@dataclass(frozen=True, slots=True)
class Arm:
    """Call: strike at these points from now on, and at no others."""

    strikes: tuple[Strike, ...]


@dataclass
class Striker:
    """The strikes of one process. Thread safe."""

    name: str
    file: Path
    strikes: tuple[Strike, ...] = ()
    _counts: Counter[tuple[str, Edge]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, strikes: tuple[Strike, ...]) -> None:
        """Strike at these points from now on, and at no others."""
        with self._lock:
            self.strikes = strikes
            self._counts.clear()

    def reach(self, point: str, edge: Edge) -> bool:
        """A point is reached: strike if that is due. True when a message is to be lost."""
        with self._lock:
            self._counts[point, edge] += 1
            due = [each for each in self.strikes if (each.point, each.edge) == (point, edge)]
            due = [each for each in due if each.nth == self._counts[point, edge]]
        for strike in due:
            struck = Struck(self.name, os.getpid(), time.monotonic(), strike)
            with self.file.open("ab", buffering=0) as file:
                file.write(msgspec.json.encode(struck) + b"\n")
            if strike.kind is Kind.LOST:
                return True
            sent = signal.SIGKILL if strike.kind is Kind.KILL else signal.SIGSTOP
            signal.pthread_kill(threading.get_ident(), sent)  # to this thread: it gets no further
        return False


def read_struck(file: Path) -> list[Struck]:
    """Every strike of a system that took place so far."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=Struck) for line in lines]


class StrikingTracer:
    """A tracer whose lines are points."""

    def __init__(self, inner: Tracer, striker: Striker, written: Callable[[Emit], None] = lambda emitted: None) -> None:
        """`written` is told of each line after it was written and before the process can be struck."""
        self._inner = inner
        self._striker = striker
        self._written = written

    def emit(self, emitted: Emit) -> None:
        """As `Tracer.emit`."""
        self._striker.reach(emitted.action.value, Edge.BEFORE)
        self._inner.emit(emitted)
        self._written(emitted)
        self._striker.reach(emitted.action.value, Edge.AFTER)


class StrikingControl:
    """A commit record whose calls are points."""

    def __init__(self, inner: ControlPlane, striker: Striker) -> None:
        self._inner = inner
        self._striker = striker

    def _step(self, operation: str, ask: Callable[[], T]) -> T:
        point = f"record {operation}"
        if self._striker.reach(point, Edge.BEFORE):
            raise ControlPlaneUnavailable(operation, "the request was lost")
        reply = ask()
        if self._striker.reach(point, Edge.AFTER):
            raise ControlPlaneUnavailable(operation, "the reply was lost")
        return reply

    def read(self, candidate: CandidateId = NO_CANDIDATE, *, clock: int = 0) -> ControlView:
        """See `ControlPlane.read`."""
        return self._step("read", lambda: self._inner.read(candidate, clock=clock))

    def acquire_epoch(self, *, clock: int = 0) -> Acquired:
        """See `ControlPlane.acquire_epoch`."""
        return self._step("acquire", lambda: self._inner.acquire_epoch(clock=clock))

    def prepare(self, request: PrepareRequest, *, clock: int = 0) -> Prepared | Refused:
        """See `ControlPlane.prepare`."""
        return self._step("prepare", lambda: self._inner.prepare(request, clock=clock))

    def commit(self, request: CommitRequest, *, clock: int = 0) -> Committed | Refused:
        """See `ControlPlane.commit`."""
        return self._step("commit", lambda: self._inner.commit(request, clock=clock))

    def kill(self, epoch: Epoch, candidate: CandidateId, *, clock: int = 0) -> Killed | Refused:
        """See `ControlPlane.kill`."""
        return self._step("kill", lambda: self._inner.kill(epoch, candidate, clock=clock))

    def bootstrap(self, epoch: Epoch, record: Record, *, clock: int = 0) -> Committed | Refused:
        """See `ControlPlane.bootstrap`."""
        return self._step("bootstrap", lambda: self._inner.bootstrap(epoch, record, clock=clock))

    def history(self) -> tuple[Record, ...]:
        """See `ControlPlane.history`."""
        return self._inner.history()

    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """See `ControlPlane.journal`."""
        return self._inner.journal(start)
