"""The coordinator of one method: start, refit with or without a kill, restore a restarted server.

The same protocol carries every method. A kill stalls the owners' link in the middle of the refit, waits until every
live server has applied something and the victim has not flushed, and then sends SIGKILL to the whole victim; the traces
must show both, or the run ends. The retry, the joint commit and the later restore are the project's own.
Not handled: when to train (the loop decides); a coordinator that dies.

Paper: Section 6.3 (retry, joint commit, restore); Section 8.3 (kills in the middle of a refit)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from examples.grpo.servers import GrpoFleet
from nemo_dcr.cli.fleet import CALL_S
from nemo_dcr.cli.job import DemoJob
from nemo_dcr.cli.payload_store import PayloadStore
from nemo_dcr.cli.places import place_of
from nemo_dcr.cli.trainer_process import STALL, Stall
from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.control import open_control
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import AttemptId, InstanceId, ReceiverId
from nemo_dcr.protocol.coordinator_events import (
    AttemptEnded,
    CallReceiver,
    CoordinatorEffect,
    Ready,
    SteppedDown,
    TransitionAborted,
    TransitionEnded,
    VersionCommitted,
)
from nemo_dcr.protocol.messages import PrepareReceiver
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.record import DELTA_MODES, AttemptMode
from nemo_dcr.runtime.addresses import new_incarnation
from nemo_dcr.runtime.chronicle import Chronicle
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.methods import TIMINGS
from nemo_dcr.runtime.timeline import RefitTimeline
from nemo_dcr.runtime.timings import TimingsOf
from nemo_dcr.runtime.trace_file import FileTracer, write_journal
from nemo_dcr.trace import LamportClock

TRANSITION_S = 300.0
LOST_AFTER_S = 20.0
"""A silent endpoint of a busy machine is no dead one; a killed one breaks its connection at once."""
_STALL_AFTER = 3
"""Payloads of each owner before a stall, when no refit has told how many there are."""


@dataclass(frozen=True, slots=True)
class Refit:
    """One finished transition."""

    version: int
    modes: tuple[str, ...]
    """Of its attempts, in order."""
    refit_s: float
    transition_s: float


@dataclass
class _Watched:
    """What the coordinator did since the weights were frozen."""

    modes: dict[AttemptId, AttemptMode] = field(default_factory=dict)
    ended: set[AttemptId] = field(default_factory=set)
    committed: AttemptId | None = None
    version: int = 0
    killed: bool = False

    def see(self, effect: CoordinatorEffect) -> None:
        match effect:
            case CallReceiver(PrepareReceiver() as call):
                self.modes[call.attempt] = call.mode
            case AttemptEnded(attempt, _):
                self.ended.add(attempt)
            case VersionCommitted(record):
                self.committed, self.version = record.attempt, record.version
            case _:
                pass

    @property
    def running(self) -> AttemptId | None:
        latest = max(self.modes, default=None)
        return latest if latest not in self.ended else None


class Refits:
    """Coordinator over the fleet of one method; `close` releases everything but the fleet."""

    def __init__(self, job: DemoJob, fleet: GrpoFleet, clock: LamportClock, store: PayloadStore) -> None:
        self._job, self._fleet, self._clock = job, fleet, clock
        self._transport = place_of(job, "coordinator", store.credentials).transport
        self._control = open_control(job.record)
        self._coordinator: Coordinator | None = None
        self._tracer: FileTracer | None = None
        self._chronicle: Chronicle | None = None
        self._watched = _Watched()
        self._payloads_per_owner = 2 * _STALL_AFTER

    def start(self) -> None:
        """Start what is missing, let every server prove what it holds, and write the first record."""
        fleet = self._fleet
        fleet.start(lambda: None)
        classes = {name: path.value for name, path in fleet.prewarm(fleet.receivers()).items()}
        refit = RefitConfig(attempt_deadline_s=TRANSITION_S, lost_after_s=LOST_AFTER_S)
        incarnation = new_incarnation(self._job.addresses, "coordinator")
        self._tracer = FileTracer(self._job.traces / "coordinator.ndjson", "coordinator", incarnation, self._clock)
        self._chronicle = Chronicle(self._job.chronicle, "coordinator", incarnation)
        self._coordinator = Coordinator(
            CoordinatorConfig(
                refit=refit, owners=fleet.endpoints.owners(), bootstrap_instances=len(self._job.instances)
            ),
            fleet.endpoints,
            self._control,
            self._transport,
            classes=classes,
            tracer=self._tracer,
            told=self._chronicle.tell,
            clock=self._clock,
            observer=lambda effect: self._watched.see(effect),
        )
        self._coordinator.become()
        self._run_until(Ready)
        fleet.wait_until_served()

    def refit(self, *, victim: InstanceId | None = None, gate: GateMode = GateMode.SYNC) -> Refit:
        """Send the frozen weights to every live server; `victim` dies when all have applied a part of them.

        Raises: OperatorNeeded when the refit was not committed, or the victim died too late.
        """
        coordinator, fleet = self._require(), self._fleet
        self._watched = _Watched()
        if victim is not None:
            stall = Stall(max(1, self._payloads_per_owner // 2))
            fleet.endpoints.call_owners(STALL, stall, CALL_S)
        coordinator.set_gate(gate)
        begin = time.monotonic()

        def each_round() -> None:
            if victim is not None and not self._watched.killed:
                self._kill_when_everyone_wrote(victim)

        coordinator.look()
        self._run_until(TransitionEnded, each_round)
        self._run_until(Ready, each_round)
        if victim is not None:
            if not self._watched.killed:
                raise OperatorNeeded(f"{victim} was still alive after the refit", "run this method again")
            fleet.forget(victim)
        fleet.wait_until_served()
        return self._finished(time.monotonic() - begin)

    def kill(self, instance: InstanceId) -> None:
        """SIGKILL to a server between two refits, where a resumed run needs it dead."""
        self._fleet.kill(instance)
        self._fleet.forget(instance)
        coordinator = self._require()
        coordinator.look()
        self._run_until(Ready)

    def restore(self, instance: InstanceId) -> None:
        """Start a killed server again and restore it densely to the committed version."""
        receivers = self._fleet.restart(instance)
        coordinator = self._require()
        coordinator.classes = {name: path.value for name, path in self._fleet.prewarm(receivers).items()}
        coordinator.look()
        self._run_until(Ready)
        self._fleet.wait_until_served()

    def close(self) -> None:
        """Release record, transport and trace."""
        self._transport.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._chronicle is not None:
            self._chronicle.close()
        write_journal(self._job.traces / "control.ndjson", self._control.journal())

    def _kill_when_everyone_wrote(self, victim: InstanceId) -> None:
        attempt, fleet = self._watched.running, self._fleet
        live: list[ReceiverId] = list(fleet.endpoints.receivers())
        if attempt is None or not all(fleet.applied(receiver, attempt) for receiver in live):
            return
        fleet.kill(victim)
        self._watched.killed = True
        if any(fleet.acknowledged(rank, attempt) for rank in fleet.receivers([victim])):
            raise OperatorNeeded(f"{victim} was killed after its last item", "run this method again")

    def _finished(self, transition_s: float) -> Refit:
        watched, endpoints = self._watched, self._fleet.endpoints
        if watched.committed is None:
            raise OperatorNeeded("the refit was not committed", "see the coordinator's trace")
        call = TimingsOf(watched.committed)
        owners = tuple(timing for timing, _ in endpoints.call_owners(TIMINGS, call, CALL_S).values())
        receivers = tuple(timing for timing, _ in endpoints.call_receivers(TIMINGS, call, CALL_S).values())
        self._payloads_per_owner = min(int(timing.counts.get("payloads", 0)) for timing in owners)
        return Refit(
            version=watched.version,
            modes=tuple(mode.value for mode in watched.modes.values() if mode in DELTA_MODES),
            refit_s=RefitTimeline("refit", owners, receivers).latency_s,
            transition_s=transition_s,
        )

    def _require(self) -> Coordinator:
        if self._coordinator is None:
            raise OperatorNeeded("the method was not started", "call start() first")
        return self._coordinator

    def _run_until(self, kind: type, each_round: Callable[[], None] | None = None) -> None:
        end = self._require().run_until(
            lambda effect: isinstance(effect, (kind, SteppedDown, TransitionAborted)),
            TRANSITION_S,
            each_round=each_round,
        )
        if isinstance(end, (SteppedDown, TransitionAborted)):
            raise OperatorNeeded(f"the coordinator gave up: {end.reason}", "see the coordinator's trace")
