"""Fixed walks through every action of a receiver endpoint, and each of its guards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemo_dcr.config import GateMode
from nemo_dcr.ids import AttemptId, CandidateId, Incarnation, Member, OwnerId, PayloadKey, ReceiverId, Version
from nemo_dcr.protocol import endpoint
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol.digests import applied_digest, manifest_digest
from nemo_dcr.protocol.messages import (
    CloseGate,
    FinishRestore,
    OpenApply,
    OpenGate,
    PrepareReceiver,
    ReceiverStatus,
    StopReceiver,
)
from nemo_dcr.protocol.tags import Tag, TagKind
from nemo_dcr.record import AttemptMode
from nemo_dcr.trace import Action, Emit

NAME, INC = ReceiverId("e0/0"), Incarnation(7)
ME = Member(NAME, INC)
C1, C2 = CandidateId("c1"), CandidateId("c2")
CLEAN0, CLEAN1 = Tag(TagKind.CLEAN, Version(0)), Tag(TagKind.CLEAN, Version(1))
DIRTY = Tag(TagKind.DIRTY, Version(0), C1)
DONE5 = Tag(TagKind.DONE, Version(0), C1, AttemptId(5))
XOR, OVERWRITE, DENSE, FINISH, RESTORE = AttemptMode


class Node:
    """One endpoint with everything it asked for."""

    def __init__(self, tag: Tag = CLEAN0, *, gate_open: bool = True, **fields: Any) -> None:
        state, self.effects = endpoint.start(ME, ranks=1)
        self.state = replace(state, tag=tag, gate_open=gate_open, **fields)
        self.calls = 0

    def feed(self, event: Any) -> tuple[Any, ...]:
        self.state, self.effects = endpoint.step(self.state, event)
        return self.effects

    def call(self, call: Any) -> Any:
        """The reply if it came at once, else None."""
        self.calls += 1
        self.feed(es.Called(self.calls, call))
        return self.reply(self.calls)

    def reply(self, call_id: int) -> Any:
        return next((e.reply for e in self.effects if isinstance(e, es.Reply) and e.call_id == call_id), None)

    def has(self, effect: type) -> bool:
        return any(isinstance(each, effect) for each in self.effects)

    def actions(self) -> list[Action]:
        return [each.action for each in self.effects if isinstance(each, Emit)]

    def prepared(self, attempt: int = 1, mode: AttemptMode = XOR, **fields: Any) -> Node:
        reply = self.call(prepare(attempt, mode, **fields))
        if reply is None:
            self.feed(es.Drained(self.state.attempt))
        assert self.state.attempt == attempt
        return self

    def opened(self, attempt: int = 1, mode: AttemptMode = XOR, **fields: Any) -> Node:
        self.prepared(attempt, mode, **fields)
        assert self.call(OpenApply(NAME, INC, AttemptId(attempt))).accepted
        return self

    def stage(self, number: int = 0, *, attempt: int = 1, owner: int = 0, digest: bytes = b"") -> tuple[Any, ...]:
        return self.feed(es.PayloadStaged(key(number, attempt, owner), digest or bytes([number]) * 16))

    def manifest(self, count: int, *, attempt: int = 1, owner: int = 0) -> tuple[Any, ...]:
        digest = manifest_digest([bytes([i]) * 16 for i in range(count)])
        return self.feed(es.ManifestSeen(AttemptId(attempt), OwnerId(owner), count, digest))

    def apply(self, *numbers: int, attempt: int = 1) -> tuple[Any, ...]:
        keys = tuple(key(number, attempt) for number in numbers)
        self.feed(es.ApplyRequested(AttemptId(attempt), keys))
        assert self.has(es.PermitApply)
        return self.feed(es.PayloadsApplied(AttemptId(attempt), keys))

    def acked(self, attempt: int = 1, mode: AttemptMode = XOR, **fields: Any) -> Node:
        self.opened(attempt, mode, **fields)
        self.stage(0, attempt=attempt)
        self.manifest(1, attempt=attempt)
        self.apply(0, attempt=attempt)
        assert self.has(es.Flush)
        self.feed(es.Flushed(AttemptId(attempt)))
        assert self.state.acked
        return self


def key(number: int, attempt: int = 1, owner: int = 0) -> PayloadKey:
    return PayloadKey(AttemptId(attempt), OwnerId(owner), number)


def prepare(attempt: int = 1, mode: AttemptMode = XOR, **fields: Any) -> PrepareReceiver:
    call = PrepareReceiver(
        NAME, INC, AttemptId(attempt), mode, GateMode.SYNC, Version(0), AttemptId(0), C1, (OwnerId(0),)
    )
    return replace(call, **fields)


def test_new_process_knows_nothing_of_its_storage_and_serves_nothing():
    state, effects = endpoint.start(ME, ranks=2)
    assert (state.tag, state.gate_open, state.attempt) == (Tag(), False, 0)
    assert [e.action for e in effects] == [Action.START_RECEIVER]


def test_whole_attempt_ends_in_an_acknowledgement_over_what_was_applied():
    node = Node().opened()
    assert (node.state.gate_open, node.state.tag) == (False, CLEAN0)
    node.stage(0)
    assert node.has(es.Stage)
    node.stage(1)
    node.feed(es.ApplyRequested(AttemptId(1), (key(0), key(1))))
    assert node.state.tag == DIRTY
    node.feed(es.ItemApplied(AttemptId(1), key(0), "w"))
    assert node.actions() == [Action.APPLY_ITEM]
    node.feed(es.PayloadsApplied(AttemptId(1), (key(0), key(1))))
    assert not node.has(es.Flush)
    node.manifest(2)
    assert node.has(es.Flush)
    assert node.has(es.PushReport)
    node.feed(es.Flushed(AttemptId(1)))
    report = node.call(ReceiverStatus(NAME)).report
    assert (report.acked, report.tag) == (True, Tag(TagKind.DONE, Version(0), C1, AttemptId(1)))
    assert report.applied_digest == applied_digest({OwnerId(0): [bytes([0]) * 16, bytes([1]) * 16]})


def test_owner_without_changes_is_still_waited_for():
    node = Node().opened(owners=(OwnerId(0), OwnerId(1)))
    node.manifest(0)
    assert not node.has(es.Flush)
    node.manifest(0, owner=1)
    assert node.has(es.Flush)


# ------------------------------------------------------------------------------------------------------- eligibility


@pytest.mark.parametrize(
    ("tag", "modes"),
    [
        (Tag(), {DENSE, RESTORE}),
        (CLEAN0, {XOR, OVERWRITE, DENSE, FINISH, RESTORE}),
        (CLEAN1, {DENSE, RESTORE}),
        (DIRTY, {OVERWRITE, DENSE, RESTORE}),
        (replace(DIRTY, candidate=C2), {DENSE, RESTORE}),
        (replace(DIRTY, version=Version(1)), {DENSE, RESTORE}),
        (DONE5, {OVERWRITE, DENSE, RESTORE}),
        (replace(DONE5, candidate=C2), {DENSE, RESTORE}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_only_storage_that_the_records_lead_on_from_is_eligible(tag, modes):
    accepted = {mode for mode in AttemptMode if Node(tag).call(prepare(6, mode)).accepted}
    assert accepted == modes


@pytest.mark.parametrize("mode", list(AttemptMode))
def test_done_of_the_committed_attempt_is_the_committed_version(mode):
    node = Node(DONE5).prepared(6, mode, version=Version(1), record_attempt=AttemptId(5), candidate=C2)
    assert node.state.tag == CLEAN1


def test_refused_prepare_changes_nothing_and_says_why():
    node = Node(DIRTY)
    reply = node.call(prepare())
    assert (reply.accepted, node.state.attempt, node.actions()) == (False, 0, [Action.REFUSE_PREPARE])
    assert "dirty(0,c1)" in reply.refusal


# ------------------------------------------------------------------------------------------------------------- fence


def test_prepare_for_another_incarnation_is_ignored():
    node = Node()
    assert not node.call(prepare(incarnation=Incarnation(6))).accepted
    assert (node.state.attempt, node.actions()) == (0, [Action.IGNORE_STALE])


def test_older_prepare_is_ignored_and_a_repeated_one_answered_again():
    node = Node().prepared(3)
    assert not node.call(prepare(2)).accepted
    assert node.actions() == [Action.IGNORE_STALE]
    assert node.call(prepare(3)).accepted
    assert node.state.attempt == 3


def test_newer_attempt_is_installed_only_after_the_drain_of_the_older_one():
    node = Node().opened()
    node.stage(0)
    node.feed(es.ApplyRequested(AttemptId(1), (key(0),)))
    assert node.call(prepare(2, OVERWRITE)) is None
    assert (node.has(es.Drain), node.state.attempt) == (True, 1)
    node.stage(1)
    assert not node.has(es.Stage)
    node.feed(es.Drained(AttemptId(1)))
    assert (node.state.attempt, node.state.tag, node.state.seen) == (2, DIRTY, {})
    assert node.reply(2 + 1).accepted
    assert node.actions() == [Action.STOP_AND_WAIT, Action.ENDPOINT_PREPARE]
    assert node.has(es.StartIntake)


def lines(node: Node) -> list[tuple[Action, int, int]]:
    """Action, attempt, and the attempt that is installed after it."""
    return [(each.action, each.attempt, each.post["att"]) for each in node.effects if isinstance(each, Emit)]


def test_first_attempt_of_a_process_has_nothing_to_drain():
    node = Node()
    assert node.call(prepare(4)).accepted
    assert lines(node) == [(Action.ENDPOINT_PREPARE, 4, 4)]
    fresh = Node()
    fresh.call(StopReceiver(NAME, INC, AttemptId(3)))
    fresh.prepared(4)
    assert lines(fresh) == [(Action.ENDPOINT_PREPARE, 4, 4)]


@pytest.mark.parametrize("ended", ["running", "acknowledged", "failed", "stopped"])
@pytest.mark.parametrize("mode", [OVERWRITE, RESTORE])
def test_an_attempt_that_could_write_is_stopped_and_waited_for_once_before_the_next(ended, mode):
    node = Node().acked(1) if ended == "acknowledged" else Node().opened(1)
    if ended == "failed":
        node.feed(es.ApplyFailed(AttemptId(1), "LC1 broken"))
        assert lines(node) == [(Action.FAIL_RECEIVER, 1, 1)]
    if ended == "stopped":
        assert node.call(StopReceiver(NAME, INC, AttemptId(1))) is None
        assert lines(node) == []
    if ended in ("failed", "stopped"):
        node.feed(es.Drained(AttemptId(1)))
        assert lines(node) == [(Action.STOP_AND_WAIT, 1, 1)]
        node.feed(es.Drained(AttemptId(1)))
        assert lines(node) == []
    node.prepared(2, mode)
    installed = (Action.START_RESTORE if mode is RESTORE else Action.ENDPOINT_PREPARE, 2, 2)
    first = [(Action.STOP_AND_WAIT, 1, 1)] if ended in ("running", "acknowledged") else []
    assert lines(node) == [*first, installed]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("mode", [FINISH, RESTORE])
def test_an_attempt_with_nothing_to_write_is_drained_from_the_start(mode, stopped):
    node = Node(loaded_digest=b"ckpt").prepared(1, mode, baseline_digest=b"ckpt")
    assert node.state.drained
    if stopped:
        assert node.call(StopReceiver(NAME, INC, AttemptId(1))).accepted
        assert (lines(node), node.state.stopped) == ([], True)
    node.feed(es.ApplyFailed(AttemptId(1), "nothing was written"))
    assert lines(node) == [(Action.IGNORE_STALE, 1, 1)]
    node.prepared(2)
    assert lines(node) == [(Action.ENDPOINT_PREPARE, 2, 2)]


def test_a_stop_of_an_attempt_that_is_not_installed_only_raises_the_fence_and_says_so_once():
    node = Node().opened(1)
    for expected in ([(Action.STOP_AND_WAIT, 4, 1)], []):
        assert node.call(StopReceiver(NAME, INC, AttemptId(4))).accepted
        assert (lines(node), node.state.stopped, node.state.drained) == (expected, False, False)
    node.call(prepare(4))
    assert lines(node) == [(Action.IGNORE_STALE, 4, 1)]


def test_a_failure_before_any_attempt_changes_nothing():
    node = Node()
    node.feed(es.PayloadRejected(AttemptId(0), "whose?"))
    assert (lines(node), node.state.failure) == ([(Action.IGNORE_STALE, 0, 0)], "")


def test_storage_is_looked_at_again_after_the_drain():
    node = Node().opened()
    node.stage(0)
    node.call(prepare(2, FINISH))
    node.state = replace(node.state, tag=DIRTY)
    node.feed(es.Drained(AttemptId(1)))
    assert (node.state.attempt, node.reply(3).accepted) == (1, False)
    assert Action.REFUSE_PREPARE in node.actions()


def test_newest_of_two_waiting_prepares_wins():
    node = Node().prepared()
    assert node.call(prepare(2)) is None
    assert node.call(prepare(3)) is None
    assert not node.reply(2).accepted
    node.feed(es.Drained(AttemptId(1)))
    assert (node.state.attempt, node.reply(3).accepted) == (3, True)


def test_payload_and_manifest_of_another_attempt_are_ignored():
    node = Node().prepared(2)
    node.stage(0, attempt=1)
    assert node.actions() == [Action.IGNORE_STALE]
    node.manifest(1, attempt=1)
    assert (node.actions(), node.state.seen, node.state.manifests) == ([Action.IGNORE_STALE], {}, {})


def test_payload_of_an_owner_outside_the_attempt_is_ignored():
    node = Node().prepared()
    node.stage(0, owner=9)
    assert not node.has(es.Stage)


@pytest.mark.parametrize("call", [CloseGate, OpenApply])
def test_calls_of_another_attempt_or_incarnation_change_nothing(call):
    node = Node().prepared(2)
    for attempt, incarnation in ((1, INC), (3, INC), (2, Incarnation(6))):
        before = replace(node.state, revision=0)
        assert not node.call(call(NAME, incarnation, AttemptId(attempt))).accepted
        assert replace(node.state, revision=0) == before


# ------------------------------------------------------------------------------------------------------ duplicates


def test_duplicate_payload_is_dropped_even_after_it_was_applied_and_acknowledged():
    node = Node().opened()
    node.stage(0)
    node.stage(0)
    assert (node.has(es.Stage), node.actions()) == (False, [Action.IGNORE_DUPLICATE])
    node.apply(0)
    node.stage(0)
    assert not node.has(es.Stage)
    node.manifest(1)
    node.feed(es.Flushed(AttemptId(1)))
    node.stage(0)
    assert (node.has(es.Stage), node.state.acked) == (False, True)


def test_same_payload_with_other_bytes_fails_the_attempt():
    node = Node().opened()
    node.stage(0)
    node.stage(0, digest=b"x" * 16)
    assert "different bytes" in node.state.failure
    assert node.has(es.Drain)


def test_deduplication_starts_afresh_with_every_attempt():
    node = Node().opened()
    node.stage(0)
    node.prepared(2, OVERWRITE)
    node.stage(0, attempt=2)
    assert node.has(es.Stage)


@pytest.mark.parametrize("late", [True, False])
def test_payloads_that_the_manifest_does_not_list_fail_the_attempt(late):
    node = Node().opened()
    if late:
        node.manifest(1)
        node.stage(3)
    else:
        node.stage(3)
        node.manifest(1)
    assert "not those of its manifest" in node.state.failure


def test_two_different_manifests_of_one_owner_fail_the_attempt():
    node = Node().opened()
    node.manifest(1)
    node.manifest(1)
    assert node.state.failure == ""
    node.manifest(2)
    assert "two different manifests" in node.state.failure


# ------------------------------------------------------------------------------------------------------------ writes


def test_nothing_is_written_before_open_apply_over_running_requests_or_while_asleep():
    node = Node()
    node.feed(es.RequestArrived("q"))
    assert node.has(es.AdmitRequest)
    node.prepared()
    node.stage(0)
    wish = es.ApplyRequested(AttemptId(1), (key(0),))
    assert isinstance(node.feed(wish)[0], es.DenyApply)
    node.call(OpenApply(NAME, INC, AttemptId(1)))
    assert not node.has(es.WakeApply)
    assert isinstance(node.feed(wish)[0], es.DenyApply)
    node.feed(es.RequestDone("q"))
    assert node.has(es.WakeApply)
    assert node.has(es.PushReport)
    node.feed(es.EngineSlept(keeps_storage=True))
    assert isinstance(node.feed(wish)[0], es.DenyApply)
    node.feed(es.EngineWoke())
    assert isinstance(node.feed(wish)[-1], es.PermitApply)


def test_same_payload_is_permitted_once():
    node = Node().opened()
    node.stage(0)
    wish = es.ApplyRequested(AttemptId(1), (key(0),))
    assert isinstance(node.feed(wish)[-1], es.PermitApply)
    assert isinstance(node.feed(wish)[0], es.DenyApply)
    node.feed(es.PayloadsApplied(AttemptId(1), (key(0),)))
    assert isinstance(node.feed(wish)[0], es.DenyApply)


def test_raw_storage_stays_unknown_through_a_dense_attempt_until_its_flush():
    node = Node(Tag(), gate_open=False).opened(mode=DENSE)
    node.stage(0)
    node.manifest(1)
    node.apply(0)
    assert node.state.tag == Tag()
    node.feed(es.Flushed(AttemptId(1)))
    assert node.state.tag.kind is TagKind.DONE


def test_dense_attempt_over_a_mixture_with_another_candidate_makes_storage_unknown():
    node = Node(replace(DIRTY, candidate=C2), gate_open=False).opened(mode=DENSE)
    node.stage(0)
    node.apply(0)
    assert node.state.tag == Tag()


@pytest.mark.parametrize("tag", [CLEAN0, DIRTY, DONE5])
def test_a_dense_attempt_that_was_cut_off_leaves_unknown_storage_whatever_it_wrote_over(tag):
    node = Node(tag, gate_open=False).opened(attempt=6, mode=DENSE)
    node.stage(0, attempt=6)
    node.apply(0, attempt=6)
    assert node.state.tag == Tag()
    node.feed(es.ApplyFailed(AttemptId(6), "the loader stopped between two copies"))
    node.feed(es.Drained(AttemptId(6)))
    assert node.call(prepare(7, OVERWRITE)).refusal


def test_a_trace_line_comes_before_the_reply_that_it_explains():
    _, effects = endpoint.step(Node().state, es.Called(1, prepare(1, XOR)))
    kinds = [isinstance(effect, Emit) for effect in effects]
    assert kinds == sorted(kinds, reverse=True)


def test_no_acknowledgement_while_a_write_is_unanswered():
    node = Node().opened()
    node.stage(0)
    node.manifest(1)
    node.feed(es.ApplyRequested(AttemptId(1), (key(0),)))
    assert not node.has(es.Flush)
    assert not node.state.acked


def test_flush_without_changes_still_waits_for_open_apply_and_quiet():
    node = Node().prepared(gate=GateMode.ASYNC)
    node.manifest(0)
    assert not node.has(es.Flush)
    node.call(CloseGate(NAME, INC, AttemptId(1)))
    assert not node.has(es.Flush)
    node.call(OpenApply(NAME, INC, AttemptId(1)))
    assert node.has(es.Flush)


def test_a_late_copy_of_the_call_that_closed_the_gate_does_not_close_it_again():
    node = Node().prepared(gate=GateMode.ASYNC)
    node.manifest(0)
    close = CloseGate(NAME, INC, AttemptId(1))
    assert node.call(close).accepted
    node.call(OpenApply(NAME, INC, AttemptId(1)))
    node.feed(es.Flushed(AttemptId(1)))
    assert node.call(close).accepted  # its first answer may have been lost
    node.call(OpenGate(NAME, INC, AttemptId(1), AttemptId(1), Version(1)))
    assert node.state.gate_open
    late = node.call(close)
    assert (late.accepted, node.state.gate_open, node.actions()) == (False, True, [Action.IGNORE_STALE])


# -------------------------------------------------------------------------------------------------------------- stop


def test_stop_is_answered_after_the_drain_and_sticks():
    node = Node().opened()
    node.stage(0)
    node.manifest(1)
    assert node.call(StopReceiver(NAME, INC, AttemptId(1))) is None
    assert node.has(es.Drain)
    node.feed(es.Drained(AttemptId(1)))
    assert node.reply(3).accepted
    assert (node.state.stopped, node.state.drained, node.state.pending) == (True, True, frozenset())
    for event in (es.Flushed(AttemptId(1)), es.PayloadStaged(key(1), b"d"), es.ApplyRequested(AttemptId(1), (key(0),))):
        node.feed(event)
        assert [node.has(es.Stage), node.has(es.PermitApply), node.state.acked] == [False] * 3
    assert not node.call(OpenApply(NAME, INC, AttemptId(1))).accepted
    assert node.call(StopReceiver(NAME, INC, AttemptId(1))).accepted


def test_stop_between_flush_and_its_outcome_leaves_no_acknowledgement():
    node = Node().opened()
    node.stage(0)
    node.manifest(1)
    node.apply(0)
    assert node.has(es.Flush)
    node.call(StopReceiver(NAME, INC, AttemptId(1)))
    node.feed(es.Flushed(AttemptId(1)))
    assert (node.state.acked, node.state.tag) == (False, DIRTY)


def test_stop_of_a_replaced_attempt_returns_at_once():
    node = Node().opened(2)
    assert node.call(StopReceiver(NAME, INC, AttemptId(1))).accepted
    assert (node.state.stopped, node.actions()) == (False, [Action.IGNORE_STALE])


def test_stop_that_overtakes_its_prepare_keeps_the_prepare_out():
    node = Node()
    assert node.call(StopReceiver(NAME, INC, AttemptId(4))).accepted
    assert not node.call(prepare(4)).accepted
    assert node.prepared(5).state.attempt == 5


def test_stop_that_meets_its_prepare_in_the_drain_keeps_it_out():
    node = Node().prepared(1)
    assert node.call(prepare(2)) is None
    assert node.call(StopReceiver(NAME, INC, AttemptId(2))) is None
    assert lines(node) == [(Action.STOP_AND_WAIT, 2, 1)]
    node.feed(es.Drained(AttemptId(1)))
    assert (node.reply(2).accepted, node.reply(3).accepted, node.state.attempt) == (False, True, 1)
    assert lines(node) == [(Action.STOP_AND_WAIT, 1, 1), (Action.IGNORE_STALE, 2, 1)]


@pytest.mark.parametrize("event", [es.PayloadRejected, es.ApplyFailed])
def test_failure_is_reported_drained_and_only_counted_for_the_running_attempt(event):
    node = Node().opened(2)
    node.feed(event(AttemptId(1), "old"))
    assert (node.state.failure, node.actions()) == ("", [Action.IGNORE_STALE])
    node.feed(event(AttemptId(2), "LC1 broken"))
    assert (node.state.failure, node.has(es.Drain), node.has(es.PushReport)) == ("LC1 broken", True, True)
    assert not node.call(OpenApply(NAME, INC, AttemptId(2))).accepted


# -------------------------------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize(
    ("mode", "gate", "closes"),
    [
        (XOR, GateMode.SYNC, True),
        (DENSE, GateMode.SYNC, True),
        (FINISH, GateMode.SYNC, False),
        (RESTORE, GateMode.SYNC, True),
        (XOR, GateMode.ASYNC, False),
        (RESTORE, GateMode.ASYNC, True),
    ],
)
def test_prepare_closes_the_gate_of_synchronous_attempts_and_restores(mode, gate, closes):
    node = Node().prepared(1, mode, gate=gate)
    assert node.state.gate_open is not closes
    assert node.has(es.SetGate) is closes
    (line,) = [effect for effect in node.effects if isinstance(effect, Emit)]
    assert line.action is (Action.START_RESTORE if mode is RESTORE else Action.ENDPOINT_PREPARE)
    assert line.post["gate"] is not closes


def test_gate_opens_over_committed_storage_and_resolves_done():
    node = Node().acked()
    assert node.call(OpenGate(NAME, INC, AttemptId(1), AttemptId(1), Version(1))).accepted
    assert (node.state.gate_open, node.state.tag) == (True, CLEAN1)
    assert node.call(OpenGate(NAME, INC, AttemptId(1), AttemptId(1), Version(1))).accepted
    assert Action.OPEN_GATE not in node.actions()


def test_gate_stays_closed_before_the_commit_and_for_another_attempt():
    node = Node().acked(2)
    for attempt, record_attempt in ((2, 1), (1, 1), (1, 2), (3, 3)):
        assert not node.call(OpenGate(NAME, INC, AttemptId(attempt), AttemptId(record_attempt), Version(1))).accepted
    assert not node.state.gate_open


def test_gate_stays_closed_while_an_attempt_runs_over_clean_storage():
    node = Node().prepared(2)
    assert not node.call(OpenGate(NAME, INC, AttemptId(2), AttemptId(0), Version(0))).accepted


def test_a_request_is_admitted_and_finished_once():
    node = Node()
    node.feed(es.RequestArrived("q"))
    assert (node.has(es.AdmitRequest), node.actions()) == (True, [Action.ADMIT_REQUEST])
    node.feed(es.RequestArrived("q"))
    assert (node.has(es.RefuseRequest), node.actions()) == (True, [])
    node.feed(es.RequestDone("q"))
    assert (node.state.requests, node.actions()) == (frozenset(), [Action.FINISH_REQUEST])
    node.feed(es.RequestDone("q"))
    assert node.effects == ()


def test_closed_gate_refuses_requests():
    node = Node().prepared()
    node.feed(es.RequestArrived("q"))
    assert (node.has(es.RefuseRequest), node.state.requests) == (True, frozenset())


# ----------------------------------------------------------------------------------------------------------- restore


def test_restore_leaves_storage_unknown_until_it_is_confirmed():
    node = Node(CLEAN0).acked(4, RESTORE, version=Version(1), candidate=CandidateId(""))
    assert node.state.tag == Tag()
    assert not node.call(OpenGate(NAME, INC, AttemptId(4), AttemptId(2), Version(1))).accepted
    assert not node.call(FinishRestore(NAME, INC, AttemptId(4), Version(2))).accepted
    assert not node.call(FinishRestore(NAME, INC, AttemptId(3), Version(1))).accepted
    assert node.call(FinishRestore(NAME, INC, AttemptId(4), Version(1))).accepted
    assert node.state.tag == CLEAN1
    assert node.call(FinishRestore(NAME, INC, AttemptId(4), Version(1))).accepted
    assert node.call(OpenGate(NAME, INC, AttemptId(4), AttemptId(2), Version(1))).accepted


def test_prepare_during_a_restore_drains_it_first():
    node = Node(Tag(), gate_open=False).opened(4, RESTORE)
    node.stage(0, attempt=4)
    node.feed(es.ApplyRequested(AttemptId(4), (key(0, 4),)))
    assert node.call(prepare(5, DENSE)) is None
    assert not node.call(FinishRestore(NAME, INC, AttemptId(4), Version(0))).accepted
    node.feed(es.Drained(AttemptId(4)))
    assert (node.state.attempt, node.state.tag) == (5, Tag())


def test_untouched_storage_of_the_same_checkpoint_needs_no_payloads():
    node = Node(Tag(), gate_open=False, loaded_digest=b"ckpt").prepared(1, RESTORE, baseline_digest=b"ckpt")
    assert (node.state.acked, node.has(es.StartIntake)) == (True, False)
    assert node.call(FinishRestore(NAME, INC, AttemptId(1), Version(0))).accepted


@pytest.mark.parametrize(("loaded", "baseline"), [(b"ckpt", b"other"), (b"", b""), (b"", b"ckpt"), (b"ckpt", b"")])
def test_unknown_or_different_checkpoints_prove_nothing(loaded, baseline):
    node = Node(Tag(), gate_open=False, loaded_digest=loaded).prepared(1, RESTORE, baseline_digest=baseline)
    assert (node.state.acked, node.has(es.StartIntake)) == (False, True)


def test_first_write_ends_the_claim_to_a_checkpoint():
    node = Node(Tag(), gate_open=False, loaded_digest=b"ckpt").opened(1, DENSE)
    node.stage(0)
    node.apply(0)
    assert node.state.loaded_digest == b""


# ------------------------------------------------------------------------------------------------------------- sleep


def test_sleeping_engine_takes_no_prepare_and_no_request():
    node = Node()
    node.feed(es.EngineSlept(keeps_storage=True))
    assert (node.state.gate_open, node.state.tag, node.has(es.SetGate)) == (False, CLEAN0, True)
    assert not node.call(prepare()).accepted
    node.feed(es.RequestArrived("q"))
    assert node.has(es.RefuseRequest)
    node.feed(es.EngineWoke())
    assert (node.state.gate_open, node.call(prepare()).accepted) == (False, True)


def test_engine_that_released_its_weights_claims_nothing_and_fails_its_attempt():
    node = Node().acked()
    node.feed(es.EngineSlept(keeps_storage=False))
    assert (node.state.tag, node.state.acked) == (Tag(), False)
    assert "released" in node.state.failure
    serving = Node()
    serving.feed(es.EngineSlept(keeps_storage=False))
    told = [(line.action, line.post["gate"], line.post["tag"]) for line in serving.effects if isinstance(line, Emit)]
    assert told == [(Action.CLOSE_GATE, False, "clean(0)"), (Action.FAIL_RECEIVER, False, "none")]
    finishing = Node().prepared(1, FINISH)
    finishing.feed(es.EngineSlept(keeps_storage=False))
    assert (finishing.state.stopped, finishing.actions()) == (True, [Action.CLOSE_GATE, Action.FAIL_RECEIVER])
    idle = Node()
    idle.feed(es.EngineSlept(keeps_storage=False))
    assert (idle.state.tag, idle.state.failure) == (Tag(), "")


def test_reports_grow_with_every_step():
    node = Node()
    first = node.call(ReceiverStatus(NAME)).report
    assert node.call(ReceiverStatus(NAME)).report.revision > first.revision
