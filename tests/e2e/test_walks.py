"""Fixed walks through failures that other systems met (C1 to C15 of the failure catalogue): one story a test."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import GateMode
from nemo_dcr.errors import ControlPlaneUnavailable
from nemo_dcr.ids import AttemptId, InstanceId, Member, OwnerId, ReceiverId, Version, instance_of
from nemo_dcr.protocol.coordinator_events import AbortRequested, AttemptEnded, SteppedDown, TransitionAborted
from nemo_dcr.protocol.tags import TagKind
from nemo_dcr.record import DELTA_MODES, AttemptMode
from nemo_dcr.source.baseline import committed
from nemo_dcr.testing.local_checks import differences
from nemo_dcr.testing.local_cluster import FAST, NO_FAULTS, LocalCluster
from nemo_dcr.testing.local_network import CallFaults
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Composed, PadRows, Parameters, Replicate, Rule, Slice, Transpose
from nemo_dcr.trace import Action
from nemo_dcr.transport.faults import FaultPlan
from nemo_dcr.transport.memory import MemoryTransport
from tests.e2e.chaos import trace_faults

E0, E1, E2, E3 = (InstanceId(f"e{number}") for number in range(4))
TENSORS = (
    TensorMeta("a.w", (8, 4), "BF16"),
    TensorMeta("b.w", (5, 6), "F32"),
    TensorMeta("c.w", (6,), "F16"),
    TensorMeta("d.w", (4, 4), "I64"),
)
RULES: dict[str, Rule] = {"a.w": Slice(0), "b.w": Composed(), "c.w": PadRows(4), "d.w": Transpose()}


class FailsOnce(Replicate):
    """A loader that raises once, in the next load of one rank, when armed."""

    def __init__(self) -> None:
        self._armed: Parameters | None = None

    def arm(self, cluster: LocalCluster, receiver: str) -> None:
        """Fail the next load of that receiver."""
        self._armed = cluster.receivers[ReceiverId(receiver)].model._stored

    def load(self, name: str, tensor: Tensor, parameters: Parameters, rank: int, world: int) -> list[str]:
        if parameters is self._armed:
            self._armed = None
            raise RuntimeError("the loader gave up")
        return super().load(name, tensor, parameters, rank, world)


def cluster_of(
    *,
    owners: int = 2,
    rules: dict[str, Rule] = RULES,
    gate: GateMode = GateMode.SYNC,
    faults: CallFaults = NO_FAULTS,
    payloads: FaultPlan | None = None,
    residual: bool = False,
    serving: float = 0.0,
    max_attempts: int = 5,
    seed: int = 5,
) -> LocalCluster:
    """Three instances, the third of two ranks, that serve version 0."""
    cluster = LocalCluster(
        LocalSource(TENSORS, seed=seed, owners=owners, residual=residual),
        rules,
        {E0: 1, E1: 1, E2: 2},
        seed=seed,
        refit=replace(FAST, gate=gate, max_attempts=max_attempts),
        faults=faults,
        transport=MemoryTransport(payloads, window=1 << 20),
        group_payloads=1,
        serving=serving,
    )
    cluster.run(lambda: cluster.serving_all)
    return cluster


def finish(cluster: LocalCluster, version: int) -> None:
    """Everybody serves this version in the end: every stored bit; each trace line is a step."""
    cluster.run(lambda: cluster.serving_all)
    assert cluster.record.version == version
    for receiver in cluster.receivers.values():
        receiver.bits = None
        assert differences(cluster, receiver, Version(version)) == []
    assert trace_faults(cluster) == []


def prepares(cluster: LocalCluster, modes: frozenset[AttemptMode] = DELTA_MODES) -> list[str]:
    """Modes of the attempts, in order."""
    found = [entry.args["mode"] for entry in cluster.control.journal() if entry.action == Action.PREPARE]
    return [mode for mode in found if AttemptMode(mode) in modes]


def failures(cluster: LocalCluster) -> list[str]:
    """Why attempts failed."""
    return [effect.reason for effect in cluster.outcomes if isinstance(effect, AttemptEnded) and effect.reason]


def required(cluster: LocalCluster, attempt: int) -> set[str]:
    """Instances of an attempt's required set."""
    (entry,) = [e for e in cluster.control.journal() if e.action == Action.PREPARE and e.attempt == attempt]
    return {instance_of(ReceiverId(member.split("@")[0])) for member in str(entry.args["required"]).split(",")}


def test_the_baseline_stays_and_the_retry_sends_the_same_changes_after_a_failed_apply() -> None:
    """C1, C8: one of three engines cannot apply; nothing moves on, nobody serves, the retry finds the same set."""
    broken = FailsOnce()
    cluster = cluster_of(rules={**RULES, "d.w": broken})
    changed: dict[OwnerId, list[tuple[int, int]]] = defaultdict(list)

    def trackers() -> list[list[bytes]]:
        return [[words.tobytes() for _, _, words in o.node.delta.tracker_words()] for o in cluster.owners.values()]

    def note(owner: OwnerId) -> None:
        counts = cluster.owners[owner].node.counts
        changed[owner].append((counts.changed_elements, counts.emitted))

    def on_failure() -> None:
        assert [owner.node.delta.tag for owner in cluster.owners.values()] == [committed(Version(0))] * 2
        assert trackers() == before
        assert cluster.record.version == 0
        assert not any(receiver.node.report.gate_open for receiver in cluster.receivers.values())
        seen.append(True)

    seen: list[bool] = []
    before = trackers()
    cluster.train(rate=0.5)
    broken.arm(cluster, "e1/0")
    cluster.at("FailAttempt", on_failure)
    for owner in cluster.owners:
        for skip in (0, 1):
            cluster.at("EndStream", partial(note, owner), node=f"owner {owner}", skip=skip)
    finish(cluster, 1)
    assert seen == [True]
    assert "the loader gave up" in failures(cluster)[0]
    assert prepares(cluster) == ["xor", "overwrite"]
    assert all(len(set(counts)) == 1 for counts in changed.values())
    assert max(map(len, changed.values())) == 2


def test_no_old_byte_lands_after_stop_and_wait_whatever_arrives_late() -> None:
    """C2: an apply fails in the middle; everything of the failed attempt arrives again during the retry."""
    broken = FailsOnce()
    plan = FaultPlan(seed=1, repeat=0.5, stale=0.9, reorder=0.5)
    cluster = cluster_of(rules={**RULES, "d.w": broken}, payloads=plan, faults=CallFaults(repeat=0.5, late=0.5))
    cluster.train(rate=0.5)
    broken.arm(cluster, "e2/1")
    finish(cluster, 1)
    assert prepares(cluster) == ["xor", "overwrite"]
    stale = [
        event for _, event in cluster.trace if event.action is Action.IGNORE_STALE and event.args["reason"] == "payload"
    ]
    assert stale
    cluster.transition()
    finish(cluster, 2)


def test_an_xor_payload_that_arrives_many_times_is_applied_once() -> None:
    """C3: every announcement and every call is delivered at least twice, some with lost replies."""
    cluster = cluster_of(payloads=FaultPlan(repeat=1.0), faults=CallFaults(repeat=1.0, lose_reply=0.1))
    cluster.train(rate=0.5)
    finish(cluster, 1)
    assert prepares(cluster) == ["xor"]
    assert any(event.action is Action.IGNORE_DUPLICATE for _, event in cluster.trace)


KILLS = {
    "before the first payload": ("EndpointPrepare", "e1/0", 0),
    "amid the payloads": ("ApplyItem", "e1/0", 1),
    "after the last payload, before the acknowledgement": ("Flush", "e1/0", 0),
    "after the acknowledgement, before the commit": ("CompleteAttempt", "coordinator", 0),
    "after the commit, before the baseline update": ("after commit", "coordinator", 0),
    "during the baseline update": ("UpdateBaseline", "owner", 0),
    "before the gates open": ("EndTransition", "owner", 1),
}


@pytest.mark.parametrize("gate", list(GateMode))
@pytest.mark.parametrize("when", KILLS)
def test_an_engine_that_is_killed_comes_back_only_through_a_dense_restore(when: str, gate: GateMode) -> None:
    """C4: the process is gone with its storage, and starts again from the checkpoint of version 0."""
    cluster = cluster_of(gate=gate)
    cluster.transition()
    action, node, skip = KILLS[when]
    cluster.train(rate=0.5)
    cluster.at(action, lambda: cluster.crash_instance(E1), node=node, skip=skip)
    cluster.run(lambda: cluster.idle)
    first = cluster.receivers[ReceiverId("e1/0")].life
    assert not first.alive
    assert cluster.record.version == 2
    cluster.start_instance(E1)
    reborn = cluster.receivers[ReceiverId("e1/0")].life
    finish(cluster, 2)
    restores = [e for e in cluster.control.journal() if e.action == Action.PREPARE and e.args["mode"] == "restore"]
    assert f"e1/0@{reborn.incarnation}" in str(restores[-1].args["required"])
    assert Member(ReceiverId("e1/0"), reborn.incarnation) not in cluster.record.required
    cluster.transition()
    finish(cluster, 3)
    assert Member(ReceiverId("e1/0"), reborn.incarnation) in cluster.record.required


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("point", ["after commit", "UpdateBaseline", "CopyItem"])
def test_a_crash_after_the_commit_is_rolled_forward(point: str, residual: bool) -> None:
    """C5: owner and coordinator die when the record has moved; the new ones must not retry, and track version 1."""
    cluster = cluster_of(owners=1, residual=residual)
    cluster.train(rate=0.5)

    def crash() -> None:
        cluster.crash_owner(OwnerId(0))
        cluster.coordinators[0].life.alive = False

    cluster.at(point, crash)
    cluster.run(lambda: cluster.record.version == 1 and not cluster.owners[OwnerId(0)].life.alive)
    cluster.restart_owner(OwnerId(0))
    finish(cluster, 1)
    assert prepares(cluster) == ["xor"]
    assert cluster.owners[OwnerId(0)].node.delta.tag == committed(Version(1))
    cluster.transition()
    finish(cluster, 2)
    assert prepares(cluster) == ["xor", "xor"]


@pytest.mark.parametrize("residual", [False, True])
def test_a_trainer_that_dies_before_the_commit_goes_on_with_a_dense_attempt(residual: bool) -> None:
    """C5, D12: the trackers are lost, the candidate is not; its next attempt sends everything."""
    cluster = cluster_of(owners=1, residual=residual)
    cluster.train(rate=0.5)
    cluster.at("EmitPayload", lambda: cluster.crash_owner(OwnerId(0)), node="owner 0")
    cluster.run(lambda: not cluster.owners[OwnerId(0)].life.alive)
    cluster.restart_owner(OwnerId(0))
    finish(cluster, 1)
    assert prepares(cluster) == ["xor", "dense"]


@pytest.mark.parametrize("point", ["StartAttempt", "CompleteAttempt", "before commit"])
def test_a_coordinator_that_dies_before_the_commit_is_followed_by_an_overwrite_retry(point: str) -> None:
    """C5: nothing was committed, so the new coordinator goes on with the same candidate and never sends XOR again."""
    cluster = cluster_of()

    def crash() -> None:
        cluster.coordinators[0].life.alive = False

    cluster.train(rate=0.5)
    cluster.at(point, crash)
    finish(cluster, 1)
    assert prepares(cluster) == ["xor", "overwrite"]
    assert cluster.record.epoch == 2


@pytest.mark.parametrize(("moment", "outcome"), [("after commit", "committed"), ("before commit", "not committed")])
def test_a_commit_without_a_reply_is_settled_by_one_read_after_its_deadline(moment: str, outcome: str) -> None:
    """D14: the reply, or the call itself, is lost; nothing is decided before the deadline has passed."""
    cluster = cluster_of()
    cluster.train(rate=0.5)
    asked: list[float] = []

    def lose() -> None:
        asked.append(cluster.time)
        raise ControlPlaneUnavailable("commit", "the reply was lost")

    def settle() -> None:
        asked.append(cluster.time)

    cluster.at(moment, lose)
    cluster.at("ResolveCommit", settle)
    finish(cluster, 1)
    outcomes = [event.args["outcome"] for _, event in cluster.trace if event.action is Action.RESOLVE_COMMIT]
    assert outcomes[0] == outcome
    assert asked[1] - asked[0] >= FAST.commit_deadline_s
    assert prepares(cluster) == (["xor"] if outcome == "committed" else ["xor", "overwrite"])


def test_a_paused_coordinator_that_comes_back_conflicts_and_steps_down() -> None:
    """C7: coordinator 0 stops right before its commit; coordinator 1 commits; 0 goes on with its old request."""
    cluster = cluster_of()
    cluster.train(rate=0.5)

    def pause() -> None:
        rival = cluster.take_over()
        for _ in range(400):
            if cluster.record.version == 1:
                break
            cluster.guard(rival.life, rival.coordinator.round)

    cluster.at("before commit", pause, node="coordinator 0")
    cluster.run(lambda: cluster.coordinators[0].out)
    assert cluster.record.epoch == 2
    assert [effect for effect in cluster.outcomes if isinstance(effect, SteppedDown)]
    conflicts = [e.args for e in cluster.control.journal() if e.action == Action.CONFLICT]
    assert [(args["operation"], args["reason"]) for args in conflicts] == [("commit", "stale_epoch")]
    finish(cluster, 1)
    assert prepares(cluster) == ["xor", "overwrite"]


@pytest.mark.parametrize("gate", list(GateMode))
def test_an_engine_that_joins_in_the_middle_is_required_only_in_the_next_attempt(gate: GateMode) -> None:
    """C14."""
    cluster = cluster_of(gate=gate, serving=0.1)
    cluster.train(rate=0.5)

    def join() -> None:
        cluster.instances[E3] = 1
        cluster.start_instance(E3)

    cluster.at("EmitPayload", join)
    cluster.run(lambda: cluster.record.version == 1)
    assert "e3" not in required(cluster, cluster.record.attempt)
    finish(cluster, 1)
    cluster.transition()
    finish(cluster, 2)
    assert required(cluster, cluster.record.attempt) == {"e0", "e1", "e2", "e3"}


def test_an_engine_that_leaves_fails_the_attempt_and_is_not_required_in_the_next() -> None:
    """C14: it is announced no more, so nobody waits for it."""
    cluster = cluster_of()
    cluster.train(rate=0.5)
    cluster.at("ApplyItem", lambda: cluster.remove_instance(E1), node="e0/0")
    finish(cluster, 1)
    assert failures(cluster) == ["receiver e1/0 is lost: it left the endpoints, in phase applying"]
    assert prepares(cluster) == ["xor", "overwrite"]
    assert required(cluster, cluster.record.attempt) == {"e0", "e2"}


def test_a_silent_engine_is_named_and_left_behind_until_it_is_heard_again() -> None:
    """C11 without processes: no reply, no broken connection; the others go on, and it is restored when it is back."""
    cluster = cluster_of()
    cluster.train(rate=0.5)
    cluster.at("ApplyItem", lambda: cluster.silent.update({"e2/0", "e2/1"}), node="e2/0")
    began = cluster.time
    cluster.run(lambda: cluster.idle)
    assert failures(cluster)[0].startswith("receiver e2/0 is lost: no reply")
    assert cluster.time - began < 10 * FAST.lost_after_s
    assert required(cluster, cluster.record.attempt) == {"e0", "e1"}
    assert not any(cluster.receivers[ReceiverId(name)].node.report.gate_open for name in ("e2/0", "e2/1"))
    cluster.silent.clear()
    finish(cluster, 1)


@pytest.mark.parametrize("keeps_storage", [True, False])
def test_a_sleeping_engine_takes_no_writes_and_wakes_to_the_committed_version(keeps_storage: bool) -> None:
    """C15: level 1 keeps the weights, level 2 releases them; after the wake only a restore or the old tag counts."""
    cluster = cluster_of()
    node = cluster.receivers[ReceiverId("e1/0")].node
    node.slept(keeps_storage=keeps_storage)
    cluster.train(rate=0.5)
    cluster.run(lambda: cluster.idle)
    assert cluster.record.version == 1
    assert required(cluster, cluster.record.attempt) == {"e0", "e2"}
    assert (node.report.gate_open, node.admit("q")) == (False, False)
    assert node.report.tag.kind is (TagKind.CLEAN if keeps_storage else TagKind.NONE)
    assert not [e for name, e in cluster.trace if name == "e1/0" and e.action is Action.APPLY_ITEM]
    node.woke()
    finish(cluster, 1)


def test_an_engine_that_falls_asleep_in_an_attempt_fails_it() -> None:
    """C15: the storage that was half written is gone."""
    cluster = cluster_of()
    node = cluster.receivers[ReceiverId("e1/0")].node
    cluster.train(rate=0.5)
    cluster.at("Accept", lambda: node.slept(keeps_storage=False), node="e1/0")
    cluster.run(lambda: cluster.idle)
    assert "released its weights" in failures(cluster)[0]
    node.woke()
    finish(cluster, 1)


def test_a_candidate_that_is_given_up_leaves_no_trace_in_storage_or_baseline() -> None:
    """D27: after an abort everybody is back at version 0, engines by dense restores, and training goes on from it."""
    cluster = cluster_of()
    cluster.train(rate=0.5)
    due: list[bool] = []

    def operator() -> None:
        if due:
            due.clear()
            cluster.coordinators[0].coordinator.feed(AbortRequested())

    cluster.at("ApplyItem", lambda: due.append(True), skip=3)
    cluster.run(lambda: any(isinstance(e, TransitionAborted) for e in cluster.outcomes), each=operator)
    finish(cluster, 0)
    cluster.transition()
    finish(cluster, 1)


def test_attempts_that_always_fail_end_in_an_abort_that_names_the_reason() -> None:
    """D26: after the limit the candidate is killed; version 0 is served again."""
    plan = FaultPlan(alter=1.0, harm_through=AttemptId(3))
    cluster = cluster_of(max_attempts=2, payloads=plan)
    cluster.train(rate=0.5)
    cluster.run(lambda: any(isinstance(effect, TransitionAborted) for effect in cluster.outcomes))
    (aborted,) = [effect for effect in cluster.outcomes if isinstance(effect, TransitionAborted)]
    assert "digest" in aborted.reason or "not valid" in aborted.reason
    assert prepares(cluster) == ["xor", "overwrite"]
    finish(cluster, 0)


def test_every_owner_lost_with_no_transition_open_rebuilds_from_resident_weights() -> None:
    """D12: with nothing frozen the resident weights are the committed version."""
    cluster = cluster_of()
    cluster.transition()
    for owner in tuple(cluster.owners):
        cluster.restart_owner(owner)
    finish(cluster, 1)
    assert all(owner.node.delta.tag == committed(Version(1)) for owner in cluster.owners.values())
    cluster.transition()
    finish(cluster, 2)
    assert prepares(cluster) == ["xor", "xor"]
