"""The conformance suite of control planes: a class of tests that each back end's test class inherits.

Give `open`: the same place is the same commit record, through a handle of its own, as another process would have it.
Back ends that processes share also inherit `ControlProcessSuite` and give `url`. Random sequences of calls are compared
step by step with the control plane in memory, which is `control_rules` over plain lists. The names of the tests are
their claims.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
"""

# ruff: noqa: D102
from __future__ import annotations

import dataclasses
import random
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_dcr.control.memory import MemoryControl
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Epoch, Incarnation, Version
from nemo_dcr.record import (
    AttemptMode,
    Committed,
    ControlPlane,
    Killed,
    Prepared,
    Record,
    Refusal,
    Refused,
    WatchedControlPlane,
)
from nemo_dcr.testing.control_calls import (
    LIFETIME_S,
    MEMBERS,
    STEPS,
    ManualClock,
    Step,
    bootstrap,
    check_chain,
    check_journal,
    commit,
    commit_once,
    granted,
    prepare,
    refusal,
    successor,
)
from nemo_dcr.trace import Action

PATIENCE_S = 60.0


class ControlSuite(ABC):
    """Tests that every back end passes."""

    rounds = 25
    """How often each thread tries to add a version, or more often until one was added."""

    @abstractmethod
    def open(self, place: Path, now: Callable[[], float]) -> WatchedControlPlane:
        """Open the commit record at `place`, a path that nothing else uses; its directory exists."""

    def test_a_new_control_plane_has_no_record(self, tmp_path: Path) -> None:
        view = self.open(tmp_path / "k", ManualClock()).read()
        assert (view.record, view.epoch, view.last_attempt, view.candidate_dead) == (None, 0, 0, False)
        assert self.open(tmp_path / "k", ManualClock()).history() == ()

    def test_a_new_epoch_fences_every_older_one(self, tmp_path: Path) -> None:
        control, other = self.open(tmp_path / "k", ManualClock()), self.open(tmp_path / "k", ManualClock())
        old, record = bootstrap(control)
        attempt = granted(prepare(control, old, record))
        new = other.acquire_epoch().epoch
        assert new > old
        assert refusal(prepare(control, old, record)) is Refusal.STALE_EPOCH
        assert refusal(commit(control, old, record, attempt)) is Refusal.STALE_EPOCH
        assert refusal(control.kill(old, CandidateId("c1"))) is Refusal.STALE_EPOCH
        assert control.read().record == record
        granted(prepare(other, new, record))

    def test_a_replaced_coordinator_cannot_write_the_first_record(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        old = control.acquire_epoch().epoch
        attempt = granted(prepare(control, old, None, NO_CANDIDATE, AttemptMode.RESTORE))
        control.acquire_epoch()
        first = Record(Version(0), NO_CANDIDATE, b"b", attempt, MEMBERS, Version(0), old)
        assert refusal(control.bootstrap(old, first)) is Refusal.STALE_EPOCH
        assert control.read().record is None

    def test_the_first_record_is_written_once(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, first = bootstrap(control)
        assert refusal(control.bootstrap(epoch, first)) is Refusal.RECORD_MOVED
        assert check_chain(control) == (first,)

    def test_the_first_record_needs_a_restore_attempt_of_its_receivers(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch = control.acquire_epoch().epoch
        attempt = granted(prepare(control, epoch, None, NO_CANDIDATE, AttemptMode.RESTORE))
        first = Record(Version(0), NO_CANDIDATE, b"b", attempt, MEMBERS, Version(0), epoch)
        later = dataclasses.replace(first, attempt=AttemptId(attempt + 1))
        fewer = dataclasses.replace(first, required=MEMBERS[:1])
        assert refusal(control.bootstrap(epoch, later)) is Refusal.NOT_LATEST
        assert refusal(control.bootstrap(epoch, fewer)) is Refusal.MALFORMED
        assert isinstance(control.bootstrap(epoch, first), Committed)

    def test_attempt_ids_increase_over_all_coordinators(self, tmp_path: Path) -> None:
        handles = [self.open(tmp_path / "k", ManualClock()) for _ in range(2)]
        epoch, record = bootstrap(handles[0])
        attempts = [record.attempt]
        for turn in range(6):
            control = handles[turn % 2]
            epoch = control.acquire_epoch().epoch
            attempts.append(granted(prepare(control, epoch, record)))
            attempts.append(granted(prepare(control, epoch, record)))
        assert attempts == sorted(set(attempts))
        assert handles[0].read().last_attempt == attempts[-1]

    def test_prepare_and_commit_compare_the_whole_record(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        attempt = granted(prepare(control, epoch, record))
        restarted = dataclasses.replace(MEMBERS[0], incarnation=Incarnation(5))
        for wrong in (
            dataclasses.replace(record, digest=b"other"),
            dataclasses.replace(record, required=MEMBERS[1:]),
            dataclasses.replace(record, required=(restarted, MEMBERS[1])),
            dataclasses.replace(record, epoch=Epoch(epoch + 1)),
            dataclasses.replace(record, attempt=AttemptId(7)),
        ):
            for reply in (prepare(control, epoch, wrong), commit(control, epoch, wrong, attempt)):
                assert refusal(reply) is Refusal.RECORD_MOVED
                assert isinstance(reply, Refused)
                assert reply.record == record
        assert refusal(prepare(control, epoch, None, NO_CANDIDATE, AttemptMode.RESTORE)) is Refusal.RECORD_MOVED
        assert isinstance(commit(control, epoch, record, attempt), Committed)

    def test_a_commit_becomes_the_record(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        for number in range(1, 4):
            attempt = granted(prepare(control, epoch, record, f"c{number}"))
            reply = commit(control, epoch, record, attempt, f"c{number}")
            assert isinstance(reply, Committed)
            assert reply.record == successor(record, epoch, attempt, f"c{number}")
            record = reply.record
            assert self.open(tmp_path / "k", ManualClock()).read().record == record
        assert [kept.version for kept in check_chain(control)] == [0, 1, 2, 3]
        check_journal(control)

    def test_a_lost_reply_is_resolved_by_reading(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        attempt = granted(prepare(control, epoch, record))
        commit(control, epoch, record, attempt)
        committed = self.open(tmp_path / "k", ManualClock()).read().record
        assert committed == successor(record, epoch, attempt)
        again = commit(control, epoch, record, attempt)
        assert refusal(again) is Refusal.RECORD_MOVED
        assert isinstance(again, Refused)
        assert again.record == committed
        assert len(check_chain(control)) == 2

    def test_a_later_prepare_fences_an_earlier_commit(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        first = granted(prepare(control, epoch, record))
        second = granted(prepare(control, epoch, record))
        assert refusal(commit(control, epoch, record, first)) is Refusal.NOT_LATEST
        assert refusal(commit(control, epoch, record, AttemptId(second + 1))) is Refusal.NOT_LATEST
        assert isinstance(commit(control, epoch, record, second), Committed)

    def test_a_commit_after_its_deadline_is_refused(self, tmp_path: Path) -> None:
        now = ManualClock()
        control = self.open(tmp_path / "k", now)
        epoch, record = bootstrap(control)
        attempt = granted(prepare(control, epoch, record))
        now.value += 5
        assert refusal(commit(control, epoch, record, attempt, deadline=now.value - 0.001)) is Refusal.DEADLINE
        assert isinstance(commit(control, epoch, record, attempt, deadline=now.value), Committed)

    def test_the_deadline_of_the_attempt_binds_whatever_the_request_says(self, tmp_path: Path) -> None:
        now = ManualClock()
        control = self.open(tmp_path / "k", now)
        epoch, record = bootstrap(control)
        prepared = prepare(control, epoch, record)
        attempt = granted(prepared)
        assert isinstance(prepared, Prepared)
        assert prepared.deadline == now.value + LIFETIME_S
        now.value += LIFETIME_S + 0.001
        assert refusal(commit(control, epoch, record, attempt)) is Refusal.DEADLINE
        assert control.read().record == record

    def test_a_dead_candidate_is_dead_for_ever(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        attempt = granted(prepare(control, epoch, record))
        for _ in range(2):
            assert isinstance(control.kill(epoch, CandidateId("c1")), Killed)
        again = self.open(tmp_path / "k", ManualClock())
        epoch_after = again.acquire_epoch().epoch
        assert again.read(CandidateId("c1")).candidate_dead
        assert not again.read(CandidateId("c2")).candidate_dead
        assert refusal(commit(control, epoch, record, attempt)) is Refusal.STALE_EPOCH
        assert refusal(commit(again, epoch_after, record, attempt)) is Refusal.DEAD_CANDIDATE
        assert refusal(prepare(again, epoch_after, record)) is Refusal.DEAD_CANDIDATE
        granted(prepare(again, epoch_after, record, "c2"))

    def test_a_committed_candidate_can_be_neither_killed_nor_prepared(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        attempt = granted(prepare(control, epoch, record))
        reply = commit(control, epoch, record, attempt)
        assert isinstance(reply, Committed)
        assert refusal(control.kill(epoch, CandidateId("c1"))) is Refusal.COMMITTED_CANDIDATE
        assert refusal(prepare(control, epoch, reply.record)) is Refusal.COMMITTED_CANDIDATE
        granted(prepare(control, epoch, reply.record, "c1", AttemptMode.FINISH))

    def test_only_the_first_attempt_of_a_candidate_may_send_xor(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        granted(prepare(control, epoch, record, "c1", AttemptMode.XOR))
        assert refusal(prepare(control, epoch, record, "c1", AttemptMode.XOR)) is Refusal.XOR_RETRY
        granted(prepare(control, epoch, record, "c1", AttemptMode.OVERWRITE))
        granted(prepare(control, epoch, record, "c2", AttemptMode.XOR))
        granted(prepare(control, epoch, record, NO_CANDIDATE, AttemptMode.RESTORE))
        counts = [control.read(CandidateId(name)).candidate_attempts for name in ("c1", "c2", "c3", "")]
        assert counts == [2, 1, 0, 0]

    def test_a_refusal_changes_nothing(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        before = dataclasses.replace(control.read(CandidateId("c1")), clock=0)
        refused = [
            prepare(control, Epoch(epoch - 1), record),
            prepare(control, epoch, None),
            commit(control, epoch, record, AttemptId(99)),
            commit(control, epoch, record, record.attempt),
            control.kill(Epoch(epoch + 1), CandidateId("c1")),
            control.bootstrap(epoch, record),
        ]
        assert all(isinstance(reply, Refused) for reply in refused)
        assert dataclasses.replace(control.read(CandidateId("c1")), clock=0) == before
        assert check_chain(control) == (record,)
        assert [line.action for line in control.journal()][-len(refused) :] == [Action.CONFLICT] * len(refused)

    def test_clocks_pass_every_clock_that_was_seen(self, tmp_path: Path) -> None:
        handles = [self.open(tmp_path / "k", ManualClock()) for _ in range(2)]
        assert handles[0].acquire_epoch(clock=1000).clock == 1001
        assert handles[1].read(clock=5).clock == 1002
        assert handles[0].acquire_epoch().clock == 1003
        check_journal(handles[1])

    def test_everything_survives_opening_again(self, tmp_path: Path) -> None:
        control = self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        granted(prepare(control, epoch, record, "c\u00e9\u4e2d'\"; --"))
        control.kill(epoch, CandidateId("c\u00e9\u4e2d'\"; --"))
        again = self.open(tmp_path / "k", ManualClock())
        assert again.history() == control.history()
        assert again.journal() == control.journal()
        view = again.read(CandidateId("c\u00e9\u4e2d'\"; --"))
        assert (view.record, view.epoch, view.last_attempt) == (record, epoch, record.attempt + 1)
        assert (view.candidate_attempts, view.candidate_dead) == (1, True)

    def test_a_record_carries_the_time_of_its_commit(self, tmp_path: Path) -> None:
        now = ManualClock()
        control = self.open(tmp_path / "k", now)
        epoch, record = bootstrap(control)
        attempt = granted(prepare(control, epoch, record))
        now.value += 7.25
        reply = commit(control, epoch, record, attempt)
        assert isinstance(reply, Committed)
        again = self.open(tmp_path / "k", now)
        times = [kept.time for kept in (reply.record, *again.history())]
        assert times == [now.value, now.value - 7.25, now.value]
        assert again.peek().record == reply.record

    def test_a_look_sees_what_a_read_sees_and_changes_nothing(self, tmp_path: Path) -> None:
        control, other = self.open(tmp_path / "k", ManualClock()), self.open(tmp_path / "k", ManualClock())
        epoch, record = bootstrap(control)
        attempt = granted(prepare(control, epoch, record))
        read = control.read(CandidateId("c1"))
        assert [other.peek(CandidateId("c1")) for _ in range(2)] == [read, read]
        assert isinstance(commit(control, epoch, record, attempt), Committed)
        assert other.peek().record != record
        assert control.journal() == other.journal()

    def test_a_watch_returns_the_next_version_or_nothing_in_time(self, tmp_path: Path) -> None:
        control, other = self.open(tmp_path / "k", ManualClock()), self.open(tmp_path / "k", ManualClock())
        assert other.watch(timeout_s=0) is None
        epoch, record = bootstrap(control)
        assert other.watch(timeout_s=PATIENCE_S) == record
        assert other.watch(record.version, timeout_s=0.01) is None
        seen: list[Record | None] = []
        watching = threading.Thread(target=lambda: seen.append(other.watch(record.version, timeout_s=PATIENCE_S)))
        watching.start()
        attempt = granted(prepare(control, epoch, record))
        assert isinstance(commit(control, epoch, record, attempt), Committed)
        watching.join(PATIENCE_S)
        assert seen == [successor(record, epoch, attempt)]

    def test_threads_lose_no_update(self, tmp_path: Path) -> None:
        bootstrap(self.open(tmp_path / "k", ManualClock()))
        shared = self.open(tmp_path / "k", ManualClock())
        acknowledged: list[AttemptId] = []

        def work(control: ControlPlane) -> None:
            epoch: Epoch | None = None
            deadline, tried = time.monotonic() + PATIENCE_S, 0
            # Threads that always meet commit nothing, however often they try: they go on until one came through.
            while tried < self.rounds or (not acknowledged and time.monotonic() < deadline):
                begin, tried = time.monotonic(), tried + 1
                epoch, attempt = commit_once(control, epoch)
                if attempt is not None:
                    acknowledged.append(attempt)
                else:  # whoever begins in another's turn ends it
                    time.sleep(random.uniform(0, 6 * (time.monotonic() - begin)))

        handles = [shared, shared, self.open(tmp_path / "k", ManualClock())]
        threads = [threading.Thread(target=work, args=(handle,)) for handle in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        records = check_chain(shared)
        assert acknowledged
        assert sorted(acknowledged) == [record.attempt for record in records[1:]]
        check_journal(shared)

    @given(steps=st.lists(STEPS, min_size=5, max_size=30))
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_random_calls_equal_the_rules_step_by_step(self, steps: list[Step]) -> None:
        self.compare_with_rules(steps)

    def compare_with_rules(self, steps: list[Step]) -> None:
        """Make the same calls here and in memory; a back end that is slow runs fewer examples of them."""
        now = ManualClock()
        with tempfile.TemporaryDirectory() as directory:
            control, rules = self.open(Path(directory) / "k", now), MemoryControl(now=now)
            assert bootstrap(control) == bootstrap(rules)
            for step in steps:
                now.value += step.wait_s
                view, records = rules.read(), rules.history()
                assert control.read() == view
                assert step.apply(control, view, records) == step.apply(rules, view, records)
                last = rules.read(step.candidate_on(records))
                assert control.read(step.candidate_on(records)) == last
                assert last.last_attempt >= view.last_attempt
                assert control.history()[: len(records)] == records
            assert control.journal() == rules.journal()
            check_chain(control)
            check_journal(control)
