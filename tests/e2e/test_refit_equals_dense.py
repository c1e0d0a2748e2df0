"""Proposition 1 as a property: whatever the geometry, the loaders, the changes and the faults, a refit ends in the bits
of a dense load, on every rank, in every parameter and buffer, changed or not; and nobody ever serves anything else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_dcr.config import GateMode
from nemo_dcr.ids import AttemptId
from nemo_dcr.testing.local_checks import differences
from nemo_dcr.testing.local_cluster import FAST, LocalCluster
from nemo_dcr.testing.local_network import CallFaults
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.strategies import ToyTable, toy_tables
from nemo_dcr.transport.faults import FaultPlan
from nemo_dcr.transport.memory import MemoryTransport
from tests.e2e.chaos import Chaos, Fault, faults, settle


@dataclass(frozen=True)
class Case:
    table: ToyTable
    seed: int
    owners: int
    residual: bool
    instances: dict[str, int]
    gate: GateMode
    check: bool
    proved: bool
    serving: float
    rate: float

    def cluster(self, *, calls: CallFaults | None = None, payloads: FaultPlan | None = None) -> LocalCluster:
        tensors, rules = self.table
        return LocalCluster(
            LocalSource(tensors, seed=self.seed, owners=self.owners, residual=self.residual and self.owners == 1),
            rules,
            self.instances,
            seed=self.seed,
            refit=replace(FAST, gate=self.gate, post_apply_check=self.check),
            faults=calls or CallFaults(),
            transport=MemoryTransport(payloads, window=1 << 20),
            proved=self.proved,
            serving=self.serving,
        )


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        table=toy_tables(),
        seed=st.integers(0, 1 << 32),
        owners=st.integers(1, 3),
        residual=st.booleans(),
        instances=st.sampled_from(({"e0": 1, "e1": 2}, {"e0": 1}, {"e0": 2, "e1": 1}, {"e0": 3})),
        gate=st.sampled_from(GateMode),
        check=st.booleans(),
        proved=st.booleans(),
        serving=st.sampled_from((0.0, 0.2)),
        rate=st.sampled_from((0.0, 0.05, 0.4, 1.0)),
    )


def require_dense(cluster: LocalCluster) -> None:
    """Every rank holds the committed version, every bit of it; so do the trackers."""
    record = cluster.record
    for receiver in cluster.receivers.values():
        receiver.bits = None
        assert differences(cluster, receiver, record.version) == []
    assert cluster.idle


@settings(max_examples=40)
@given(cases())
def test_refits_without_faults_equal_dense_loads(case: Case) -> None:
    cluster = case.cluster()
    cluster.run(lambda: cluster.serving_all)
    for version in (1, 2):
        cluster.train(case.rate)
        cluster.run(lambda: cluster.serving_all)
        assert cluster.record.version == version
        require_dense(cluster)
    assert not any(entry.mode != "xor" for entry in cluster.control._attempts if entry.candidate)


@settings(max_examples=60)
@given(cases(), st.lists(faults(), max_size=4), st.integers(0, 1 << 16), st.booleans())
def test_refits_under_faults_equal_dense_loads(case: Case, schedule: list[Fault], seed: int, noisy: bool) -> None:
    calls = CallFaults(lose=0.05, lose_reply=0.05, repeat=0.1, late=0.1, control=0.1) if noisy else CallFaults()
    payloads = FaultPlan(
        seed=seed,
        lose=0.1,
        repeat=0.2,
        reorder=0.2,
        late=0.1,
        stale=0.2,
        lose_for_good=0.02,
        forget=0.05,
        alter=0.05,
        harm_through=AttemptId(6),
    )
    cluster = case.cluster(calls=calls, payloads=payloads if noisy else None)
    cluster.run(lambda: cluster.serving_all)
    chaos = Chaos(cluster, schedule)
    for _ in range(2):
        chaos.bring_back()
        cluster.run(lambda: cluster.idle, each=chaos.each_round)
        cluster.train(case.rate)
        cluster.run(lambda: cluster.idle, each=chaos.each_round)
    settle(cluster, chaos)
    require_dense(cluster)
