"""Auxiliary invariants of the trainer and of owners: what streams, baselines and payloads mean.

Spec: none   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.dsl import Claim, State, Term, conj, disj, implies, neg
from spec.proof.vocabulary import (
    Attempt,
    Element,
    Owner,
    Payload,
    Version,
    before,
    is_delta,
    is_version,
    new_word,
    old_word,
    packed_into,
    sends_all,
)


def fill_is_a_version(s: State, o: Owner) -> Term:
    """A copy into the baseline ends at a committed version."""
    return implies(s.filling(o), is_version(s, s.fill_version(o)))


def fill_reads_the_version(s: State, o: Owner) -> Term:
    """It reads the candidate of that version."""
    v = s.fill_version(o)
    from_candidate = conj(s.frozen(o), s.frozen_candidate(o) == s.version_candidate(v))
    from_live = conj(neg(s.frozen(o)), s.is_resident(o), s.resident(o) == s.version_candidate(v))
    return implies(s.filling(o), disj(from_candidate, from_live))


def copied_words_are_the_version(s: State, o: Owner, e: Element) -> Term:
    """What was copied is a word of that version."""
    copied = conj(s.filling(o), s.owner_of(e) == o, s.copied(e))
    return implies(copied, s.base(e) == s.word(s.version_candidate(s.fill_version(o)), e))


def fill_and_tag(s: State, o: Owner) -> Term:
    """While copying, nothing is claimed; `updating` means copying."""
    return conj(
        implies(s.filling(o), s.tracker(o) != s.at()),
        implies(conj(s.filling(o), s.tracker(o) == s.lost()), neg(s.frozen(o))),
        implies(s.tracker(o) == s.updating(), s.filling(o)),
        disj(s.tracker(o) == s.at(), s.tracker(o) == s.updating(), s.tracker(o) == s.lost()),
    )


def streams_are_drained_first(s: State, o: Owner) -> Term:
    """A stream that runs left no prepared one beside it, and unless it failed no update moves the baseline under it."""
    moved = conj(s.streaming(o), neg(s.owner_failed(o)), s.tracker(o) == s.updating())
    return conj(neg(conj(s.ready(o), s.streaming(o))), neg(moved))


def the_step_was_stepped(s: State) -> Term:
    """The trainer made its last candidate."""
    return s.stepped(s.step())


def frozen_is_the_step(s: State, o: Owner) -> Term:
    """Owners hold the trainer's last candidate, or none."""
    return implies(s.frozen(o), conj(s.frozen_candidate(o) == s.step(), s.began(o)))


def unbegun_steps_are_open(s: State, o: Owner) -> Term:
    """A candidate that some owner did not offer yet is not committed."""
    return implies(conj(s.survives(), neg(s.began(o))), neg(s.chosen(s.step())))


def frozen_is_open_or_the_record(s: State, o: Owner) -> Term:
    """A frozen candidate is not committed, or is the record's: its transition did not end here."""
    chosen = conj(s.survives(), s.frozen(o), s.chosen(s.frozen_candidate(o)))
    return implies(chosen, s.frozen_candidate(o) == s.version_candidate(s.record_version()))


def fill_is_current(s: State, o: Owner) -> Term:
    """A copy into the baseline leads to the record's version."""
    return implies(conj(s.survives(), s.filling(o)), s.fill_version(o) == s.record_version())


def resident_is_current(s: State, o: Owner) -> Term:
    """Live weights outside of a transition are the record's."""
    idle = conj(s.survives(), neg(s.frozen(o)), s.is_resident(o))
    return implies(idle, s.resident(o) == s.version_candidate(s.record_version()))


def thawed_stays(s: State, v: Version, o: Owner) -> Term:
    """A transition that ended at an owner does not begin again."""
    again = conj(s.frozen(o), s.frozen_candidate(o) == s.version_candidate(v))
    return implies(s.thawed(v, o), conj(is_version(s, v), implies(s.survives(), neg(again))))


def ended_owners_wait(s: State, t: Attempt, o: Owner) -> Term:
    """While an attempt that the owner ended may still be committed, its candidate is frozen there."""
    current = conj(s.booted(), s.base_version(t) == s.record_version(), neg(s.dead(s.candidate(t))))
    waits = conj(s.survives(), s.ended(t, o), is_delta(s, t), current)
    return implies(waits, conj(s.frozen(o), s.frozen_candidate(o) == s.candidate(t)))


def ended_was_stepped(s: State, t: Attempt, o: Owner) -> Term:
    """What an owner ended was made by the trainer."""
    return implies(conj(s.ended(t, o), is_delta(s, t)), s.stepped(s.candidate(t)))


def runs_do_not_come_back(s: State, t: Attempt, u: Attempt, o: Owner) -> Term:
    """While the owner is in the run that an attempt asked for, no later attempt ended at another run of it."""
    later = conj(s.made(t), s.made(u), before(s, t, u), s.run(o) == s.member_run(t, o))
    return implies(conj(later, s.member_run(u, o) != s.run(o)), neg(s.ended(u, o)))


def members_were_used(s: State, t: Attempt, o: Owner) -> Term:
    """An attempt asks an owner in a run that it has or had."""
    return implies(s.made(t), s.run_used(o, s.member_run(t, o)))


def ended_attempts_were_installed(s: State, t: Attempt, o: Owner) -> Term:
    """What a run of an owner ended, it had installed."""
    return implies(conj(s.ended(t, o), s.member_run(t, o) == s.run(o)), s.owner_knew(o, t))


def installed_attempts_are_the_newest(s: State, t: Attempt, u: Attempt, o: Owner) -> Term:
    """An owner has the newest attempt installed of those that this run ever had."""
    return implies(conj(s.owner_knew(o, t), s.owner_att(o, u)), s.attempt_le(t, u))


def open_streams_have_not_ended(s: State, t: Attempt, o: Owner) -> Term:
    """A stream that is prepared or runs has not ended."""
    open_one = conj(disj(s.ready(o), s.streaming(o)), s.owner_att(o, t))
    return implies(open_one, neg(s.ended(t, o)))


def settled_steps_are_chosen_or_dead(s: State, o: Owner) -> Term:
    """An owner that left the transition of the last step left it because it was committed, or dead."""
    return implies(conj(s.began(o), neg(s.frozen(o))), disj(s.chosen(s.step()), s.dead(s.step())))


def the_step_is_open_or_the_record(s: State) -> Term:
    """The last step is not committed, or it is the record."""
    return implies(s.chosen(s.step()), s.step() == s.version_candidate(s.record_version()))


def ended_is_the_step(s: State, t: Attempt, o: Owner) -> Term:
    """An attempt that some owner ended, and that may still be committed, carries the last step."""
    current = conj(s.booted(), s.base_version(t) == s.record_version(), neg(s.dead(s.candidate(t))))
    return implies(conj(s.ended(t, o), is_delta(s, t), current), s.candidate(t) == s.step())


def owner_attempts_are_asked(s: State, o: Owner, t: Attempt) -> Term:
    """An installed attempt asked for this run of the owner."""
    return implies(s.owner_att(o, t), conj(s.made(t), s.member_run(t, o) == s.run(o), s.owner_knew(o, t)))


def one_installed_attempt(s: State, o: Owner, t: Attempt, u: Attempt) -> Term:
    """One attempt is installed at a time."""
    return implies(conj(s.owner_att(o, t), s.owner_att(o, u)), t == u)


def streams_bring_payloads(s: State, o: Owner, t: Attempt) -> Term:
    """What runs at an owner is a stream of an attempt that has something to send."""
    return implies(conj(s.streaming(o), s.owner_att(o, t)), s.mode(t) != s.finish())


def runs_are_used(s: State, o: Owner) -> Term:
    """An owner's incarnation is one that it has or had."""
    return s.run_used(o, s.run(o))


def senders_were_members(s: State, t: Attempt, p: Payload, o: Owner) -> Term:
    """What is sent under an attempt was sent by the run that the attempt asked for."""
    return implies(conj(s.sent(t, p), s.owns(p, o)), conj(s.made(t), s.run_used(o, s.member_run(t, o))))


def finish_sends_nothing(s: State, t: Attempt, p: Payload) -> Term:
    """What is sent belongs to an attempt that brings payloads."""
    return implies(s.sent(t, p), conj(s.made(t), s.mode(t) != s.finish()))


def records_are_packed(s: State, t: Attempt, p: Payload, e: Element) -> Term:
    """A record is in the payload into which the required run packs it, and that payload was sent (D31)."""
    return implies(s.carries(t, p, e), conj(p == packed_into(s, t, e), s.sent(t, p), s.made(t)))


def sent_payloads_are_complete(s: State, t: Attempt, e: Element) -> Term:
    """A payload that was sent carries every record that is packed into it."""
    p = packed_into(s, t, e)
    changed = disj(sends_all(s, t), old_word(s, t, e) != new_word(s, t, e))
    return implies(conj(s.sent(t, p), changed), s.carries(t, p, e))


def ended_owners_sent_all(s: State, t: Attempt, e: Element) -> Term:
    """After a manifest, everything that differs is in a payload, and that payload is listed."""
    p = packed_into(s, t, e)
    changed = disj(sends_all(s, t), old_word(s, t, e) != new_word(s, t, e))
    out = conj(s.sent(t, p), s.listed(t, p))
    return implies(conj(s.ended(t, s.owner_of(e)), changed), out)


def listed_is_sent(s: State, t: Attempt, p: Payload) -> Term:
    """A manifest lists what was sent."""
    return implies(s.listed(t, p), s.sent(t, p))


def ended_is_streamed(s: State, t: Attempt, o: Owner) -> Term:
    """A manifest comes from the run that the attempt asked for."""
    return implies(s.ended(t, o), conj(s.made(t), s.run_used(o, s.member_run(t, o))))


LEMMAS: tuple[Claim, ...] = (
    fill_is_a_version,
    fill_reads_the_version,
    copied_words_are_the_version,
    fill_and_tag,
    streams_are_drained_first,
    the_step_was_stepped,
    frozen_is_the_step,
    unbegun_steps_are_open,
    frozen_is_open_or_the_record,
    fill_is_current,
    resident_is_current,
    thawed_stays,
    ended_owners_wait,
    ended_was_stepped,
    runs_do_not_come_back,
    members_were_used,
    ended_attempts_were_installed,
    installed_attempts_are_the_newest,
    open_streams_have_not_ended,
    settled_steps_are_chosen_or_dead,
    the_step_is_open_or_the_record,
    ended_is_the_step,
    owner_attempts_are_asked,
    one_installed_attempt,
    streams_bring_payloads,
    runs_are_used,
    senders_were_members,
    finish_sends_nothing,
    records_are_packed,
    sent_payloads_are_complete,
    ended_owners_sent_all,
    listed_is_sent,
    ended_is_streamed,
)
