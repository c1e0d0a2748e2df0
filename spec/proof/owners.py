"""Actions of the trainer and of owners: steps, streams, the baseline, crashes.

Owners are told one by one: one may be in a transition that has ended at another. The optimizer step is collective: it
happens when no owner holds a candidate or copies weights. A baseline is copied word by word; a crash leaves it as
trash. Not handled: how records are formed (lemmas L1 to L8); publishing order inside a stream.

Paper: Section 6.3; Figure B.3; Algorithms B.1, B.2   Spec: StartOwner, BeginTransition, OwnerPrepare, EmitPayload,
EndStream, StopOwner, FailOwner, UpdateBaseline, RebuildBaseline, CopyItem, BaselineFilled, LoseBaseline, EndTransition,
DropCandidate   Proofs: baseline_follows_commit   Conditions: SC3, SC4
"""

from __future__ import annotations

from spec.proof.dsl import Action, Flag, Post, State, Term, conj, disj, guard, implies, ite, neg, put, rows
from spec.proof.vocabulary import (
    ATTEMPT,
    ELEMENT,
    OWNER,
    Attempt,
    Candidate,
    Element,
    Owner,
    Payload,
    Run,
    Seed,
    Version,
    before,
    is_version,
)


@guard
def holds_version(s: State, o: Term, v: Term) -> Term:
    """The baseline is exactly this version (SC3)."""
    return conj(s.tracker(o) == s.at(), s.tracker_version(o) == v)


@guard
def restore_base(s: State, o: Term, v: Term) -> Term:
    """What a restore needs of the baseline that it sends (D19)."""
    return holds_version(s, o, v)


@guard
def delta_base(s: State, o: Term, v: Term) -> Term:
    """What a comparison needs of the baseline that it compares with (SC3)."""
    return holds_version(s, o, v)


@guard
def has_followed(s: State, o: Term, v: Term) -> Term:
    """What the end of a transition needs of the baseline."""
    return holds_version(s, o, v)


@guard
def is_frozen(s: State, o: Term, c: Term) -> Term:
    """It is the owner's frozen candidate (SC4)."""
    return conj(s.frozen(o), s.frozen_candidate(o) == c)


@guard
def update_matches(s: State, o: Term, c: Term) -> Term:
    """A late update names another candidate and is refused (D11)."""
    return is_frozen(s, o, c)


@guard
def is_owner_member(s: State, o: Term, t: Term) -> Term:
    """The call names this incarnation (D5, D31)."""
    return s.run(o) == s.member_run(t, o)


@guard
def owner_is_newer(s: State, o: Term, t: Term) -> Term:
    """No attempt that is as new was installed or stopped."""
    return s.every(ATTEMPT, lambda u: implies(disj(s.owner_knew(o, u), s.owner_fenced(o, u)), before(s, u, t)))


@guard
def owner_is_drained(s: State, o: Term) -> Term:
    """No stream of an older attempt runs."""
    return conj(neg(s.ready(o)), neg(s.streaming(o)))


@guard
def may_stream(s: State, o: Term, t: Term) -> Term:
    """Base binding: records are formed between the committed baseline and the attempt's own candidate."""
    c, v = s.candidate(t), s.base_version(t)
    dense = conj(s.mode(t) == s.dense(), is_frozen(s, o, c), s.tracker(o) != s.updating())
    whole = conj(s.mode(t) == s.restore(), restore_base(s, o, v))
    changed = conj(disj(s.mode(t) == s.by_xor(), s.mode(t) == s.overwrite()), is_frozen(s, o, c), delta_base(s, o, v))
    return disj(s.mode(t) == s.finish(), dense, whole, changed)


@guard
def streams_undisturbed(s: State, o: Term) -> Term:
    """No baseline moves under a stream that reads it; one that failed looks before each payload (`may_stream`)."""
    return disj(neg(s.streaming(o)), s.owner_failed(o))


@guard
def moves_forward(s: State, o: Term, v: Term) -> Term:
    """A baseline is never taken back."""
    older = conj(s.version_le(s.tracker_version(o), v), s.tracker_version(o) != v)
    return disj(s.tracker(o) == s.lost(), older)


@guard
def is_committed_resident(s: State, o: Term, v: Term) -> Term:
    """The live weights are the committed version, and no transition is open here (D12)."""
    return conj(neg(s.frozen(o)), s.is_resident(o), s.resident(o) == s.version_candidate(v))


@guard
def copy_source(s: State, o: Term) -> Term:
    """What a copy into the baseline reads: the frozen candidate, or the live weights."""
    return ite(s.frozen(o), s.frozen_candidate(o), s.resident(o))


@guard
def all_copied(s: State, o: Term) -> Term:
    """Every word of the owner was copied."""
    return s.every(ELEMENT, lambda e: implies(s.owner_of(e) == o, s.copied(e)))


@guard
def all_emitted(s: State, o: Term, t: Term) -> Term:
    """Everything that has a record is published (D24)."""
    return s.every(
        ELEMENT,
        lambda e: implies(conj(s.owner_of(e) == o, has_record(s, o, t, e)), s.sent(t, s.packed(t, s.run(o), e))),
    )


@guard
def is_dead(s: State, c: Term) -> Term:
    """The control plane said that the candidate is dead (D27)."""
    return s.dead(c)


@guard
def loses_baseline(s: State) -> Term:
    """A crash leaves no claim on the baseline (D12)."""
    return s.lost()


@guard
def may_freeze(s: State, o: Term) -> Term:
    """A transition begins after the last one ended, and when nothing copies from the weights."""
    return conj(neg(s.frozen(o)), neg(s.filling(o)))


@guard
def everybody_thawed(s: State) -> Term:
    """The optimizer steps only when no transition is open and nothing is copied from live weights (SC4)."""
    return s.every(OWNER, lambda o: conj(neg(s.frozen(o)), s.began(o), neg(s.filling(o))))


def has_record(s: State, o: Term, t: Term, e: Term) -> Term:
    """The owner sends the element: all of them in dense attempts and restores, otherwise those that changed."""
    whole = disj(s.mode(t) == s.dense(), s.mode(t) == s.restore())
    return disj(whole, s.base(e) != s.word(s.frozen_candidate(o), e))


def start_owner(s: State, o: Owner, m: Run, j: Seed, keeps: Flag) -> tuple[Term, Post]:
    """It crashed and starts again: the baseline is trash; the frozen candidate comes back, or does not (A7)."""
    fresh = conj(neg(s.run_used(o, m)), implies(s.survives(), keeps))
    return fresh, {
        "run": put(o, to=m),
        "run_used": put(o, m, to=True),
        "tracker": put(o, to=loses_baseline(s)),
        "base": rows(to=lambda e: ite(s.owner_of(e) == o, s.trash(j, e), s.base(e))),
        "filling": put(o, to=False),
        "frozen": put(o, to=conj(s.frozen(o), keeps)),
        "began": put(o, to=conj(s.began(o), keeps)),
        "is_resident": put(o, to=False),
        "owner_att": rows(o, to=lambda t: False),
        "owner_knew": rows(o, to=lambda t: False),
        "owner_fenced": rows(o, to=lambda t: False),
        "ready": put(o, to=False),
        "streaming": put(o, to=False),
        "owner_failed": put(o, to=False),
    }


def begin_transition(s: State, o: Owner, c: Candidate) -> tuple[Term, Post]:
    """It offers a candidate: a new one, which all ranks made together, or the one that others offered already."""
    joins = conj(c == s.step(), neg(s.began(o)))
    steps = conj(neg(s.stepped(c)), everybody_thawed(s))
    return conj(may_freeze(s, o), disj(joins, steps)), {
        "step": put(to=c),
        "stepped": put(c, to=True),
        "frozen": put(o, to=True),
        "frozen_candidate": put(o, to=c),
        "began": rows(to=lambda q: disj(q == o, conj(s.began(q), s.stepped(c)))),
        "is_resident": rows(to=lambda q: conj(s.is_resident(q), s.stepped(c), q != o)),
    }


def owner_prepare(s: State, o: Owner, t: Attempt) -> tuple[Term, Post]:
    """It installs an attempt."""
    called = conj(s.started(t), is_owner_member(s, o, t), owner_is_newer(s, o, t))
    return conj(called, owner_is_drained(s, o), may_stream(s, o, t)), {
        "owner_att": rows(o, to=lambda u: u == t),
        "owner_knew": put(o, t, to=True),
        "ready": put(o, to=True),
        "owner_failed": put(o, to=False),
    }


def start_stream(s: State, o: Owner, t: Attempt) -> tuple[Term, Post]:
    """The stream call arrives; baseline and candidate are looked at again."""
    return conj(s.ready(o), s.owner_att(o, t), s.mode(t) != s.finish(), may_stream(s, o, t)), {
        "ready": put(o, to=False),
        "streaming": put(o, to=True),
    }


def emit_payload(s: State, o: Owner, t: Attempt, p: Payload) -> tuple[Term, Post]:
    """It publishes one payload, with the records of all words that it packs into it."""
    streams = conj(s.streaming(o), s.owner_att(o, t), may_stream(s, o, t), s.owns(p, o), neg(s.sent(t, p)))

    def packs(e: Term) -> Term:
        return conj(s.owner_of(e) == o, s.packed(t, s.run(o), e) == p, has_record(s, o, t, e))

    def target(e: Term) -> Term:
        return ite(s.mode(t) == s.restore(), s.base(e), s.word(s.frozen_candidate(o), e))

    return streams, {
        "sent": put(t, p, to=True),
        "carries": rows(t, p, to=packs),
        "record_old": rows(t, to=lambda e: ite(packs(e), s.base(e), s.record_old(t, e))),
        "record_new": rows(t, to=lambda e: ite(packs(e), target(e), s.record_new(t, e))),
    }


def end_stream(s: State, o: Owner, t: Attempt) -> tuple[Term, Post]:
    """It publishes the manifest of what it sent, last, even when that is nothing."""
    streams = conj(s.streaming(o), s.owner_att(o, t), may_stream(s, o, t), neg(s.owner_failed(o)))
    return conj(streams, all_emitted(s, o, t)), {
        "ended": put(t, o, to=True),
        "listed": rows(t, to=lambda p: disj(s.listed(t, p), conj(s.owns(p, o), s.sent(t, p)))),
        "streaming": put(o, to=False),
    }


def stop_owner(s: State, o: Owner, t: Attempt) -> tuple[Term, Post]:
    """Nothing of the attempt can be published any more; or a late prepare of it is kept out."""
    current, later = conj(s.owner_att(o, t), neg(owner_is_drained(s, o))), owner_is_newer(s, o, t)
    return disj(current, later), {
        "ready": put(o, to=conj(s.ready(o), later)),
        "streaming": put(o, to=conj(s.streaming(o), later)),
        "owner_fenced": put(o, t, to=disj(later, s.owner_fenced(o, t))),
    }


def fail_owner(s: State, o: Owner) -> tuple[Term, Post]:
    """The stream failed: no manifest, though a payload may still appear until it is stopped."""
    return neg(owner_is_drained(s, o)), {"owner_failed": put(o, to=True)}


def update_baseline(s: State, o: Owner, v: Version) -> tuple[Term, Post]:
    """The copy of the committed candidate begins."""
    free = conj(streams_undisturbed(s, o), neg(s.filling(o)), moves_forward(s, o, v))
    called = conj(s.rolled(v), neg(holds_version(s, o, v)))
    return conj(called, update_matches(s, o, s.version_candidate(v)), free), {
        "tracker": put(o, to=s.updating()),
        "filling": put(o, to=True),
        "fill_version": put(o, to=v),
        "copied": rows(to=lambda e: conj(s.copied(e), s.owner_of(e) != o)),
    }


def rebuild_baseline(s: State, o: Owner, v: Version) -> tuple[Term, Post]:
    """A lost baseline is refilled from live weights that are the committed version."""
    lost = conj(s.tracker(o) == s.lost(), neg(s.filling(o)))
    return conj(is_version(s, v), lost, is_committed_resident(s, o, v)), {
        "filling": put(o, to=True),
        "fill_version": put(o, to=v),
        "copied": rows(to=lambda e: conj(s.copied(e), s.owner_of(e) != o)),
    }


def copy_item(s: State, o: Owner, e: Element) -> tuple[Term, Post]:
    """One word is copied; again does no harm."""
    return conj(s.filling(o), s.owner_of(e) == o), {
        "base": put(e, to=s.word(copy_source(s, o), e)),
        "copied": put(e, to=True),
    }


def baseline_filled(s: State, o: Owner) -> tuple[Term, Post]:
    """The baseline is the new version."""
    return conj(s.filling(o), all_copied(s, o)), {
        "tracker": put(o, to=s.at()),
        "tracker_version": put(o, to=s.fill_version(o)),
        "filling": put(o, to=False),
    }


def lose_baseline(s: State, o: Owner, j: Seed) -> tuple[Term, Post]:
    """A copy broke off, or memory was lost; the process lives, and so does a stream that needs no baseline."""
    return disj(s.tracker(o) != s.lost(), s.filling(o)), {
        "tracker": put(o, to=loses_baseline(s)),
        "base": rows(to=lambda e: ite(s.owner_of(e) == o, s.trash(j, e), s.base(e))),
        "filling": put(o, to=False),
    }


def end_transition(s: State, o: Owner, v: Version) -> tuple[Term, Post]:
    """The candidate is thawed: training goes on from it."""
    called = conj(is_version(s, v), is_frozen(s, o, s.version_candidate(v)))
    return conj(called, has_followed(s, o, v)), {
        "frozen": put(o, to=False),
        "is_resident": put(o, to=True),
        "resident": put(o, to=s.frozen_candidate(o)),
    }


def drop_candidate(s: State, o: Owner) -> tuple[Term, Post]:
    """A dead candidate is given up."""
    idle = conj(neg(s.filling(o)), s.tracker(o) != s.updating(), neg(s.streaming(o)))
    return conj(s.frozen(o), is_dead(s, s.frozen_candidate(o)), idle), {
        "frozen": put(o, to=False),
        "is_resident": put(o, to=False),
    }


def reload_weights(s: State, o: Owner) -> tuple[Term, Post]:
    """After a drop or a restart the committed version is loaded again."""
    return conj(neg(s.frozen(o)), s.began(o), neg(s.filling(o))), {
        "is_resident": put(o, to=True),
        "resident": put(o, to=s.version_candidate(s.record_version())),
    }


def report_thawed(s: State, o: Owner, v: Version) -> tuple[Term, Post]:
    """The owner says that it is not in the transition to this version any more."""
    thawed = neg(conj(s.frozen(o), s.frozen_candidate(o) == s.version_candidate(v)))
    return conj(is_version(s, v), thawed), {"thawed": put(v, o, to=True)}


ACTIONS: tuple[Action, ...] = (
    start_owner,
    begin_transition,
    owner_prepare,
    emit_payload,
    end_stream,
    stop_owner,
    fail_owner,
    update_baseline,
    rebuild_baseline,
    copy_item,
    baseline_filled,
    lose_baseline,
    end_transition,
    drop_candidate,
)
UNTRACED: tuple[Action, ...] = (start_stream, reload_weights, report_thawed)
