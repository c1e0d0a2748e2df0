"""Auxiliary invariants of receivers: what storage is, given what was seen, written and acknowledged.

Spec: none   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.dsl import Claim, State, Term, conj, disj, implies, neg
from spec.proof.vocabulary import (
    Attempt,
    Element,
    Incarnation,
    Owner,
    Payload,
    Receiver,
    Request,
    is_delta,
    is_version,
    new_word,
    old_word,
    packed_into,
)


def installed_attempts_exist(s: State, r: Receiver) -> Term:
    """The installed attempt, if any, was made, and asked for this incarnation."""
    t = s.att(r)
    member = conj(s.made(t), s.required(t, r), s.member_inc(t, r) == s.inc(r))
    return disj(t == s.no_attempt(), member)


def incarnations_are_used(s: State, r: Receiver) -> Term:
    """A receiver's incarnation is one that it has or had."""
    return s.inc_used(r, s.inc(r))


def no_attempt_does_nothing(s: State, r: Receiver) -> Term:
    """Without an attempt nothing runs."""
    return implies(s.att(r) == s.no_attempt(), conj(s.stopped(r), s.drained(r), neg(s.permitted(r)), neg(s.acked(r))))


def seen_is_sent(s: State, r: Receiver, p: Payload) -> Term:
    """Accepted payloads were sent under the installed attempt."""
    return implies(s.seen(r, p), s.sent(s.att(r), p))


def sees_ended_owners(s: State, r: Receiver, o: Owner) -> Term:
    """Manifests that are in were published."""
    return implies(s.sees_end(r, o), s.ended(s.att(r), o))


def pending_is_carried(s: State, r: Receiver, t: Attempt, e: Element) -> Term:
    """A pending write is a record of a payload that was accepted."""
    p = packed_into(s, t, e)
    return implies(s.pending(r, t, e), conj(s.seen(r, p), s.carries(t, p, e)))


def acked_has_nothing_pending(s: State, r: Receiver, t: Attempt, e: Element) -> Term:
    """An acknowledged attempt writes no more."""
    return implies(s.acked(r), conj(neg(s.permitted(r)), neg(s.pending(r, t, e))))


def tags_of_receivers(s: State, r: Receiver) -> Term:
    """A receiver's tag is one of four."""
    return disj(*[s.tag(r) == kind for kind in (s.none(), s.clean(), s.dirty(), s.done())])


def writers_are_quiet(s: State, r: Receiver, q: Request) -> Term:
    """From the permit on, the gate is closed and no request runs."""
    return implies(s.permitted(r), conj(neg(s.gate(r)), neg(s.serves(r, q)), neg(s.drained(r)), neg(s.acked(r))))


def writers_lowered_their_tag(s: State, r: Receiver) -> Term:
    """From the permit on, the tag claims no more than a mixture of this attempt."""
    t = s.att(r)
    mixture = conj(s.tag(r) == s.dirty(), s.tag_version(r) == s.base_version(t), s.tag_candidate(r) == s.candidate(t))
    return implies(s.permitted(r), conj(neg(s.loaded(r)), disj(s.tag(r) == s.none(), mixture)))


def drained_attempts_are_over(s: State, r: Receiver) -> Term:
    """Drained and not stopped: a finish attempt, or acknowledged without payloads. Finish attempts never write."""
    quiet = conj(s.drained(r), neg(s.stopped(r)))
    writes = implies(s.open_apply(r), s.mode(s.att(r)) != s.finish())
    return conj(implies(quiet, disj(s.mode(s.att(r)) == s.finish(), s.acked(r))), writes)


def running_attempts_fit(s: State, r: Receiver) -> Term:
    """XOR and finish run on the base version (XOR until the permit), overwrites on it or on a mixture."""
    t = s.att(r)
    clean = conj(s.tag(r) == s.clean(), s.tag_version(r) == s.base_version(t))
    mixture = conj(
        disj(s.tag(r) == s.dirty(), s.tag(r) == s.done()),
        s.tag_version(r) == s.base_version(t),
        s.tag_candidate(r) == s.candidate(t),
    )
    runs = conj(t != s.no_attempt(), neg(s.acked(r)))
    return implies(
        runs,
        conj(
            implies(conj(s.mode(t) == s.by_xor(), neg(s.permitted(r)), neg(s.stopped(r))), clean),
            implies(disj(s.mode(t) == s.by_xor(), s.mode(t) == s.overwrite()), disj(clean, mixture)),
            implies(s.mode(t) == s.finish(), clean),
        ),
    )


def dirty_tags_are_versions(s: State, r: Receiver) -> Term:
    """A mixture starts from a committed version."""
    return implies(disj(s.tag(r) == s.dirty(), s.tag(r) == s.done()), is_version(s, s.tag_version(r)))


def done_tags_are_attempts(s: State, r: Receiver) -> Term:
    """A `done` tag names the attempt that was acknowledged, by this incarnation."""
    t = s.tag_attempt(r)
    names = conj(
        s.made(t),
        is_delta(s, t),
        s.candidate(t) == s.tag_candidate(r),
        s.base_version(t) == s.tag_version(r),
        s.attempt_le(t, s.att(r)),
    )
    return implies(s.tag(r) == s.done(), names)


def unwritten_words_are_old(s: State, r: Receiver, e: Element) -> Term:
    """XOR: what was not written yet is the old word."""
    t = s.att(r)
    p = packed_into(s, t, e)
    runs = conj(t != s.no_attempt(), s.mode(t) == s.by_xor(), neg(s.stopped(r)), neg(s.acked(r)))
    waits = disj(neg(s.seen(r, p)), neg(s.carries(t, p, e)), s.pending(r, t, e))
    return implies(conj(runs, waits), s.store(r, e) == old_word(s, t, e))


def written_words_are_new(s: State, r: Receiver, e: Element) -> Term:
    """What was accepted and is not pending any more is the new word."""
    t = s.att(r)
    p = packed_into(s, t, e)
    runs = conj(t != s.no_attempt(), neg(s.stopped(r)))
    written = conj(s.seen(r, p), s.carries(t, p, e), neg(s.pending(r, t, e)))
    return implies(conj(runs, written), s.store(r, e) == new_word(s, t, e))


def acks_are_exact(s: State, t: Attempt, r: Receiver, e: Element) -> Term:
    """Who acknowledged and was not prepared again holds the new words."""
    bound = conj(s.ack(t, r, s.inc(r)), s.att(r) == t)
    return implies(bound, s.store(r, e) == new_word(s, t, e))


def acks_are_acked(s: State, t: Attempt, r: Receiver) -> Term:
    """An acknowledgement on the way is one that was given, and no older than what is installed."""
    bound = conj(s.ack(t, r, s.inc(r)), s.att(r) == t)
    return implies(bound, s.acked(r))


def acked_is_on_the_way(s: State, r: Receiver) -> Term:
    """What was acknowledged is on the way, and is no finish attempt."""
    t = s.att(r)
    return implies(s.acked(r), conj(s.ack(t, r, s.inc(r)), s.mode(t) != s.finish()))


def acks_are_old(s: State, t: Attempt, r: Receiver, n: Incarnation) -> Term:
    """An acknowledgement is of an attempt that this incarnation installed, and of one that it has or had."""
    of_now = implies(n == s.inc(r), s.attempt_le(t, s.att(r)))
    return implies(s.ack(t, r, n), conj(s.inc_used(r, n), s.made(t), of_now))


def acked_tags(s: State, t: Attempt, r: Receiver) -> Term:
    """An acknowledged delta attempt is `done`, until its commit lets the gate open."""
    bound = conj(s.acked(r), s.att(r) == t, is_delta(s, t))
    done = conj(s.tag(r) == s.done(), s.tag_attempt(r) == t)
    clean = conj(s.tag(r) == s.clean(), s.won(t), s.succ(s.base_version(t), s.tag_version(r)))
    return implies(bound, disj(done, clean))


def loaded_is_the_first_candidate(s: State, r: Receiver, e: Element) -> Term:
    """Untouched storage is what was loaded."""
    return implies(s.loaded(r), s.store(r, e) == s.word(s.first_candidate(), e))


LEMMAS: tuple[Claim, ...] = (
    installed_attempts_exist,
    incarnations_are_used,
    no_attempt_does_nothing,
    seen_is_sent,
    sees_ended_owners,
    pending_is_carried,
    acked_has_nothing_pending,
    tags_of_receivers,
    writers_are_quiet,
    writers_lowered_their_tag,
    drained_attempts_are_over,
    running_attempts_fit,
    dirty_tags_are_versions,
    done_tags_are_attempts,
    unwritten_words_are_old,
    written_words_are_new,
    acks_are_exact,
    acks_are_acked,
    acked_is_on_the_way,
    acks_are_old,
    acked_tags,
    loaded_is_the_first_candidate,
)
