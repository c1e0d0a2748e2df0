"""Fixed walks through every action of an owner, and each of its guards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemo_dcr.ids import AttemptId, CandidateId, Incarnation, OwnerId, Version
from nemo_dcr.protocol import owner
from nemo_dcr.protocol import owner_state as os_
from nemo_dcr.protocol.digests import manifest_digest
from nemo_dcr.protocol.messages import (
    DropCandidate,
    EndTransition,
    OwnerStatus,
    PrepareOwner,
    RebuildBaseline,
    StopOwner,
    StreamEnd,
    StreamOwner,
    StreamStatus,
    UpdateBaseline,
)
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.record import AttemptMode
from nemo_dcr.trace import Action, Emit

ME, INC = OwnerId(3), Incarnation(7)
C1, C2, NONE = CandidateId("c1"), CandidateId("c2"), CandidateId("")
AT0, AT1, LOST = TrackerTag(TrackerKind.AT), TrackerTag(TrackerKind.AT, Version(1)), TrackerTag()
XOR, OVERWRITE, DENSE, FINISH, RESTORE = AttemptMode


class Node:
    def __init__(self, tracker: TrackerTag = AT0, candidate: CandidateId = C1, **fields: Any) -> None:
        state, self.effects = owner.start(ME, INC, tracker=tracker, candidate=candidate)
        self.state = replace(state, **fields)
        self.calls = 0

    def feed(self, event: Any) -> None:
        self.state, self.effects = owner.step(self.state, event)

    def call(self, call: Any) -> Any:
        self.calls += 1
        self.feed(os_.OwnerCalled(self.calls, call))
        return self.reply(self.calls)

    def reply(self, call_id: int) -> Any:
        return next((e.reply for e in self.effects if isinstance(e, os_.OwnerAnswer) and e.call_id == call_id), None)

    def effect(self, kind: type) -> Any:
        return next((each for each in self.effects if isinstance(each, kind)), None)

    def actions(self) -> list[Action]:
        return [each.action for each in self.effects if isinstance(each, Emit)]

    def streaming(self, attempt: int = 1, mode: AttemptMode = XOR) -> Node:
        assert self.call(prepare(attempt, mode)).accepted
        assert self.call(StreamOwner(ME, INC, AttemptId(attempt))).accepted
        assert self.state.status is StreamStatus.STREAMING
        return self


def prepare(attempt: int = 1, mode: AttemptMode = XOR, **fields: Any) -> PrepareOwner:
    return replace(PrepareOwner(ME, INC, AttemptId(attempt), mode, Version(0), C1, {"w": "xor"}), **fields)


def test_stream_ends_with_the_manifest_of_what_was_published():
    node = Node().streaming()
    for number, digest in enumerate((b"a", b"b")):
        node.feed(os_.PayloadPublished(AttemptId(1), number, digest))
        assert node.actions() == []
    node.feed(os_.StreamEnded(AttemptId(1), manifest_digest([b"a", b"b"])))
    report = node.call(OwnerStatus(ME)).report
    assert (report.status, report.end) == (StreamStatus.ENDED, StreamEnd((b"a", b"b"), manifest_digest([b"a", b"b"])))


def test_a_payload_is_traced_with_its_names_in_order_before_it_is_published():
    node = Node().streaming()
    node.feed(os_.PayloadFormed(AttemptId(1), 0, ("b.w", "a.w"), 1))
    (line,) = [effect for effect in node.effects if isinstance(effect, Emit)]
    assert (line.action, line.attempt) == (Action.EMIT_PAYLOAD, 1)
    assert line.args == {"payload": 0, "names": "a.w,b.w", "xor": 1}
    assert node.state.published == ()


def test_start_of_the_stream_carries_the_plan_and_happens_once():
    node = Node().streaming()
    started = node.effect(os_.StartStream)
    assert (started.attempt, started.mode, started.version, started.every_element) == (1, XOR, 0, False)
    assert (started.candidate, started.classes) == (C1, {"w": "xor"})
    assert node.call(StreamOwner(ME, INC, AttemptId(1))).accepted
    assert node.effect(os_.StartStream) is None


@pytest.mark.parametrize("mode", [DENSE, RESTORE])
def test_dense_and_restore_send_every_element(mode):
    assert Node().streaming(mode=mode).effect(os_.StartStream).every_element


@pytest.mark.parametrize("digest", [manifest_digest([]), manifest_digest([b"a", b"b"])])
def test_manifest_over_another_set_fails_the_stream(digest):
    node = Node().streaming()
    node.feed(os_.PayloadPublished(AttemptId(1), 0, b"a"))
    node.feed(os_.StreamEnded(AttemptId(1), digest))
    assert (node.state.end, Action.FAIL_OWNER in node.actions()) == (None, True)


def test_payload_numbers_count_from_zero_without_a_gap():
    node = Node().streaming()
    node.feed(os_.PayloadPublished(AttemptId(1), 1, b"a"))
    assert "number 0" in node.state.failure


@pytest.mark.parametrize(
    ("tracker", "candidate", "modes"),
    [
        (AT0, C1, {XOR, OVERWRITE, DENSE, FINISH, RESTORE}),
        (AT0, C2, {FINISH, RESTORE}),
        (AT0, NONE, {FINISH, RESTORE}),
        (AT1, C1, {DENSE, FINISH}),
        (LOST, C1, {DENSE, FINISH}),
        (TrackerTag(TrackerKind.UPDATING), C1, {FINISH}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_stream_needs_the_committed_baseline_and_the_frozen_candidate(tracker, candidate, modes):
    assert {mode for mode in AttemptMode if Node(tracker, candidate).call(prepare(1, mode)).accepted} == modes


def test_binding_is_looked_at_again_when_the_stream_starts():
    node = Node()
    node.call(prepare())
    node.feed(os_.BaselineLost("bad memory"))
    assert not node.call(StreamOwner(ME, INC, AttemptId(1))).accepted
    assert node.effect(os_.StartStream) is None


@pytest.mark.parametrize(("tracker", "mode"), [(AT0, XOR), (LOST, DENSE)])
def test_lost_baseline_fails_a_running_stream(tracker, mode):
    node = Node(tracker).streaming(mode=mode)
    node.feed(os_.BaselineLost("bad memory"))
    assert (node.state.tracker, "bad memory" in node.state.failure) == (LOST, True)
    assert node.effect(os_.StopStream) is not None
    lost = [] if tracker == LOST else [Action.LOSE_BASELINE]
    assert node.actions() == [*lost, Action.FAIL_OWNER]


# ------------------------------------------------------------------------------------------------------------- fence


@pytest.mark.parametrize("call", [prepare(2), StreamOwner(ME, INC, AttemptId(2)), StopOwner(ME, INC, AttemptId(2))])
def test_calls_for_another_incarnation_change_nothing(call):
    node = Node().streaming()
    before = replace(node.state, revision=0)
    assert not node.call(replace(call, incarnation=Incarnation(6))).accepted
    assert replace(node.state, revision=0) == before


def test_newer_attempt_waits_until_the_older_stream_stopped():
    node = Node().streaming()
    assert node.call(prepare(2, OVERWRITE)) is None
    assert node.effect(os_.StopStream).attempt == 1
    assert node.state.attempt == 1
    node.feed(os_.StreamStopped(AttemptId(1)))
    assert (node.state.attempt, node.state.status, node.reply(3).accepted) == (2, StreamStatus.PREPARED, True)


def test_stop_is_answered_after_the_stream_stopped_and_sticks():
    node = Node().streaming()
    assert node.call(StopOwner(ME, INC, AttemptId(1))) is None
    node.feed(os_.StreamStopped(AttemptId(1)))
    assert node.reply(3).accepted
    assert not node.call(StreamOwner(ME, INC, AttemptId(1))).accepted


def test_a_manifest_that_was_out_before_the_stream_stopped_is_traced():
    node = Node().streaming()
    assert node.call(StopOwner(ME, INC, AttemptId(1))) is None
    node.feed(os_.StreamEnded(AttemptId(1), manifest_digest([])))
    assert (node.actions(), node.state.status) == ([Action.END_STREAM], StreamStatus.ENDED)
    node.feed(os_.StreamStopped(AttemptId(1)))
    assert node.reply(3).accepted
    assert node.actions() == []


def test_a_stop_that_meets_its_prepare_keeps_it_out():
    node = Node().streaming()
    assert node.call(prepare(2, OVERWRITE)) is None
    assert node.call(StopOwner(ME, INC, AttemptId(2))) is None
    assert [(e.action, e.attempt) for e in node.effects if isinstance(e, Emit)] == [(Action.STOP_OWNER, 2)]
    node.feed(os_.StreamStopped(AttemptId(1)))
    assert node.actions() == [Action.STOP_OWNER, Action.IGNORE_STALE]
    assert (node.reply(3).accepted, node.reply(4).accepted, node.state.attempt) == (False, True, 1)


def test_stale_calls_are_ignored():
    node = Node().streaming(3)
    assert not node.call(prepare(2)).accepted
    assert not node.call(StreamOwner(ME, INC, AttemptId(2))).accepted
    assert node.call(StopOwner(ME, INC, AttemptId(2))).accepted
    assert node.state.status is StreamStatus.STREAMING


def test_stop_that_overtakes_its_prepare_keeps_the_prepare_out_and_says_so_once():
    node = Node()
    assert node.call(StopOwner(ME, INC, AttemptId(4))).accepted
    assert node.actions() == [Action.STOP_OWNER]
    assert node.call(StopOwner(ME, INC, AttemptId(4))).accepted
    assert node.actions() == []
    assert not node.call(prepare(4)).accepted
    assert node.actions() == [Action.IGNORE_STALE]
    assert node.call(prepare(5)).accepted


# ---------------------------------------------------------------------------------------------------------- baseline


def test_baseline_follows_the_commit_and_only_then_the_transition_ends():
    node = Node(baseline_digest=b"ckpt")
    assert not node.call(EndTransition(ME, C1, Version(1))).accepted
    assert node.call(UpdateBaseline(ME, C1, Version(1))).accepted
    assert (node.effect(os_.CopyCandidate), node.state.tracker.kind) == (
        os_.CopyCandidate(C1, Version(1)),
        TrackerKind.UPDATING,
    )
    assert not node.call(EndTransition(ME, C1, Version(1))).accepted
    assert node.call(UpdateBaseline(ME, C1, Version(1))).accepted
    assert node.effect(os_.CopyCandidate) is None
    node.feed(os_.BaselineFilled(Version(1)))
    assert (node.state.tracker, node.state.baseline_digest) == (AT1, b"")
    assert node.call(EndTransition(ME, C1, Version(1))).accepted
    assert (node.state.candidate, node.state.resident) == (NONE, C1)
    assert node.effect(os_.ThawCandidate) == os_.ThawCandidate(C1)


def test_repeated_update_and_end_of_another_coordinator_change_nothing():
    node = Node(AT1, NONE, resident=C1)
    before = replace(node.state, revision=0)
    assert node.call(UpdateBaseline(ME, C1, Version(1))).accepted
    assert node.call(EndTransition(ME, C1, Version(1))).accepted
    assert replace(node.state, revision=0) == before


@pytest.mark.parametrize("tracker", [AT0, LOST])
def test_update_to_another_candidate_is_refused(tracker):
    node = Node(tracker, C2)
    assert not node.call(UpdateBaseline(ME, C1, Version(1))).accepted
    assert (node.state.tracker, node.effect(os_.CopyCandidate)) == (tracker, None)


def test_update_never_goes_backwards_and_never_runs_under_a_stream():
    assert not Node(TrackerTag(TrackerKind.AT, Version(2))).call(UpdateBaseline(ME, C1, Version(1))).accepted
    assert not Node().streaming().call(UpdateBaseline(ME, C1, Version(1))).accepted


def test_lost_baseline_takes_the_committed_candidate():
    node = Node(LOST)
    assert node.call(UpdateBaseline(ME, C1, Version(1))).accepted
    node.feed(os_.BaselineFilled(Version(1)))
    assert node.state.tracker == AT1


def test_outcome_of_a_copy_that_was_given_up_is_ignored():
    node = Node()
    node.call(UpdateBaseline(ME, C1, Version(1)))
    node.feed(os_.BaselineLost("bad memory"))
    for late in (os_.ItemCopied(Version(1), "w"), os_.BaselineFilled(Version(1)), os_.BaselineLost("again")):
        before = replace(node.state, revision=0)
        node.feed(late)
        assert (replace(node.state, revision=0), node.effects) == (before, ())
    assert node.state.tracker == LOST


@pytest.mark.parametrize("lost", [False, True])
def test_each_copied_tensor_is_a_step_of_the_copy_that_runs(lost):
    node = Node(LOST, NONE, resident=C1) if lost else Node()
    copied = os_.ItemCopied(Version(1), "w")
    node.feed(copied)
    assert node.effects == ()
    assert node.call((RebuildBaseline if lost else UpdateBaseline)(ME, C1, Version(1))).accepted
    node.feed(os_.ItemCopied(Version(2), "w"))
    assert node.effects == ()
    node.feed(copied)
    (line,) = node.effects
    assert (line.action, dict(line.args)) == (Action.COPY_ITEM, {"name": "w"})
    assert line.post["tracker"] == ("lost" if lost else "updating(0)")
    node.feed(os_.BaselineFilled(Version(1)))
    assert node.actions() == [Action.BASELINE_FILLED]
    node.feed(copied)
    assert (node.effects, node.state.tracker) == ((), AT1)


@pytest.mark.parametrize(
    ("candidate", "resident", "accepted"), [(NONE, C1, True), (NONE, None, False), (NONE, C2, False), (C2, C1, False)]
)
def test_lost_baseline_is_refilled_only_from_weights_that_are_the_committed_version(candidate, resident, accepted):
    node = Node(LOST, candidate, resident=resident)
    assert node.call(RebuildBaseline(ME, C1, Version(1))).accepted is accepted
    assert (node.effect(os_.RefillBaseline) is not None) is accepted


def test_training_ends_the_claim_that_the_weights_are_committed():
    node = Node(LOST, NONE, resident=C1)
    node.feed(os_.WeightsChanged())
    assert not node.call(RebuildBaseline(ME, C1, Version(1))).accepted


def test_a_rebuild_whose_weights_change_under_it_is_lost_again():
    node = Node(LOST, NONE, resident=C1)
    node.call(RebuildBaseline(ME, C1, Version(1)))
    node.feed(os_.WeightsChanged())
    assert (node.actions(), node.state.tracker) == ([Action.LOSE_BASELINE], LOST)
    node.feed(os_.BaselineFilled(Version(1)))
    assert (node.actions(), node.state.tracker) == ([], LOST)
    node.feed(os_.CandidateFrozen(C2))
    assert (node.effect(os_.AnswerTrainer).refusal, node.state.candidate) == ("", C2)


def test_weights_stay_as_they_are_while_they_are_frozen_or_loaded():
    node = Node(AT0, C1)
    node.feed(os_.WeightsChanged())
    assert "frozen" in node.effect(os_.AnswerTrainer).refusal
    node.call(DropCandidate(ME, C1))
    node.feed(os_.WeightsChanged())
    assert "loaded" in node.effect(os_.AnswerTrainer).refusal
    node.feed(os_.WeightsReloaded(NONE))
    node.feed(os_.WeightsChanged())
    assert (node.effect(os_.AnswerTrainer).refusal, node.state.resident) == ("", None)


def test_rebuild_is_repeatable_and_keeps_the_weights_still():
    node = Node(LOST, NONE, resident=C1)
    node.call(RebuildBaseline(ME, C1, Version(1)))
    assert node.call(RebuildBaseline(ME, C1, Version(1))).accepted
    assert node.effect(os_.RefillBaseline) is None
    node.feed(os_.CandidateFrozen(C2))
    assert node.effect(os_.AnswerTrainer).refusal
    node.feed(os_.BaselineFilled(Version(1)))
    assert node.call(RebuildBaseline(ME, C1, Version(1))).accepted
    node.feed(os_.CandidateFrozen(C2))
    assert (node.effect(os_.AnswerTrainer).refusal, node.state.candidate) == ("", C2)


# --------------------------------------------------------------------------------------------------------- candidate


def test_transition_begins_once_and_not_before_the_last_one_ended():
    node = Node(AT0, NONE)
    node.feed(os_.CandidateFrozen(C1))
    assert (node.state.candidate, node.actions()) == (C1, [Action.BEGIN_TRANSITION])
    node.feed(os_.CandidateFrozen(C1))
    assert (node.effect(os_.AnswerTrainer).refusal, node.actions()) == ("", [])
    node.feed(os_.CandidateFrozen(C2))
    assert (bool(node.effect(os_.AnswerTrainer).refusal), node.state.candidate) == (True, C1)


def test_a_name_that_was_committed_is_never_frozen_again():
    ended = Node(AT0, C1)
    ended.call(UpdateBaseline(ME, C1, Version(1)))
    ended.feed(os_.BaselineFilled(Version(1)))
    ended.call(EndTransition(ME, C1, Version(1)))
    restarted = Node()
    restarted.state, _ = owner.start(ME, INC, tracker=AT1, resident=C1)
    for node in (ended, restarted):
        node.feed(os_.WeightsChanged())
        node.feed(os_.CandidateFrozen(C1))
        assert "new name" in node.effect(os_.AnswerTrainer).refusal
        assert node.state.candidate == NONE
        node.feed(os_.CandidateFrozen(C2))
        assert node.state.candidate == C2


def test_dead_candidate_is_dropped_after_its_stream_stopped_and_weights_are_reloaded():
    node = Node().streaming()
    assert node.call(DropCandidate(ME, C1)) is None
    assert (node.effect(os_.StopStream).attempt, node.state.candidate) == (1, C1)
    node.feed(os_.StreamStopped(AttemptId(1)))
    assert (node.reply(3).accepted, node.state.candidate) == (True, NONE)
    assert node.effect(os_.ReloadCommitted) == os_.ReloadCommitted(C1)
    node.feed(os_.CandidateFrozen(C2))
    assert node.effect(os_.AnswerTrainer).refusal
    node.feed(os_.WeightsReloaded(NONE))
    assert node.state.resident == NONE
    node.feed(os_.CandidateFrozen(C2))
    assert node.state.candidate == C2


def test_drop_of_another_candidate_changes_nothing_and_a_committed_one_is_kept():
    node = Node()
    assert node.call(DropCandidate(ME, C2)).accepted
    assert node.state.candidate == C1
    node.call(UpdateBaseline(ME, C1, Version(1)))
    assert not node.call(DropCandidate(ME, C1)).accepted
    assert node.state.candidate == C1


def test_stream_failure_counts_only_while_it_runs():
    node = Node()
    node.feed(os_.StreamFailed(AttemptId(1), "early"))
    assert node.state.failure == ""
    node.streaming()
    node.feed(os_.StreamFailed(AttemptId(1), "the store is full"))
    assert (node.state.failure, node.actions()) == ("the store is full", [Action.FAIL_OWNER])


def test_a_stream_fails_once_whatever_follows():
    node = Node().streaming()
    lines = []
    for event in (
        os_.StreamFailed(AttemptId(1), "no space"),
        os_.BaselineLost("bad memory"),
        os_.StreamFailed(AttemptId(1), "again"),
    ):
        node.feed(event)
        lines += node.actions()
    assert (lines.count(Action.FAIL_OWNER), node.state.failure) == (1, "no space")
