"""Algorithm B.2, sentence by sentence: retries, joint commit, membership and failover, over real machines and words.

Each test paraphrases the sentence it checks (Section 6.3 and Appendix B).
"""

from __future__ import annotations

import pytest

from nemo_dcr.ids import OwnerId, ReceiverId
from nemo_dcr.protocol import coordinator_events as ce
from nemo_dcr.protocol.digests import candidate_digest
from nemo_dcr.protocol.tags import TagKind, TrackerKind
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.record import Refused
from nemo_dcr.trace import Action
from tests.unit.protocol.cluster import Cluster

E0, E1, O0 = ReceiverId("e0/0"), ReceiverId("e1/0"), OwnerId(0)


def at_version_0(**shape) -> Cluster:
    cluster = Cluster(**shape)
    cluster.become(0)
    cluster.run()
    return cluster


def modes(cluster: Cluster) -> list[str]:
    return [cluster.entry(t).mode.value for t in range(1, len(cluster.control._attempts) + 1)]


def until(cluster: Cluster, phase: Phase, c: int = 0) -> None:
    cluster.run_until(lambda: cluster.coordinators[c].state.phase is phase)


def test_version_v_stays_committed_through_every_failure_and_retry():
    """Appendix B: version v stays committed until a joint commit publishes v+1 after every required ACK."""
    cluster = at_version_0()
    cluster.train(7)
    for _ in range(3):
        until(cluster, Phase.RUNNING)
        cluster.expire(0)
        cluster.run_until(lambda: cluster.coordinators[0].state.phase is not Phase.RUNNING)
        assert cluster.record().version == 0
    cluster.run()
    assert cluster.record().version == 1
    assert {(1 + 4, member) for member in cluster.record().required} <= cluster.acks


def test_retry_recomputes_the_complete_changed_set_as_absolute_overwrites():
    """Section 6.3: recomputes the complete changed set from the same candidate and the unchanged baseline; every record
    becomes an absolute overwrite."""
    cluster = at_version_0()
    name = cluster.train(7)
    cluster.run_until(lambda: cluster.receivers[E0].state.tag.kind is TagKind.DIRTY)
    cluster.expire(0)
    cluster.run()
    base, new = cluster.versions[0], cluster.candidates[name]
    records = [record for key, payload in cluster.payloads.items() if key.attempt == 3 for record in payload.records]
    assert sorted(records) == sorted((item, False, new[item]) for item in new if new[item] != base[item])
    assert modes(cluster) == ["restore", "xor", "overwrite"]


def test_retry_repairs_receivers_that_hold_a_mixture():
    """Section 6.3: partial writes leave a mixture of old and updated values; the retry yields L_r(W^{v+1})."""
    cluster = at_version_0()
    cluster.train(7)
    cluster.run_until(
        lambda: cluster.receivers[E0].state.tag.kind is TagKind.DIRTY and len(cluster.receivers[E0].issued) == 1
    )
    cluster.expire(0)
    cluster.run_until(lambda: cluster.receivers[E0].state.attempt == 3)
    assert cluster.receivers[E0].storage not in (cluster.versions[0], cluster.candidates["c1"])
    cluster.run()
    assert cluster.receivers[E0].storage == cluster.candidates["c1"] == cluster.versions[1]


def test_membership_changes_take_effect_only_between_attempts():
    """Section 6.3: receiver membership changes take effect only between attempts."""
    cluster = at_version_0(instances=3)
    cluster.train(7)
    until(cluster, Phase.RUNNING)
    first = cluster.entry(2).required
    cluster.kill_instance("e2")
    cluster.run_until(lambda: bool(cluster.commits))
    assert len(first) == 3
    assert len(cluster.record().required) == 2
    assert cluster.record().attempt > 2


def test_restarted_receiver_restores_the_committed_version_densely_before_it_joins():
    """Section 6.3: new or restarted receivers restore the committed version through a dense refit before joining."""
    cluster = at_version_0()
    cluster.train(7)
    cluster.run()
    cluster.restart_instance("e1")
    cluster.run()
    assert modes(cluster)[-1] == "restore"
    restored = [record for key, payload in cluster.payloads.items() if key.attempt == 3 for record in payload.records]
    assert sorted(restored) == sorted((item, False, word) for item, word in cluster.versions[1].items())
    cluster.train(9)
    cluster.run()
    assert modes(cluster)[-1] == "xor"
    assert cluster.receivers[E1].state.member in cluster.record().required


def test_commit_record_binds_the_policy_to_its_baseline_its_payloads_and_its_receivers():
    """Section 6.3: the joint commit publishes the policy and binds it to its source baseline in the commit record."""
    cluster = at_version_0(owners=2)
    cluster.train(7)
    cluster.run()
    before, record = cluster.control.history()
    digests = [payload.digest for key, payload in cluster.payloads.items() if key.attempt == record.attempt]
    assert record.digest == candidate_digest(before.digest, digests)
    assert (record.version, record.baseline, record.candidate) == (1, 0, "c1")
    assert record.required == tuple(sorted(r.state.member for r in cluster.receivers.values()))


def test_commit_succeeds_only_over_the_version_v_record():
    """Section 6.3: a commit succeeds only if the commit record still equals K^v."""
    cluster = at_version_0()
    cluster.train(7)
    cluster.run()
    cluster.train(9)
    cluster.run()
    again = cluster.control.commit(cluster.commits[0])
    assert isinstance(again, Refused)
    assert cluster.record().version == 2


def test_baselines_are_updated_after_the_commit_and_before_the_transition_ends():
    """Section 6.3: owners then update trackers and residual baseline in place, before the transition ends or change
    detection resumes."""
    cluster = at_version_0()
    cluster.train(7)
    until(cluster, Phase.COMMITTING)
    assert cluster.owners[O0].baseline == {item: cluster.versions[0][item] for item in cluster.items[O0]}
    cluster.run()
    order = [event.action for event in cluster.emits]
    steps = [Action.SEND_COMMIT, Action.UPDATE_BASELINE, Action.BASELINE_FILLED, Action.END_TRANSITION]
    assert [order.index(action) for action in steps] == sorted(order.index(action) for action in steps)
    assert order.index(Action.END_TRANSITION) < max(i for i, action in enumerate(order) if action is Action.OPEN_GATE)
    assert cluster.owners[O0].baseline == {item: cluster.versions[1][item] for item in cluster.items[O0]}


@pytest.mark.parametrize("committed", [True, False])
def test_new_coordinator_reads_the_record_before_it_decides_whether_to_retry(committed):
    """Section 6.3: a new coordinator reads the same commit record before deciding whether to retry."""
    cluster = at_version_0()
    cluster.train(7)
    until(cluster, Phase.COMMITTING)
    if committed:
        cluster._do_control(0)
    cluster.coordinators[0].up = False
    cluster.become(1)
    cluster.run()
    assert modes(cluster)[2:] == (["finish"] if committed else ["overwrite"])
    assert (cluster.record().version, cluster.settled()) == (1, True)


def test_replaced_coordinator_gets_a_conflict_for_any_later_prepare_or_commit():
    """Appendix B: the control plane accepts prepare only from the active coordinator and raises a conflict for any
    later prepare or commit of a replaced one."""
    cluster = at_version_0()
    cluster.train(7)
    until(cluster, Phase.COMMITTING)
    cluster.control.acquire_epoch()
    cluster.run_until(lambda: cluster.coordinators[0].state.phase is Phase.OUT)
    (stepped,) = [outcome for outcome in cluster.outcomes if isinstance(outcome, ce.SteppedDown)]
    assert "stale_epoch" in stepped.reason
    assert cluster.record().version == 0
    conflict = cluster.control.journal()[-1]
    assert (conflict.action, conflict.args["operation"]) == (Action.CONFLICT, "commit")


def test_attempt_identifier_comes_from_prepare_and_grows_over_coordinators():
    """Appendix B: payloads, control calls and gate operations carry the attempt identifier that prepare returned."""
    cluster = at_version_0()
    cluster.train(7)
    until(cluster, Phase.RUNNING)
    cluster.become(1)
    cluster.run()
    assert [entry.attempt for entry in cluster.control._attempts] == list(range(1, len(cluster.control._attempts) + 1))
    assert [entry.epoch for entry in cluster.control._attempts] == [1, 1, 2]
    assert {key.attempt for key in cluster.payloads} <= {entry.attempt for entry in cluster.control._attempts}


def test_commit_carries_a_deadline_that_the_control_plane_enforces():
    """Section 6.3: commit deadlines. A late commit is refused, so one read after the deadline is final."""
    cluster = at_version_0()
    cluster.train(7)
    until(cluster, Phase.COMMITTING)
    cluster.unknown(0)
    cluster._do_wait(0)
    reply = cluster._execute(cluster.late_control.pop())
    assert isinstance(reply, Refused)
    assert reply.reason == "deadline"
    cluster.run()
    assert (cluster.record().attempt, cluster.settled()) == (3, True)


def test_failure_that_retries_can_not_repair_is_handed_to_an_operator():
    """Appendix B: if retries cannot repair a failure, an operator is needed. The committed version is kept."""
    cluster = at_version_0()
    cluster.train(7)
    while not cluster.control._dead:
        until(cluster, Phase.RUNNING)
        cluster.expire(0)
        cluster.run_until(lambda: cluster.coordinators[0].state.phase is not Phase.RUNNING)
        cluster.run_until(lambda: cluster.control._dead or cluster.coordinators[0].state.phase is Phase.RUNNING)
    cluster.run()
    (aborted,) = [outcome for outcome in cluster.outcomes if isinstance(outcome, ce.TransitionAborted)]
    assert aborted.candidate == "c1"
    assert (cluster.record().version, cluster.settled()) == (0, True)


def test_lost_baseline_is_never_rebuilt_from_a_candidate_that_is_not_committed():
    """Appendix A.1: the committed baseline stays fixed until the joint commit."""
    cluster = at_version_0()
    cluster.train(7)
    until(cluster, Phase.RUNNING)
    cluster.crash_owner(O0)
    cluster.run_until(lambda: bool(cluster.commits))
    assert cluster.owners[O0].state.tracker.kind is TrackerKind.LOST
    cluster.run()
    assert modes(cluster)[-1] == "dense"
    assert cluster.settled()
