"""Auxiliary invariants of the control plane and of coordinators: what the record, ids and beliefs mean.

Spec: none   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.dsl import Claim, State, Term, conj, disj, implies, neg
from spec.proof.vocabulary import (
    Attempt,
    Candidate,
    Coordinator,
    Epoch,
    Owner,
    Receiver,
    Version,
    before,
    is_delta,
    is_version,
    known_version,
)


def record_is_committed(s: State) -> Term:
    """K is in its own history."""
    return implies(s.booted(), conj(s.committed(s.record_version(), s.record_attempt()), s.made(s.record_attempt())))


def record_before_boot(s: State) -> Term:
    """Before the first record everything is at version 0 and no attempt."""
    first = conj(s.record_version() == s.first_version(), s.record_attempt() == s.no_attempt())
    return disj(s.booted(), first)


def first_version_is_first_candidate(s: State) -> Term:
    """Version 0 is the weights that training started from."""
    return s.version_candidate(s.first_version()) == s.first_candidate()


def ids_are_ordered(s: State, t: Attempt) -> Term:
    """No id above the last one exists; 0 is none."""
    return implies(s.made(t), conj(s.attempt_le(t, s.last_attempt()), t != s.no_attempt()))


def epochs_are_ordered(s: State, x: Epoch) -> Term:
    """No epoch above the active one was handed out."""
    return conj(implies(s.granted(x), s.epoch_le(x, s.epoch())), implies(s.taken(x), s.granted(x)))


def attempts_are_of_old_epochs(s: State, t: Attempt) -> Term:
    """An attempt belongs to an epoch that was handed out."""
    return implies(s.made(t), s.epoch_le(s.attempt_epoch(t), s.epoch()))


def attempt_starts_from_a_version(s: State, t: Attempt) -> Term:
    """What prepare expected was the record."""
    return implies(s.made(t), known_version(s, s.base_version(t)))


def attempt_expects_the_record(s: State, t: Attempt, u: Attempt) -> Term:
    """The attempt that prepare expected is the one that committed the expected version."""
    expects = conj(s.made(t), s.base_attempt(t, u))
    none = conj(u == s.no_attempt(), s.base_version(t) == s.first_version(), s.mode(t) == s.restore())
    return implies(expects, conj(disj(none, s.committed(s.base_version(t), u)), before(s, u, t)))


def settled_attempts_carry_the_version(s: State, t: Attempt) -> Term:
    """Restore and finish stand for the committed candidate."""
    return implies(conj(s.made(t), neg(is_delta(s, t))), s.candidate(t) == s.version_candidate(s.base_version(t)))


def delta_attempts_lead_on(s: State, t: Attempt) -> Term:
    """No attempt leads from a version to the same candidate."""
    return implies(conj(s.made(t), is_delta(s, t)), s.candidate(t) != s.version_candidate(s.base_version(t)))


def delta_attempts_follow_the_boot(s: State, t: Attempt) -> Term:
    """Only restores come before the first record."""
    return implies(conj(s.made(t), s.mode(t) != s.restore()), s.booted())


def later_attempts_start_from_the_record(s: State, t: Attempt) -> Term:
    """An attempt with a later id than the record's was prepared on this record (D15)."""
    later = conj(s.made(t), before(s, s.record_attempt(), t))
    return implies(later, s.base_version(t) == s.record_version())


def winners_are_committed(s: State, v: Version, t: Attempt) -> Term:
    """`won` is the projection of the history, and an old winner is no later than the record's attempt."""
    return implies(s.committed(v, t), conj(s.won(t), s.made(t), s.attempt_le(t, s.record_attempt())))


def winners_have_a_version(s: State, t: Attempt, v: Version) -> Term:
    """A committed attempt committed the successor of what it started from."""
    delta = implies(s.succ(s.base_version(t), v), s.committed(v, t))
    return implies(conj(s.won(t), is_delta(s, t)), delta)


def winners_exist(s: State, t: Attempt) -> Term:
    """Only complete attempts are committed, and none after the record's."""
    return implies(s.won(t), conj(s.made(t), s.booted(), s.completed(t), s.attempt_le(t, s.record_attempt())))


def one_coordinator_an_epoch(s: State, k: Coordinator, j: Coordinator) -> Term:
    """Two coordinators never act under one epoch."""
    both = conj(s.viewing(k), s.viewing(j), s.coordinator_epoch(k) == s.coordinator_epoch(j))
    return implies(both, k == j)


def coordinators_took_their_epoch(s: State, k: Coordinator) -> Term:
    """An acting coordinator took its epoch."""
    return implies(s.viewing(k), s.taken(s.coordinator_epoch(k)))


def attempts_come_from_taken_epochs(s: State, t: Attempt) -> Term:
    """Who prepared had taken its epoch."""
    return implies(s.made(t), s.taken(s.attempt_epoch(t)))


def views_are_records(s: State, k: Coordinator) -> Term:
    """What a coordinator believes was once the record."""
    return implies(conj(s.viewing(k), s.views_record(k)), s.committed(s.view_version(k), s.view_attempt(k)))


def blind_views_see_version_zero(s: State, k: Coordinator) -> Term:
    """Who saw no record believes in version 0 and no attempt."""
    first = conj(s.view_version(k) == s.first_version(), s.view_attempt(k) == s.no_attempt())
    return implies(conj(s.viewing(k), neg(s.views_record(k))), first)


def said_of_attempts(s: State, t: Attempt) -> Term:
    """Nothing is said of attempts that do not exist."""
    said = disj(s.started(t), s.completed(t), s.commit_asked(t), s.failed(t), s.confirmed(t))
    asked = implies(s.commit_asked(t), conj(s.completed(t), is_delta(s, t)))
    return conj(implies(said, s.made(t)), asked, implies(s.confirmed(t), s.booted()))


def attempts_have_a_mode(s: State, t: Attempt) -> Term:
    """There are five modes."""
    return implies(s.made(t), disj(is_delta(s, t), s.mode(t) == s.finish(), s.mode(t) == s.restore()))


def own_wins_are_the_record(s: State, k: Coordinator) -> Term:
    """A commit that the active coordinator waits for, and that succeeded, is the record."""
    waits = conj(s.viewing(k), s.committing(k), s.coordinator_epoch(k) == s.epoch())
    return implies(conj(waits, s.won(s.waits_for(k))), s.waits_for(k) == s.record_attempt())


def versions_are_chosen(s: State, v: Version) -> Term:
    """Every version has a chosen candidate."""
    return implies(known_version(s, v), s.chosen(s.version_candidate(v)))


def winners_are_chosen(s: State, t: Attempt) -> Term:
    """The candidate of a committed attempt is chosen."""
    return implies(conj(s.won(t), is_delta(s, t)), s.chosen(s.candidate(t)))


def chosen_was_stepped(s: State, c: Candidate) -> Term:
    """What was chosen was made by the trainer."""
    return implies(s.chosen(c), s.stepped(c))


def one_version_a_candidate(s: State, v: Version, u: Version) -> Term:
    """No candidate is committed twice."""
    both = conj(
        s.survives(), known_version(s, v), known_version(s, u), s.version_candidate(v) == s.version_candidate(u)
    )
    return implies(both, v == u)


def completed_is_acked(s: State, t: Attempt, r: Receiver) -> Term:
    """A complete attempt was acknowledged by every member."""
    return implies(conj(s.completed(t), s.mode(t) != s.finish(), s.required(t, r)), s.ack(t, r, s.member_inc(t, r)))


def completed_is_ended(s: State, t: Attempt, o: Owner) -> Term:
    """A complete delta attempt was ended by every owner."""
    return implies(conj(s.completed(t), is_delta(s, t)), s.ended(t, o))


def waiting_coordinators_asked(s: State, k: Coordinator) -> Term:
    """Who waits for a commit asked for it, under its own epoch."""
    t = s.waits_for(k)
    asked = conj(s.commit_asked(t), s.attempt_epoch(t) == s.coordinator_epoch(k))
    return implies(conj(s.viewing(k), s.committing(k)), asked)


def requests_are_decided(s: State, k: Coordinator, t: Attempt) -> Term:
    """A request of the active epoch that nobody waits for has won, or can not win any more."""
    of_k = conj(s.viewing(k), s.coordinator_epoch(k) == s.epoch(), s.attempt_epoch(t) == s.epoch())
    waited = conj(s.committing(k), s.waits_for(k) == t)
    return implies(conj(of_k, s.commit_asked(t), neg(waited)), disj(s.won(t), s.late(t)))


def rolled_is_committed(s: State, v: Version) -> Term:
    """Baselines are told to follow committed versions only."""
    return implies(s.rolled(v), is_version(s, v))


LEMMAS: tuple[Claim, ...] = (
    record_is_committed,
    record_before_boot,
    first_version_is_first_candidate,
    ids_are_ordered,
    epochs_are_ordered,
    attempts_are_of_old_epochs,
    attempt_starts_from_a_version,
    attempt_expects_the_record,
    settled_attempts_carry_the_version,
    delta_attempts_lead_on,
    delta_attempts_follow_the_boot,
    later_attempts_start_from_the_record,
    winners_are_committed,
    winners_have_a_version,
    winners_exist,
    one_coordinator_an_epoch,
    coordinators_took_their_epoch,
    attempts_come_from_taken_epochs,
    views_are_records,
    blind_views_see_version_zero,
    said_of_attempts,
    attempts_have_a_mode,
    own_wins_are_the_record,
    versions_are_chosen,
    winners_are_chosen,
    chosen_was_stepped,
    one_version_a_candidate,
    completed_is_acked,
    completed_is_ended,
    waiting_coordinators_asked,
    requests_are_decided,
    rolled_is_committed,
)
