"""Actions of receivers: prepare, intake, application word by word, flush, stop, gate, restore, crash.

A payload is accepted as a whole and written word by word in any order, so a stop or a crash may come between any two
words. A write that was issued keeps the id of its attempt until it takes effect: whether an old one can still land is
what the fence is about. XOR leads the old word to the new one and back; on any other word it gives any word.
Not handled: loaders and conditions (LC1 to LC12); digests; an engine that sleeps.

Paper: Section 6.3; Section 7 (gate); Algorithm B.1   Spec: StartReceiver, EndpointPrepare, CloseGate, OpenApply,
Accept, SeeManifest, StartApply, ApplyItem, Flush, FailReceiver, StopAndWait, OpenGate, AdmitRequest, FinishRequest,
StartRestore, FinishRestore   Proofs: dedup_once, version_alignment, fence_stops_old_writes, restore_exact,
gate_serves_one_version
"""

from __future__ import annotations

from spec.proof.dsl import Action, Change, Flag, Post, State, Term, conj, disj, implies, ite, neg, put, rows
from spec.proof.receiver_guards import (
    all_quiet,
    becomes_clean,
    closes_gate,
    dirty_tag,
    end_is_current,
    gate_after_flush,
    is_confirmed,
    is_current,
    is_drained,
    is_eligible,
    is_member,
    is_newer,
    is_proved,
    is_quiet,
    is_running,
    keeps_pending,
    lowers_tag,
    may_admit,
    may_finish_restore,
    may_flush,
    may_open_gate,
    may_write,
    not_duplicate,
    open_is_due,
    payload_is_current,
    seen_at_install,
    sent_as_xor,
    start_tag,
    stopped_by_stop,
    transition_ended,
    xor_result,
)
from spec.proof.vocabulary import (
    RECEIVER,
    Attempt,
    Element,
    Incarnation,
    Instance,
    Owner,
    Payload,
    Receiver,
    Request,
    Seed,
    Version,
    Word,
)


def start_receiver(s: State, i: Instance, n: Incarnation, j: Seed, known: Flag) -> tuple[Term, Post]:
    """New processes: the ranks of an instance live and die together. Nothing is known of their storage, unless they
    loaded the first checkpoint.
    """

    def set_to(name: str, value: Term) -> Change:
        return rows(to=lambda r: ite(s.instance(r) == i, value, s.lookup(name)(r)))

    def cleared(name: str) -> Change:
        return rows(to=lambda r, *key: conj(s.instance(r) != i, s.lookup(name)(r, *key)))

    def stored(r: Term, e: Term) -> Term:
        return ite(s.instance(r) == i, ite(known, s.word(s.first_candidate(), e), s.trash(j, e)), s.store(r, e))

    fresh = s.every(RECEIVER, lambda r: implies(s.instance(r) == i, neg(s.inc_used(r, n))))
    return fresh, {
        "inc": set_to("inc", n),
        "inc_used": rows(to=lambda r, m: disj(s.inc_used(r, m), conj(s.instance(r) == i, m == n))),
        "att": set_to("att", s.no_attempt()),
        "fenced": set_to("fenced", s.no_attempt()),
        "stopped": set_to("stopped", True),
        "drained": set_to("drained", True),
        "tag": set_to("tag", start_tag(s)),
        "loaded": set_to("loaded", known),
        "store": rows(to=stored),
        **{name: cleared(name) for name in ("gate", "serves", "seen", "sees_end", "pending")},
        **{name: cleared(name) for name in ("open_apply", "permitted", "acked")},
    }


def _is_asked(s: State, r: Term, t: Term) -> Term:
    return conj(s.started(t), is_member(s, r, t), is_newer(s, r, t), is_drained(s, r))


def _installed(s: State, r: Term, t: Term, proved: Term) -> Post:
    committed = becomes_clean(s, r, t)
    return {
        "att": put(r, to=t),
        "tag": put(r, to=ite(committed, s.clean(), s.tag(r))),
        "tag_version": put(r, to=ite(committed, s.base_version(t), s.tag_version(r))),
        "gate": put(r, to=conj(s.gate(r), neg(closes_gate(s, t)))),
        "seen": rows(r, to=lambda p: seen_at_install(s, r, p)),
        "sees_end": rows(r, to=lambda o: False),
        "open_apply": put(r, to=False),
        "permitted": put(r, to=False),
        "acked": put(r, to=proved),
        "stopped": put(r, to=False),
        "drained": put(r, to=disj(s.mode(t) == s.finish(), proved)),
    }


def endpoint_prepare(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """The attempt is installed; everything older is drained."""
    fits = conj(s.mode(t) != s.restore(), is_eligible(s, r, t))
    return conj(_is_asked(s, r, t), fits), _installed(s, r, t, False)


def start_restore(s: State, r: Receiver, t: Attempt, proved: Flag) -> tuple[Term, Post]:
    """A restore is installed; `proved`: storage is known to be the baseline, and nothing is sent."""
    fits = conj(s.mode(t) == s.restore(), implies(proved, is_proved(s, r, t)))
    acknowledged = disj(s.ack(t, r, s.inc(r)), proved)
    return conj(_is_asked(s, r, t), fits), {**_installed(s, r, t, proved), "ack": put(t, r, s.inc(r), to=acknowledged)}


def begin_drain(s: State, r: Receiver) -> tuple[Term, Post]:
    """A stop or a newer prepare arrived: intake is off; issued writes may still take effect."""
    return s.att(r) != s.no_attempt(), {"stopped": put(r, to=True)}


def stop_and_wait(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """No write of the attempt can take effect any more; or a late prepare of it is kept out."""
    current, later = conj(s.att(r) == t, s.stopped(r), t != s.no_attempt()), is_newer(s, r, t)
    return disj(current, later), {
        "stopped": put(r, to=ite(current, stopped_by_stop(s, r), s.stopped(r))),
        "drained": put(r, to=disj(current, s.drained(r))),
        "permitted": put(r, to=conj(s.permitted(r), neg(current))),
        "pending": rows(r, to=lambda u, e: conj(s.pending(r, u, e), disj(neg(current), keeps_pending(s, r, u, e)))),
        "fenced": put(r, to=ite(current, s.fenced(r), t)),
    }


def fail_receiver(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """A loader condition, a bad payload, a post-apply check: the attempt failed here."""
    return conj(is_running(s, r, t), neg(s.acked(r)), s.mode(t) != s.finish()), {"stopped": put(r, to=True)}


def close_gate(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """No request is admitted any more."""
    return is_running(s, r, t), {"gate": put(r, to=False)}


def open_apply(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """Writes of the attempt are allowed once it is quiet."""
    return conj(is_running(s, r, t), s.mode(t) != s.finish(), all_quiet(s, t)), {"open_apply": put(r, to=True)}


def accept(s: State, r: Receiver, t: Attempt, p: Payload) -> tuple[Term, Post]:
    """A payload counts as seen, and its records are to be written."""
    fits = conj(payload_is_current(s, r, t), neg(s.acked(r)), not_duplicate(s, r, p))
    return conj(s.sent(t, p), fits), {
        "seen": put(r, p, to=True),
        "pending": rows(r, t, to=lambda e: disj(s.pending(r, t, e), s.carries(t, p, e))),
    }


def see_manifest(s: State, r: Receiver, t: Attempt, o: Owner) -> tuple[Term, Post]:
    """The expected set of one owner is known."""
    return conj(s.ended(t, o), end_is_current(s, r, t), neg(s.acked(r))), {"sees_end": put(r, o, to=True)}


def start_apply(s: State, r: Receiver) -> tuple[Term, Post]:
    """The apply thread is let go; storage is marked before it writes."""
    t = s.att(r)
    lowered = conj(lowers_tag(s, r))
    return conj(is_running(s, r, t), neg(s.acked(r)), may_write(s, r)), {
        "permitted": put(r, to=True),
        "tag": put(r, to=ite(lowered, dirty_tag(s, r), s.tag(r))),
        "tag_candidate": put(r, to=ite(lowered, s.candidate(t), s.tag_candidate(r))),
        "loaded": put(r, to=False),
    }


def apply_item(s: State, r: Receiver, t: Attempt, e: Element, w: Word) -> tuple[Term, Post]:
    """One word is written."""
    written = ite(sent_as_xor(s, t, e), xor_result(s, r, t, e, w), w == s.record_new(t, e))
    return conj(s.permitted(r), s.pending(r, t, e), written), {
        "store": put(r, e, to=w),
        "pending": put(r, t, e, to=False),
    }


def flush(s: State, r: Receiver) -> tuple[Term, Post]:
    """The device is synchronised; the attempt is acknowledged."""
    t = s.att(r)
    restores = s.mode(t) == s.restore()
    return may_flush(s, r), {
        "acked": put(r, to=True),
        "permitted": put(r, to=False),
        "gate": put(r, to=gate_after_flush(s, r)),
        "tag": put(r, to=ite(restores, s.tag(r), s.done())),
        "tag_version": put(r, to=ite(restores, s.tag_version(r), s.base_version(t))),
        "tag_candidate": put(r, to=ite(restores, s.tag_candidate(r), s.candidate(t))),
        "tag_attempt": put(r, to=ite(restores, s.tag_attempt(r), t)),
        "ack": put(t, r, s.inc(r), to=True),
    }


def open_gate(s: State, r: Receiver, t: Attempt, v: Version, u: Attempt) -> tuple[Term, Post]:
    """Requests are admitted, over version v, which attempt u committed."""
    called = conj(s.committed(v, u), transition_ended(s, v), open_is_due(s, t))
    return conj(called, may_open_gate(s, r, t, v, u)), {
        "gate": put(r, to=True),
        "opened": put(r, to=t),
        "tag": put(r, to=s.clean()),
        "tag_version": put(r, to=v),
    }


def admit_request(s: State, r: Receiver, q: Request) -> tuple[Term, Post]:
    """A request runs."""
    return may_admit(s, r), {"serves": put(r, q, to=True)}


def finish_request(s: State, r: Receiver, q: Request) -> tuple[Term, Post]:
    """It ended."""
    return s.serves(r, q), {"serves": put(r, q, to=False)}


def finish_restore(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """Restored storage is the committed version."""
    return conj(is_confirmed(s, t), may_finish_restore(s, r, t)), {
        "tag": put(r, to=s.clean()),
        "tag_version": put(r, to=s.base_version(t)),
    }


def refuse_prepare(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """A prepare does not fit; the coordinator learns it."""
    return conj(s.started(t), disj(neg(is_member(s, r, t)), neg(is_eligible(s, r, t)))), {}


def ignore_duplicate(s: State, r: Receiver, t: Attempt, p: Payload) -> tuple[Term, Post]:
    """A payload was seen before."""
    return conj(s.sent(t, p), is_current(s, r, t), neg(not_duplicate(s, r, p))), {}


def ignore_stale(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """A call, payload or manifest of a replaced or stopped attempt changes nothing."""
    return disj(neg(is_running(s, r, t)), s.acked(r)), {}


def report_prepared(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """It says that it installed the attempt."""
    return is_running(s, r, t), {"reported": put(t, r, to=True)}


def report_quiet(s: State, r: Receiver, t: Attempt) -> tuple[Term, Post]:
    """It says that its gate is closed and no request in flight, under the attempt."""
    return conj(is_running(s, r, t), is_quiet(s, r)), {"reported_quiet": put(t, r, to=True)}


ACTIONS: tuple[Action, ...] = (
    start_receiver,
    endpoint_prepare,
    refuse_prepare,
    close_gate,
    open_apply,
    accept,
    see_manifest,
    ignore_duplicate,
    ignore_stale,
    start_apply,
    apply_item,
    flush,
    fail_receiver,
    stop_and_wait,
    open_gate,
    admit_request,
    finish_request,
    start_restore,
    finish_restore,
)
UNTRACED: tuple[Action, ...] = (begin_drain, report_prepared, report_quiet)
