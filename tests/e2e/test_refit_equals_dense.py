"""Proposition 1 as a property: whatever the geometry, the loaders, the changes and the faults, a refit ends in the bits
of a dense load, on every rank, in every parameter and buffer, changed or not; and nobody ever serves anything else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import GateMode
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, OwnerId, ReceiverId
from nemo_dcr.record import AttemptMode
from nemo_dcr.testing.local_checks import differences
from nemo_dcr.testing.local_cluster import FAST, NO_FAULTS, LocalCluster
from nemo_dcr.testing.local_network import CallFaults
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.strategies import ToyTable, toy_tables
from nemo_dcr.testing.toy_loader import Composed, Slice
from nemo_dcr.trace import Action
from nemo_dcr.transport.faults import FaultPlan
from nemo_dcr.transport.memory import MemoryTransport
from tests.e2e.chaos import Chaos, Fault, faults, trace_faults

EXAMPLES = max(40, settings.default.max_examples // 4)
NOISE = CallFaults(lose=0.05, lose_reply=0.05, repeat=0.1, late=0.1, control=0.1)
HARM = FaultPlan(lose=0.1, repeat=0.2, reorder=0.2, late=0.1, stale=0.2, lose_for_good=0.02, forget=0.04, alter=0.04)


@dataclass(frozen=True)
class Case:
    """One job: trainer, engines, gate, and how much changes."""

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

    def cluster(self, *, noisy: bool = False) -> LocalCluster:
        """Its cluster; a noisy one loses, repeats, delays and spoils."""
        tensors, rules = self.table
        payloads = replace(HARM, seed=self.seed, harm_through=AttemptId(6)) if noisy else None
        return LocalCluster(
            LocalSource(tensors, seed=self.seed, owners=self.owners, residual=self.residual and self.owners == 1),
            rules,
            self.instances,
            seed=self.seed,
            refit=replace(FAST, gate=self.gate, post_apply_check=self.check),
            faults=NOISE if noisy else NO_FAULTS,
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
        rate=st.sampled_from((0.05, 0.4, 1.0, 0.0)),
    )


def require_dense(cluster: LocalCluster) -> None:
    """Every rank holds the committed version, every bit of it."""
    record = cluster.record
    assert record is not None
    for receiver in cluster.receivers.values():
        receiver.bits = None
        assert differences(cluster, receiver, record.version) == []


@settings(max_examples=EXAMPLES)
@given(cases())
def test_refits_without_faults_equal_dense_loads(case: Case) -> None:
    cluster = case.cluster()
    cluster.run(lambda: cluster.serving_all)
    for version in (1, 2):
        cluster.train(case.rate)
        cluster.run(lambda: cluster.serving_all)
        assert cluster.record.version == version
        require_dense(cluster)
    modes = [entry.args["mode"] for entry in cluster.control.journal() if entry.action == Action.PREPARE]
    assert modes == [AttemptMode.RESTORE, AttemptMode.XOR, AttemptMode.XOR]


@settings(max_examples=EXAMPLES + 20)
@given(cases(), st.lists(faults(), max_size=4), st.booleans())
def test_refits_under_faults_equal_dense_loads(case: Case, schedule: list[Fault], noisy: bool) -> None:
    """Checks run after every step; in the end nobody is left behind, and the versions count the commits."""
    cluster = case.cluster(noisy=noisy)
    cluster.run(lambda: cluster.serving_all)
    chaos = Chaos(cluster, schedule)
    for _ in range(2):
        cluster.run(lambda: cluster.idle, each=chaos.each_round)
        cluster.train(case.rate)
        cluster.run(lambda: cluster.idle, each=chaos.each_round)
    chaos.calm_down()
    cluster.run(lambda: cluster.serving_all)
    require_dense(cluster)
    assert [record.version for record in cluster.control.history()] == list(range(len(cluster.control.history())))
    assert trace_faults(cluster) == []


@pytest.fixture
def settled() -> LocalCluster:
    """Two instances that serve version 1."""
    tensors = (TensorMeta("a", (4, 3), "BF16"), TensorMeta("b", (5,), "F32"))
    source = LocalSource(tensors, seed=3, owners=2)
    cluster = LocalCluster(source, {"a": Slice(0), "b": Composed()}, {"e0": 1, "e1": 2}, seed=3)
    cluster.run(lambda: cluster.serving_all)
    cluster.transition()
    return cluster


def test_the_checks_see_one_wrong_stored_bit(settled: LocalCluster) -> None:
    receiver = settled.receivers[ReceiverId("e1/1")]
    stored = integer_view(receiver.model.get_buffer("b"))
    with torch.no_grad():
        stored[2] ^= 1
    receiver.bits = None
    with pytest.raises(AssertionError, match=r"e1/1 claims version 1, but \['b'\] hold other bits"):
        settled.ticks(1.0, lambda: False)


def test_the_checks_see_one_wrong_tracker_bit(settled: LocalCluster) -> None:
    _, _, words = next(settled.owners[OwnerId(0)].node.delta.tracker_words())
    words[0] ^= words.dtype.type(1)
    with pytest.raises(AssertionError):
        settled.transition()


def test_the_checks_see_a_record_that_is_missing(settled: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that forgets one changed element commits storage that is not the candidate's."""
    from nemo_dcr.kernels import hot, plain

    found = plain.changed_indices
    monkeypatch.setattr(hot._CHOICE, "loops", plain)
    monkeypatch.setattr(plain, "changed_indices", lambda new, old: found(new, old)[1:])
    with pytest.raises(AssertionError, match="is required in version 2"):
        settled.transition()


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        tensors = (TensorMeta("a", (4, 3), "BF16"), TensorMeta("b", (5,), "F32"))
        source = LocalSource(tensors, seed=9, owners=2)
        cluster = LocalCluster(source, {"a": Slice(0), "b": Composed()}, {"e0": 2}, seed=9, faults=NOISE, serving=0.2)
        cluster.run(lambda cluster=cluster: cluster.serving_all)
        cluster.train()
        cluster.run(lambda cluster=cluster: cluster.idle)
        runs.append((cluster.trace, cluster.control.journal(), cluster.time))
    assert runs[0] == runs[1]
    assert cluster.record.candidate != NO_CANDIDATE
