"""The coordinator over whole clusters: every decision, and every outcome of the control plane."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, Epoch, Incarnation, OwnerId, ReceiverId, Version
from nemo_dcr.protocol import attempt as attempts
from nemo_dcr.protocol import coordinator_events as ce
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol import membership, transition
from nemo_dcr.protocol import owner as transition_owner
from nemo_dcr.protocol.attempt import AttemptPhase
from nemo_dcr.protocol.endpoint_report import report
from nemo_dcr.protocol.tags import Tag, TagKind, TrackerKind, TrackerTag
from nemo_dcr.protocol.transition_state import CoordinatorConfig, Phase
from nemo_dcr.record import AttemptMode, Refusal, Refused
from nemo_dcr.trace import Action
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.invariants import STATE_INVARIANTS, check

# monotone and fence_mono compare with the step before.
E0, E1, O0 = ReceiverId("e0/0"), ReceiverId("e1/0"), OwnerId(0)


def ready(**shape) -> Cluster:
    cluster = Cluster(**shape)
    cluster.become(0)
    cluster.run()
    assert cluster.settled()
    return cluster


def until_phase(cluster: Cluster, phase: Phase, c: int = 0) -> None:
    cluster.run_until(lambda: cluster.coordinators[c].state.phase is phase)


def finish(cluster: Cluster) -> None:
    cluster.run()
    check(cluster, tuple(STATE_INVARIANTS))
    assert cluster.settled()


def modes(cluster: Cluster) -> list[str]:
    return [entry.mode.value for entry in cluster.control._attempts]


def ended(cluster: Cluster, kind: type) -> list:
    return [outcome for outcome in cluster.outcomes if isinstance(outcome, kind)]


# ----------------------------------------------------------------------------------------------------------- decisions


def test_first_record_follows_the_dense_restore_of_every_receiver():
    cluster = ready()
    assert modes(cluster) == ["restore"]
    assert cluster.control.history()[0].required == tuple(sorted(r.state.member for r in cluster.receivers.values()))


def test_bootstrap_waits_for_the_instances_it_was_told_of():
    cluster = Cluster(instances=2)
    cluster.kill_instance("e1")
    cluster.become(0)
    with pytest.raises(AssertionError, match="still busy"):
        cluster.run(limit=200)
    assert cluster.control.history() == ()
    assert ended(cluster, ce.Held)[0].reason == "1 of 2 engine instances answer"
    cluster.restart_instance("e1")
    finish(cluster)


@pytest.mark.parametrize("gate", list(GateMode))
@pytest.mark.parametrize(("instances", "ranks", "owners"), [(1, 1, 1), (2, 2, 2), (3, 1, 2)])
def test_transition_commits_once_with_xor_and_everybody_serves_it(gate, instances, ranks, owners):
    cluster = ready(instances=instances, ranks=ranks, owners=owners, gate=gate)
    for seed in (3, 5):
        cluster.train(seed)
        finish(cluster)
    assert modes(cluster) == ["restore", "xor", "xor"]
    assert [outcome.version for outcome in ended(cluster, ce.TransitionEnded)] == [1, 2]


def test_transition_without_any_change_commits_too():
    cluster = ready()
    cluster.train(1)
    finish(cluster)
    name = cluster.train(1)
    cluster.candidates[name] = dict(cluster.versions[-1])
    for o, own in cluster.owners.items():
        own.weights = {item: cluster.versions[-1][item] for item in cluster.items[o]}
    finish(cluster)
    assert cluster.record().version == 2


def test_failed_attempt_is_retried_as_overwrites_over_the_mixture():
    cluster = ready()
    cluster.train(7)
    cluster.run_until(
        lambda: cluster.receivers[E0].state.tag.kind is TagKind.DIRTY and len(cluster.receivers[E0].issued) < 2
    )
    cluster._receive(E0, es.ApplyFailed(cluster.receivers[E0].state.attempt, "LC1 broken"))
    finish(cluster)
    assert modes(cluster) == ["restore", "xor", "overwrite"]
    assert [outcome.reason for outcome in ended(cluster, ce.AttemptEnded)][
        1
    ] == "receiver e0/0: LC1 broken, in phase applying"


def test_attempt_that_failed_before_any_write_is_still_never_repeated_as_xor():
    cluster = ready(gate=GateMode.ASYNC)
    cluster.train(7)
    until_phase(cluster, Phase.RUNNING)
    cluster.expire(0)
    finish(cluster)
    assert modes(cluster) == ["restore", "xor", "overwrite"]


def test_killed_instance_is_named_left_behind_and_restored_after_the_commit():
    cluster = ready(instances=2, ranks=2)
    cluster.train(7)
    cluster.run_until(lambda: bool(cluster.receivers[ReceiverId("e1/1")].issued))
    cluster.kill_instance("e1")
    cluster.run_until(lambda: bool(cluster.commits))
    assert "e1/" in ended(cluster, ce.AttemptEnded)[1].reason
    assert {member.receiver for member in cluster.record().required} == {"e0/0", "e0/1"}
    cluster.restart_instance("e1")
    finish(cluster)
    assert modes(cluster) == ["restore", "xor", "overwrite", "restore"]


def test_receiver_that_restarts_in_an_attempt_is_not_taken_for_its_predecessor():
    cluster = ready()
    cluster.train(7)
    cluster.run_until(lambda: bool(cluster.receivers[E1].issued))
    cluster.restart_instance("e1")
    finish(cluster)
    assert any("e1/0" in outcome.reason for outcome in ended(cluster, ce.AttemptEnded))


@pytest.mark.parametrize("crash", ["owner", "baseline"])
def test_lost_baseline_makes_the_next_attempt_dense_and_is_refilled_by_the_commit(crash):
    cluster = ready(owners=2)
    cluster.train(7)
    (cluster.crash_owner if crash == "owner" else cluster.lose_baseline)(O0)
    finish(cluster)
    assert modes(cluster) == ["restore", "dense"]
    assert cluster.owners[O0].state.tracker.version == 1


def test_lost_baseline_is_refilled_from_resident_weights_while_idle():
    cluster = ready()
    cluster.train(7)
    finish(cluster)
    cluster.crash_owner(O0)
    finish(cluster)
    assert cluster.owners[O0].state.tracker.kind is TrackerKind.AT
    assert cluster.owners[O0].baseline == cluster.owners[O0].weights


@pytest.mark.parametrize("phase", [Phase.UPDATING, Phase.REBUILDING])
def test_baseline_that_is_lost_again_during_its_copy_is_copied_again(phase):
    cluster = ready()
    if phase is Phase.UPDATING:
        cluster.train(7)
    else:
        cluster.crash_owner(O0)
    until_phase(cluster, phase)
    cluster.run_until(lambda: cluster.owners[O0].copying is not None)
    cluster.run_until(lambda: not cluster.coordinators[0].calls)
    cluster.lose_baseline(O0)
    finish(cluster)
    assert cluster.owners[O0].state.tracker.kind is TrackerKind.AT
    assert cluster.owners[O0].baseline == cluster.owners[O0].weights


def test_too_many_attempts_kill_the_candidate_and_everybody_goes_on_with_the_old_version():
    cluster = ready()
    cluster.train(7)
    for _ in range(cluster.refit.max_attempts):
        cluster.run_until(lambda: any(r.state.tag.kind is TagKind.DIRTY for r in cluster.receivers.values()))
        until_phase(cluster, Phase.RUNNING)
        cluster.expire(0)
        cluster.run_until(lambda: cluster.coordinators[0].state.phase is not Phase.RUNNING)
    finish(cluster)
    (aborted,) = ended(cluster, ce.TransitionAborted)
    assert (aborted.candidate, "deadline passed" in aborted.reason) == ("c1", True)
    assert (cluster.record().version, cluster.control._dead) == (0, {"c1"})
    cluster.train(9)
    finish(cluster)
    assert cluster.record().candidate == "c2"


def test_requested_abort_stops_a_running_attempt():
    cluster = ready()
    cluster.train(7)
    until_phase(cluster, Phase.RUNNING)
    cluster.abort(0)
    finish(cluster)
    assert [outcome.reason for outcome in ended(cluster, ce.AttemptEnded)][
        1
    ] == "abort was requested, in phase preparing"
    assert cluster.control._dead == {"c1"}


def test_abort_that_comes_after_the_commit_changes_nothing():
    cluster = ready()
    cluster.train(7)
    cluster.run_until(lambda: bool(cluster.commits))
    cluster.abort(0)
    finish(cluster)
    assert (cluster.record().version, cluster.control._dead) == (1, set())


def test_owners_with_different_candidates_are_held_and_named():
    cluster = ready(owners=2)
    cluster.train(7)
    cluster.owners[O0].state = replace(cluster.owners[O0].state, candidate="other")
    with pytest.raises(AssertionError, match="still busy"):
        cluster.run(limit=300)
    assert "hold different candidates ['c1', 'other']" in ended(cluster, ce.Held)[0].reason


def test_owner_that_has_not_frozen_is_waited_for():
    cluster = ready(owners=2)
    cluster.train(7)
    cluster.owners[O0].state = replace(cluster.owners[O0].state, candidate="")
    with pytest.raises(AssertionError, match="still busy"):
        cluster.run(limit=300)
    assert "owners [0] have not frozen candidate 'c1'" in ended(cluster, ce.Held)[0].reason


@pytest.mark.parametrize("kind", [TrackerKind.AT, TrackerKind.UPDATING])
def test_a_baseline_later_than_the_record_is_held_and_never_committed_over(kind):
    """The record was rolled back, or it is another run's: that baseline could never follow a commit."""
    cluster = ready(owners=2)
    cluster.owners[O0].state = replace(cluster.owners[O0].state, tracker=TrackerTag(kind, Version(3)))
    cluster.train(7)
    with pytest.raises(AssertionError, match="still busy"):
        cluster.run(limit=300)
    assert "owners [0] hold a later version than 0" in ended(cluster, ce.Held)[0].reason
    assert modes(cluster).count("xor") + modes(cluster).count("dense") == 0


def test_a_baseline_earlier_than_the_record_is_made_anew_by_a_dense_attempt():
    """A trainer from an old checkpoint: never a delta on its base, and its next baseline is the record's."""
    cluster = ready(owners=2)
    for size in (7, 5):
        cluster.train(size)
        finish(cluster)
    assert cluster.record().version == 2
    cluster.owners[O0].state = replace(
        cluster.owners[O0].state, tracker=TrackerTag(TrackerKind.AT, Version(0)), resident=NO_CANDIDATE
    )
    before = len(modes(cluster))
    cluster.train(3)
    finish(cluster)
    assert modes(cluster)[before:] == ["dense"]
    assert cluster.record().version == 3
    assert {str(each.state.tracker) for each in cluster.owners.values()} == {"at(3)"}


# ------------------------------------------------------------------------------------------------------------- failover


@pytest.mark.parametrize(
    "phase",
    [Phase.PREPARING, Phase.RUNNING, Phase.COMMITTING, Phase.UPDATING, Phase.ENDING, Phase.OPENING, Phase.READING],
)
@pytest.mark.parametrize("dies", [True, False])
def test_new_coordinator_finishes_from_every_phase(phase, dies):
    cluster = ready()
    cluster.train(7)
    until_phase(cluster, phase)
    cluster.coordinators[0].up = not dies
    cluster.become(1)
    finish(cluster)
    assert cluster.record().version == 1


def test_takeover_after_the_commit_fences_rolls_forward_and_does_not_retry():
    cluster = ready()
    cluster.train(7)
    cluster.run_until(lambda: bool(cluster.commits))
    cluster.coordinators[0].up = False
    cluster.become(1)
    finish(cluster)
    assert modes(cluster) == ["restore", "xor", "finish"]


def test_takeover_while_idle_with_closed_gates_opens_them():
    cluster = ready()
    cluster.train(7)
    until_phase(cluster, Phase.OPENING)
    cluster.coordinators[0].up = False
    cluster.become(1)
    finish(cluster)
    assert modes(cluster)[-1] == "finish"


def test_takeover_of_an_open_transition_continues_with_overwrites():
    cluster = ready()
    cluster.train(7)
    until_phase(cluster, Phase.RUNNING)
    cluster.become(1)
    finish(cluster)
    assert modes(cluster)[:3] == ["restore", "xor", "overwrite"]
    assert cluster.coordinators[0].state.phase is Phase.OUT


def test_replaced_coordinator_steps_down_and_ignores_everything():
    cluster = ready()
    cluster.become(1)
    cluster.run()
    cluster.coordinators[0].state = replace(cluster.coordinators[0].state, phase=Phase.READING)
    cluster._coordinate(0, ce.ControlReplied(cluster.control.read()))
    assert cluster.coordinators[0].state.phase is Phase.OUT
    for event in (ce.LookAgain(), ce.Surveyed((), ()), ce.ControlUnknown(), ce.AbortRequested()):
        assert transition.step(cluster.coordinators[0].state, event) == (cluster.coordinators[0].state, ())


# ------------------------------------------------------------------------------------------------------ unknown replies


@pytest.mark.parametrize("arrives", ["before", "never", "late"])
def test_commit_without_a_reply_is_settled_by_one_read_after_its_deadline(arrives):
    cluster = ready()
    cluster.train(7)
    until_phase(cluster, Phase.COMMITTING)
    if arrives == "before":
        cluster._do_control(0)
    cluster.unknown(0)
    assert cluster.coordinators[0].state.phase is Phase.WAITING_DEADLINE
    assert cluster.coordinators[0].waits is not None
    cluster._do_wait(0)
    assert cluster.coordinators[0].state.phase is Phase.RESOLVING
    if arrives == "late":
        cluster._do_late_control(0)
    finish(cluster)
    assert cluster.record().version == 1
    assert modes(cluster)[1:] == (["xor"] if arrives == "before" else ["xor", "overwrite"])


@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("number", range(9))
def test_any_control_plane_reply_may_be_lost(number, executed):
    """Until version 1 is served there are nine calls; the one without a reply took effect, or never arrived."""
    cluster = Cluster()
    cluster.become(0)
    asked = 0
    while cluster.record() is None or cluster.record().version == 0 or not cluster.settled():
        if cluster.coordinators[0].control is not None:
            if executed or asked != number:
                cluster._do_control(0)
            if asked == number:
                cluster.unknown(0)
            asked += 1
        elif possible := cluster.progress():
            cluster.do(possible[0])
        else:
            cluster.train(7)
    assert asked > number
    finish(cluster)
    assert cluster.record().version == 1


def test_late_commit_of_a_killed_candidate_is_refused():
    cluster = ready()
    cluster.train(7)
    until_phase(cluster, Phase.COMMITTING)
    cluster.unknown(0)
    cluster.become(1)
    cluster.run_until(lambda: cluster.coordinators[1].state.phase is Phase.SURVEYING)
    cluster.abort(1)
    cluster.run_until(lambda: "c1" in cluster.control._dead)
    cluster._do_late_control(0)
    finish(cluster)
    assert cluster.record().version == 0


# -------------------------------------------------------------------------------------------------------------- attempt


def running(gate: GateMode = GateMode.SYNC) -> tuple[Cluster, attempts.AttemptState]:
    cluster = ready(gate=gate)
    cluster.train(7)
    until_phase(cluster, Phase.RUNNING)
    return cluster, cluster.coordinators[0].state.attempt


def test_nothing_streams_before_every_endpoint_is_prepared():
    cluster, state = running()
    assert state.phase is AttemptPhase.PREPARING
    reports = [report(r.state) for r in cluster.receivers.values()]
    for each in reports:
        state, effects = attempts.step(state, ce.ReceiverReported(replace(each, attempt=AttemptId(2), quiet=True)))
        assert effects == ()
    assert state.phase is AttemptPhase.PREPARING


def test_asynchronous_gates_close_only_after_everything_is_staged_everywhere():
    cluster, _ = running(GateMode.ASYNC)
    cluster.run_until(lambda: cluster.coordinators[0].state.attempt.phase is AttemptPhase.CLOSING)
    assert all(r.state.gate_open for r in cluster.receivers.values())
    assert all(report(r.state).staged and not r.state.apply_open for r in cluster.receivers.values())
    cluster.run_until(lambda: cluster.coordinators[0].state.attempt.phase is AttemptPhase.APPLYING)
    assert not any(r.state.gate_open for r in cluster.receivers.values())
    finish(cluster)


def test_rank_without_requests_does_not_write_while_its_leader_still_serves():
    cluster = ready(instances=1, ranks=2, gate=GateMode.ASYNC)
    cluster.train(7)
    cluster.request(E0)
    cluster.run()
    assert cluster.coordinators[0].state.attempt.phase is AttemptPhase.CLOSING
    assert not cluster.receivers[ReceiverId("e0/1")].issued
    cluster.finish_request(E0)
    finish(cluster)


def test_old_reports_do_not_take_a_member_back():
    cluster, state = running()
    newest = replace(report(cluster.receivers[E0].state), attempt=AttemptId(2), revision=90)
    state, _ = attempts.step(state, ce.ReceiverReported(newest))
    state, _ = attempts.step(state, ce.ReceiverReported(replace(newest, revision=10, stopped=True)))
    assert state.receivers[E0] == newest
    state, _ = attempts.step(state, ce.ReceiverReported(replace(newest, incarnation=Incarnation(0), stopped=True)))
    assert state.phase is AttemptPhase.PREPARING


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"incarnation": 99}, "receiver e0/0 restarted"),
        ({"attempt": 9}, "receiver e0/0 was prepared for attempt 9"),
        ({"attempt": 2, "stopped": True, "failure": "LC5"}, "receiver e0/0: LC5"),
        ({"attempt": 2, "stopped": True}, "receiver e0/0: was stopped"),
    ],
)
def test_failure_names_the_receiver(change, reason):
    cluster, state = running()
    state, effects = attempts.step(state, ce.ReceiverReported(replace(report(cluster.receivers[E0].state), **change)))
    assert (state.phase, state.reason) == (AttemptPhase.STOPPING, f"{reason}, in phase preparing")
    stopped = [e.call for e in effects if isinstance(e, ce.CallReceiver | ce.CallOwner)]
    assert len(stopped) == 3


def test_failed_attempt_waits_for_every_stop_but_those_of_lost_endpoints():
    _, state = running()
    state, effects = attempts.step(state, ce.ReceiverLost(E0, Incarnation(0), "silent"))
    stops = [e.call for e in effects if isinstance(e, ce.CallReceiver | ce.CallOwner)]
    assert [getattr(call, "receiver", "owner") for call in stops] == [E1, "owner"]
    state, _ = attempts.step(state, ce.OwnerLost(O0, "silent"))
    assert state.phase is AttemptPhase.STOPPING
    state, effects = attempts.step(state, ce.ReceiverLost(E1, Incarnation(0), "silent"))
    assert (state.phase, effects) == (AttemptPhase.FAILED, (ce.AttemptEnded(AttemptId(2), state.reason),))
    assert state.reason == "receiver e0/0 is lost: silent, in phase preparing"


def test_acknowledgement_over_other_payloads_than_were_sent_fails_the_attempt():
    cluster, _ = running()
    cluster.run_until(lambda: all(r.state.acked and r.state.attempt == 2 for r in cluster.receivers.values()))
    wrong = replace(report(cluster.receivers[E0].state), applied_digest=b"x" * 16)
    cluster._coordinate(0, ce.ReceiverReported(wrong))
    cluster.run_until(lambda: cluster.coordinators[0].state.phase is not Phase.RUNNING)
    assert any("e0/0 acknowledged other payloads" in each.reason for each in ended(cluster, ce.AttemptEnded))
    finish(cluster)


def test_deadline_names_who_had_not_finished():
    _, state = running()
    state, _ = attempts.step(state, ce.DeadlinePassed(AttemptId(1)))
    assert state.phase is AttemptPhase.PREPARING
    state, _ = attempts.step(state, ce.DeadlinePassed(AttemptId(2)))
    assert state.reason == "deadline passed without e0/0, e1/0, owner 0, in phase preparing"


# ----------------------------------------------------------------------------------------------------------- membership


def test_instance_takes_part_with_all_its_ranks_awake_or_not_at_all():
    cluster = ready(instances=2, ranks=2)
    reports = [report(r.state) for r in cluster.receivers.values()]
    everyone = membership.complete_instances(reports, lambda r: True)
    assert [member.receiver for member in everyone] == ["e0/0", "e0/1", "e1/0", "e1/1"]
    assert len(membership.complete_instances(reports[1:], lambda r: True)) == 2
    assert len(membership.complete_instances([replace(reports[0], asleep=True), *reports[1:]], lambda r: True)) == 2
    assert len(membership.complete_instances(reports, lambda r: r.receiver != "e1/1")) == 2


def test_sleeping_instance_is_left_out_and_taken_in_again():
    cluster = ready()
    cluster._receive(E1, es.EngineSlept(keeps_storage=False))
    cluster.train(7)
    cluster.run_until(lambda: bool(cluster.commits))
    assert [member.receiver for member in cluster.record().required] == [E0]
    cluster._receive(E1, es.EngineWoke())
    finish(cluster)


def test_first_attempt_takes_only_receivers_at_the_committed_version():
    cluster = ready()
    record, owners = cluster.record(), [transition_owner.report(o.state) for o in cluster.owners.values()]
    reports = [report(r.state) for r in cluster.receivers.values()]
    mixed = [replace(reports[0], tag=Tag(TagKind.DIRTY, record.version, "c")), reports[1]]
    assert membership.choose_attempt(record, "c", 0, mixed, owners)[1] == (cluster.receivers[E1].state.member,)
    mode, required = membership.choose_attempt(record, "c", 1, mixed, owners)
    assert (mode, len(required)) == (AttemptMode.OVERWRITE, 2)


def test_refusal_that_contradicts_the_control_plane_steps_down():
    state = transition.start(CoordinatorConfig(refit=RefitConfig(), owners=(O0,)))
    state, _ = transition.step(state, ce.BecomeCoordinator())
    for reason in (Refusal.STALE_EPOCH, Refusal.MALFORMED):
        refused = ce.ControlReplied(Refused(reason, "detail", None, 1))
        after, effects = transition.step(replace(state, phase=Phase.PREPARING, epoch=Epoch(1)), refused)
        assert after.phase is Phase.OUT
        assert [each.action for each in effects if hasattr(each, "action")] == [Action.STEP_DOWN]
