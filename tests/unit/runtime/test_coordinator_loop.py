"""The coordinator's loop: it never keeps its caller, never spins, and names what is missing in time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import GateMode
from nemo_dcr.errors import ControlPlaneUnavailable, EndpointLost, TransportFailed
from nemo_dcr.ids import AttemptId, InstanceId, OwnerId, instance_of
from nemo_dcr.protocol.coordinator_events import AttemptEnded, Held, Ready, TransitionEnded
from nemo_dcr.protocol.messages import ReceiverStatus
from nemo_dcr.runtime.coordinator import OUTCOMES_KEPT
from nemo_dcr.testing.local_cluster import FAST, LocalCluster
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Slice
from nemo_dcr.trace import Action
from nemo_dcr.transport.memory import MemoryTransport

E1 = InstanceId("e1")


def cluster_of(transport: MemoryTransport | None = None) -> LocalCluster:
    """Two instances and an owner, not bootstrapped."""
    tensors = (TensorMeta("a", (8, 3), "BF16"), TensorMeta("b", (5,), "F32"))
    source = LocalSource(tensors, seed=1)
    return LocalCluster(source, {"a": Slice(0), "b": Slice(0)}, {"e0": 1, "e1": 1}, transport=transport)


@pytest.fixture
def cluster() -> LocalCluster:
    """The same, serving version 0 under coordinator 0."""
    made = cluster_of()
    made.run(lambda: made.serving_all)
    return made


def test_a_held_coordinator_gives_its_caller_a_turn_and_a_timeout(cluster: LocalCluster) -> None:
    cluster.crash_owner(OwnerId(0))
    coordinator = cluster.coordinators[0].coordinator
    turns: list[float] = []
    coordinator.look()
    with pytest.raises(EndpointLost, match=r"endpoint coordinator is lost: no end after 1 s; it is .*owners \[0\]"):
        coordinator.run_until(lambda effect: False, 1.0, each_round=lambda: turns.append(cluster.time))
    assert len(turns) > 10
    assert [effect for effect in cluster.outcomes if isinstance(effect, Held)]


def test_what_holds_a_coordinator_may_be_repaired_between_its_rounds(cluster: LocalCluster) -> None:
    cluster.train()
    cluster.crash_owner(OwnerId(0))
    coordinator = cluster.coordinators[0].coordinator
    coordinator.look()
    rounds: list[int] = []

    def repair() -> None:
        rounds.append(1)
        if len(rounds) == 5:
            cluster.restart_owner(OwnerId(0))

    coordinator.run_until(lambda effect: isinstance(effect, TransitionEnded), 10.0, each_round=repair)
    assert cluster.record.version == 1


def test_outcomes_that_nobody_asks_for_do_not_pile_up(cluster: LocalCluster) -> None:
    coordinator = cluster.coordinators[0].coordinator
    for _ in range(2 * OUTCOMES_KEPT):
        coordinator.look()
        coordinator.round()
    waiting: list[object] = []

    def never(outcome: object) -> bool:
        waiting.append(outcome)
        return False

    with pytest.raises(EndpointLost):
        coordinator.run_until(never, FAST.heartbeat_s)
    assert OUTCOMES_KEPT <= len(waiting) <= OUTCOMES_KEPT + 1
    assert all(isinstance(outcome, Ready) for outcome in waiting)


def test_an_unreachable_control_plane_is_asked_once_a_heartbeat(cluster: LocalCluster) -> None:
    asked: list[float] = []

    def unreachable() -> None:
        asked.append(cluster.time)
        cluster.at("before acquire_epoch", unreachable)
        raise ControlPlaneUnavailable("acquire_epoch", "the file is locked")

    cluster.at("before acquire_epoch", unreachable)
    second = cluster.take_over()
    with pytest.raises(EndpointLost, match="it is acquiring"):
        second.coordinator.run_until(lambda effect: False, 1.0)
    assert 5 < len(asked) <= 1.0 / FAST.heartbeat_s + 2
    cluster.forget_points()
    second.coordinator.run_until(lambda effect: isinstance(effect, Ready), 5.0)


def test_a_broken_connection_is_a_loss_at_once(cluster: LocalCluster) -> None:
    cluster.train()
    failed: list[float] = []
    crashed: list[float] = []

    def crash() -> None:
        crashed.append(cluster.time)
        cluster.crash_instance(E1)

    cluster.at("Accept", crash, node="e1")
    cluster.at("FailAttempt", lambda: failed.append(cluster.time))
    cluster.run(lambda: cluster.idle)
    assert failed[0] - crashed[0] < FAST.lost_after_s / 2
    (ended,) = [effect for effect in cluster.outcomes if isinstance(effect, AttemptEnded) and effect.reason]
    assert ended.reason == "receiver e1/0 is lost: the connection broke, in phase applying"


def test_one_lost_status_call_does_not_cost_an_engine_its_place(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survey asks again until the endpoint answers or counts as lost."""
    lost: list[Any] = []

    def reaches(call: Any) -> bool:
        if isinstance(call, ReceiverStatus) and instance_of(call.receiver) == E1 and not lost:
            lost.append(call)
            return False
        return True

    cluster.train()
    monkeypatch.setattr(cluster, "reaches", reaches)
    cluster.coordinators[0].coordinator.look()
    cluster.run(lambda: cluster.idle)
    assert len(lost) == 1
    assert E1 in {instance_of(member.receiver) for member in cluster.record.required}


def test_an_engine_that_stays_silent_is_left_out_after_lost_after_s(cluster: LocalCluster) -> None:
    cluster.train()
    cluster.silent.add("e1/0")
    began = cluster.time
    cluster.run(lambda: cluster.idle)
    assert {instance_of(member.receiver) for member in cluster.record.required} == {"e0"}
    assert cluster.time - began < 6 * FAST.lost_after_s


class Uncleanable(MemoryTransport):
    """A store that cannot delete."""

    def cleanup(self, through: AttemptId) -> None:
        raise TransportFailed("memory", "read-only")


def test_a_cleanup_that_fails_costs_disk_space_and_no_transition(caplog: pytest.LogCaptureFixture) -> None:
    cluster = cluster_of(Uncleanable())
    with caplog.at_level(logging.WARNING):
        cluster.run(lambda: cluster.serving_all)
        cluster.transition()
    assert cluster.record.version == 1
    assert "read-only" in caplog.text


def test_the_gate_of_the_next_attempt_can_be_chosen(cluster: LocalCluster) -> None:
    for gate, stays_open in ((GateMode.ASYNC, True), (GateMode.SYNC, False)):
        cluster.coordinators[0].coordinator.set_gate(gate)
        cluster.trace.clear()
        cluster.transition()
        prepared = [event for _, event in cluster.trace if event.action is Action.ENDPOINT_PREPARE]
        assert [event.post["gate"] for event in prepared] == [stays_open] * 2


def test_progress_is_read_from_the_newest_owner_reports(cluster: LocalCluster) -> None:
    cluster.transition()
    (report,) = cluster.coordinators[0].coordinator.owner_reports()
    assert (report.owner, report.tracker.version) == (0, 1)


def test_the_attempt_deadline_fails_an_attempt_that_waits_for_nothing_it_can_name() -> None:
    """An owner whose stream never ends answers every status call; only the deadline ends that."""
    cluster = cluster_of()
    cluster.run(lambda: cluster.serving_all)
    cluster.train()
    owner = cluster.owners[OwnerId(0)]
    work, owner.node.work = owner.node.work, lambda timeout_s: False  # type: ignore[method-assign]
    cluster.at("FailAttempt", lambda: setattr(owner.node, "work", work))
    began = cluster.time
    cluster.run(lambda: cluster.idle)
    (ended,) = [effect for effect in cluster.outcomes if isinstance(effect, AttemptEnded) and effect.reason]
    assert ended.reason.startswith("deadline passed")
    assert "owner 0" in ended.reason
    assert cluster.time - began < replace(FAST).attempt_deadline_s + 2.0
