"""Actions of coordinators: take over, run an attempt, ask for the commit, learn its outcome, roll forward.

Any number of coordinators act at once, and those that were replaced go on with what they knew. What a coordinator says
is a message that stays on the way for ever: it may be received late, again, or never.
Not handled: which action it chooses among those that are safe (decision, membership), beyond what safety needs.

Paper: Section 6.3; Algorithms B.1, B.2   Spec: BecomeCoordinator, StartAttempt, CompleteAttempt, FailAttempt,
SendCommit, ResolveCommit, StepDown, RollForward   Proofs: joint_commit_binds, takeover_decides_once
"""

from __future__ import annotations

from spec.proof.control import is_latest, prepare_holds_epoch, record_matches
from spec.proof.dsl import Action, Post, State, Term, conj, disj, guard, implies, ite, neg, put
from spec.proof.vocabulary import OWNER, RECEIVER, Attempt, Coordinator, Epoch, Version, is_delta


@guard
def reads_after_epoch(s: State) -> Term:
    """What it believes was read after the epoch was handed out, not before (D2)."""
    return True


@guard
def is_acked(s: State, t: Term, r: Term) -> Term:
    """The member, in the required incarnation, acknowledged the attempt (D5)."""
    return s.ack(t, r, s.member_inc(t, r))


@guard
def has_all_acks(s: State, t: Term) -> Term:
    """Every required receiver acknowledged."""
    return s.every(RECEIVER, lambda r: implies(s.required(t, r), is_acked(s, t, r)))


@guard
def all_ended(s: State, t: Term) -> Term:
    """Every owner published its whole set."""
    return s.every(OWNER, lambda o: s.ended(t, o))


@guard
def all_prepared(s: State, t: Term) -> Term:
    """Every required receiver said that it installed the attempt."""
    return s.every(RECEIVER, lambda r: implies(s.required(t, r), s.reported(t, r)))


@guard
def may_commit(s: State, k: Term, t: Term) -> Term:
    """The attempt is complete, and on the record that the coordinator still believes in."""
    same = conj(s.view_version(k) == s.base_version(t), s.base_attempt(t, s.view_attempt(k)))
    return conj(has_all_acks(s, t), s.views_record(k), same)


@guard
def expires(s: State, t: Term) -> Term:
    """Before "not committed" is believed, the deadline passes: no request of the attempt succeeds later (D14)."""
    return True


@guard
def record_is_committed(s: State, k: Term, v: Term) -> Term:
    """Baselines follow a record that was read, never a commit that was only asked for."""
    return conj(s.views_record(k), s.view_version(k) == v)


def runs(s: State, k: Term, t: Term) -> Term:
    """The attempt is one that this coordinator, under its present epoch, got from the control plane."""
    return conj(s.made(t), s.attempt_epoch(t) == s.coordinator_epoch(k))


def _view(s: State, k: Term) -> Post:
    return {
        "viewing": put(k, to=True),
        "views_record": put(k, to=s.booted()),
        "view_version": put(k, to=s.record_version()),
        "view_attempt": put(k, to=s.record_attempt()),
    }


def become_coordinator(s: State, k: Coordinator, x: Epoch) -> tuple[Term, Post]:
    """It learns an epoch that was handed out, even one that is over, and then reads the record (D2).

    Nothing of an earlier life is kept.
    """
    free = conj(s.granted(x), neg(s.taken(x)))
    fresh = reads_after_epoch(s)
    return free, {
        "taken": put(x, to=True),
        "coordinator_epoch": put(k, to=x),
        "committing": put(k, to=False),
        **_view(s, k),
        "view_version": put(k, to=ite(fresh, s.record_version(), s.view_version(k))),
        "view_attempt": put(k, to=ite(fresh, s.record_attempt(), s.view_attempt(k))),
    }


def read_record(s: State, k: Coordinator) -> tuple[Term, Post]:
    """It looks again. (A read that shows another epoch makes it step down.)"""
    return conj(s.viewing(k), neg(s.committing(k)), s.coordinator_epoch(k) == s.epoch()), _view(s, k)


def start_attempt(s: State, k: Coordinator, t: Attempt) -> tuple[Term, Post]:
    """Prepare calls go out to all members."""
    return conj(s.viewing(k), runs(s, k, t)), {"started": put(t, to=True)}


def complete_attempt(s: State, k: Coordinator, t: Attempt) -> tuple[Term, Post]:
    """Everybody acknowledged what the owners sent; a finish attempt carries nothing to acknowledge."""
    delta = conj(is_delta(s, t), has_all_acks(s, t), all_ended(s, t))
    over = disj(
        delta, conj(s.mode(t) == s.restore(), has_all_acks(s, t)), conj(s.mode(t) == s.finish(), all_prepared(s, t))
    )
    return conj(s.viewing(k), runs(s, k, t), s.started(t), neg(s.failed(t)), over), {"completed": put(t, to=True)}


def fail_attempt(s: State, k: Coordinator, t: Attempt) -> tuple[Term, Post]:
    """A deadline, a refusal, a lost member, an abort: no commit of it will be asked for."""
    return conj(s.viewing(k), runs(s, k, t), neg(s.completed(t))), {"failed": put(t, to=True)}


def send_commit(s: State, k: Coordinator, t: Attempt) -> tuple[Term, Post]:
    """The compare-and-set is asked for; from now on it may take effect at any time."""
    one = conj(s.viewing(k), neg(s.committing(k)), runs(s, k, t), s.completed(t), is_delta(s, t))
    return conj(one, may_commit(s, k, t)), {
        "commit_asked": put(t, to=True),
        "committing": put(k, to=True),
        "waits_for": put(k, to=t),
    }


def resolve_commit(s: State, k: Coordinator, t: Attempt, v: Version) -> tuple[Term, Post]:
    """The outcome is known: by a reply, even a late one, or by one read after the deadline."""
    waits = conj(s.viewing(k), s.committing(k), s.waits_for(k) == t)
    yes = s.committed(v, t)
    no = conj(neg(s.won(t)), prepare_holds_epoch(s, k), v == s.record_version())
    return conj(waits, disj(yes, no)), {
        "committing": put(k, to=False),
        "views_record": put(k, to=True),
        "view_version": put(k, to=v),
        "view_attempt": put(k, to=_attempt_of(s, t)),
        "late": put(t, to=disj(s.late(t), conj(neg(s.won(t)), expires(s, t)))),
    }


def _attempt_of(s: State, t: Term) -> Term:
    """K.att as the reply or the read shows it."""
    return ite(s.won(t), t, s.record_attempt())


def step_down(s: State, k: Coordinator) -> tuple[Term, Post]:
    """It was replaced, or it died."""
    return s.viewing(k), {"viewing": put(k, to=False), "committing": put(k, to=False)}


def roll_forward(s: State, k: Coordinator, v: Version) -> tuple[Term, Post]:
    """Baselines are told to follow the record."""
    return conj(s.viewing(k), record_is_committed(s, k, v)), {"rolled": put(v, to=True)}


def confirm_restore(s: State, k: Coordinator, t: Attempt) -> tuple[Term, Post]:
    """The record was read again after a restore and is unchanged (D19)."""
    same = conj(is_latest(s, t), record_matches(s, k), prepare_holds_epoch(s, k), s.booted())
    return conj(s.viewing(k), runs(s, k, t), s.completed(t), same), {"confirmed": put(t, to=True)}


ACTIONS: tuple[Action, ...] = (
    become_coordinator,
    start_attempt,
    complete_attempt,
    fail_attempt,
    send_commit,
    resolve_commit,
    step_down,
    roll_forward,
)
UNTRACED: tuple[Action, ...] = (read_record, confirm_restore)
