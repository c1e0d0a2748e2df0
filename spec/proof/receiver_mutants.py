"""Mutants of receivers: attempts and retries, what an acknowledgement speaks for, the gate.

Spec: Mutants   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.dsl import conj, disj, neg
from spec.proof.mutant import ENDPOINT_TESTS, always, mutant, never
from spec.proof.receiver_guards import is_quiet
from spec.proof.vocabulary import INCARNATION, OWNER

ATTEMPTS = (
    mutant(
        "retry_xor",
        "a retry sends differences again",
        "written_words_are_new",
        sent_as_xor=lambda s, t, e: conj(disj(s.mode(t) == s.by_xor(), s.mode(t) == s.overwrite()), s.coded_xor(t, e)),
    ),
    mutant("no_dedup", "a repeated payload is written again", "unwritten_words_are_old", not_duplicate=always),
    mutant(
        "dedup_across_attempts",
        "the deduplication set outlives its attempt",
        "seen_is_sent",
        seen_at_install=lambda s, r, p: s.seen(r, p),
    ),
    mutant(
        "no_endpoint_fence",
        "a payload of another attempt is accepted",
        "fence_safe",
        payload_is_current=lambda s, r, t: conj(s.att(r) != s.no_attempt(), neg(s.stopped(r))),
    ),
    mutant(
        "foreign_manifest",
        "a manifest of another attempt is accepted",
        "sees_ended_owners",
        end_is_current=lambda s, r, t: conj(s.att(r) != s.no_attempt(), neg(s.stopped(r))),
    ),
    mutant("no_drain", "a newer attempt is installed before the older is drained", "fence_safe", is_drained=always),
    mutant(
        "restore_not_drained",
        "a prepare does not wait for a restore that still copies (D29)",
        "fence_safe",
        is_drained=lambda s, r: disj(s.drained(r), s.mode(s.att(r)) == s.restore()),
    ),
    mutant("drain_keeps_writes", "a drain does not wait for issued writes", "fence_safe", keeps_pending=always),
    mutant("not_sticky", "a stop forbids nothing later (D28)", "written_words_are_new", stopped_by_stop=never),
    mutant("flush_after_stop", "a stopped attempt is acknowledged (D28)", "acks_are_exact", not_stopped=always),
    mutant(
        "prepare_not_monotone",
        "a late prepare of an older attempt is installed",
        "fence_mono",
        is_newer=lambda s, r, t: conj(s.att(r) != t, s.fenced(r) != t),
    ),
    mutant(
        "no_elig_recheck", "the receiver does not look at its own tag (D6)", "running_attempts_fit", is_eligible=always
    ),
    mutant(
        "other_candidate",
        "a mixture with another candidate counts as one of this candidate (D8)",
        "running_attempts_fit",
        is_mixture=lambda s, r, t: conj(
            disj(s.tag(r) == s.dirty(), s.tag(r) == s.done()), s.tag_version(r) == s.base_version(t)
        ),
    ),
    mutant(
        "other_version",
        "a mixture of another version counts as one of this version",
        "running_attempts_fit",
        is_mixture=lambda s, r, t: conj(
            disj(s.tag(r) == s.dirty(), s.tag(r) == s.done()), s.tag_candidate(r) == s.candidate(t)
        ),
    ),
    mutant(
        "done_is_clean",
        "acknowledged counts as committed (D7)",
        "clean_exact",
        is_committed_done=lambda s, r, t: s.tag(r) == s.done(),
    ),
    mutant(
        "abort_no_dirty",
        "a mixture becomes clean at the next prepare",
        "clean_exact",
        becomes_clean=lambda s, r, t: disj(s.tag(r) == s.dirty(), s.tag(r) == s.done()),
    ),
    mutant(
        "tag_not_lowered",
        "storage is written under a tag that claims more (D25)",
        "writers_lowered_their_tag",
        lowers_tag=never,
    ),
    mutant(
        "dense_dirty",
        "a dense attempt that broke off counts as a mixture (D13)",
        "dirty_repairable",
        dirty_tag=lambda s, r: s.dirty(),
    ),
    mutant(
        "no_inc_prepare",
        "a prepare for an earlier incarnation is taken (D5)",
        "installed_attempts_exist",
        is_member=lambda s, r, t: s.required(t, r),
    ),
    mutant(
        "no_inc_ack",
        "an acknowledgement of another incarnation counts (D5)",
        "completed_is_acked",
        is_acked=lambda s, t, r: s.some(INCARNATION, lambda n: s.ack(t, r, n)),
    ),
    mutant(
        "no_inc_check",
        "incarnations are looked at nowhere (D5)",
        "installed_attempts_exist",
        is_member=lambda s, r, t: s.required(t, r),
        is_acked=lambda s, t, r: s.some(INCARNATION, lambda n: s.ack(t, r, n)),
    ),
    mutant("join_no_restore", "a restarted receiver claims a version", "clean_exact", start_tag=lambda s: s.clean()),
    mutant(
        "retry_new_cand",
        "the optimizer steps inside a transition (D8)",
        "frozen_is_the_step",
        may_freeze=lambda s, o: neg(s.filling(o)),
        everybody_thawed=lambda s: s.every(OWNER, lambda o: conj(s.began(o), neg(s.filling(o)))),
    ),
)

ACKNOWLEDGEMENTS = (
    mutant("no_manifest", "an acknowledgement waits for no manifest (D24)", "acks_are_exact", all_manifests=always),
    mutant(
        "one_manifest",
        "an acknowledgement waits for the manifest of one owner",
        "acks_are_exact",
        all_manifests=lambda s, r: s.some(OWNER, lambda o: s.sees_end(r, o)),
    ),
    mutant(
        "ack_before_staged",
        "an acknowledgement does not wait for listed payloads",
        "acks_are_exact",
        is_staged=lambda s, r: s.every(OWNER, lambda o: s.sees_end(r, o)),
    ),
    mutant("ack_before_flush", "an acknowledgement does not wait for writes", "acks_are_exact", nothing_pending=always),
    mutant(
        "end_early", "a manifest is published before everything is sent", "ended_owners_sent_all", all_emitted=always
    ),
)

GATES = (
    mutant("gate_not_closed", "prepare leaves the gate open (D20)", "gate_transition", closes_gate=never),
    mutant("gate_early", "the gate opens at the acknowledgement", "gate_safe", gate_after_flush=always),
    mutant(
        "no_quiesce", "requests in flight are not waited for", "quiet_then_opened", is_quiet=lambda s, r: neg(s.gate(r))
    ),
    mutant(
        "flush_open_gate",
        "an attempt without changes is acknowledged behind an open gate (D30)",
        "gate_safe",
        flush_permitted=always,
    ),
    mutant("write_unopened", "writes begin without open_apply", "writers_are_quiet", may_write=is_quiet),
    mutant(
        "open_no_fence", "a late gate call of an older attempt is accepted", "gate_transition", open_is_current=always
    ),
    mutant(
        "open_before_end", "gates open before owners left the transition", "gate_transition", transition_ended=always
    ),
    mutant(
        "write_unquiet",
        "a rank does not look at its own gate before it writes",
        "",
        covered_by=ENDPOINT_TESTS + "test_flush_without_changes_still_waits_for_open_apply_and_quiet",
        may_write=lambda s, r: s.open_apply(r),
    ),
    mutant("open_apply_early", "writes are allowed before every rank is quiet", "writers_were_let", all_quiet=always),
    mutant(
        "half_instance",
        "an instance takes part with some of its ranks",
        "members_are_whole_instances",
        takes_whole_instances=always,
    ),
    mutant(
        "finish_unprepared",
        "a finish attempt is complete before every member installed it",
        "finish_is_prepared",
        all_prepared=always,
    ),
    mutant(
        "open_incomplete",
        "gates open under an attempt that is not complete",
        "open_gates_are_complete",
        open_is_due=always,
    ),
    mutant(
        "unknown_member",
        "a member is required in an incarnation that is still to come",
        "split_instances_are_silent",
        has_answered=always,
    ),
    mutant("admit_closed", "a request starts at a closed gate", "gate_safe", may_admit=always),
    mutant(
        "proved_by_nothing",
        "a restore is proved without a look at storage",
        "acks_are_exact",
        is_proved=lambda s, r, t: s.mode(t) == s.restore(),
    ),
    mutant(
        "restore_unfinished",
        "a restore is finished before everything is applied",
        "clean_exact",
        may_finish_restore=lambda s, r, t: conj(s.att(r) == t, s.mode(t) == s.restore(), neg(s.stopped(r))),
    ),
    mutant(
        "restore_unconfirmed",
        "the record is not read again after a restore (D19)",
        "",
        covered_by=ENDPOINT_TESTS + "test_restore_leaves_storage_unknown_until_it_is_confirmed",
        is_confirmed=lambda s, t: s.booted(),
    ),
)
