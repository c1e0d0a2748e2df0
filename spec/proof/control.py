"""Actions of the control plane: epochs, attempt ids, the commit record, dead candidates.

Each action is one atomic durable step (A6). Whoever asks may have read the record long ago, and may have been replaced
since; what is compared is what protects. The members of an attempt and its candidate are any that the asker likes.
Not handled: deadlines as times. A commit that was found to have failed is late from then on (`resolve_commit`).

Paper: Section 6.3; Appendix B   Spec: AcquireEpoch, Prepare, Commit, KillCandidate, Bootstrap, Conflict
Proofs: joint_commit_binds, takeover_decides_once   Conditions: SC7
"""

from __future__ import annotations

from spec.proof.dsl import Action, Post, State, Term, conj, disj, guard, implies, neg, put, rows
from spec.proof.vocabulary import (
    ATTEMPT,
    CANDIDATE,
    OWNER,
    RECEIVER,
    Attempt,
    Candidate,
    Coordinator,
    Epoch,
    Mode,
    Version,
    before,
    is_delta,
)


@guard
def holds_epoch(s: State, epoch: Term) -> Term:
    """The asker is the active coordinator."""
    return epoch == s.epoch()


@guard
def prepare_holds_epoch(s: State, k: Term) -> Term:
    """Who asks for a prepare, a kill or the first record."""
    return holds_epoch(s, s.coordinator_epoch(k))


@guard
def commit_holds_epoch(s: State, t: Term) -> Term:
    """Who asks for a commit is who prepared."""
    return holds_epoch(s, s.attempt_epoch(t))


@guard
def record_matches(s: State, k: Term) -> Term:
    """The compare of prepare: the record is what the coordinator read."""
    same = conj(s.view_version(k) == s.record_version(), s.view_attempt(k) == s.record_attempt())
    return conj(s.views_record(k) == s.booted(), implies(s.booted(), same))


@guard
def commit_matches(s: State, t: Term) -> Term:
    """The compare of commit: the record is what prepare expected."""
    return conj(s.booted(), s.base_version(t) == s.record_version(), s.base_attempt(t, s.record_attempt()))


@guard
def is_latest(s: State, t: Term) -> Term:
    """No later prepare fenced the attempt (D15)."""
    return t == s.last_attempt()


@guard
def in_time(s: State, t: Term) -> Term:
    """The deadline has not passed (D14)."""
    return neg(s.late(t))


@guard
def not_dead(s: State, c: Term) -> Term:
    """The candidate was not given up, looked at by commit."""
    return neg(s.dead(c))


@guard
def prepare_not_dead(s: State, c: Term) -> Term:
    """The same, looked at by prepare."""
    return neg(s.dead(c))


@guard
def not_committed(s: State, c: Term) -> Term:
    """The candidate is not the committed one."""
    return c != s.version_candidate(s.record_version())


@guard
def may_xor(s: State, c: Term) -> Term:
    """Only the first attempt of a candidate may send XOR records (D9)."""
    return s.every(ATTEMPT, lambda t: implies(conj(s.made(t), is_delta(s, t)), s.candidate(t) != c))


@guard
def takes_whole_instances(s: State, t: Term) -> Term:
    """An instance takes part with all its ranks or not at all."""
    return s.every(
        (RECEIVER, RECEIVER),
        lambda r, q: implies(conj(s.required(t, r), s.instance(r) == s.instance(q)), s.required(t, q)),
    )


@guard
def has_answered(s: State, t: Term, r: Term) -> Term:
    """A member is required in an incarnation that lives or lived: one that answered a survey."""
    return s.inc_used(r, s.member_inc(t, r))


@guard
def owner_has_answered(s: State, t: Term, o: Term) -> Term:
    """An owner is asked in an incarnation that lives or lived."""
    return s.run_used(o, s.member_run(t, o))


@guard
def is_bound(s: State, t: Term, r: Term, n: Term) -> Term:
    """The record binds exactly the members that the attempt required."""
    return conj(s.required(t, r), s.member_inc(t, r) == n)


@guard
def no_record_yet(s: State) -> Term:
    """The first record is written once."""
    return neg(s.booted())


def _takes(s: State, m: Term, c: Term) -> Term:
    """Candidate and mode fit: delta modes take an open candidate, the others stand for the committed one."""
    delta = disj(m == s.by_xor(), m == s.overwrite(), m == s.dense())
    open_one = conj(s.booted(), prepare_not_dead(s, c), not_committed(s, c), implies(m == s.by_xor(), may_xor(s, c)))
    settled = conj(
        disj(m == s.restore(), conj(m == s.finish(), s.booted())), c == s.version_candidate(s.record_version())
    )
    return disj(conj(delta, open_one), settled)


def acquire_epoch(s: State, x: Epoch) -> tuple[Term, Post]:
    """A new epoch is handed out; who asked may never learn it."""
    fresh = conj(s.epoch_le(s.epoch(), x), x != s.epoch())
    return fresh, {"epoch": put(to=x), "granted": put(x, to=True)}


def prepare(s: State, k: Coordinator, t: Attempt, m: Mode, c: Candidate) -> tuple[Term, Post]:
    """Attempt t exists, for the record that the coordinator read."""
    asked = conj(s.viewing(k), neg(s.committing(k)), prepare_holds_epoch(s, k), record_matches(s, k))
    fresh = conj(before(s, s.last_attempt(), t), before(s, s.no_attempt(), t))
    answered = s.every(RECEIVER, lambda r: implies(s.required(t, r), has_answered(s, t, r)))
    owners = s.every(OWNER, lambda o: owner_has_answered(s, t, o))
    members = conj(takes_whole_instances(s, t), answered, owners)
    return conj(asked, fresh, _takes(s, m, c), members), {
        "made": put(t, to=True),
        "last_attempt": put(to=t),
        "mode": put(t, to=m),
        "candidate": put(t, to=c),
        "base_version": put(t, to=s.view_version(k)),
        "base_attempt": rows(t, to=lambda u: u == s.view_attempt(k)),
        "attempt_epoch": put(t, to=s.coordinator_epoch(k)),
    }


def commit(s: State, t: Attempt, v: Version) -> tuple[Term, Post]:
    """The record becomes version v, by attempt t."""
    matches = conj(commit_matches(s, t), s.succ(s.record_version(), v))
    can = conj(commit_holds_epoch(s, t), matches, is_latest(s, t), not_dead(s, s.candidate(t)), in_time(s, t))
    return conj(s.commit_asked(t), is_delta(s, t), can), {
        "record_version": put(to=v),
        "record_attempt": put(to=t),
        "version_candidate": put(v, to=s.candidate(t)),
        "committed": put(v, t, to=True),
        "won": put(t, to=True),
        "chosen": put(s.candidate(t), to=True),
        "bound": rows(t, to=lambda r, n: is_bound(s, t, r, n)),
    }


def kill_candidate(s: State, k: Coordinator, c: Candidate) -> tuple[Term, Post]:
    """The candidate is dead for ever (D27)."""
    return conj(s.viewing(k), prepare_holds_epoch(s, k), not_committed(s, c)), {"dead": put(c, to=True)}


def bootstrap(s: State, k: Coordinator, t: Attempt) -> tuple[Term, Post]:
    """The first record: exactly the members of a complete restore. Who asked may never learn it."""
    own = conj(s.viewing(k), s.attempt_epoch(t) == s.coordinator_epoch(k), s.mode(t) == s.restore(), s.completed(t))
    return conj(own, prepare_holds_epoch(s, k), no_record_yet(s), is_latest(s, t)), {
        "booted": put(to=True),
        "record_attempt": put(to=t),
        "committed": put(s.first_version(), t, to=True),
        "won": put(t, to=True),
        "bound": rows(t, to=lambda r, n: is_bound(s, t, r, n)),
    }


def conflict(s: State, k: Coordinator) -> tuple[Term, Post]:
    """A request is refused: nothing changes."""
    candidates = s.every(CANDIDATE, lambda c: neg(not_committed(s, c)))
    return disj(neg(prepare_holds_epoch(s, k)), neg(record_matches(s, k)), candidates, s.viewing(k)), {}


ACTIONS: tuple[Action, ...] = (acquire_epoch, prepare, commit, kill_candidate, bootstrap, conflict)
