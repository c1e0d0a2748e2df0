"""Auxiliary invariants of instances of several ranks: nobody writes while the leading rank serves.

Spec: none   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.dsl import Claim, State, Term, conj, disj, implies, neg
from spec.proof.vocabulary import Attempt, Element, Receiver, Request, new_word


def _serves(s: State, h: Term, q: Term, x: Term) -> Term:
    return conj(s.leads(h), s.instance(h) == s.instance(q), disj(s.gate(h), s.serves(h, x)))


def ranks_share_an_incarnation(s: State, r: Receiver, q: Receiver) -> Term:
    """The ranks of an instance started together."""
    return implies(s.instance(r) == s.instance(q), s.inc(r) == s.inc(q))


def members_are_whole_instances(s: State, t: Attempt, r: Receiver, q: Receiver) -> Term:
    """An attempt requires an instance with all its ranks."""
    return implies(conj(s.made(t), s.required(t, r), s.instance(r) == s.instance(q)), s.required(t, q))


def _is_silent(s: State, t: Term, r: Term) -> Term:
    n = s.member_inc(t, r)
    said = disj(s.ack(t, r, n), s.reported(t, r), s.reported_quiet(t, r))
    return conj(s.inc_used(r, n), s.inc(r) != n, neg(said))


def split_instances_are_silent(s: State, t: Attempt, r: Receiver, q: Receiver) -> Term:
    """Where ranks are required in different incarnations, one of them was gone already and never says anything."""
    same = conj(s.made(t), s.required(t, r), s.required(t, q), s.instance(r) == s.instance(q))
    return implies(conj(same, s.member_inc(t, r) != s.member_inc(t, q)), disj(_is_silent(s, t, r), _is_silent(s, t, q)))


def only_leaders_serve(s: State, r: Receiver, x: Request) -> Term:
    """Requests run at leading ranks."""
    return implies(s.serves(r, x), s.leads(r))


def reports_are_old(s: State, t: Attempt, r: Receiver) -> Term:
    """Who said something under an attempt installed it, and nothing older since."""
    said = conj(disj(s.reported(t, r), s.reported_quiet(t, r)), s.inc(r) == s.member_inc(t, r))
    once = conj(s.made(t), s.inc_used(r, s.member_inc(t, r)))
    used = implies(disj(s.reported(t, r), s.reported_quiet(t, r)), once)
    return conj(used, implies(said, conj(s.required(t, r), s.attempt_le(t, s.att(r)))))


def finish_is_prepared(s: State, t: Attempt, r: Receiver) -> Term:
    """A complete finish attempt was installed by every member."""
    return implies(conj(s.completed(t), s.mode(t) == s.finish(), s.required(t, r)), s.reported(t, r))


def writers_were_let(s: State, q: Receiver, r: Receiver) -> Term:
    """Writes are allowed after every member was quiet; whoever was let go was allowed to."""
    quiet = implies(conj(s.open_apply(q), s.required(s.att(q), r)), s.reported_quiet(s.att(q), r))
    return conj(quiet, implies(s.permitted(q), s.open_apply(q)))


def open_gates_are_complete(s: State, h: Receiver, x: Request) -> Term:
    """A gate was opened under a complete attempt of this incarnation, no newer than the installed one."""
    t = s.opened(h)
    member = conj(s.required(t, h), s.member_inc(t, h) == s.inc(h))
    return implies(disj(s.gate(h), s.serves(h, x)), conj(s.completed(t), member, s.attempt_le(t, s.att(h))))


def quiet_then_opened(s: State, t: Attempt, h: Receiver, x: Request) -> Term:
    """Who was quiet under an attempt and serves again was opened under that attempt or a later one."""
    again = conj(s.reported_quiet(t, h), s.inc(h) == s.member_inc(t, h), disj(s.gate(h), s.serves(h, x)))
    return implies(again, s.attempt_le(t, s.opened(h)))


def nobody_writes_under_a_leader(s: State, h: Receiver, q: Receiver, x: Request) -> Term:
    """While the leading rank serves, no rank of its instance writes."""
    return implies(_serves(s, h, q, x), neg(s.permitted(q)))


def acked_ranks_wait(s: State, t: Attempt, h: Receiver, q: Receiver, e: Element) -> Term:
    """A rank that acknowledged keeps its words until its leader goes on to a later attempt."""
    behind = conj(s.leads(h), s.instance(h) == s.instance(q), s.ack(t, q, s.inc(q)), s.attempt_le(s.att(h), t))
    return implies(behind, s.store(q, e) == new_word(s, t, e))


def prepared_ranks_wait(s: State, t: Attempt, h: Receiver, q: Receiver, e: Element) -> Term:
    """The same for a rank that installed a finish attempt, which holds the record already."""
    said = conj(s.reported(t, q), s.mode(t) == s.finish(), s.inc(q) == s.member_inc(t, q))
    behind = conj(s.leads(h), s.instance(h) == s.instance(q), said, s.attempt_le(s.att(h), t))
    return implies(behind, s.store(q, e) == new_word(s, t, e))


LEMMAS: tuple[Claim, ...] = (
    ranks_share_an_incarnation,
    members_are_whole_instances,
    split_instances_are_silent,
    only_leaders_serve,
    reports_are_old,
    finish_is_prepared,
    writers_were_let,
    open_gates_are_complete,
    quiet_then_opened,
    nobody_writes_under_a_leader,
    acked_ranks_wait,
    prepared_ranks_wait,
)
