"""One coordinator process: waits for its turn if it is a standby, takes over, and answers who asks how things stand.

The active coordinator is the one whose address lies in the directory as `coordinator`. A standby asks it how it does;
when the connection breaks, or nothing was heard or done there for `takeover_after_s`, the standby acquires the next
epoch. That alone decides: the epoch fences every older coordinator at the control plane, so a takeover that was not
needed costs time and nothing else. What to do then is read from the record and the endpoints. A replaced coordinator is
told so by its next call to the control plane, and ends.
Not handled: starting standbys; a deployment does that, and starts one anew after a takeover.

Paper: Section 6.3; Algorithm B.2 (failover)   Spec: BecomeCoordinator, StepDown   Decisions: D2, D10, D22
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import zmq

from nemo_dcr.errors import Conflict
from nemo_dcr.ids import AttemptId, CandidateId, Epoch, Incarnation
from nemo_dcr.protocol.coordinator_events import AbortRequested, CoordinatorEffect, SteppedDown, TransitionAborted
from nemo_dcr.protocol.messages import OwnerReport, ReceiverReport
from nemo_dcr.protocol.transition_state import CoordinatorConfig, Phase
from nemo_dcr.record import ControlPlane, Record
from nemo_dcr.runtime.addresses import Address, publish_address, read_address
from nemo_dcr.runtime.chronicle import Told, tell_nobody
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import STOP, Done, Nothing
from nemo_dcr.runtime.roster import Roster
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT, Method, NoReply, Peer, Server, call
from nemo_dcr.runtime.sightings import Sightings
from nemo_dcr.trace import LamportClock, Tracer
from nemo_dcr.transport.base import Transport
from nemo_dcr.transport.relay.keys import Security

logger = logging.getLogger(__name__)

ACTIVE = "coordinator"
"""The name under which the active coordinator publishes its address."""
WAIT_TOLD_S = 3.0
"""A wait for something outside is logged when it has lasted for so long."""
LOOKS_EACH = 20
"""An idle coordinator reads the record every so many heartbeats, to learn that it was replaced."""


class Role(StrEnum):
    """What a coordinator process does."""

    STANDBY = "standby"
    ACTIVE = "active"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class CoordinatorView:
    """A coordinator process as it stands: what `nemo-dcr status` shows."""

    name: str
    incarnation: Incarnation
    role: Role
    idle_s: float
    """Seconds since its loop last went round; a standby takes over when this grows too long."""
    epoch: Epoch
    phase: str
    attempt: AttemptId
    """The running attempt, or the last one; 0 for none."""
    mode: str
    attempt_phase: str
    record: Record | None
    held: str
    """What it waits for from outside; empty when it does not."""
    last_failure: str
    """Why the last attempt failed."""
    aborted: CandidateId
    """The last candidate that was given up."""
    receivers: tuple[ReceiverReport, ...]
    owners: tuple[OwnerReport, ...]
    silent: dict[str, str]
    """Endpoints that did not answer the last call, with the reason."""
    left_out: dict[str, str]
    """Receivers that can take no part, with the reason."""


COORDINATOR_STATUS = Method("CoordinatorStatus", Nothing, CoordinatorView)
ABORT = Method("Abort", Nothing, Done)


class _Stopped(Exception):
    """This process was told to stop."""


class CoordinatorNode:
    """One coordinator process, active or standby; `run` is its main thread."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: Incarnation,
        config: CoordinatorConfig,
        directory: Path,
        control: ControlPlane,
        transport: Transport,
        tracer: Tracer,
        clock: LamportClock,
        standby: bool = False,
        takeover_after_s: float = 5.0,
        prewarm_s: float = 600.0,
        listen: str = LOOPBACK,
        security: Security = PLAINTEXT,
        now: Callable[[], float] = time.time,
        observer: Callable[[CoordinatorEffect], None] = lambda effect: None,
        told: Told = tell_nobody,
    ) -> None:
        """`directory` holds the address files of the run; `name` is this process's own among them.

        `told` gets the entries of its chronicle; each transition that ends is logged too, at INFO.

        Raises: InvalidConfig when `security` does not allow `listen`, or it is taken.
        """
        self.name = name
        self.incarnation = incarnation
        self._config = config
        self._directory = directory
        self._clock = clock
        self._security = security
        self._standby = standby
        self._takeover_after_s = takeover_after_s
        self._observer = observer
        self.stopping = threading.Event()
        self._aborts = threading.Event()
        self._role = Role.STANDBY
        self._beat = time.monotonic()
        self._aborted = CandidateId("")
        self._replaced = ""
        self._socket_endpoints = SocketEndpoints(clock, security)
        self._endpoints = Sightings(self._socket_endpoints)
        self._roster = Roster(
            directory, self._socket_endpoints, clock, owners=len(config.owners), security=security, prewarm_s=prewarm_s
        )
        self._coordinator = Coordinator(
            config,
            self._endpoints,
            control,
            transport,
            tracer=tracer,
            clock=clock,
            observer=self._observe,
            now=now,
            sleep=self._sleep,
            told=told,
        )
        self._wait, self._told = ("", self._beat), ""
        self._looked: object = None
        self._rounds = 0
        self.server = Server(name, clock, listen, security=security, on_fault=lambda fault: self.stopping.set())
        self.server.answer(COORDINATOR_STATUS, lambda call: self.view())
        self.server.answer(ABORT, self._abort)
        self.server.answer(STOP, self._stop)

    def run(self) -> None:
        """Answer, wait for the turn of a standby, take over, and coordinate until told to stop.

        Raises: Conflict when another coordinator took over.
        """
        key = self._security.keys.public if self._security.keys is not None else ""
        mine = Address(self.name, self.server.address, self.incarnation, os.getpid(), key)
        self.server.start()
        try:
            publish_address(self._directory, mine)
            if self._standby and not self._await_turn():
                return
            self._role = Role.ACTIVE
            publish_address(self._directory, Address(ACTIVE, mine.address, mine.incarnation, mine.pid, mine.key))
            self._refresh()  # becoming the coordinator may begin an attempt at once, which carries the classes
            self._coordinator.become()
            while not self._replaced:
                self._turn()
            self._role = Role.REPLACED
            raise Conflict(f"coordinator {self.name} was replaced: {self._replaced}")
        except _Stopped:
            return
        finally:
            self.server.close()
            self._socket_endpoints.close()

    def view(self) -> CoordinatorView:
        """How things stand. Any thread may ask."""
        state = self._coordinator.state
        attempt = state.attempt
        return CoordinatorView(
            name=self.name,
            incarnation=self.incarnation,
            role=self._role,
            idle_s=time.monotonic() - self._beat,
            epoch=state.epoch,
            phase=state.phase.value,
            attempt=AttemptId(0) if attempt is None else attempt.plan.attempt,
            mode="" if attempt is None else attempt.plan.mode.value,
            attempt_phase="" if attempt is None else attempt.phase.value,
            record=state.record,
            held=state.held,
            last_failure=state.last_failure,
            aborted=self._aborted,
            receivers=tuple(report for _, report in sorted(self._endpoints.seen_receivers.copy().items())),
            owners=tuple(report for _, report in sorted(self._endpoints.seen_owners.copy().items())),
            silent=self._endpoints.silent.copy(),
            left_out=self._roster.left_out.copy(),
        )

    def _await_turn(self) -> bool:
        """Watch the active coordinator until it is gone; False when told to stop."""
        context: zmq.Context[Any] = zmq.Context()
        known: Address | None = None
        peer: Peer | None = None
        heard = time.monotonic()
        try:
            while not self.stopping.wait(self._config.refit.heartbeat_s):
                self._beat = time.monotonic()
                self._roster.refresh()
                file = self._directory / f"{ACTIVE}.json"
                entry = read_address(file) if file.exists() else None
                if entry is not None and entry != known:
                    if peer is not None:
                        peer.close()
                    known, heard = entry, time.monotonic()
                    peer = Peer(ACTIVE, entry.address, self._clock, context, security=self._security, key=entry.key)
                if peer is None:
                    answer: Any = NoReply("no coordinator published its address")
                else:
                    answer = call(peer, COORDINATOR_STATUS, Nothing(), self._config.refit.call_timeout_s)
                if not isinstance(answer, NoReply):
                    view: CoordinatorView = answer[0]
                    if view.role is Role.ACTIVE and view.idle_s < self._takeover_after_s:
                        heard = time.monotonic()
                    reason = f"it is {view.role} and did nothing for {view.idle_s:.1f} s"
                else:
                    reason = answer.reason
                    if answer.disconnected:
                        heard = float("-inf")
                if time.monotonic() - heard >= self._takeover_after_s:
                    logger.warning("coordinator %s takes over: %s", self.name, reason)
                    return True
            return False
        finally:
            if peer is not None:
                peer.close()
            context.term()

    def _turn(self) -> None:
        """One round, with whoever came or went before it."""
        if self.stopping.is_set():
            raise _Stopped
        self._refresh()
        if self._aborts.is_set():
            self._aborts.clear()
            self._coordinator.feed(AbortRequested())
        if self._coordinator.state.phase is Phase.READY:
            self._rounds += 1
            signature = self._endpoints.signature()
            if signature != self._looked or self._rounds >= LOOKS_EACH:
                self._looked, self._rounds = signature, 0
                self._coordinator.look()
        self._coordinator.round()
        self._beat = time.monotonic()
        self._tell_wait(self._coordinator.state.held)

    def _tell_wait(self, reason: str) -> None:
        """Log what it waits for once that has lasted; every start waits a moment for the first engines."""
        if reason != self._wait[0]:
            self._wait = (reason, self._beat)
        elif reason and reason != self._told and self._beat - self._wait[1] >= WAIT_TOLD_S:
            self._told = reason
            logger.warning("coordinator %s waits: %s", self.name, reason)

    def _refresh(self) -> None:
        """Whoever came or went, and what loaders do with each name."""
        self._roster.refresh()
        self._coordinator.classes = dict(self._roster.classes)

    def _sleep(self, seconds: float) -> None:
        """Wait, but not past a stop: nothing of a coordinator is durable, so it may end in the middle of anything."""
        self._beat = time.monotonic()
        if self.stopping.wait(seconds):
            raise _Stopped

    def _observe(self, effect: CoordinatorEffect) -> None:
        match effect:
            case SteppedDown(reason):
                self._replaced = reason
            case TransitionAborted(candidate, reason):
                self._aborted = candidate
                logger.error("%s", self._abort_notice(candidate, reason))
            case _:
                pass
        self._observer(effect)

    def _abort_notice(self, candidate: CandidateId, reason: str) -> str:
        """What an operator has to know when a transition was given up, and what to run."""
        record = self._coordinator.state.record
        committed = "no version is committed" if record is None else f"version {record.version} stays committed"
        return (
            f"candidate {candidate!r} was given up (last failed attempt: {reason or 'an abort was requested'}); "
            f"{committed}, trainers go back to its weights and receivers that hold parts of the candidate are restored "
            f"to it; run `nemo-dcr status {self._directory}` to see who is behind, repair what the reason names, and "
            f"let the trainer step on: a new candidate gets new attempts"
        )

    def _abort(self, call: Nothing) -> Done:
        if self._role is not Role.ACTIVE:
            return Done(f"{self.name} is {self._role}; ask the active coordinator")
        self._aborts.set()
        return Done()

    def _stop(self, call: Nothing) -> Done:
        self.stopping.set()
        return Done()
