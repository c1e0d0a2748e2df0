"""Refits over the emulated WAN, one after another, over either transport, and the checks of each.

This process is the coordinator. Before a transition it chooses the transport and lets the trainers step, or changes
their weights at a rate; while payloads travel it looks at the socket tables of both sides; afterwards it reads the
counters of the boundary and the timings of every node. A restore kills the engine of the last rollout host between two
refits, starts it again and waits until the coordinator has restored it densely.
Not handled: engines that are killed in a refit (the demo does that).

Paper: Section 8.1 (change injection, timed window); Section 7
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_dcr.cli.check import Oracle
from nemo_dcr.cli.engine_process import DUMP_TO_FILE, DumpToFile
from nemo_dcr.cli.fleet import Fleet
from nemo_dcr.cli.places import CHOOSE, RELAY, STORE, Choose, file_name, place_of, security_of
from nemo_dcr.cli.trainer_process import GATHER, TRAIN_STEP, Gather, TrainStep
from nemo_dcr.cli.wan_row import OVERHEAD, WanRow, construction_bound_s, crossed_between, transport_bound_s
from nemo_dcr.cli.wan_site import CONTROL_PORT, COORDINATOR, RELAY_PORT, STORE_PORT, WanSite
from nemo_dcr.config import RefitConfig
from nemo_dcr.control import open_control
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import AttemptId, CandidateId, InstanceId
from nemo_dcr.protocol.coordinator_events import (
    AttemptEnded,
    CoordinatorEffect,
    Ready,
    SteppedDown,
    TransitionAborted,
    TransitionEnded,
    VersionCommitted,
)
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.runtime.addresses import new_incarnation
from nemo_dcr.runtime.chronicle import Chronicle
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import TIMINGS
from nemo_dcr.runtime.timeline import RefitTimeline
from nemo_dcr.runtime.timings import TimingsOf
from nemo_dcr.runtime.trace_file import FileTracer, write_journal
from nemo_dcr.testing.regions import Connection, Host, Regions
from nemo_dcr.trace import LamportClock

TRANSITION_S = 600.0
CALL_S = 600.0
"""Limit for a start, a training step, a gather or a dump: six processes with a model each share a machine."""
PORT_OF = {RELAY: RELAY_PORT, STORE: STORE_PORT}


@dataclass(frozen=True, slots=True)
class Case:
    """What changes between two versions."""

    name: str
    inject_rate: float = 0.0
    """0 for a real optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The dense restore of one receiver."""

    transport: str
    receiver: str
    v_payload: int
    """Bytes of unique compressed payloads."""
    crossed: int
    """Payload-carrying bytes across the boundary, see wan_row."""
    other: int
    """Bytes of every port that is neither control nor a transport's."""
    seconds: float
    """From the coordinator's look at the started receiver to its being in step, without start and prewarm."""

    def __str__(self) -> str:
        """One line."""
        share = self.crossed / max(1, self.v_payload)
        told = f"{self.v_payload:,} bytes of payloads, {self.crossed:,} crossed ({share:.3f} x)"
        return f"{self.transport}: dense restore of {self.receiver} in {self.seconds:.1f} s, {told}"

    def unmet(self) -> list[str]:
        """What is demanded of a restore and does not hold: once up, and down once to the node that was restored."""
        most = (1 if self.transport == RELAY else 2) * self.v_payload
        demands = {
            f"{self.crossed} payload-carrying bytes, {most} are to cross": most <= self.crossed <= OVERHEAD * most,
            f"{self.other} bytes crossed on ports that nobody may use": self.other == 0,
        }
        return [f"{self.transport}, restore: {demand}" for demand, holds in demands.items() if not holds]


@dataclass(slots=True)
class _Seen:
    attempt: AttemptId | None = None
    """The latest attempt that ended."""
    committed: AttemptId | None = None
    failed: list[str] = field(default_factory=list)


class WanRun:
    """Trainers, engines and coordinator of one run; close it."""

    def __init__(self, site: WanSite) -> None:
        self._site = site
        self._job = site.job
        clock = LamportClock()
        security = security_of(self._job, COORDINATOR)
        self._fleet = Fleet(self._job, clock, SocketEndpoints(clock, security), site.environment, site.within, CALL_S)
        self._clock = clock
        self._transport = place_of(self._job, COORDINATOR, site.store.credentials).transport
        self._control = open_control(self._job.record)
        self._tracer: FileTracer | None = None
        self._chronicle: Chronicle | None = None
        self._coordinator: Coordinator | None = None
        self._seen = _Seen()
        self._version = 0
        self.timelines: list[RefitTimeline] = []
        self.foreign_sockets: list[str] = []
        """Connections between regions that were not to the control port or the transport's."""

    @property
    def checkpoint_bytes(self) -> int:
        """Of all canonical tensors."""
        return sum(meta.nbytes for meta in self._fleet.tensors)

    def start(self) -> None:
        """Start trainers and engines, prewarm, and write the first record.

        Raises: OperatorNeeded; EndpointLost when a process does not answer.
        """
        fleet = self._fleet
        fleet.start(lambda: None)
        classes = {name: path.value for name, path in fleet.prewarm(fleet.receivers()).items()}
        incarnation = new_incarnation(self._job.addresses, COORDINATOR)
        self._tracer = FileTracer(self._job.traces / "coordinator.ndjson", COORDINATOR, incarnation, self._clock)
        self._chronicle = Chronicle(self._job.chronicle, COORDINATOR, incarnation)
        refit = RefitConfig(attempt_deadline_s=TRANSITION_S, lost_after_s=20.0)
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
            observer=self._observe,
        )
        self._coordinator.become()
        self._until(Ready)

    def refit(self, transport: str, case: Case, *, warm_up: bool = False, reference_s: float = 0.0) -> WanRow:
        """One transition over `transport`. Raises: OperatorNeeded when it does not commit at the first attempt."""
        endpoints, regions = self._fleet.endpoints, self._site.regions
        self._choose(transport)
        self._version += 1
        step = TrainStep(CandidateId(f"step-{self._version}"), case.inject_rate, self._version)
        for owner, (trained, _) in endpoints.call_owners(TRAIN_STEP, step, CALL_S).items():
            if trained.problem:
                raise OperatorNeeded(f"owner {owner} did not begin: {trained.problem}", "see its log")
        self._seen = _Seen()
        looked = False

        def look_at_sockets() -> None:
            nonlocal looked
            if not looked and any(owner.payloads for owner in self._driver.owner_reports()):
                looked = True
                self.foreign_sockets += foreign_sockets(regions, {CONTROL_PORT, PORT_OF[transport]}, transport)

        before = regions.crossings()
        self._driver.look()
        self._until(TransitionEnded, look_at_sockets)
        self._until(Ready)
        after = regions.crossings()
        attempt = self._seen.committed
        if attempt is None or self._seen.failed:
            raise OperatorNeeded(f"{transport}, {case.name}: failed attempts {self._seen.failed}", "see the logs")
        if not looked:
            self.foreign_sockets.append(f"{transport}, {case.name}: over before the socket tables were looked at")
        call = TimingsOf(attempt)
        timeline = RefitTimeline(
            f"{transport} {case.name} {self._version}",
            tuple(timing for timing, _ in endpoints.call_owners(TIMINGS, call, CALL_S).values()),
            tuple(timing for timing, _ in endpoints.call_receivers(TIMINGS, call, CALL_S).values()),
        )
        self.timelines.append(timeline)
        counts = [owner.counts for owner in timeline.owners]
        boundary = regions.boundary
        return WanRow(
            transport=transport,
            case=case.name,
            number=self._version,
            warm_up=warm_up,
            rate_mbit=boundary.rate_mbit,
            rtt_ms=boundary.rtt_ms,
            nodes=len(regions.rollout),
            change_rate=_sum(counts, "changed_elements") / max(1, _sum(counts, "source_elements")),
            payloads=_sum(counts, "payloads"),
            least_payloads=min(count.get("payloads", 0) for count in counts),
            v_payload=_sum(counts, "payload_bytes"),
            crossed=crossed_between(
                before, after, transport=transport, control_port=CONTROL_PORT, port=PORT_OF[transport]
            ),
            latency_s=timeline.latency_s,
            check_s=timeline.check_s,
            construction_s=construction_bound_s(timeline),
            transport_s=transport_bound_s(timeline, transport),
            finalization_s=timeline.finalization_s,
            reference_s=reference_s,
        )

    def restore(self, transport: str) -> Restored:
        """Kill the engine of the last rollout host, start it again and have it restored over `transport`.

        Raises: OperatorNeeded when it cannot be started or restored.
        """
        regions, fleet = self._site.regions, self._fleet
        victim = InstanceId(regions.rollout[-1].name)
        self._choose(transport)
        fleet.kill(victim)
        receivers = fleet.restart(victim)
        self._choose(transport)
        self._driver.classes = {name: path.value for name, path in fleet.prewarm(receivers).items()}
        self._seen = _Seen()
        before, begin = regions.crossings(), time.monotonic()
        self._driver.look()
        self._until(Ready)
        seconds, after = time.monotonic() - begin, regions.crossings()
        if self._seen.attempt is None or self._seen.failed:
            raise OperatorNeeded(f"{victim} was not restored: {self._seen.failed}", "see the logs")
        call = TimingsOf(self._seen.attempt)
        counts = [timing.counts for timing, _ in fleet.endpoints.call_owners(TIMINGS, call, CALL_S).values()]
        crossed = crossed_between(
            before, after, transport=transport, control_port=CONTROL_PORT, port=PORT_OF[transport]
        )
        return Restored(
            transport=transport,
            receiver=str(receivers[0]),
            v_payload=_sum(counts, "payload_bytes"),
            crossed=crossed.payload,
            other=crossed.other,
            seconds=seconds,
        )

    def mismatched_bits(self) -> int:
        """Bits of all parameters and buffers of all engines that differ from a dense load of the current version.

        Storage is written on each host and compared by another process; none of it crosses the boundary.
        """
        checkpoint = self._job.directory / "oracle"
        self._fleet.endpoints.call_owners(GATHER, Gather(str(checkpoint)), CALL_S)
        directory = self._job.directory / "dumps"
        directory.mkdir(exist_ok=True)
        work: dict[str, Any] = {"checkpoint": str(checkpoint), "receivers": [], "trackers": []}
        for receiver in self._fleet.receivers():
            file = directory / f"{file_name(receiver)}.safetensors"
            dump = DumpToFile(str(file))
            self._fleet.endpoints.call_receivers(DUMP_TO_FILE, dump, CALL_S, only=[receiver])
            work["receivers"].append({"name": receiver, "rank": 0, "tp": 1, "storage": str(file)})
        with contextlib.closing(Oracle(self._job)) as oracle:
            return sum(oracle.ask(work).values())

    def close(self) -> None:
        """End every process."""
        self._fleet.close()
        self._transport.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._chronicle is not None:
            self._chronicle.close()
        write_journal(self._job.traces / "control.ndjson", self._control.journal())

    @property
    def traces(self) -> Path:
        """One trace file for each process life, complete after `close`."""
        return self._job.traces

    @property
    def _driver(self) -> Coordinator:
        if self._coordinator is None:
            raise OperatorNeeded("the run was not started", "call start() first")
        return self._coordinator

    def _choose(self, transport: str) -> None:
        endpoints = self._fleet.endpoints
        answers = [
            *endpoints.call_owners(CHOOSE, Choose(transport), CALL_S).values(),
            *endpoints.call_receivers(CHOOSE, Choose(transport), CALL_S).values(),
        ]
        for done, _ in answers:
            if done.problem:
                raise OperatorNeeded(done.problem, "name the transport in the job")

    def _observe(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, VersionCommitted):
            self._seen.committed = effect.record.attempt
        elif isinstance(effect, AttemptEnded):
            self._seen.attempt = effect.attempt
            if effect.reason:
                self._seen.failed.append(effect.reason)

    def _until(self, kind: type, each_round: Any = None) -> None:
        end = self._driver.run_until(
            lambda effect: isinstance(effect, (kind, SteppedDown, TransitionAborted)),
            TRANSITION_S,
            each_round=each_round,
        )
        if isinstance(end, (SteppedDown, TransitionAborted)):
            raise OperatorNeeded(f"the coordinator gave up: {end.reason}", "see the coordinator's trace")


def foreign_sockets(regions: Regions, allowed: set[int], told: str) -> list[str]:
    """Connections from region to region whose listening port is not allowed, by the socket tables of both sides.

    A process group with members on both sides would show here: its connections use ports of their own.
    """
    return [
        f"{told}: {host.name} has {found}"
        for host in regions.hosts
        for found in regions.connections(host)
        if not _may(regions, host, found, allowed)
    ]


def _may(regions: Regions, host: Host, found: Connection, allowed: set[int]) -> bool:
    inside = regions.region_of(found.remote) == host.region or found.remote in {"127.0.0.1", "[::1]"}
    # An idle connection of the transport that was used before may still be open.
    return inside or bool({found.local_port, found.remote_port} & (allowed | set(PORT_OF.values())))


def _sum(counts: list[dict[str, int]], name: str) -> int:
    return sum(count.get(name, 0) for count in counts)
