"""One chaos system: owners, engines, an active and a standby coordinator, as processes that die and come back.

Processes are forked from a server that imported everything once. `tick` is the deployment: it starts again what died,
continues what was stopped, notes killed lives next to the traces, and connects to new ones. Nothing here takes part in
the protocol.

Paper: Section 3; Appendix B
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from typing import Any

from nemo_dcr.errors import ControlPlaneUnavailable, OperatorNeeded
from nemo_dcr.ids import CandidateId, InstanceId, OwnerId, ReceiverId, receiver_id
from nemo_dcr.protocol.messages import OwnerReport, OwnerStatus, ReceiverReport, ReceiverStatus
from nemo_dcr.record import Record
from nemo_dcr.runtime.addresses import Address, read_addresses
from nemo_dcr.runtime.coordinator_node import ABORT, ACTIVE, COORDINATOR_STATUS, CoordinatorView, Role
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import STOP, Nothing
from nemo_dcr.runtime.rpc import Method, NoReply, Peer, call, exchange
from nemo_dcr.runtime.trace_file import declare_killed, read_log, write_journal
from nemo_dcr.testing import chaos_roles, chaos_world
from nemo_dcr.testing.chaos_points import Arm, Kind, Strike, Struck, read_struck
from nemo_dcr.testing.chaos_record import CHECK_S, LOOK_S, RECORD, RecordProcess, close_record, open_record
from nemo_dcr.testing.chaos_source import RecordPlace, SystemPlan
from nemo_dcr.testing.forked import Forked, PidSignals
from nemo_dcr.trace import LamportClock

CALL_S = 0.5
COORDINATORS = ("coordinator-a", "coordinator-b")
PRELOAD = ["nemo_dcr.testing.chaos_preload"]


def fork_server(records: Iterable[RecordPlace] = ()) -> ForkServerContext:
    """Where the processes of all systems are forked from; they know the clients of such records."""
    context = multiprocessing.get_context("forkserver")
    clients = [f"nemo_dcr.control.{place.value}" for place in records]
    context.set_forkserver_preload([*PRELOAD, *sorted(clients)])
    return context


@dataclass
class Process:
    """One process of a system over all its lives."""

    name: str
    start: Callable[[tuple[Strike, ...]], PidSignals]
    child: PidSignals
    back_at: float | None = None
    """When it is started again, once it is dead."""
    continue_at: float | None = None
    """When it is continued, while it is stopped."""
    next_strikes: tuple[Strike, ...] = ()
    """Of its next life."""


@dataclass
class SystemState:
    """What the endpoints said just now; None for one that did not answer."""

    receivers: dict[ReceiverId, ReceiverReport | None] = field(default_factory=dict)
    owners: dict[OwnerId, OwnerReport | None] = field(default_factory=dict)

    @property
    def silent(self) -> list[str]:
        """Who did not answer."""
        receivers = [str(name) for name, report in self.receivers.items() if report is None]
        return receivers + [f"owner-{name}" for name, report in self.owners.items() if report is None]


class ChaosSystem:
    """The processes of one system and the sockets to look at them. Close it."""

    def __init__(
        self,
        plan: SystemPlan,
        context: ForkServerContext,
        rng: random.Random,
        coordinators: Sequence[str] = COORDINATORS,
    ) -> None:
        """Start everything. `rng` draws how long a dead process stays away; the first coordinator is active.

        Raises: NemoDcrError when something cannot start; nothing is left then.
        """
        for directory in (plan.addresses, plan.traces, plan.served):
            directory.mkdir(parents=True)
        self.plan = plan
        chaos_world.settle(plan.hosts.values())
        if plan.hosts:
            chaos_world.small_store(plan.payloads)
        self._cut: set[str] = set()
        self._mends: list[tuple[float, Callable[[], None]]] = []
        self.control = open_record(plan, timeout_s=CHECK_S)
        self._looker = open_record(plan, timeout_s=LOOK_S)
        self.clock = LamportClock()
        self.endpoints = SocketEndpoints(self.clock, plan.security)
        self._context = context
        self._rng = rng
        self._addresses: dict[str, Address] = {}
        self._peers: dict[str, Peer] = {}
        self.struck: list[Struck] = []
        """Every strike that took place so far."""
        self.deaths = 0
        """Processes that died so far; those that ended because they were replaced are not among them."""
        self.faults: list[str] = []
        """Processes that ended in a way that nobody struck."""
        self.processes: dict[str, Process] = {}
        self._server: RecordProcess | None = None
        try:
            self._start(coordinators)
        except BaseException:
            self._release()
            raise

    def _start(self, coordinators: Sequence[str]) -> None:
        plan = self.plan
        if plan.record.is_server:
            server = self._serve_record(())
            self.processes[RECORD] = Process(RECORD, self._serve_record, server)
            server.await_answer()
        for name in plan.relays:
            self._add(name, chaos_roles.relay_role, name)
        for rank in range(plan.owners):
            self._add(f"owner-{rank}", chaos_roles.owner_role, rank)
        for instance, ranks in plan.instances.items():
            for rank in range(ranks):
                self._add(receiver_id(InstanceId(instance), rank), chaos_roles.engine_role, instance, rank)
        for number, name in enumerate(coordinators):
            first = [number > 0]

            def start(strikes: tuple[Strike, ...], name: str = name, first: list[bool] = first) -> Forked:
                standby, first[0] = first[0], True
                return self._fork(chaos_roles.coordinator_role, name, standby, strikes)

            self.processes[name] = Process(name, start, start(()))

    def _add(self, name: str, role: Callable[..., None], *arguments: object) -> None:
        def start(strikes: tuple[Strike, ...]) -> Forked:
            return self._fork(role, *arguments, strikes)

        self.processes[name] = Process(name, start, start(()))

    def _serve_record(self, strikes: tuple[Strike, ...]) -> RecordProcess:
        """The server of the record has no points."""
        self._server = RecordProcess(self.plan)
        return self._server

    def _fork(self, role: Callable[..., None], *arguments: object) -> Forked:
        return Forked(self._context, role, self.plan, *arguments)

    # ------------------------------------------------------------------------------------------------- deployment

    def tick(self) -> None:
        """Take note of strikes and deaths, start and continue what is due, connect to new lives."""
        now = time.monotonic()
        for due, mend in [each for each in self._mends if now >= each[0]]:
            self._mends.remove((due, mend))
            mend()
        found = read_struck(self.plan.strikes)
        new, self.struck = found[len(self.struck) :], found
        for struck in new:
            process = self.processes[struck.name]
            if struck.strike.kind is Kind.STOP and process.child.pid == struck.pid:
                process.continue_at = now + struck.strike.hold_s
        for process in self.processes.values():
            if process.continue_at is not None and now >= process.continue_at and process.child.is_stopped:
                # A process that says that it stops itself may not have come to it: continued now, it would stop later.
                process.continue_at = None
                process.child.signal(signal.SIGCONT)
            if process.child.exitcode is not None and process.back_at is None:
                self.bury(process)
                process.back_at = now + self._rng.uniform(0.0, 0.3)
            if process.back_at is not None and now >= process.back_at and process.name not in self._cut:
                process.back_at = None
                strikes, process.next_strikes = process.next_strikes, ()
                process.child = process.start(strikes)
        self._connect()

    def bury(self, process: Process) -> None:
        """A child has ended: by a signal of ours, replaced, or through a fault of its own."""
        code = process.child.exitcode
        process.continue_at = None
        if code == chaos_roles.REPLACED and process.name in COORDINATORS:
            return
        self.deaths += 1
        self._declare(process.name)
        if code != -signal.SIGKILL:
            self.faults.append(f"{process.name} ended by itself with code {code}")

    def _ends(self, name: str) -> tuple[int, ...]:
        """Codes of a process that was told to end; a relay node that just started does not handle the signal yet."""
        return (0, -signal.SIGTERM) if name in self.plan.relays else (0,)

    def _declare(self, name: str) -> None:
        for path in self.plan.traces.glob(f"{name.replace('/', '-')}-*.ndjson"):
            log = read_log(path)
            if log.events and not log.ended:
                declare_killed(self.plan.traces, log.events[0].node, log.events[0].incarnation)

    def _connect(self) -> None:
        for entry in read_addresses(self.plan.addresses):
            if self._addresses.get(entry.name) == entry:
                continue
            self._addresses[entry.name] = entry
            if entry.name in self._peers:
                self._peers.pop(entry.name).close()
            self._peers[entry.name] = Peer(
                entry.name, entry.address, self.clock, self.endpoints.context, security=self.plan.security
            )
            if entry.name.startswith("owner-"):
                self.endpoints.add_owner(OwnerId(int(entry.name.removeprefix("owner-"))), entry)
            elif "/" in entry.name:
                self.endpoints.add_receiver(ReceiverId(entry.name), entry)

    def kill(self, name: str) -> None:
        """SIGKILL from outside, at any time; returns once it is dead, which nobody's answer tells of a server."""
        self.processes[name].child.signal(signal.SIGKILL)
        self.processes[name].child.join()

    def stop(self, name: str, hold_s: float) -> None:
        """SIGSTOP from outside, and SIGCONT after `hold_s` seconds."""
        process = self.processes[name]
        if process.child.exitcode is None:
            process.child.signal(signal.SIGSTOP)
            process.continue_at = time.monotonic() + hold_s

    def cut(self, name: str, hold_s: float) -> None:
        """Nobody reaches this process for so long."""
        address = self.plan.hosts[name]
        chaos_world.cut(address)
        self._cut.add(name)

        def mend() -> None:
            chaos_world.join(address)
            self._cut.discard(name)

        self._mends.append((time.monotonic() + hold_s, mend))

    def split(self, some: Sequence[str], others: Sequence[str], hold_s: float) -> None:
        """These two groups of processes do not reach each other for so long."""
        groups = [self.plan.hosts[name] for name in some], [self.plan.hosts[name] for name in others]
        chaos_world.split(*groups)
        self._mends.append((time.monotonic() + hold_s, lambda: chaos_world.heal(*groups)))

    def fill(self, hold_s: float) -> None:
        """The file system of the payloads is full for so long."""
        chaos_world.fill(self.plan.payloads)
        self._mends.append((time.monotonic() + hold_s, lambda: chaos_world.free(self.plan.payloads)))

    @property
    def is_held(self) -> bool:
        """Something is stopped, cut, split or full just now."""
        return bool(self._mends) or any(each.continue_at is not None for each in self.processes.values())

    @property
    def whole(self) -> bool:
        """Everything runs, and nothing is cut, split or full."""
        return not self._mends and all(
            each.child.exitcode is None and each.continue_at is None and each.back_at is None
            for each in self.processes.values()
        )

    # ------------------------------------------------------------------------------------------------------ calls

    def ask(self, name: str, method: Method, argument: Any) -> Any:
        """Make one call to one process; None when there is no answer."""
        peer = self._peers.get(name)
        if peer is None:
            return None
        answer = call(peer, method, argument, CALL_S)
        return None if isinstance(answer, NoReply) else answer[0]

    def arm(self, strikes: dict[str, tuple[Strike, ...]]) -> bool:
        """Arm these processes and disarm all others; False when one did not answer."""
        calls = {
            name: (peer, chaos_roles.ARM, Arm(strikes.get(name, ())))
            for name, peer in self._peers.items()
            if name in self.processes
        }
        answers = exchange(calls, CALL_S * 4)
        return all(name in answers and not isinstance(answers[name], NoReply) for name in strikes)

    def state(self) -> SystemState:
        """Reports of all owners and receivers."""
        receivers = [ReceiverId(name) for name in self.processes if "/" in name]
        owners = [OwnerId(rank) for rank in range(self.plan.owners)]
        heard, owners_heard = self.endpoints.ask(
            {r: ReceiverStatus(r) for r in receivers if r in self.endpoints.receivers()},
            {o: OwnerStatus(o) for o in owners if o in self.endpoints.owners()},
            CALL_S,
        )
        return SystemState(
            {r: None if isinstance(reply := heard.get(r), NoReply | None) else reply.report for r in receivers},
            {o: None if isinstance(told := owners_heard.get(o), NoReply | None) else told.report for o in owners},
        )

    def committed(self) -> Record | None:
        """The committed record; None when there is none yet or the record gives no answer."""
        try:
            return self._looker.peek().record
        except ControlPlaneUnavailable:
            return None

    def is_dead(self, candidate: CandidateId) -> bool:
        """The record says that this candidate was given up."""
        try:
            return self._looker.peek(candidate).candidate_dead
        except ControlPlaneUnavailable:
            return False

    def coordinator(self) -> CoordinatorView | None:
        """The active coordinator as it stands, if it answers."""
        view: CoordinatorView | None = self.ask(ACTIVE, COORDINATOR_STATUS, Nothing())
        return view

    def has_one_active(self) -> bool:
        """Of its own coordinators one is active and the others wait: no zombie is left that does not know."""
        names = [name for name in self.processes if name in COORDINATORS]
        views = [self.ask(name, COORDINATOR_STATUS, Nothing()) for name in names]
        roles = sorted("silent" if view is None else view.role.value for view in views)
        return roles in ([], [Role.ACTIVE.value, *[Role.STANDBY.value] * (len(names) - 1)])

    def active(self) -> str:
        """Name of the process that is the active coordinator, by its address."""
        entry = self._addresses.get(ACTIVE)
        named = [
            name
            for name in COORDINATORS
            if entry and self._addresses.get(name) and self._addresses[name].incarnation == entry.incarnation
        ]
        return named[0] if named else COORDINATORS[0]

    def abort(self) -> bool:
        """Ask for an abort of the open transition."""
        answer = self.ask(ACTIVE, ABORT, Nothing())
        return answer is not None and not answer.problem

    def close(self) -> None:
        """End every process, in order where that is possible, and write the journal next to the traces.

        Raises: EndpointLost when the server of the record does not come back; nothing is left then either.
        """
        for _, mend in self._mends:
            mend()
        for process in self.processes.values():
            process.child.signal(signal.SIGCONT)
        try:
            self._end_in_order()
            with contextlib.suppress(OperatorNeeded):
                write_journal(self.plan.traces / "control.ndjson", self.control.journal())
        finally:
            self._release()

    def _end_in_order(self) -> None:
        if RECORD in self.processes and self._server is not None:
            if self._server.exitcode is not None:
                self.processes[RECORD].child = self._serve_record(())
            self._server.await_answer()
            del self.processes[RECORD]
        for name in self.processes:
            self.ask(name, STOP, Nothing())
        for name in self.plan.relays:
            self.processes[name].child.signal(signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        for process in self.processes.values():
            if process.child.join(max(0.0, deadline - time.monotonic())) is None:
                process.child.signal(signal.SIGKILL)
                process.child.join()
                self._declare(process.name)
            elif process.child.exitcode not in self._ends(process.name) and process.back_at is None:
                self.bury(process)

    def _release(self) -> None:
        """Nothing lives on, nothing stays open."""
        for process in self.processes.values():
            process.child.signal(signal.SIGKILL)
            process.child.join()
        if self._server is not None:
            self._server.end()
        for peer in self._peers.values():
            peer.close()
        self.endpoints.close()
        close_record(self.control)
        close_record(self._looker)
        if self.plan.hosts:
            chaos_world.remove_store(self.plan.payloads)
            chaos_world.leave(self.plan.hosts.values())
