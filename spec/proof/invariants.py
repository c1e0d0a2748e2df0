"""What holds in every state: the properties that are claimed, and the auxiliary facts that make them inductive.

Every claim is universal over its parameters. The properties have the names of Properties.tla; an auxiliary fact says
what one actor knows, or what one variable means. All together they are inductive: true at first, kept by each action.
Step properties speak of a state and the one after it.

Paper: Proposition 1; Appendix B   Spec: Properties.tla   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.dsl import Claim, State, Term, conj, disj, implies, neg
from spec.proof.vocabulary import (
    Attempt,
    Candidate,
    Coordinator,
    Element,
    Incarnation,
    Owner,
    Payload,
    Receiver,
    Request,
    Version,
    is_delta,
    is_version,
    new_word,
    old_word,
    sends_all,
)


def _version_word(s: State, v: Term, e: Term) -> Term:
    return s.word(s.version_candidate(v), e)


def _bound(s: State, r: Term, t: Term) -> Term:
    """A member of the record, the same process, not prepared again since."""
    return conj(s.bound(t, r, s.inc(r)), s.att(r) == t)


# ------------------------------------------------------------------------------------------------------- properties


def commit_exact(s: State, r: Receiver, e: Element) -> Term:
    """A version is what its receivers really store."""
    t = s.record_attempt()
    return implies(conj(s.booted(), _bound(s, r, t)), s.store(r, e) == _version_word(s, s.record_version(), e))


def commit_acked(s: State, v: Version, t: Attempt, r: Receiver, n: Incarnation) -> Term:
    """Nobody is bound to a version that it did not acknowledge."""
    return implies(conj(s.committed(v, t), s.bound(t, r, n)), s.ack(t, r, n))


def clean_exact(s: State, r: Receiver, e: Element) -> Term:
    """A receiver's claim is what later XOR records build on."""
    right = conj(is_version(s, s.tag_version(r)), s.store(r, e) == _version_word(s, s.tag_version(r), e))
    return implies(s.tag(r) == s.clean(), right)


def done_exact(s: State, r: Receiver, e: Element) -> Term:
    """An acknowledged set is complete before anybody knows whether it is committed."""
    return implies(s.tag(r) == s.done(), s.store(r, e) == s.word(s.tag_candidate(r), e))


def dirty_repairable(s: State, r: Receiver, e: Element) -> Term:
    """Outside the changed set nothing was touched: an overwrite retry repairs it."""
    old = _version_word(s, s.tag_version(r), e)
    same = old == s.word(s.tag_candidate(r), e)
    return implies(conj(s.tag(r) == s.dirty(), same), s.store(r, e) == old)


def baseline_bound(s: State, o: Owner, e: Element) -> Term:
    """A tracker that claims a version holds its words."""
    v = s.tracker_version(o)
    holds = implies(s.owner_of(e) == o, s.base(e) == _version_word(s, v, e))
    return implies(s.tracker(o) == s.at(), conj(disj(v == s.first_version(), is_version(s, v)), holds))


def baseline_follows(s: State, o: Owner) -> Term:
    """The previous version only while the transition of exactly that commit is open at this owner."""
    v, now = s.tracker_version(o), s.record_version()
    behind = conj(s.succ(v, now), s.frozen(o), s.frozen_candidate(o) == s.version_candidate(now))
    return implies(conj(s.survives(), s.tracker(o) == s.at()), disj(v == now, behind))


def payload_bound(s: State, t: Attempt, p: Payload, e: Element) -> Term:
    """Every payload ever sent, also by a zombie, is the difference that its attempt promised."""
    words = conj(
        s.record_new(t, e) == new_word(s, t, e),
        disj(sends_all(s, t), conj(s.record_old(t, e) == old_word(s, t, e), old_word(s, t, e) != new_word(s, t, e))),
    )
    return implies(s.carries(t, p, e), words)


def fence_safe(s: State, r: Receiver, t: Attempt, e: Element) -> Term:
    """No write of an attempt that was replaced can still land."""
    return implies(s.pending(r, t, e), conj(s.att(r) == t, neg(s.drained(r))))


def single_commit(s: State, v: Version, t: Attempt, u: Attempt) -> Term:
    """One chain: a version comes from one attempt, which carried its candidate and expected its predecessor."""
    first = conj(v == s.first_version(), s.mode(t) == s.restore())
    next_one = conj(is_delta(s, t), s.succ(s.base_version(t), v), s.candidate(t) == s.version_candidate(v))
    same = implies(s.committed(v, u), t == u)
    return implies(s.committed(v, t), conj(is_version(s, v), disj(first, next_one), same))


def gate_safe(s: State, r: Receiver, q: Request) -> Term:
    """A request never sees a mixture: with `clean_exact`, the words are those of one committed version."""
    return implies(disj(s.gate(r), s.serves(r, q)), s.tag(r) == s.clean())


def gate_fresh(s: State, r: Receiver, q: Request) -> Term:
    """Who is bound to a version does not go back to serving the one before."""
    bound = conj(s.booted(), _bound(s, r, s.record_attempt()), disj(s.gate(r), s.serves(r, q)))
    return implies(bound, conj(s.tag(r) == s.clean(), s.tag_version(r) == s.record_version()))


def gate_transition(s: State, r: Receiver, o: Owner) -> Term:
    """Synchronous refits: no service between prepare and the end of the transition."""
    t = s.att(r)
    over = implies(s.survives(), neg(conj(s.frozen(o), s.frozen_candidate(o) == s.candidate(t))))
    return implies(conj(s.sync(t), s.gate(r), is_delta(s, t), t != s.no_attempt()), conj(s.won(t), over))


def instance_serves_one(s: State, h: Receiver, q: Receiver, x: Request, e: Element) -> Term:
    """While the leading rank serves, every rank of its instance stores the same version."""
    serving = conj(s.leads(h), s.instance(h) == s.instance(q), disj(s.gate(h), s.serves(h, x)))
    return implies(serving, s.store(q, e) == s.store(h, e))


def takeover_decides(s: State, k: Coordinator) -> Term:
    """The active coordinator, when it waits for no commit, believes the record as it is."""
    active = conj(s.viewing(k), s.views_record(k), neg(s.committing(k)), s.coordinator_epoch(k) == s.epoch())
    return implies(active, conj(s.view_version(k) == s.record_version(), s.view_attempt(k) == s.record_attempt()))


def abort_safe(s: State, c: Candidate) -> Term:
    """The committed candidate is never one that owners may drop (D27)."""
    return implies(s.dead(c), c != s.version_candidate(s.record_version()))


PROPERTIES: tuple[Claim, ...] = (
    commit_exact,
    commit_acked,
    clean_exact,
    done_exact,
    dirty_repairable,
    baseline_bound,
    baseline_follows,
    payload_bound,
    fence_safe,
    single_commit,
    gate_safe,
    gate_fresh,
    gate_transition,
    instance_serves_one,
    takeover_decides,
    abort_safe,
)


# -------------------------------------------------------------------------------------------------- step properties


def monotone(s: State, after: State, v: Version) -> Term:
    """The record moves to its successor or stays; what was committed stays what it was."""
    moved = disj(after.record_version() == s.record_version(), s.succ(s.record_version(), after.record_version()))
    same = implies(is_version(s, v), after.version_candidate(v) == s.version_candidate(v))
    return conj(moved, same)


def fence_mono(s: State, after: State, r: Receiver) -> Term:
    """The installed attempt never goes back within an incarnation."""
    return implies(after.inc(r) == s.inc(r), s.attempt_le(s.att(r), after.att(r)))


def ack_kept(s: State, after: State, t: Attempt, r: Receiver, n: Incarnation) -> Term:
    """An acknowledgement is never withdrawn."""
    return implies(s.ack(t, r, n), after.ack(t, r, n))


def dead_kept(s: State, after: State, c: Candidate) -> Term:
    """A dead candidate stays dead."""
    return implies(s.dead(c), after.dead(c))


STEP_PROPERTIES: tuple[Claim, ...] = (monotone, fence_mono, ack_kept, dead_kept)
