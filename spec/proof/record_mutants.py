"""Mutants of the control plane, of coordinators and of owners: commits and baselines.

Spec: Mutants   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.dsl import conj
from spec.proof.mutant import COORDINATOR_TESTS, OWNER_TESTS, RULES_TESTS, always, mutant, never
from spec.proof.vocabulary import ATTEMPT, RECEIVER

COMMITS = (
    mutant(
        "commit_partial_acks",
        "a commit with some acknowledgements missing",
        "completed_is_acked",
        has_all_acks=lambda s, t: s.some(RECEIVER, lambda r: conj(s.required(t, r), s.ack(t, r, s.member_inc(t, r)))),
    ),
    mutant(
        "ack_of_any_attempt",
        "an acknowledgement of another attempt counts",
        "completed_is_acked",
        is_acked=lambda s, t, r: s.some(ATTEMPT, lambda u: s.ack(u, r, s.member_inc(t, r))),
    ),
    mutant(
        "commit_before_end", "an attempt is complete before its owners ended it", "completed_is_ended", all_ended=always
    ),
    mutant(
        "join_mid_attempt",
        "the record binds whoever is there, not who was required",
        "commit_acked",
        is_bound=lambda s, t, r, n: s.inc(r) == n,
    ),
    mutant("no_cas", "a commit does not compare the record", "single_commit", commit_matches=lambda s, t: s.booted()),
    mutant(
        "no_cas_prepare",
        "a prepare does not compare the record (D1)",
        "attempt_expects_the_record",
        record_matches=lambda s, k: s.booted(),
    ),
    mutant(
        "no_epoch_commit",
        "a commit of a replaced coordinator is accepted",
        "takeover_decides",
        commit_holds_epoch=always,
    ),
    mutant(
        "no_epoch_prepare",
        "a replaced coordinator prepares",
        "",
        covered_by=RULES_TESTS + "test_new_epoch_fences_the_old_coordinator_for_prepare_and_commit",
        prepare_holds_epoch=always,
    ),
    mutant(
        "read_before_epoch",
        "the record is read before the epoch is held (D2)",
        "takeover_decides",
        reads_after_epoch=never,
    ),
    mutant(
        "no_deadline_wait", "an unknown commit counts as failed at once (D14)", "requests_are_decided", expires=never
    ),
    mutant("late_commit", "a commit is accepted after its deadline", "takeover_decides", in_time=always),
    mutant(
        "not_latest",
        "a commit is accepted after a later prepare (D15)",
        "later_attempts_start_from_the_record",
        is_latest=always,
    ),
    mutant("commit_dead", "a dead candidate is committed (D27)", "abort_safe", not_dead=always),
    mutant(
        "prepare_dead",
        "a dead candidate is prepared",
        "",
        covered_by=RULES_TESTS + "test_prepare_is_refused",
        prepare_not_dead=always,
    ),
    mutant("kill_committed", "the committed candidate is killed", "abort_safe", not_committed=always),
    mutant("drop_alive", "an owner drops a candidate that is not dead (D27)", "ended_owners_wait", is_dead=always),
    mutant(
        "xor_later",
        "a later attempt of a candidate sends differences to clean receivers (D9)",
        "",
        covered_by=COORDINATOR_TESTS + "test_attempt_that_failed_before_any_write_is_still_never_repeated_as_xor",
        may_xor=always,
    ),
    mutant("bootstrap_twice", "the first record is written again", "single_commit", no_record_yet=always),
)

BASELINES = (
    mutant(
        "base_before_commit",
        "baselines move when a commit is asked for, not when it succeeded",
        "rolled_is_committed",
        record_is_committed=lambda s, k, v: conj(s.committing(k), s.succ(s.view_version(k), v)),
    ),
    mutant(
        "upd_no_match",
        "a late update is not compared with the candidate (D11)",
        "fill_reads_the_version",
        update_matches=lambda s, o, c: s.frozen(o),
    ),
    mutant(
        "end_before_base", "a transition ends before the baseline followed", "baseline_follows", has_followed=always
    ),
    mutant(
        "fill_from_live",
        "a baseline is filled from live weights while a candidate is frozen",
        "copied_words_are_the_version",
        copy_source=lambda s, o: s.resident(o),
    ),
    mutant(
        "fill_early", "a baseline counts as filled before every word is copied", "baseline_bound", all_copied=always
    ),
    mutant(
        "restore_stale_base",
        "a restore sends a baseline of another version (D19)",
        "payload_bound",
        restore_base=always,
    ),
    mutant(
        "no_tag_check",
        "change detection does not look at the tracker's version (SC3)",
        "payload_bound",
        delta_base=always,
    ),
    mutant(
        "rebuild_from_cand",
        "a lost baseline is refilled from whatever is there (D12)",
        "fill_reads_the_version",
        is_committed_resident=always,
    ),
    mutant(
        "crash_keeps_base",
        "a restarted owner trusts its memory (D12)",
        "baseline_bound",
        loses_baseline=lambda s: s.at(),
    ),
    mutant(
        "stream_unfrozen",
        "an owner streams another candidate (SC4)",
        "payload_bound",
        is_frozen=lambda s, o, c: s.frozen(o),
    ),
    mutant(
        "update_under_stream",
        "a baseline moves under a stream",
        "streams_are_drained_first",
        streams_undisturbed=always,
    ),
    mutant(
        "move_back",
        "a baseline is updated to an older version",
        "",
        covered_by=OWNER_TESTS + "test_update_never_goes_backwards_and_never_runs_under_a_stream",
        moves_forward=always,
    ),
    mutant(
        "owner_not_drained",
        "an owner installs an attempt under a stream",
        "streams_are_drained_first",
        owner_is_drained=always,
    ),
    mutant(
        "owner_not_newer",
        "an owner installs an older attempt",
        "installed_attempts_are_the_newest",
        owner_is_newer=always,
    ),
    mutant(
        "unknown_run",
        "an owner is asked in a run that is still to come",
        "members_were_used",
        owner_has_answered=always,
    ),
    mutant(
        "no_owner_inc",
        "a restarted owner streams an attempt of its predecessor (D31)",
        "owner_attempts_are_asked",
        is_owner_member=always,
    ),
)
