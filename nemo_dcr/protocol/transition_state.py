"""State of the coordinator: which record it believes in, what it saw of the endpoints, and what it waits for.

Paper: Section 6.3; Appendix B   Spec: coord
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_dcr.config import RefitConfig
from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId, CandidateId, Epoch, OwnerId, ReceiverId
from nemo_dcr.protocol.attempt import AttemptState
from nemo_dcr.protocol.coordinator_events import CoordinatorEffect
from nemo_dcr.protocol.messages import OwnerReport, ReceiverReport
from nemo_dcr.record import ControlView, PrepareRequest, Record
from nemo_dcr.trace import Action, Emit, Scalar

NO_EPOCH = Epoch(0)


class Phase(StrEnum):
    """What the coordinator waits for."""

    OUT = "out"
    """Not the coordinator: never was, or stepped down."""
    ACQUIRING = "acquiring"
    READING = "reading"
    """The record, before anything is decided."""
    SURVEYING = "surveying"
    READY = "ready"
    """Nothing: everything that answers holds the record."""
    PREPARING = "preparing"
    """The control plane's prepare."""
    RUNNING = "running"
    """An attempt."""
    COMMITTING = "committing"
    WAITING_DEADLINE = "waiting_deadline"
    """The commit's outcome is unknown and may still change."""
    RESOLVING = "resolving"
    """The one read that settles an unknown commit."""
    CONFIRMING = "confirming"
    """The read after a restore."""
    BOOTSTRAPPING = "bootstrapping"
    RESTORING = "restoring"
    """Restored receivers learn that their storage is committed."""
    REBUILDING = "rebuilding"
    """Lost baselines are refilled from resident weights."""
    UPDATING = "updating"
    """Baselines take the committed candidate."""
    ENDING = "ending"
    """Owners thaw the candidate."""
    OPENING = "opening"
    """Gates open."""
    KILLING = "killing"
    DROPPING = "dropping"
    """Owners give a dead candidate up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """What one coordinator is told at its start."""

    refit: RefitConfig
    owners: tuple[OwnerId, ...]
    """All owners, sorted. No attempt runs without all of them."""
    bootstrap_instances: int = 1
    """The first record waits for so many complete engine instances."""


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """One coordinator process. Nothing of it is durable: a new one starts from the record and the endpoints."""

    config: CoordinatorConfig
    phase: Phase = Phase.OUT
    epoch: Epoch = NO_EPOCH
    view: ControlView | None = None
    view_candidate: CandidateId = NO_CANDIDATE
    """The candidate that `view` speaks of."""
    receivers: Mapping[ReceiverId, ReceiverReport] = field(default_factory=dict)
    """Of the last survey."""
    owners: Mapping[OwnerId, OwnerReport] = field(default_factory=dict)
    """Of the last survey, with newer reports merged in."""
    request: PrepareRequest | None = None
    attempt: AttemptState | None = None
    """The attempt that runs, or the last one that was acknowledged."""
    fenced: AttemptId = NO_ATTEMPT
    """The attempt under which this coordinator may send gate calls: its last acknowledged one."""
    waiting: frozenset[str] = frozenset()
    """Names of the endpoints that the phase waits for."""
    answered: frozenset[OwnerId] = frozenset()
    """Owners that accepted the call of the running round."""
    ending: CandidateId = NO_CANDIDATE
    """The committed candidate whose transition this coordinator is rolling forward."""
    aborting: bool = False
    last_failure: str = ""
    """Reason of the last failed attempt."""
    held: str = ""
    """Why it looks again and again, to say it once."""

    @property
    def record(self) -> Record | None:
        """The record as last read."""
        return None if self.view is None else self.view.record


def emit(state: CoordinatorState, action: Action, attempt: AttemptId = NO_ATTEMPT, /, **args: Scalar) -> Emit:
    """Trace `action` of the coordinator with the state after it; version -1 stands for no record."""
    version = -1 if state.record is None else state.record.version
    post: dict[str, Scalar] = {"phase": state.phase.value, "epoch": state.epoch, "version": version}
    return Emit(action, attempt, args, post)


CoordinatorStep = tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]
