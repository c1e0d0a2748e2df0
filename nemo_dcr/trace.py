"""Trace events: one line for each protocol action, at the point where it takes effect.

One line is one atomic step of the specification, with the state after it. The pure machines return `Emit` effects; the
runtime stamps them with node, incarnation, a gapless sequence number and a Lamport clock, and writes them. `Action` is
the list that the specification's `Next` has to equal (docs/trace.md).

Spec: Next
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from nemo_dcr.ids import NO_ATTEMPT, AttemptId, Incarnation

TRACE_VERSION = 1

Scalar = str | int | bool | None

E = TypeVar("E")


class Action(StrEnum):
    """Every action of the protocol, spelled as in the specification."""

    # coordinator
    BECOME_COORDINATOR = "BecomeCoordinator"
    START_ATTEMPT = "StartAttempt"
    COMPLETE_ATTEMPT = "CompleteAttempt"
    FAIL_ATTEMPT = "FailAttempt"
    SEND_COMMIT = "SendCommit"
    RESOLVE_COMMIT = "ResolveCommit"
    STEP_DOWN = "StepDown"
    ROLL_FORWARD = "RollForward"
    # control plane
    ACQUIRE_EPOCH = "AcquireEpoch"
    PREPARE = "Prepare"
    COMMIT = "Commit"
    CONFLICT = "Conflict"
    KILL_CANDIDATE = "KillCandidate"
    BOOTSTRAP = "Bootstrap"
    # trainer and owners
    START_OWNER = "StartOwner"
    BEGIN_TRANSITION = "BeginTransition"
    OWNER_PREPARE = "OwnerPrepare"
    EMIT_PAYLOAD = "EmitPayload"
    END_STREAM = "EndStream"
    STOP_OWNER = "StopOwner"
    FAIL_OWNER = "FailOwner"
    UPDATE_BASELINE = "UpdateBaseline"
    COPY_ITEM = "CopyItem"
    BASELINE_FILLED = "BaselineFilled"
    REBUILD_BASELINE = "RebuildBaseline"
    LOSE_BASELINE = "LoseBaseline"
    END_TRANSITION = "EndTransition"
    DROP_CANDIDATE = "DropCandidate"
    # receivers
    START_RECEIVER = "StartReceiver"
    ENDPOINT_PREPARE = "EndpointPrepare"
    REFUSE_PREPARE = "RefusePrepare"
    CLOSE_GATE = "CloseGate"
    OPEN_APPLY = "OpenApply"
    ACCEPT = "Accept"
    SEE_MANIFEST = "SeeManifest"
    IGNORE_DUPLICATE = "IgnoreDuplicate"
    IGNORE_STALE = "IgnoreStale"
    START_APPLY = "StartApply"
    APPLY_ITEM = "ApplyItem"
    FLUSH = "Flush"
    FAIL_RECEIVER = "FailReceiver"
    STOP_AND_WAIT = "StopAndWait"
    OPEN_GATE = "OpenGate"
    ADMIT_REQUEST = "AdmitRequest"
    FINISH_REQUEST = "FinishRequest"
    START_RESTORE = "StartRestore"
    FINISH_RESTORE = "FinishRestore"


@dataclass(frozen=True, slots=True)
class Emit:
    """Effect of a machine: record that `action` took place, with arguments and the state after it."""

    action: Action
    attempt: AttemptId = NO_ATTEMPT
    args: Mapping[str, Scalar] = field(default_factory=dict)
    post: Mapping[str, Scalar] = field(default_factory=dict)


def emits_first(effects: tuple[E, ...]) -> tuple[E, ...]:
    """The same effects with every `Emit` in front, otherwise in order.

    A reply then carries a later clock than the line that explains it, so clocks order the trace causally.
    """
    return tuple(sorted(effects, key=lambda effect: not isinstance(effect, Emit)))


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a trace."""

    version: int
    node: str
    incarnation: Incarnation
    seq: int
    """Gapless for each (node, incarnation), from 0."""
    clock: int
    """Lamport clock; carried by every message and control-plane call."""
    action: str
    attempt: AttemptId
    args: Mapping[str, Any]
    post: Mapping[str, Any]


class Tracer(Protocol):
    """Where stamped events go."""

    def emit(self, emitted: Emit) -> None:
        """Stamp and record one action."""
        ...


class NullTracer:
    """Records nothing; the default."""

    def emit(self, emitted: Emit) -> None:
        """Drop the event."""


class LamportClock:
    """A Lamport clock that threads of one process share."""

    def __init__(self) -> None:
        self._value = 0
        self._lock = threading.Lock()

    def tick(self) -> int:
        """Advance and return the clock: call before sending and for every local event."""
        with self._lock:
            self._value += 1
            return self._value

    def merge(self, other: int) -> int:
        """Take note of a received clock value and advance past it."""
        with self._lock:
            self._value = max(self._value, other) + 1
            return self._value
