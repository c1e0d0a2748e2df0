"""What a coordinator of the specification sees and decides, and the calls that follow from it.

Not handled: steps (model_actions).

Paper: Section 6.3; Algorithm B.2   Spec: DeltaRefit
"""
# fmt: off
# ruff: noqa: N805

from __future__ import annotations

from collections.abc import Iterable

from model_tests.model_guards import Guards
from model_tests.model_state import (
    DELTA,
    BaselineCall,
    Call,
    CommitRequest,
    Digest,
    Member,
    Members,
    OpenMessage,
    restored_call,
    some_of,
    version_of,
)


class Here(Guards):
    """A state together with the constants: what an action looks at. Replace a method of it to weaken a guard."""

    __slots__ = ()

    def runs(s, c: str, t: int) -> bool: return s.coord[c].phase == "running" and s.coord[c].att == t
    def is_run(s, t: int) -> bool: return any(s.runs(c, t) for c in s.config.coordinators)
    def is_prepared(s, m: Member, t: int) -> bool:
        return (s.same_incarnation(m[1], s.rcv[m[0]].inc) and s.is_running(m[0], t)
                and (s.staged_first(t) or s.mode_of(t) == "finish" or s.is_quiet(m[0])))
    def all_prepared(s, t: int) -> bool:
        return (all(s.is_prepared(m, t) for m in s.row(t).req)
                and all(s.is_owner_member(o, t) and p.att == t and p.status != "stopped" for o, p in s.own.items()))
    def all_ended(s, t: int) -> bool:
        return all(any(e.att == t and e.owner == o for e in s.sent("end")) for o in s.config.owners)
    def takes_part(s, m: Member, t: int) -> bool:
        return s.same_incarnation(m[1], s.rcv[m[0]].inc) and s.is_running(m[0], t)
    def all_staged(s, t: int) -> bool:
        return s.all_ended(t) and all(s.takes_part(m, t) and s.is_staged(m[0]) for m in s.row(t).req)
    def all_quiet(s, t: int) -> bool: return all(s.takes_part(m, t) and s.is_quiet(m[0]) for m in s.row(t).req)
    def is_acked(s, m: Member, t: int) -> bool:
        return any(a.att == t and a.receiver == m[0] and s.same_incarnation(m[1], a.inc) for a in s.sent("ack"))
    def has_all_acks(s, t: int) -> bool: return all(s.is_acked(m, t) for m in s.row(t).req)
    def expected(s, t: int) -> frozenset[Digest]:
        return frozenset(p for e in s.sent("end") if e.att == t for p in e.payloads)
    def digest_agrees(s, t: int) -> bool:
        return all(s.same_set(a.payloads, s.expected(t)) for a in s.sent("ack") if a.att == t and not a.proved)
    def is_all_proved(s, t: int) -> bool:
        return all(any(a.att == t and a.receiver == m[0] and a.proved for a in s.sent("ack")) for m in s.row(t).req)
    def is_over(s, t: int) -> bool:
        return ((s.mode_of(t) == "finish" and s.all_prepared(t))
                or (s.mode_of(t) == "restore" and s.has_all_acks(t) and s.is_all_proved(t))
                or (s.mode_of(t) != "finish" and s.has_all_acks(t) and s.all_ended(t) and s.digest_agrees(t)))
    def committed_members(s, t: int) -> Members: return s.row(t).req
    def expired(s, t: int) -> frozenset[int]: return s.late | {t}

    def members(s, names: Iterable[str]) -> Members: return frozenset((r, s.rcv[r].inc) for r in names)
    def holders(s, c: str) -> Members:
        return s.members(r for r in s.config.receivers if s.holds_record(s.rcv[r].tag, s.coord[c].view))
    def in_hand(s, c: str, r: str) -> bool: return s.coord[c].phase == "fenced" and s.rcv[r].att == s.coord[c].att
    def strays(s, c: str) -> Members:
        loose = s.members(r for r in s.config.receivers if not s.in_hand(c, r))
        return loose if s.coord[c].view == 0 else loose - s.holders(c)
    def closed(s, c: str) -> Members:
        return frozenset(m for m in s.holders(c) if not s.rcv[m[0]].gate and not s.in_hand(c, m[0]))
    def eligible_for(s, c: str, mode: str, cand: int) -> Members:
        return s.members(r for r in s.config.receivers if s.fits(s.rcv[r].tag, mode, s.coord[c].view, cand))
    def all_hold(s, v: int) -> bool: return all(s.holds_version(o, v) for o in s.config.owners)
    def open_candidate(s, c: str, cand: int) -> bool:
        return cand != 0 and cand != s.record_of(s.coord[c].view).cand and any(p.frozen == cand for p in s.own.values())
    def is_idle(s) -> bool: return all(p.frozen == 0 for p in s.own.values())
    def needs_roll_forward(s, c: str) -> bool:
        cand = s.record_of(s.coord[c].view).cand
        return cand != 0 and any(p.frozen == cand for p in s.own.values())
    def all_followed(s, v: int, cand: int) -> bool:
        return all(s.has_followed(o, v) or (p.kind == "lost" and p.frozen != cand) for o, p in s.own.items())
    def mode_for(s, c: str, cand: int) -> str:
        return "dense" if not s.all_hold(version_of(s.coord[c].view)) else "xor" if s.may_xor(cand) else "overwrite"
    def is_confirmed(s, c: str) -> bool:
        return s.is_latest(s.coord[c].att) and s.record_matches(s.coord[c].view) and s.prepare_holds_epoch(c)

    def may_ask(s, c: str) -> bool: return s.coord[c].phase in ("ready", "prepared", "fenced")
    def wants_delta(s, c: str, mode: str, cand: int) -> set[Members]:
        wanted = (s.coord[c].view > 0 and not s.needs_roll_forward(c) and s.open_candidate(c, cand)
                  and all(p.frozen == cand for p in s.own.values()) and mode == s.mode_for(c, cand))
        return some_of(s.eligible_for(c, mode, cand)) if wanted else set()
    def wants_restore(s, c: str) -> set[Members]:
        wanted = (all(s.restore_base(o, version_of(s.coord[c].view)) for o in s.config.owners)
                  and not s.needs_roll_forward(c)
                  and all(s.not_dead(cand) and not s.eligible_for(c, s.mode_for(c, cand), cand)
                          for cand in range(1, s.step + 1) if s.open_candidate(c, cand)))
        return some_of(s.strays(c)) if wanted else set()
    def wants_finish(s, c: str) -> set[Members]:
        if s.coord[c].view == 0:
            return set()
        if s.needs_roll_forward(c):
            return set() if s.coord[c].phase == "fenced" else some_of(s.holders(c))
        settled = s.is_idle() and s.all_hold(version_of(s.coord[c].view)) and not s.strays(c)
        return some_of(s.closed(c)) if settled else set()
    def wants(s, c: str, mode: str, cand: int) -> set[Members]:
        if not s.may_ask(c):
            return set()
        if mode in DELTA:
            return s.wants_delta(c, mode, cand)
        if cand != 0:
            return set()
        return s.wants_restore(c) if mode == "restore" else s.wants_finish(c)

    def commit_call(s, t: int) -> CommitRequest: return CommitRequest("commit", t, s.row(t).epoch, s.row(t).view)
    def update_call(s, n: int) -> BaselineCall: return BaselineCall("update", s.record_of(n).cand, version_of(n))
    def end_call(s, n: int) -> BaselineCall: return BaselineCall("end transition", s.record_of(n).cand, version_of(n))
    def open_call(s, t: int, n: int) -> OpenMessage: return OpenMessage("open", t, version_of(n), s.record_of(n).att)
    def roll_forward_calls(s, c: str) -> set[BaselineCall]:
        due = s.coord[c].phase == "fenced" or (s.coord[c].phase == "ready" and not s.holders(c))
        return {s.update_call(s.coord[c].view)} if s.needs_roll_forward(c) and due else set()
    def may_start_stream(s, t: int) -> bool: return s.is_run(t) and s.all_prepared(t)
    def may_close_gates(s, t: int) -> bool: return s.is_run(t) and s.staged_first(t) and s.all_staged(t)
    def may_open_apply(s, t: int) -> bool:
        return s.is_run(t) and s.all_quiet(t) and (s.all_staged(t) if s.staged_first(t) else s.all_prepared(t))
    def may_send_end(s, c: str) -> bool:
        view = s.coord[c].view
        return s.coord[c].phase == "fenced" and s.all_followed(version_of(view), s.record_of(view).cand)
    def may_send_open(s, c: str) -> bool:
        return (s.coord[c].phase == "fenced" and s.coord[c].view > 0 and not s.needs_roll_forward(c)
                and (s.mode_of(s.coord[c].att) != "restore" or s.is_sent(restored_call(s.coord[c].att))))
    def may_send_restored(s, c: str) -> bool:
        return (s.coord[c].phase == "fenced" and s.mode_of(s.coord[c].att) == "restore"
                and s.coord[c].view > 0 and s.is_confirmed(c))
    def end_calls(s) -> set[BaselineCall]:
        return {*s.sent("end transition"), *(s.end_call(at.view) for c, at in s.coord.items() if s.may_send_end(c))}
    def open_calls(s) -> set[OpenMessage]:
        return {*s.sent("open"), *(s.open_call(at.att, at.view) for c, at in s.coord.items() if s.may_send_open(c))}
    def restored_calls(s) -> set[Call]:
        return {*s.sent("restored"), *(restored_call(at.att) for c, at in s.coord.items() if s.may_send_restored(c))}

    def is_stuck(s, c: str) -> bool:
        """The attempt of c can not be acknowledged any more."""
        t = s.coord[c].att
        return any(s._is_lost(m, t) for m in s.row(t).req) or any(s._is_lost_owner(o, t) for o in s.config.owners)

    def _is_lost(s, m: Member, t: int) -> bool:
        r = m[0]
        p = s.rcv[r]
        return (not s.same_incarnation(m[1], p.inc) or p.att > t or p.fenced >= t
                or (p.stopped and not p.acked if p.att == t else not s.is_eligible(r, t)))

    def _is_lost_owner(s, o: str, t: int) -> bool:
        p = s.own[o]
        return (not s.is_owner_member(o, t) or p.att > t or p.fenced >= t
                or (p.att == t and p.status in ("stopped", "failed"))
                or (not s.may_stream(o, t) and not (p.att == t and p.status == "ended")))
