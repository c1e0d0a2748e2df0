"""Runs whose traces are validated: simulated walks, clusters of real nodes in memory, processes with sockets.

Each returns the lines in causal order, and what its candidates really change where somebody knows.

Not handled: judging the lines (trace_export).

Spec: Next
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from model_tests.digest_engine import with_classes
from model_tests.recorded import record_local, record_simulated
from model_tests.storage_oracle import StorageOracle
from model_tests.trace_export import Changes
from model_tests.trace_files import Line, merged, read_directory, stamped
from nemo_dcr.config import GateMode
from nemo_dcr.ids import InstanceId, ReceiverId
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol.coordinator_events import AttemptEnded, Ready, TransitionEnded
from nemo_dcr.testing.local_cluster import FAST, LocalCluster
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.transport.memory import MemoryTransport
from tests.e2e.chaos import COORDINATOR_POINTS, OWNER_POINTS, RECEIVER_POINTS, VICTIMS, Chaos, Fault
from tests.e2e.socket_cluster import RULES, TENSORS, SocketCluster
from tests.unit.protocol import chaos
from tests.unit.protocol.cluster import Cluster


@dataclass(frozen=True)
class Run:
    """Lines of one run in causal order."""

    name: str
    lines: Sequence[Line]
    changes: Changes | None = None


def changes_of(cluster: Cluster) -> Changes:
    """What candidates of a simulated cluster change, by its words."""
    node = {item: f"owner {o}" for o, items in cluster.items.items() for item in items}

    def changes(new: str, old: str) -> frozenset[str]:
        before, after = cluster.candidates[old], cluster.candidates[new]
        return frozenset(f"{node[item]}/{item}" for item in after if after[item] != before[item])

    return changes


def simulated(seed: int) -> Run:
    """A random walk with faults."""
    found: list[tuple[Cluster, list[Line]]] = []
    chaos.walk(seed, names=(), on_start=lambda c: found.append((c, record_simulated(c))))
    ((cluster, lines),) = found
    return Run(f"walk {seed}", lines, changes_of(cluster))


def steady(seed: int, *, trainings: int = 2, gate: GateMode = GateMode.SYNC, owners: int = 1) -> Run:
    """A cluster of one shape without faults, whose steps come in drawn order."""
    rng = random.Random(seed)
    cluster = Cluster(instances=2, owners=owners, gate=gate)
    lines = record_simulated(cluster)
    cluster.become(0)
    cluster.run()
    for _ in range(trainings):
        cluster.train(rng.randrange(1, 1 << 9))
        while steps := cluster.progress():
            cluster.do(rng.choice(steps))
    return Run(f"steady {seed}", lines, changes_of(cluster))


def both_gates() -> Run:
    """A synchronous refit, then a coordinator that is configured for the asynchronous gate takes over and refits."""
    cluster = Cluster(owners=2, gate=GateMode.SYNC)
    lines = record_simulated(cluster)
    successor = cluster.coordinators[1]
    config = replace(successor.state.config, refit=replace(cluster.refit, gate=GateMode.ASYNC))
    successor.state = replace(successor.state, config=config)
    for coordinator in range(2):
        cluster.become(coordinator)
        cluster.run()
        cluster.train(5 + coordinator)
        cluster.run()
    return Run("both gates", lines, changes_of(cluster))


def rejected_payload() -> Run:
    """A receiver gets a payload that is not valid; the retry commits."""
    cluster = Cluster()
    lines = record_simulated(cluster)
    cluster.become(0)
    cluster.run()
    cluster.train(5)
    victim = cluster.receivers[ReceiverId("e0/0")]
    cluster.run_until(lambda: victim.state.apply_open and not victim.state.acked)
    cluster._receive(ReceiverId("e0/0"), es.PayloadRejected(victim.state.attempt, "a digest is wrong"))
    cluster.run()
    return Run("rejected payload", lines, changes_of(cluster))


def local(seed: int, faults: int = 4) -> Run:
    """Real nodes, tensors and loaders in one thread, with faults at drawn points."""
    rng = random.Random(seed)
    cluster = LocalCluster(
        LocalSource(TENSORS, seed=seed, owners=rng.choice((1, 2))),
        RULES,
        {InstanceId("e0"): 1, InstanceId("e1"): rng.choice((1, 2))},
        seed=seed,
        refit=replace(FAST, gate=rng.choice(list(GateMode)), max_attempts=5),
        transport=MemoryTransport(None, window=1 << 20),
        group_payloads=1,
        serving=rng.choice((0.0, 0.05)),
        proved=rng.random() < 0.6,
    )
    oracle = StorageOracle(cluster)
    lines = record_local(cluster, oracle)
    points = ("", *RECEIVER_POINTS, *OWNER_POINTS, *COORDINATOR_POINTS)
    drawn = [Fault(rng.choice(VICTIMS), rng.randrange(3), rng.choice(points), rng.randrange(13)) for _ in range(faults)]
    struck = Chaos(cluster, drawn)
    for _ in range(2):
        struck.bring_back()
        with suppress(AssertionError):  # an owner that died while it froze waits for an abort that nobody asks for
            cluster.run(lambda: cluster.serving_all, rounds=300, each=struck.each_round)
        struck.bring_back()
        if all(owner.life.alive and not owner.rank.frozen for owner in cluster.owners.values()):
            with suppress(AssertionError):
                cluster.train(rate=0.4)
    struck.calm_down()
    with suppress(AssertionError):
        cluster.run(lambda: cluster.serving_all, rounds=300)
    alive = {(owner.life.name, int(owner.life.incarnation)) for owner in cluster.owners.values() if owner.life.alive}
    lives = {(line.node, line.incarnation) for line in lines if line.node.startswith("owner ")}
    return Run(f"local {seed}", merged(stamped(lines), killed=lives - alive), oracle.changes)


def processes(directory: Path) -> tuple[Path, Run]:
    """Engine processes, sockets and files; an engine is killed in a stream and comes back.

    Returns its traces, and their lines with the classes of what engines told of their storage.
    """
    cluster = SocketCluster(directory, {"e0": 1, "e1": 2}, processes=True, module="model_tests.digest_engine")
    victim = ReceiverId("e0/0")
    try:
        cluster.store.hold_after = 2
        cluster.train()

        def strike() -> None:
            if victim in cluster.children and [r.payloads for r in cluster.coordinator.owner_reports()] == [2]:
                cluster.kill(victim)

        cluster.until(AttemptEnded, strike)
        cluster.until(TransitionEnded)
        cluster.until(Ready)
        cluster.start_instance(InstanceId("e0"))
        cluster.prewarm([victim])
        cluster.coordinator.look()
        cluster.until(Ready)
        cluster.train()
        cluster.until(TransitionEnded)
        cluster.until(Ready)
    finally:
        cluster.close()
    traces = directory / "traces"
    return traces, Run("processes", with_classes(read_directory(traces), cluster.source, cluster.instances))


def from_directory(directory: Path) -> Run:
    """A run that wrote files."""
    return Run(str(directory), read_directory(directory))
