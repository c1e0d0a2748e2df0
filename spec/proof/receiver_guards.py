"""Guards of receivers, and the values that their actions write where a mistake would be easy.

Each is one named condition; a mutant swaps exactly one of them. Names are those of endpoint_guards and alignment.

Paper: Section 6.3; Appendix B   Spec: guards of the receiver's actions   Proofs: dedup_once, fence_stops_old_writes,
version_alignment   Conditions: SC7
"""

from __future__ import annotations

from spec.proof.dsl import State, Term, conj, disj, guard, implies, ite, neg
from spec.proof.vocabulary import ATTEMPT, ELEMENT, OWNER, PAYLOAD, RECEIVER, REQUEST, before


@guard
def is_member(s: State, r: Term, t: Term) -> Term:
    """The call names this incarnation (D5)."""
    return conj(s.required(t, r), s.member_inc(t, r) == s.inc(r))


@guard
def is_newer(s: State, r: Term, t: Term) -> Term:
    """No attempt that is as new was installed or stopped."""
    return conj(before(s, s.att(r), t), before(s, s.fenced(r), t))


@guard
def is_drained(s: State, r: Term) -> Term:
    """Nothing of the installed attempt can take effect any more (D3)."""
    return s.drained(r)


@guard
def is_current(s: State, r: Term, t: Term) -> Term:
    """The fence: only the installed attempt acts."""
    return conj(s.att(r) == t, t != s.no_attempt())


@guard
def is_running(s: State, r: Term, t: Term) -> Term:
    """Installed and not stopped."""
    return conj(is_current(s, r, t), neg(s.stopped(r)))


@guard
def payload_is_current(s: State, r: Term, t: Term) -> Term:
    """The fence at the payload."""
    return is_running(s, r, t)


@guard
def end_is_current(s: State, r: Term, t: Term) -> Term:
    """The fence at the manifest."""
    return is_running(s, r, t)


@guard
def is_committed_done(s: State, r: Term, t: Term) -> Term:
    """A `done` tag whose attempt is that of the record which t expects is the committed version (D7)."""
    return conj(s.tag(r) == s.done(), s.base_attempt(t, s.tag_attempt(r)))


@guard
def is_mixture(s: State, r: Term, t: Term) -> Term:
    """Storage is a mixture of the attempt's version and of this very candidate (D8)."""
    started = disj(s.tag(r) == s.dirty(), s.tag(r) == s.done())
    return conj(started, s.tag_version(r) == s.base_version(t), s.tag_candidate(r) == s.candidate(t))


@guard
def holds_record(s: State, r: Term, t: Term) -> Term:
    """Storage is exactly the attempt's version."""
    return disj(conj(s.tag(r) == s.clean(), s.tag_version(r) == s.base_version(t)), is_committed_done(s, r, t))


@guard
def is_eligible(s: State, r: Term, t: Term) -> Term:
    """The receiver's own look at its tag, which decides (D6, SC7)."""
    any_storage = disj(s.mode(t) == s.dense(), s.mode(t) == s.restore())
    return disj(any_storage, holds_record(s, r, t), conj(s.mode(t) == s.overwrite(), is_mixture(s, r, t)))


@guard
def is_proved(s: State, r: Term, t: Term) -> Term:
    """A restore without payloads: untouched storage was loaded from the checkpoint that the baseline still equals."""
    return conj(s.mode(t) == s.restore(), s.base_version(t) == s.first_version(), s.loaded(r))


@guard
def closes_gate(s: State, t: Term) -> Term:
    """Prepare closes the gate: always for a restore, and for a synchronous attempt that brings payloads (D20)."""
    return disj(s.mode(t) == s.restore(), conj(s.sync(t), s.mode(t) != s.finish()))


@guard
def not_duplicate(s: State, r: Term, p: Term) -> Term:
    """Each payload is accepted once per attempt (D23)."""
    return neg(s.seen(r, p))


@guard
def is_quiet(s: State, r: Term) -> Term:
    """Gate closed and no request in flight."""
    return conj(neg(s.gate(r)), s.every(REQUEST, lambda q: neg(s.serves(r, q))))


@guard
def may_write(s: State, r: Term) -> Term:
    """Writes may start: opened and quiet."""
    return conj(s.open_apply(r), is_quiet(s, r))


@guard
def flush_permitted(s: State, r: Term) -> Term:
    """The acknowledgement waits for the same, even when nothing was to be applied (D30)."""
    return conj(s.open_apply(r), is_quiet(s, r))


@guard
def is_staged(s: State, r: Term) -> Term:
    """Every manifest is in, and every payload that they list (D24)."""
    listed = s.every(PAYLOAD, lambda p: implies(s.listed(s.att(r), p), s.seen(r, p)))
    return conj(all_manifests(s, r), listed)


@guard
def all_manifests(s: State, r: Term) -> Term:
    """Every owner's manifest is in."""
    return s.every(OWNER, lambda o: s.sees_end(r, o))


@guard
def nothing_pending(s: State, r: Term) -> Term:
    """Every accepted record was written."""
    return s.every((ATTEMPT, ELEMENT), lambda t, e: neg(s.pending(r, t, e)))


@guard
def not_stopped(s: State, r: Term) -> Term:
    """A stopped attempt is never acknowledged (D28)."""
    return neg(s.stopped(r))


@guard
def may_flush(s: State, r: Term) -> Term:
    """All staged and applied, not stopped, opened and quiet."""
    kind = conj(s.att(r) != s.no_attempt(), s.mode(s.att(r)) != s.finish(), neg(s.acked(r)))
    return conj(kind, not_stopped(s, r), flush_permitted(s, r), is_staged(s, r), nothing_pending(s, r))


@guard
def may_admit(s: State, r: Term) -> Term:
    """A request starts at the open gate of a leading rank only."""
    return conj(s.gate(r), s.leads(r))


@guard
def open_is_current(s: State, r: Term, t: Term) -> Term:
    """The fence at the gate."""
    return is_current(s, r, t)


@guard
def all_quiet(s: State, t: Term) -> Term:
    """Every required receiver said that it is quiet: no rank writes while another one of its instance serves."""
    return s.every(RECEIVER, lambda r: implies(s.required(t, r), s.reported_quiet(t, r)))


@guard
def open_is_due(s: State, t: Term) -> Term:
    """Gate calls are sent under an attempt that is complete."""
    return s.completed(t)


@guard
def transition_ended(s: State, v: Term) -> Term:
    """Gates open after every owner left the transition to the version (D20)."""
    return s.every(OWNER, lambda o: s.thawed(v, o))


@guard
def may_open_gate(s: State, r: Term, t: Term, v: Term, u: Term) -> Term:
    """Only the current attempt opens the gate, and only over committed storage."""
    over = disj(s.mode(t) == s.finish(), s.acked(r))
    done = conj(s.tag(r) == s.done(), s.tag_attempt(r) == u)
    storage = disj(conj(s.tag(r) == s.clean(), s.tag_version(r) == v), done)
    return conj(open_is_current(s, r, t), over, storage)


@guard
def may_finish_restore(s: State, r: Term, t: Term) -> Term:
    """The whole baseline was applied and flushed under this restore, and nothing replaced or stopped it."""
    return conj(is_running(s, r, t), s.mode(t) == s.restore(), s.acked(r))


@guard
def is_confirmed(s: State, t: Term) -> Term:
    """The record was read again after the restore (D19)."""
    return s.confirmed(t)


@guard
def becomes_clean(s: State, r: Term, t: Term) -> Term:
    """At install, a tag is raised only by the record (D7)."""
    return is_committed_done(s, r, t)


@guard
def start_tag(s: State) -> Term:
    """A new process claims nothing."""
    return s.none()


@guard
def dirty_tag(s: State, r: Term) -> Term:
    """The tag before the first write (D25); storage of unknown content never becomes dirty (D13)."""
    t = s.att(r)
    whole = disj(s.mode(t) == s.dense(), s.mode(t) == s.restore())
    starts = disj(conj(s.tag(r) == s.clean(), s.tag_version(r) == s.base_version(t)), is_mixture(s, r, t))
    return ite(conj(neg(whole), starts), s.dirty(), s.none())


@guard
def seen_at_install(s: State, r: Term, p: Term) -> Term:
    """Deduplication starts afresh with every attempt."""
    return False


@guard
def stopped_by_stop(s: State, r: Term) -> Term:
    """A stop is sticky (D28)."""
    return True


@guard
def keeps_pending(s: State, r: Term, t: Term, e: Term) -> Term:
    """A drain drops the queue and waits for issued writes: none is left (A3)."""
    return False


@guard
def gate_after_flush(s: State, r: Term) -> Term:
    """An acknowledgement opens no gate."""
    return s.gate(r)


@guard
def lowers_tag(s: State, r: Term) -> Term:
    """The tag is lowered before the first write, not after (D25)."""
    return True


@guard
def sent_as_xor(s: State, t: Term, e: Term) -> Term:
    """The record is a difference: only in XOR attempts, where the encoding rule allows it."""
    return conj(s.mode(t) == s.by_xor(), s.coded_xor(t, e))


def xor_result(s: State, r: Term, t: Term, e: Term, w: Term) -> Term:
    """XOR of the record to the stored word: old to new and back; anything on other words."""
    stored, old, new = s.store(r, e), s.record_old(t, e), s.record_new(t, e)
    return conj(implies(stored == old, w == new), implies(stored == new, w == old))
