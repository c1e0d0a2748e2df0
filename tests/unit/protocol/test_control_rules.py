"""Every refusal of the control plane, one by one, and what an accepted step writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_dcr import control_rules as rules
from nemo_dcr.ids import AttemptId, CandidateId, Epoch, Incarnation, Member, OwnerId, ReceiverId, Version
from nemo_dcr.record import AttemptEntry, AttemptMode, CommitRequest, Facts, PrepareRequest, Record, Refusal
from nemo_dcr.trace import Action

REQUIRED = (Member(ReceiverId("e0/0"), Incarnation(1)), Member(ReceiverId("e1/0"), Incarnation(5)))
OWNERS = (OwnerId(0), OwnerId(1))
K = Record(Version(3), CandidateId("c3"), b"d3", AttemptId(8), REQUIRED, Version(2), Epoch(2))
ENTRY = AttemptEntry(AttemptId(9), Epoch(2), CandidateId("c4"), AttemptMode.XOR, Version(3), REQUIRED, OWNERS, 50.0)
FACTS = Facts(K, Epoch(2), AttemptId(9), ENTRY, 0, False, 100, 12)
PREPARE = PrepareRequest(Epoch(2), K, CandidateId("c4"), AttemptMode.XOR, REQUIRED, OWNERS, 20.0)
NEW = Record(Version(4), CandidateId("c4"), b"d4", AttemptId(9), REQUIRED, Version(3), Epoch(2))
COMMIT = CommitRequest(Epoch(2), AttemptId(9), K, NEW, 40.0)
FIRST = Record(Version(0), CandidateId(""), b"d0", AttemptId(1), REQUIRED, Version(0), Epoch(1))
RESTORED = AttemptEntry(AttemptId(1), Epoch(1), CandidateId(""), AttemptMode.RESTORE, None, REQUIRED, OWNERS, 50.0)
UNBORN = Facts(None, Epoch(1), AttemptId(1), RESTORED, 0, False, 5, 2)


def reason(found: tuple[Refusal, str] | None) -> Refusal | None:
    return None if found is None else found[0]


def test_prepare_writes_the_next_row_of_the_attempt_table():
    decision = rules.decide_prepare(FACTS, PREPARE, now=7.0, clock=200)
    assert decision.entry == replace(ENTRY, attempt=AttemptId(10), deadline=27.0)
    assert (decision.reply.attempt, decision.reply.deadline, decision.clock) == (10, 27.0, 201)
    assert (decision.journal.action, decision.journal.seq, decision.journal.attempt) == (Action.PREPARE, 12, 10)
    assert decision.journal.args["required"] == "e0/0@1,e1/0@5"


@pytest.mark.parametrize(
    ("facts", "request_", "expected"),
    [
        (FACTS, replace(PREPARE, epoch=Epoch(1)), Refusal.STALE_EPOCH),
        (FACTS, replace(PREPARE, expect=replace(K, digest=b"other")), Refusal.RECORD_MOVED),
        (FACTS, replace(PREPARE, expect=None), Refusal.RECORD_MOVED),
        (replace(FACTS, candidate_dead=True), PREPARE, Refusal.DEAD_CANDIDATE),
        (FACTS, replace(PREPARE, candidate=CandidateId("c3")), Refusal.COMMITTED_CANDIDATE),
        (replace(FACTS, candidate_attempts=1), PREPARE, Refusal.XOR_RETRY),
        (FACTS, replace(PREPARE, required=()), Refusal.MALFORMED),
        (FACTS, replace(PREPARE, required=REQUIRED[::-1]), Refusal.MALFORMED),
        (FACTS, replace(PREPARE, required=(REQUIRED[0], replace(REQUIRED[0], incarnation=2))), Refusal.MALFORMED),
        (FACTS, replace(PREPARE, owners=()), Refusal.MALFORMED),
        (FACTS, replace(PREPARE, owners=OWNERS[::-1]), Refusal.MALFORMED),
        (FACTS, replace(PREPARE, candidate=CandidateId("")), Refusal.MALFORMED),
        (FACTS, replace(PREPARE, mode=AttemptMode.RESTORE), Refusal.MALFORMED),
        (UNBORN, replace(PREPARE, epoch=Epoch(1), expect=None), Refusal.MALFORMED),
    ],
)  # fmt: skip
def test_prepare_is_refused(facts, request_, expected):
    assert reason(rules.why_not_prepare(facts, request_)) is expected
    decision = rules.decide_prepare(facts, request_, now=0.0, clock=0)
    assert (decision.reply.reason, decision.reply.record, decision.entry) == (expected, facts.record, None)
    assert decision.journal.action is Action.CONFLICT


@pytest.mark.parametrize(
    "request_",
    [
        replace(PREPARE, mode=AttemptMode.OVERWRITE),
        replace(PREPARE, mode=AttemptMode.DENSE),
        replace(PREPARE, mode=AttemptMode.FINISH, candidate=CandidateId("c3"), owners=()),
        replace(PREPARE, mode=AttemptMode.RESTORE, candidate=CandidateId("")),
    ],
)
def test_prepare_after_a_first_attempt_allows_every_mode_but_xor(request_):
    assert rules.why_not_prepare(replace(FACTS, candidate_attempts=3), request_) is None


def test_restore_is_the_only_mode_before_the_first_record():
    request = replace(PREPARE, epoch=Epoch(1), expect=None, mode=AttemptMode.RESTORE, candidate=CandidateId(""))
    assert rules.why_not_prepare(UNBORN, request) is None
    assert rules.decide_prepare(UNBORN, request, now=0.0, clock=0).entry.baseline is None


def test_commit_replaces_the_record_up_to_the_deadline():
    decision = rules.decide_commit(FACTS, COMMIT, now=40.0, clock=0)
    assert (decision.record, decision.reply.record, decision.clock) == (NEW, NEW, 101)
    assert (decision.journal.action, decision.journal.post["version"]) == (Action.COMMIT, 4)


@pytest.mark.parametrize(
    ("facts", "request_", "expected"),
    [
        (replace(FACTS, epoch=Epoch(3)), COMMIT, Refusal.STALE_EPOCH),
        (replace(FACTS, record=NEW), COMMIT, Refusal.RECORD_MOVED),
        (replace(FACTS, last=AttemptId(10)), COMMIT, Refusal.NOT_LATEST),
        (replace(FACTS, candidate_dead=True), COMMIT, Refusal.DEAD_CANDIDATE),
        (FACTS, replace(COMMIT, deadline=39.0), Refusal.DEADLINE),
        (replace(FACTS, entry=replace(ENTRY, deadline=39.0)), COMMIT, Refusal.DEADLINE),
        (replace(FACTS, entry=None), COMMIT, Refusal.MALFORMED),
        (replace(FACTS, entry=replace(ENTRY, mode=AttemptMode.FINISH)), COMMIT, Refusal.MALFORMED),
        (replace(FACTS, entry=replace(ENTRY, baseline=Version(2))), COMMIT, Refusal.MALFORMED),
        (FACTS, replace(COMMIT, new=replace(NEW, version=Version(5))), Refusal.MALFORMED),
        (FACTS, replace(COMMIT, new=replace(NEW, baseline=Version(2))), Refusal.MALFORMED),
        (FACTS, replace(COMMIT, new=replace(NEW, required=REQUIRED[:1])), Refusal.MALFORMED),
        (FACTS, replace(COMMIT, new=replace(NEW, candidate=CandidateId("x"))), Refusal.MALFORMED),
        (FACTS, replace(COMMIT, new=replace(NEW, epoch=Epoch(1))), Refusal.MALFORMED),
    ],
)  # fmt: skip
def test_commit_is_refused(facts, request_, expected):
    assert reason(rules.why_not_commit(facts, request_, now=39.5)) is expected
    assert rules.decide_commit(facts, request_, now=39.5, clock=0).record is None


def test_the_control_plane_stamps_the_time_and_no_compare_looks_at_it():
    decision = rules.decide_commit(FACTS, replace(COMMIT, new=replace(NEW, time=99.0)), now=39.5, clock=0)
    assert decision.record.time == decision.reply.record.time == 39.5
    assert rules.decide_bootstrap(UNBORN, Epoch(1), FIRST, 0, 7.5).record.time == 7.5
    assert rules.record_matches(replace(K, time=1.0), replace(K, time=2.0))


def test_a_commit_may_be_written_until_the_earlier_deadline():
    assert rules.decide_commit(FACTS, COMMIT, now=39.5, clock=0).not_after == min(COMMIT.deadline, ENTRY.deadline)
    early = replace(FACTS, entry=replace(ENTRY, deadline=39.6))
    assert rules.decide_commit(early, COMMIT, now=39.5, clock=0).not_after == 39.6


def test_kill_is_for_ever_idempotent_and_never_hits_a_committed_candidate():
    decision = rules.decide_kill(FACTS, Epoch(2), CandidateId("c4"), 0)
    assert (decision.dead, decision.reply.candidate) == ("c4", "c4")
    again = rules.decide_kill(replace(FACTS, candidate_dead=True), Epoch(2), CandidateId("c4"), 0)
    assert (again.reply.candidate, again.dead, again.journal) == ("c4", None, None)
    assert reason(rules.why_not_kill(FACTS, Epoch(2), CandidateId("c3"))) is Refusal.COMMITTED_CANDIDATE
    assert reason(rules.why_not_kill(FACTS, Epoch(1), CandidateId("c4"))) is Refusal.STALE_EPOCH
    assert reason(rules.why_not_kill(FACTS, Epoch(2), CandidateId(""))) is Refusal.MALFORMED


def test_first_record_follows_a_restore_of_exactly_its_receivers():
    decision = rules.decide_bootstrap(UNBORN, Epoch(1), FIRST, 0)
    assert (decision.record, decision.journal.action) == (FIRST, Action.BOOTSTRAP)


@pytest.mark.parametrize(
    ("facts", "record", "expected"),
    [
        (replace(UNBORN, epoch=Epoch(2)), FIRST, Refusal.STALE_EPOCH),
        (replace(UNBORN, record=FIRST), FIRST, Refusal.RECORD_MOVED),
        (replace(UNBORN, last=AttemptId(2)), FIRST, Refusal.NOT_LATEST),
        (replace(UNBORN, entry=None), FIRST, Refusal.NOT_LATEST),
        (UNBORN, replace(FIRST, required=REQUIRED[:1]), Refusal.MALFORMED),
        (UNBORN, replace(FIRST, version=Version(1)), Refusal.MALFORMED),
        (UNBORN, replace(FIRST, candidate=CandidateId("c")), Refusal.MALFORMED),
        (replace(UNBORN, entry=replace(RESTORED, mode=AttemptMode.DENSE)), FIRST, Refusal.MALFORMED),
    ],
)
def test_bootstrap_is_refused(facts, record, expected):
    assert reason(rules.why_not_bootstrap(facts, Epoch(1), record)) is expected
    assert rules.decide_bootstrap(facts, Epoch(1), record, 0).record is None


def test_new_epoch_fences_the_old_coordinator_for_prepare_and_commit():
    acquired = rules.decide_acquire_epoch(FACTS, 0)
    after = replace(FACTS, epoch=acquired.epoch)
    assert acquired.reply.epoch == 3
    assert reason(rules.why_not_prepare(after, PREPARE)) is Refusal.STALE_EPOCH
    assert reason(rules.why_not_commit(after, COMMIT, now=0.0)) is Refusal.STALE_EPOCH


def test_read_reports_what_the_next_coordinator_needs():
    view = rules.decide_read(replace(FACTS, candidate_attempts=2, candidate_dead=True), 500).reply
    assert (view.record, view.epoch, view.last_attempt, view.candidate_attempts) == (K, 2, 9, 2)
    assert (view.candidate_dead, view.clock) == (True, 501)
