"""A whole cluster in one process and one thread: the real nodes, a seeded network, and checks after every step.

Owners, receivers and coordinators are the classes that processes run; engines are toy models with native loaders. A
*tick* lets nodes work in a drawn order; ticks happen while a coordinator waits for answers or sleeps, and between two
payloads of a stream. Time is a number. The same seed gives the same run. After each step of a receiver a clean tag, an
open gate and a running request mean storage that equals a dense load of one committed version, bit for bit.
Faults are methods, and may be set to strike when some node reaches an action of the trace (`at`).
Not handled: threads, sockets and processes (see runtime.serve); real engines (see adapters).

Paper: Proposition 1; Table B.2 (failures)   Spec: CleanExact, CommitExact, BaselineBound, GateSafe
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_dcr.bits import Words
from nemo_dcr.config import QueueConfig, RefitConfig
from nemo_dcr.control.memory import MemoryControl
from nemo_dcr.ids import (
    NO_CANDIDATE,
    CandidateId,
    Incarnation,
    InstanceId,
    OwnerId,
    ReceiverId,
    Version,
    instance_of,
    receiver_id,
)
from nemo_dcr.protocol.coordinator_events import CoordinatorEffect, SteppedDown, VersionCommitted
from nemo_dcr.protocol.tags import Tag, TagKind, TrackerKind, TrackerTag
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.record import Record
from nemo_dcr.runtime.chronicle import Entry
from nemo_dcr.testing.local_checks import check_owner, check_receiver, check_required
from nemo_dcr.testing.local_network import CallFaults, Life, NodeCrashed
from nemo_dcr.testing.local_nodes import LocalCoordinator, LocalOwner, LocalReceiver, NodeKit
from nemo_dcr.testing.local_oracle import DenseOracle
from nemo_dcr.testing.local_source import LocalRank, LocalSource
from nemo_dcr.testing.toy_loader import Rule
from nemo_dcr.trace import Emit
from nemo_dcr.transport.memory import MemoryTransport

FAST = RefitConfig(
    heartbeat_s=0.01,
    call_timeout_s=0.5,
    lost_after_s=0.5,
    attempt_deadline_s=2.0,
    commit_deadline_s=0.5,
    clock_skew_s=0.2,
)
"""Deadlines for a clock that is a number."""
NO_FAULTS = CallFaults()
FIRST_DIGEST = b"version 0"
PATIENCE = 10
"""A coordinator that waits for answers lets the nodes work so many times before it gives up."""


@dataclass(eq=False)
class _Point:
    what: str
    node: str
    skip: int
    do: Callable[[], object]


class LocalCluster:
    """Owners of a `LocalSource`, engine instances with `instances[name]` ranks each, and coordinators."""

    def __init__(
        self,
        source: LocalSource,
        rules: Mapping[str, Rule],
        instances: Mapping[str, int],
        *,
        seed: int = 0,
        refit: RefitConfig = FAST,
        faults: CallFaults = NO_FAULTS,
        transport: MemoryTransport | None = None,
        group_payloads: int = 2,
        proved: bool = True,
        serving: float = 0.0,
    ) -> None:
        """Start all nodes but a coordinator.

        Args:
            proved: the first record may be proved by digests; otherwise every receiver is restored densely.
            serving: probability that a request arrives in a tick.
        """
        self.source = source
        self.instances = {InstanceId(name): ranks for name, ranks in instances.items()}
        self.refit = refit
        self.faults = faults
        self.serving = serving
        self.rng = random.Random(seed)
        self.time = 1000.0
        self.control = MemoryControl(now=lambda: self.time)
        self.oracle = DenseOracle(source, rules)
        self.receivers: dict[ReceiverId, LocalReceiver] = {}
        self.owners: dict[OwnerId, LocalOwner] = {}
        self.coordinators: list[LocalCoordinator] = []
        self.outcomes: list[CoordinatorEffect] = []
        self.trace: list[tuple[str, Emit]] = []
        self.chronicle: list[Entry] = []
        self.requests: dict[str, tuple[InstanceId, Version]] = {}
        self.silent: set[str] = set()
        """Receivers and owners (`owner 0`) that live and cannot be reached."""
        self._kit = NodeKit(
            source=source,
            rules=rules,
            oracle=self.oracle,
            control=self.control,
            transport=transport or MemoryTransport(window=1 << 20),
            refit=refit,
            queue=QueueConfig(group_payloads=group_payloads),
            digest=FIRST_DIGEST if proved else b"",
            told=self.chronicle.append,
        )
        self._later: list[Callable[[], object]] = []
        self._busy: set[str] = set()
        self._points: list[_Point] = []
        self._lives = 0
        for name in self.instances:
            self.start_instance(name)
        for rank in source.ranks.values():
            self._start_owner(rank, first=True)

    # ---------------------------------------------------------------------------------------------- lives of nodes

    def _life(self, name: str) -> Life:
        self._lives += 1
        return Life(name, Incarnation(self._lives))

    def start_instance(self, instance: InstanceId) -> None:
        """Start every rank of an instance from the checkpoint of version 0, in place of an earlier life."""
        self.crash_instance(instance)
        ranks = self.instances[instance]
        for rank in range(ranks):
            name = receiver_id(instance, rank)
            self.receivers[name] = self._kit.receiver(self, self._life(name), instance, rank, ranks)

    def crash_instance(self, instance: InstanceId) -> None:
        """Every rank dies; peers see broken connections."""
        for name, receiver in self.receivers.items():
            if instance_of(name) == instance:
                receiver.life.alive = False
        self.requests = {key: value for key, value in self.requests.items() if value[0] != instance}

    def remove_instance(self, instance: InstanceId) -> None:
        """Every rank dies and is announced no more."""
        self.crash_instance(instance)
        self.receivers = {name: r for name, r in self.receivers.items() if instance_of(name) != instance}

    def _start_owner(self, rank: LocalRank, *, first: bool = False) -> None:
        self.owners[rank.owner] = self._kit.owner(self, self._life(f"owner {rank.owner}"), rank, first=first)

    def crash_owner(self, owner: OwnerId) -> None:
        """The process dies with its trackers; weights and frozen candidate survive on a replica."""
        self.owners[owner].life.alive = False

    def restart_owner(self, owner: OwnerId) -> None:
        """A new process with a lost baseline, in place of an earlier life."""
        self.crash_owner(owner)
        self._start_owner(self.owners[owner].rank)

    def take_over(self) -> LocalCoordinator:
        """Start one more coordinator; the others go on until they notice."""
        started = self._kit.coordinator(
            self,
            self._life(f"coordinator {len(self.coordinators)}"),
            owners=tuple(self.owners),
            instances=len(self.instances),
            classes=unite_tables({str(name): receiver.classes for name, receiver in self.receivers.items()}),
            observer=lambda effect: self._observe(started, effect),
            monotonic=lambda: self.time,
            skew=self.rng.uniform(-0.5, 0.5) * self.refit.clock_skew_s,
        )
        self.coordinators.append(started)
        self.guard(started.life, started.coordinator.become)
        return started

    def _observe(self, actor: LocalCoordinator, effect: CoordinatorEffect) -> None:
        if not isinstance(effect, Emit):
            self.outcomes.append(effect)
        if isinstance(effect, SteppedDown):
            actor.out = True
        if isinstance(effect, VersionCommitted):
            check_required(self, effect.record)

    def guard(self, life: Life, step: Callable[[], object]) -> bool:
        """Let a process do something, perhaps its last; the truth of what it returned."""
        if not life.alive or life.name in self._busy:
            return False
        self._busy.add(life.name)
        try:
            return bool(step())
        except NodeCrashed as crash:
            if crash.life is not life:
                raise
            return False
        finally:
            self._busy.discard(life.name)

    # ----------------------------------------------------------------------------------------------------- driving

    @property
    def record(self) -> Record | None:
        """The commit record."""
        history = self.control.history()
        return history[-1] if history else None

    def candidate_of(self, version: Version) -> CandidateId:
        """The candidate that a committed version is."""
        return self.control.history()[version].candidate

    def canonical(self, version: Version) -> dict[str, Words]:
        """Full canonical words of a committed version."""
        return self.oracle.canonical(self.candidate_of(version))

    def at(self, what: str, do: Callable[[], object], *, node: str = "", skip: int = 0) -> None:
        """Do something once: when a node whose name begins with `node` traces the action `what`, after `skip` times.

        `what` may also be `before commit` or `after commit`, of any control-plane operation.
        """
        self._points.append(_Point(what, node, skip, do))

    def forget_points(self) -> None:
        """Nothing that was set by `at` happens any more."""
        self._points.clear()

    def traced(self, life: Life, emitted: Emit) -> None:
        """A node traced an action; what was set for it happens."""
        self.trace.append((life.name, emitted))
        self.reached(emitted.action.value, life.name)

    def reached(self, what: str, node: str) -> None:
        """A node is at a point; what was set for it happens."""
        for point in list(self._points):
            if point.what == what and node.startswith(point.node) and point in self._points:
                point.skip -= 1
                if point.skip < 0:
                    self._points.remove(point)
                    point.do()

    def train(self, rate: float = 0.3) -> CandidateId:
        """All owners step to new weights and freeze them. Raises: AssertionError when an owner refuses."""
        candidate = CandidateId(f"c{len(self.source.weights)}")
        owners = self.owners.values()
        self.source.draw(candidate, next(iter(owners)).rank.committed, rate)
        for owner in owners:
            owner.node.weights_changed()
            owner.rank.load(candidate)
            owner.rank.frozen = candidate
            if self.guard(owner.life, partial(owner.node.freeze, candidate)):
                raise AssertionError(f"{owner.life.name} refuses {candidate}")
        return candidate

    @property
    def idle(self) -> bool:
        """No transition is open: every owner lives, nothing is frozen, and baselines are the committed version."""
        record = self.record
        if record is None or not all(owner.life.alive for owner in self.owners.values()):
            return False
        reports = [owner.node.report for owner in self.owners.values()]
        tracker = TrackerTag(TrackerKind.AT, record.version)
        return all(r.candidate == NO_CANDIDATE and r.tracker == tracker and r.resident is not None for r in reports)

    @property
    def serving_all(self) -> bool:
        """Idle, and every announced receiver lives and serves the committed version."""
        record, reports = self.record, [r.node.report for r in self.receivers.values() if r.life.alive]
        if record is None or not self.idle or len(reports) < len(self.receivers):
            return False
        return all(report.gate_open and report.tag == Tag(TagKind.CLEAN, record.version) for report in reports)

    def run(self, until: Callable[[], bool], *, rounds: int = 3000, each: Callable[[], object] = lambda: None) -> None:
        """Rounds of coordinators in drawn order until something holds; a new one takes over when none is left.

        Raises: AssertionError after `rounds` rounds.
        """
        for _ in range(rounds):
            if until():
                return
            actors = [each for each in self.coordinators if each.acts] or [self.take_over()]
            actor = self.rng.choice(actors)
            self.guard(actor.life, actor.coordinator.look)
            self.guard(actor.life, actor.coordinator.round)
            each()
        raise AssertionError(f"no end after {rounds} rounds; last outcomes {self.outcomes[-4:]}")

    def transition(self) -> CandidateId:
        """One transition without further ado."""
        candidate = self.train()
        self.run(lambda: self.serving_all)
        return candidate

    # ------------------------------------------------------------------------------------- what the network asks of it

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return probability > 0 and self.rng.random() < probability

    def known_receivers(self) -> dict[ReceiverId, Incarnation]:
        """Announced receivers, the dead ones too."""
        return {name: receiver.life.incarnation for name, receiver in self.receivers.items()}

    def known_owners(self) -> tuple[OwnerId, ...]:
        """Announced owners."""
        return tuple(sorted(self.owners))

    def deliver(self, call: Any, respond: Callable[[Any], None]) -> bool:
        """Hand a call to the life that listens now; False when it is dead, or dies of it."""
        node: LocalReceiver | LocalOwner | None
        node = self.receivers.get(call.receiver) if hasattr(call, "receiver") else self.owners.get(call.owner)
        if node is None or not node.life.alive:
            return False
        name, busy = node.life.name, node.life.name in self._busy
        self._busy.add(name)
        try:
            node.node.call(call, respond)
        except NodeCrashed as crash:
            if crash.life is not node.life:
                raise
        finally:
            if not busy:
                self._busy.discard(name)
        return node.life.alive

    def reaches(self, call: Any) -> bool:
        """False while the endpoint is silent."""
        name = call.receiver if hasattr(call, "receiver") else f"owner {call.owner}"
        return name not in self.silent

    def later(self, action: Callable[[], object]) -> None:
        """Do this in some later tick."""
        self._later.append(action)

    def ticks(self, seconds: float, until: Callable[[], bool] = lambda: True) -> None:
        """Let the nodes work and time pass: a little when `until` comes true, else all of `seconds`."""
        for _ in range(PATIENCE):
            self.tick()
            if until():
                self.time += min(seconds, 0.005)
                return
        self.time += seconds

    def between_payloads(self) -> None:
        """A payload was published; others may work before the next."""
        self.tick()

    def tick(self) -> None:
        """Each thread of each node takes one step or none, in drawn order; late calls arrive; requests come and go."""
        steps: list[Callable[[], object]] = []
        for receiver in self.receivers.values():
            steps += [partial(self._intake, receiver), partial(self._apply, receiver)]
        steps += [partial(self._work, owner) for owner in self.owners.values()]
        steps += [partial(self._serve, instance) for instance in self.instances if self.serving]
        self.rng.shuffle(steps)
        for step in steps:
            if self.rng.random() < 0.7:
                step()
        while self._later and self.rng.random() < 0.2:
            self._later.pop(self.rng.randrange(len(self._later)))()

    def _intake(self, receiver: LocalReceiver) -> None:
        self.guard(receiver.life, lambda: receiver.node.intake(0))

    def _apply(self, receiver: LocalReceiver) -> None:
        if self.guard(receiver.life, lambda: receiver.node.work(0)):
            receiver.bits = None
        if receiver.life.alive:
            check_receiver(self, receiver)

    def _work(self, owner: LocalOwner) -> None:
        if self.guard(owner.life, lambda: owner.node.work(0)) and owner.life.alive:
            check_owner(self, owner)

    def _serve(self, instance: InstanceId) -> None:
        running = [request for request, (where, _) in self.requests.items() if where == instance]
        first = self.receivers.get(receiver_id(instance, 0))
        if first is None or not first.life.alive or first.life.name in self._busy:
            return
        if running and self.rng.random() < 0.3:
            self.requests.pop(running[0], None)
            self.guard(first.life, lambda: first.node.finish(running[0]))
        elif self.chance(self.serving):
            request = f"{instance} {len(self.trace)}"
            version = first.node.report.tag.version
            if self.guard(first.life, lambda: first.node.admit(request)):
                self.requests[request] = (instance, version)
