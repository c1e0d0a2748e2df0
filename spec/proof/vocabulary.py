"""The state of the whole system as a table: sorts, symbols, the axioms of what never changes, and the first state.

Sorts stand in one order, and every function goes from a higher sort to a lower one; so no term can be nested without
end and each query has a finite answer (a test checks the order). Things are without number: any count of receivers,
words, payloads, owners, attempts, versions, candidates, epochs, incarnations and coordinators.
What an attempt carries from the beginning is a rigid symbol: who is required, in which incarnations, how its owners
would pack their words. Nothing is known about these choices, so every choice is covered.

Paper: Section 3; Appendix B   Spec: the variables of DeltaRefit   Proofs: PROOFS.md section 1
"""

from __future__ import annotations

from typing import Annotated, Any

from spec.proof.dsl import BOOL, Sort, State, Symbol, Term, conj, disj, implies, neg

COORDINATOR, RECEIVER, ATTEMPT, ELEMENT = Sort("Coordinator"), Sort("Receiver"), Sort("Attempt"), Sort("Element")
PAYLOAD, OWNER, RUN, INCARNATION = Sort("Payload"), Sort("Owner"), Sort("Run"), Sort("Incarnation")
EPOCH, VERSION, CANDIDATE, WORD = Sort("Epoch"), Sort("Version"), Sort("Candidate"), Sort("Word")
REQUEST, SEED, MODE, KIND, INSTANCE = Sort("Request"), Sort("Seed"), Sort("Mode"), Sort("Kind"), Sort("Instance")

SORT_ORDER: tuple[Sort, ...] = (COORDINATOR, RECEIVER, ATTEMPT, ELEMENT, OWNER, RUN, PAYLOAD, INCARNATION, EPOCH)
SORT_ORDER = (*SORT_ORDER, VERSION, CANDIDATE, SEED, WORD, REQUEST, MODE, KIND, INSTANCE)
"""Functions go from left to right."""

Coordinator = Annotated[Any, COORDINATOR]
Receiver = Annotated[Any, RECEIVER]
Attempt = Annotated[Any, ATTEMPT]
Element = Annotated[Any, ELEMENT]
Payload = Annotated[Any, PAYLOAD]
Owner = Annotated[Any, OWNER]
Run = Annotated[Any, RUN]
Incarnation = Annotated[Any, INCARNATION]
Epoch = Annotated[Any, EPOCH]
Version = Annotated[Any, VERSION]
Candidate = Annotated[Any, CANDIDATE]
Word = Annotated[Any, WORD]
Request = Annotated[Any, REQUEST]
Seed = Annotated[Any, SEED]
Mode = Annotated[Any, MODE]
Kind = Annotated[Any, KIND]
Instance = Annotated[Any, INSTANCE]

MODES = ("by_xor", "overwrite", "dense", "finish", "restore")
KINDS = ("none", "clean", "dirty", "done", "at", "updating", "lost")

_RIGID: list[tuple[str, tuple[Sort, ...], Sort, str]] = [
    ("attempt_le", (ATTEMPT, ATTEMPT), BOOL, "order of attempt ids"),
    ("version_le", (VERSION, VERSION), BOOL, "order of versions"),
    ("epoch_le", (EPOCH, EPOCH), BOOL, "order of epochs"),
    ("succ", (VERSION, VERSION), BOOL, "the second is the next version after the first"),
    ("no_attempt", (), ATTEMPT, "id 0"),
    ("first_version", (), VERSION, "version 0"),
    ("first_candidate", (), CANDIDATE, "the weights that training started from"),
    ("word", (CANDIDATE, ELEMENT), WORD, "the words of a candidate (A7)"),
    ("trash", (SEED, ELEMENT), WORD, "what memory holds after a crash: anything"),
    ("instance", (RECEIVER,), INSTANCE, "the engine instance of which the receiver is a rank"),
    ("leads", (RECEIVER,), BOOL, "the rank that admits the requests of its instance"),
    ("owner_of", (ELEMENT,), OWNER, "the owner that compares an element (L0)"),
    ("owns", (PAYLOAD, OWNER), BOOL, "payload names are those of one owner (D23)"),
    ("required", (ATTEMPT, RECEIVER), BOOL, "the required set: any set, even an empty one"),
    ("member_inc", (ATTEMPT, RECEIVER), INCARNATION, "the incarnation that is required of a member"),
    ("member_run", (ATTEMPT, OWNER), RUN, "the incarnation that is asked of an owner"),
    ("packed", (ATTEMPT, RUN, ELEMENT), PAYLOAD, "the payload into which a run of an owner packs an element"),
    ("coded_xor", (ATTEMPT, ELEMENT), BOOL, "an XOR attempt may send this record as XOR"),
    ("sync", (ATTEMPT,), BOOL, "gate mode of an attempt: closed from prepare on; otherwise only before writes"),
    ("survives", (), BOOL, "a frozen candidate is always brought back after a crash of its owner"),
    *[(mode, (), MODE, "a mode of an attempt") for mode in MODES],
    *[(kind, (), KIND, "what a receiver or an owner claims of its words") for kind in KINDS],
]
_STATE: list[tuple[str, tuple[Sort, ...], Sort, str]] = [
    # control plane
    ("booted", (), BOOL, "there is a record"),
    ("record_version", (), VERSION, "K.ver"),
    ("record_attempt", (), ATTEMPT, "K.att"),
    ("version_candidate", (VERSION,), CANDIDATE, "the candidate of a committed version"),
    ("committed", (VERSION, ATTEMPT), BOOL, "the record was once this version, of this attempt"),
    ("won", (ATTEMPT,), BOOL, "the attempt was committed"),
    ("bound", (ATTEMPT, RECEIVER, INCARNATION), BOOL, "the record that the attempt wrote names this member"),
    ("chosen", (CANDIDATE,), BOOL, "the candidate is, or was, a version"),
    ("epoch", (), EPOCH, "of the active coordinator"),
    ("granted", (EPOCH,), BOOL, "handed out"),
    ("last_attempt", (), ATTEMPT, "the latest id"),
    ("made", (ATTEMPT,), BOOL, "the id was allocated"),
    ("mode", (ATTEMPT,), MODE, "row of the attempt table"),
    ("base_version", (ATTEMPT,), VERSION, "version of the record that prepare expected"),
    ("base_attempt", (ATTEMPT, ATTEMPT), BOOL, "the second is the attempt of the record that prepare expected"),
    ("candidate", (ATTEMPT,), CANDIDATE, "what receivers hold at the end: for restore and finish the committed one"),
    ("attempt_epoch", (ATTEMPT,), EPOCH, "row of the attempt table"),
    ("dead", (CANDIDATE,), BOOL, "given up for ever (D27)"),
    ("late", (ATTEMPT,), BOOL, "its commit deadline passed (D14)"),
    # coordinators, and what they said
    ("coordinator_epoch", (COORDINATOR,), EPOCH, "its own epoch"),
    ("taken", (EPOCH,), BOOL, "some coordinator runs under it"),
    ("viewing", (COORDINATOR,), BOOL, "it read the record and did not step down"),
    ("views_record", (COORDINATOR,), BOOL, "it read that there is one"),
    ("view_version", (COORDINATOR,), VERSION, "as read"),
    ("view_attempt", (COORDINATOR,), ATTEMPT, "as read"),
    ("committing", (COORDINATOR,), BOOL, "it waits for the outcome of a commit"),
    ("waits_for", (COORDINATOR,), ATTEMPT, "the attempt of that commit"),
    ("started", (ATTEMPT,), BOOL, "prepare calls were sent"),
    ("completed", (ATTEMPT,), BOOL, "acknowledged by all"),
    ("failed", (ATTEMPT,), BOOL, "given up"),
    ("commit_asked", (ATTEMPT,), BOOL, "a commit request is on the way for ever"),
    ("rolled", (VERSION,), BOOL, "update_baseline calls for this version are on the way for ever"),
    ("confirmed", (ATTEMPT,), BOOL, "a restore: the record was read again and is unchanged (D19)"),
    # trainer and owners
    ("step", (), CANDIDATE, "the candidate that the trainer made last"),
    ("stepped", (CANDIDATE,), BOOL, "made at some time"),
    ("began", (OWNER,), BOOL, "the owner took part in the last step and offered its candidate"),
    ("run", (OWNER,), RUN, "its incarnation"),
    ("run_used", (OWNER, RUN), BOOL, "an incarnation that it has or had"),
    ("frozen", (OWNER,), BOOL, "it is in a transition"),
    ("frozen_candidate", (OWNER,), CANDIDATE, "of that transition"),
    ("is_resident", (OWNER,), BOOL, "its live weights are known to be a committed candidate"),
    ("resident", (OWNER,), CANDIDATE, "which one"),
    ("tracker", (OWNER,), KIND, "at, updating or lost"),
    ("tracker_version", (OWNER,), VERSION, "with `at` and `updating`"),
    ("filling", (OWNER,), BOOL, "a copy into the baseline runs"),
    ("fill_version", (OWNER,), VERSION, "what it will be"),
    ("base", (ELEMENT,), WORD, "the committed source baseline, at the owner of the element"),
    ("copied", (ELEMENT,), BOOL, "the running copy did it"),
    ("owner_att", (OWNER, ATTEMPT), BOOL, "the attempt that the owner installed"),
    ("owner_knew", (OWNER, ATTEMPT), BOOL, "an attempt that this run of the owner installed at some time"),
    ("owner_fenced", (OWNER, ATTEMPT), BOOL, "stopped before it was installed"),
    ("ready", (OWNER,), BOOL, "installed, the stream has not begun"),
    ("streaming", (OWNER,), BOOL, "payloads may appear"),
    ("owner_failed", (OWNER,), BOOL, "no manifest will follow"),
    ("sent", (ATTEMPT, PAYLOAD), BOOL, "published"),
    ("carries", (ATTEMPT, PAYLOAD, ELEMENT), BOOL, "the payload has a record for the element"),
    ("record_old", (ATTEMPT, ELEMENT), WORD, "an XOR record is the difference of this word ..."),
    ("record_new", (ATTEMPT, ELEMENT), WORD, "... and this one; an overwrite record is this one"),
    ("listed", (ATTEMPT, PAYLOAD), BOOL, "in the manifest of its owner"),
    ("ended", (ATTEMPT, OWNER), BOOL, "the manifest is published"),
    ("thawed", (VERSION, OWNER), BOOL, "the owner reported that the transition to this version ended"),
    # receivers
    ("inc", (RECEIVER,), INCARNATION, "its incarnation"),
    ("inc_used", (RECEIVER, INCARNATION), BOOL, "an incarnation that it has or had"),
    ("att", (RECEIVER,), ATTEMPT, "the installed attempt"),
    ("fenced", (RECEIVER,), ATTEMPT, "stopped before it was installed, up to this id"),
    ("stopped", (RECEIVER,), BOOL, "intake and acknowledgement are off (D28)"),
    ("drained", (RECEIVER,), BOOL, "nothing of the attempt can take effect any more"),
    ("tag", (RECEIVER,), KIND, "none, clean, dirty or done (D7)"),
    ("tag_version", (RECEIVER,), VERSION, "of the tag"),
    ("tag_candidate", (RECEIVER,), CANDIDATE, "of the tag"),
    ("tag_attempt", (RECEIVER,), ATTEMPT, "of the tag"),
    ("loaded", (RECEIVER,), BOOL, "untouched since it loaded the first checkpoint"),
    ("gate", (RECEIVER,), BOOL, "open"),
    ("opened", (RECEIVER,), ATTEMPT, "the attempt under which the gate was opened last"),
    ("reported", (ATTEMPT, RECEIVER), BOOL, "the receiver said that it installed the attempt"),
    ("reported_quiet", (ATTEMPT, RECEIVER), BOOL, "it said that it is quiet under the attempt"),
    ("serves", (RECEIVER, REQUEST), BOOL, "the request is in flight"),
    ("seen", (RECEIVER, PAYLOAD), BOOL, "accepted under the installed attempt"),
    ("sees_end", (RECEIVER, OWNER), BOOL, "the manifest of the owner is in"),
    ("pending", (RECEIVER, ATTEMPT, ELEMENT), BOOL, "a write of that attempt that did not take effect yet"),
    ("open_apply", (RECEIVER,), BOOL, "writes are allowed once it is quiet"),
    ("permitted", (RECEIVER,), BOOL, "the apply thread was let go; the tag is lowered"),
    ("acked", (RECEIVER,), BOOL, "everything was applied and flushed"),
    ("ack", (ATTEMPT, RECEIVER, INCARNATION), BOOL, "the acknowledgement is on the way for ever"),
    ("store", (RECEIVER, ELEMENT), WORD, "stored words"),
]

TABLE = {
    **{name: Symbol(name, args, result, True, about) for name, args, result, about in _RIGID},
    **{name: Symbol(name, args, result, False, about) for name, args, result, about in _STATE},
}


def before(s: State, left: Term, right: Term) -> Term:
    """Attempt `left` has the smaller id."""
    return conj(s.attempt_le(left, right), left != right)


def is_delta(s: State, t: Term) -> Term:
    """The attempt may end in a commit."""
    return disj(s.mode(t) == s.by_xor(), s.mode(t) == s.overwrite(), s.mode(t) == s.dense())


def old_word(s: State, t: Term, e: Term) -> Term:
    """The word of the version that the attempt starts from."""
    return s.word(s.version_candidate(s.base_version(t)), e)


def new_word(s: State, t: Term, e: Term) -> Term:
    """The word that a receiver holds at the end of the attempt."""
    return s.word(s.candidate(t), e)


def packed_into(s: State, t: Term, e: Term) -> Term:
    """The payload into which the required run of its owner packs the element."""
    return s.packed(t, s.member_run(t, s.owner_of(e)), e)


def is_version(s: State, v: Term) -> Term:
    """The record once was this version."""
    return conj(s.booted(), s.version_le(v, s.record_version()))


def known_version(s: State, v: Term) -> Term:
    """Version 0 exists before its record."""
    return disj(v == s.first_version(), is_version(s, v))


def sends_all(s: State, t: Term) -> Term:
    """Dense attempts and restores carry every element."""
    return disj(s.mode(t) == s.dense(), s.mode(t) == s.restore())


# ------------------------------------------------------------------------------------------------------------ axioms


def _order(s: State, name: str, sort: Sort) -> list[Term]:
    le = s.lookup(name)
    return [
        s.every(sort, lambda a: le(a, a)),
        s.every((sort, sort), lambda a, b: implies(conj(le(a, b), le(b, a)), a == b)),
        s.every((sort, sort, sort), lambda a, b, c: implies(conj(le(a, b), le(b, c)), le(a, c))),
        s.every((sort, sort), lambda a, b: disj(le(a, b), le(b, a))),
    ]


def axioms(s: State) -> list[Term]:
    """What is true of the rigid symbols."""
    different = [
        neg(s.lookup(left)() == s.lookup(right)())
        for names in (MODES, KINDS)
        for number, left in enumerate(names)
        for right in names[number + 1 :]
    ]
    return [
        *_order(s, "attempt_le", ATTEMPT),
        *_order(s, "version_le", VERSION),
        *_order(s, "epoch_le", EPOCH),
        *different,
        s.every(ATTEMPT, lambda t: s.attempt_le(s.no_attempt(), t)),
        s.every(VERSION, lambda v: s.version_le(s.first_version(), v)),
        s.every((VERSION, VERSION), lambda v, u: implies(s.succ(v, u), conj(s.version_le(v, u), v != u))),
        s.every(
            (VERSION, VERSION, VERSION),
            lambda v, u, x: implies(s.succ(v, u), disj(s.version_le(x, v), s.version_le(u, x))),
        ),
        s.every(
            (RECEIVER, RECEIVER),
            lambda r, q: implies(conj(s.leads(r), s.leads(q), s.instance(r) == s.instance(q)), r == q),
        ),
        s.every((PAYLOAD, OWNER, OWNER), lambda p, o, q: implies(conj(s.owns(p, o), s.owns(p, q)), o == q)),
        s.every((ATTEMPT, RUN, ELEMENT), lambda t, m, e: s.owns(s.packed(t, m, e), s.owner_of(e))),
    ]


def first_state(s: State) -> list[Term]:
    """What is true at the start: owners hold version 0, nothing is known of receivers, nobody coordinates."""
    return [
        neg(s.booted()),
        s.record_version() == s.first_version(),
        s.record_attempt() == s.no_attempt(),
        s.last_attempt() == s.no_attempt(),
        s.version_candidate(s.first_version()) == s.first_candidate(),
        s.step() == s.first_candidate(),
        s.every(CANDIDATE, lambda c: s.stepped(c) == (c == s.first_candidate())),
        s.every(CANDIDATE, lambda c: conj(neg(s.dead(c)), s.chosen(c) == (c == s.first_candidate()))),
        s.every((VERSION, ATTEMPT), lambda v, t: neg(s.committed(v, t))),
        s.every(EPOCH, lambda x: conj(s.epoch_le(s.epoch(), x), neg(s.granted(x)), neg(s.taken(x)))),
        s.every(
            ATTEMPT,
            lambda t: conj(
                *[neg(s.lookup(name)(t)) for name in ("made", "started", "completed", "commit_asked", "won")]
            ),
        ),
        s.every(ATTEMPT, lambda t: conj(neg(s.failed(t)), neg(s.late(t)), neg(s.confirmed(t)))),
        s.every(COORDINATOR, lambda k: conj(neg(s.viewing(k)), neg(s.committing(k)))),
        s.every(VERSION, lambda v: neg(s.rolled(v))),
        s.every((VERSION, OWNER), lambda v, o: neg(s.thawed(v, o))),
        s.every(
            OWNER,
            lambda o: conj(
                s.tracker(o) == s.at(),
                s.tracker_version(o) == s.first_version(),
                s.began(o),
                s.is_resident(o),
                s.resident(o) == s.first_candidate(),
                s.run_used(o, s.run(o)),
                *[neg(s.lookup(name)(o)) for name in ("frozen", "filling", "ready", "streaming", "owner_failed")],
            ),
        ),
        s.every(
            (OWNER, ATTEMPT), lambda o, t: conj(neg(s.owner_att(o, t)), neg(s.owner_knew(o, t)), neg(s.ended(t, o)))
        ),
        s.every(ELEMENT, lambda e: s.base(e) == s.word(s.first_candidate(), e)),
        s.every((ATTEMPT, PAYLOAD), lambda t, p: conj(neg(s.sent(t, p)), neg(s.listed(t, p)))),
        s.every((ATTEMPT, PAYLOAD, ELEMENT), lambda t, p, e: neg(s.carries(t, p, e))),
        s.every(
            RECEIVER,
            lambda r: conj(
                s.att(r) == s.no_attempt(),
                s.fenced(r) == s.no_attempt(),
                s.stopped(r),
                s.drained(r),
                s.tag(r) == s.none(),
                s.inc_used(r, s.inc(r)),
                *[neg(s.lookup(name)(r)) for name in ("loaded", "gate", "open_apply", "permitted", "acked")],
            ),
        ),
        s.every((RECEIVER, RECEIVER), lambda r, q: implies(s.instance(r) == s.instance(q), s.inc(r) == s.inc(q))),
        s.every((ATTEMPT, RECEIVER), lambda t, r: conj(neg(s.reported(t, r)), neg(s.reported_quiet(t, r)))),
        s.every((RECEIVER, REQUEST), lambda r, q: neg(s.serves(r, q))),
        s.every((RECEIVER, PAYLOAD), lambda r, p: neg(s.seen(r, p))),
        s.every((RECEIVER, OWNER), lambda r, o: neg(s.sees_end(r, o))),
        s.every((RECEIVER, ATTEMPT, ELEMENT), lambda r, t, e: neg(s.pending(r, t, e))),
        s.every((ATTEMPT, RECEIVER, INCARNATION), lambda t, r, n: neg(s.ack(t, r, n))),
    ]
