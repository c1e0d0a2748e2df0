"""Fault schedules for a local cluster: faults in drawn rounds and at drawn points of the trace, restarts afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from nemo_dcr.ids import OwnerId, instance_of
from nemo_dcr.protocol.coordinator_events import AbortRequested
from nemo_dcr.testing.local_cluster import NO_FAULTS, LocalCluster
from nemo_dcr.trace import Action, Emit
from tests.unit.protocol.trace_steps import step_faults

RECEIVER_POINTS = (
    "EndpointPrepare",
    "Accept",
    "SeeManifest",
    "OpenApply",
    "ApplyItem",
    "Flush",
    "StopAndWait",
    "StartRestore",
    "FinishRestore",
    "OpenGate",
)
OWNER_POINTS = (
    "BeginTransition",
    "OwnerPrepare",
    "EmitPayload",
    "EndStream",
    "UpdateBaseline",
    "CopyItem",
    "BaselineFilled",
    "RebuildBaseline",
    "EndTransition",
    "DropCandidate",
)
COORDINATOR_POINTS = (
    "BecomeCoordinator",
    "StartAttempt",
    "CompleteAttempt",
    "FailAttempt",
    "SendCommit",
    "ResolveCommit",
    "RollForward",
    "before prepare",
    "after prepare",
    "before commit",
    "after commit",
    "before kill",
    "after kill",
)
VICTIMS = ("instance", "owner", "coordinator", "takeover", "silence", "abort")


@dataclass(frozen=True)
class Fault:
    """What happens, to which of them, and when: at a point of the trace, or in a round when `point` is empty."""

    victim: str
    which: int
    point: str
    skip: int


def faults() -> st.SearchStrategy[Fault]:
    """One fault at any time."""
    points = st.sampled_from(("", *RECEIVER_POINTS, *OWNER_POINTS, *COORDINATOR_POINTS))
    return st.builds(Fault, st.sampled_from(VICTIMS), st.integers(0, 2), points, st.integers(0, 12))


class Chaos:
    """Carries out a schedule over one cluster."""

    def __init__(self, cluster: LocalCluster, schedule: list[Fault]) -> None:
        self.cluster = cluster
        self.rng = random.Random(len(schedule))
        self.rounds = 0
        self.due: list[tuple[int, Fault]] = []
        for fault in schedule:
            if fault.point:
                cluster.at(fault.point, lambda fault=fault: self.strike(fault), skip=fault.skip)
            else:
                self.due.append((3 * fault.skip, fault))

    def strike(self, fault: Fault) -> None:
        """Let it happen."""
        cluster = self.cluster
        instance = sorted(cluster.instances)[fault.which % len(cluster.instances)]
        acting = [actor for actor in cluster.coordinators if actor.acts]
        match fault.victim:
            case "instance":
                cluster.crash_instance(instance)
            case "owner":
                cluster.crash_owner(OwnerId(fault.which % len(cluster.owners)))
            case "coordinator" if acting:
                acting[fault.which % len(acting)].life.alive = False
            case "takeover" if len(acting) < 3:
                rival = cluster.take_over()
                for _ in range(fault.which * 4):
                    cluster.guard(rival.life, rival.coordinator.round)
            case "silence":
                cluster.silent |= {name for name in cluster.receivers if instance_of(name) == instance}
            case "abort" if acting:
                actor = acting[fault.which % len(acting)]
                if fault.point:  # a machine cannot be fed from inside its own step
                    self.due.append((self.rounds + 1, fault))
                else:
                    cluster.guard(actor.life, lambda: actor.coordinator.feed(AbortRequested()))

    def each_round(self) -> None:
        """What is due; dead nodes come back after some rounds, and silent ones are heard again."""
        cluster, self.rounds = self.cluster, self.rounds + 1
        for when, fault in [entry for entry in self.due if entry[0] <= self.rounds]:
            self.due.remove((when, fault))
            self.strike(Fault(fault.victim, fault.which, "", 0))
        if self.rng.random() < 0.1:
            self.bring_back()
        if self.rng.random() < 0.05:
            cluster.silent.clear()

    def bring_back(self) -> None:
        """Restart everything that is dead."""
        cluster = self.cluster
        for instance in {instance_of(name) for name, receiver in cluster.receivers.items() if not receiver.life.alive}:
            cluster.start_instance(instance)
        for owner in [owner for owner, each in cluster.owners.items() if not each.life.alive]:
            cluster.restart_owner(owner)

    def calm_down(self) -> None:
        """No more faults."""
        cluster = self.cluster
        cluster.faults = NO_FAULTS
        cluster.silent.clear()
        cluster.forget_points()
        self.due.clear()
        self.bring_back()


def trace_faults(cluster: LocalCluster) -> list[str]:
    """Lines that are no step of the specification, and writes behind a fence."""
    items = {
        owner.life.name: {meta.name for meta in owner.node.delta.tensor_table()} for owner in cluster.owners.values()
    }
    return [*step_faults(cluster.trace, items), *fence_faults(cluster.trace)]


def fence_faults(trace: list[tuple[str, Emit]]) -> list[str]:
    """Writes of a receiver under another attempt than the installed one, or after its stop_and_wait."""
    found, installed, stopped = [], dict[str, int](), set[tuple[str, int]]()
    for node, event in trace:
        match event.action:
            case Action.START_RECEIVER:
                installed.pop(node, None)
                stopped = {entry for entry in stopped if entry[0] != node}
            case Action.ENDPOINT_PREPARE | Action.START_RESTORE:
                installed[node] = event.attempt
            case Action.STOP_AND_WAIT:
                stopped.add((node, event.attempt))
            case Action.APPLY_ITEM if installed.get(node) != event.attempt or (node, event.attempt) in stopped:
                found.append(f"{node} wrote under attempt {event.attempt}, installed {installed.get(node)}")
            case _:
                pass
    return found
