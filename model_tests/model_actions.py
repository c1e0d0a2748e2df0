"""The 47 actions of the specification, each by its name in snake case.

An action returns the variables that it changes, or raises `NotEnabled` with the name of the guard that does not hold. A
parameter is what Next quantifies over, or what an existential inside of the action chooses.
Not handled: what parameters range over, and taking a step (model).

Paper: Section 6; Algorithms B.1, B.2   Spec: DeltaRefit
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from model_tests.model_decisions import Here
from model_tests.model_state import (
    DELTA,
    RAW,
    UNKNOWN,
    Coordinator,
    EndMessage,
    Manifest,
    Map,
    Members,
    Record,
    Row,
    apply_call,
    arrived,
    clean,
    close_call,
    digest,
    done,
    flip,
    mapped,
    new_receiver,
    overwrite,
    prepare_call,
    restored_call,
    stop_call,
    stream_call,
    version_of,
    xor,
)

Changes = dict[str, Any]


class NotEnabled(Exception):
    """The guard of that name, among those of the action, does not hold."""


def need(**guards: bool) -> None:
    """Raise NotEnabled for the first guard that does not hold."""
    for name, holds in guards.items():
        if not holds:
            raise NotEnabled(name)


def only(found: Iterable[Any]) -> Any:
    """The one message that an existential asks for.

    Raises: ValueError for two of them, which would be two steps with one name; no configuration has that.
    """
    some = list(found)
    need(exists=bool(some))
    if len(some) > 1:
        raise ValueError(f"one step, several outcomes: {some}")
    return some[0]


# ------------------------------------------------------------------------------------------ actions: control plane


def acquire_epoch(s: Here, c: str) -> Changes:
    return {"epoch": s.epoch + 1, "coord": s.coord.but(c, Coordinator("acquiring", s.epoch + 1, 0, 0))}


def prepare(s: Here, c: str, mode: str, cand: int, members: Members) -> Changes:
    need(can_prepare=s.can_prepare(c, mode, cand))
    need(wants=members in s.wants(c, mode, cand))
    row = Row(s.coord[c].epoch, cand, mode, s.coord[c].view, members, Map({o: s.own[o].inc for o in s.config.owners}))
    return {"table": (*s.table, row), "coord": s.coordinator_with(c, phase="prepared", att=s.last() + 1)}


def commit(s: Here, t: int) -> Changes:
    need(is_sent=s.is_sent(s.commit_call(t)))
    need(can_commit=s.can_commit(t))
    return {"chain": (*s.chain, Record(s.row(t).cand, t, s.committed_members(t), s.row(t).epoch, s.base_version(t)))}


def kill_candidate(s: Here, c: str, cand: int) -> Changes:
    need(
        may_ask=s.may_ask(c),
        open_candidate=s.open_candidate(c, cand),
        not_dead=cand not in s.dead,
        can_kill=s.can_kill(c, cand),
    )
    return {"dead": s.dead | {cand}}


def bootstrap(s: Here, c: str) -> Changes:
    need(fenced=s.coord[c].phase == "fenced")
    need(restore=s.mode_of(s.coord[c].att) == "restore", no_view=s.coord[c].view == 0, can_bootstrap=s.can_bootstrap(c))
    record = Record(0, s.coord[c].att, s.row(s.coord[c].att).req, s.coord[c].epoch, 0)
    return {"chain": (*s.chain, record), "coord": s.coordinator_with(c, view=len(s.chain) + 1)}


def conflict(s: Here, c: str) -> Changes:
    refused = any(m.epoch == s.coord[c].epoch and not s.can_commit(m.att) for m in s.sent("commit"))
    need(refused=(s.coord[c].phase in ("ready", "fenced") and not s.prepare_holds_epoch(c)) or refused)
    return {}


# -------------------------------------------------------------------------------------------- actions: coordinator


def become_coordinator(s: Here, c: str) -> Changes:
    need(acquiring=s.coord[c].phase == "acquiring")
    return {"coord": s.coordinator_with(c, phase="ready", view=len(s.chain))}


def start_attempt(s: Here, c: str) -> Changes:
    need(prepared=s.coord[c].phase == "prepared")
    return {"coord": s.coordinator_with(c, phase="running"), "net": s.net | {prepare_call(s.coord[c].att)}}


def complete_attempt(s: Here, c: str) -> Changes:
    need(running=s.coord[c].phase == "running")
    need(is_over=s.is_over(s.coord[c].att))
    phase = "acked" if s.mode_of(s.coord[c].att) in DELTA else "fenced"
    return {"coord": s.coordinator_with(c, phase=phase)}


def fail_attempt(s: Here, c: str) -> Changes:
    need(running=s.coord[c].phase == "running")
    return {"coord": s.coordinator_with(c, phase="ready"), "net": s.net | {stop_call(s.coord[c].att)}}


def send_commit(s: Here, c: str) -> Changes:
    t = s.coord[c].att
    need(acked=s.coord[c].phase == "acked")
    need(has_all_acks=s.has_all_acks(t), same_view=s.row(t).view == s.coord[c].view)
    return {"coord": s.coordinator_with(c, phase="committing"), "net": s.net | {s.commit_call(t)}}


def resolve_commit(s: Here, c: str) -> Changes:
    need(committing=s.coord[c].phase == "committing")
    if s.k().att == s.coord[c].att:
        return {"coord": s.coordinator_with(c, phase="fenced", view=len(s.chain))}
    need(prepare_holds_epoch=s.prepare_holds_epoch(c))
    return {"coord": s.coordinator_with(c, phase="ready", view=len(s.chain)), "late": s.expired(s.coord[c].att)}


def step_down(s: Here, c: str) -> Changes:
    need(phase=s.coord[c].phase in ("ready", "fenced", "committing"), replaced=not s.prepare_holds_epoch(c))
    return {"coord": s.coord.but(c, Coordinator("out", 0, 0, 0))}


def roll_forward(s: Here, c: str) -> Changes:
    return {"net": s.net | {only(s.roll_forward_calls(c))}}


# -------------------------------------------------------------------------------------------------- actions: owner


def start_owner(s: Here, o: str) -> Changes:
    new = s.own[o]._replace(inc=s.own[o].inc + 1, att=0, fenced=0, status="idle", kind="lost", ver=0, filling=UNKNOWN)
    return {"own": s.own.but(o, new), "base": s.lost_base(o)}


def begin_transition(s: Here, o: str) -> Changes:
    c = s.next_candidate(o)
    need(next_candidate=c != 0)
    changes: Changes = {"own": s.owner_with(o, frozen=c, began=c)}
    if c <= s.own[o].began or c > s.step:
        mine = frozenset({s.step + 1})
        live = {i: s.content[s.own[s.config.owner_of[i]].live][i] for i in s.config.items}
        made = {i: flip(word, mine if i in s.config.changes[s.step + 1] else frozenset()) for i, word in live.items()}
        changes |= {"content": s.content.but(c, Map(made)), "step": s.step + 1}
    return changes


def owner_prepare(s: Here, o: str, t: int) -> Changes:
    need(
        is_sent=s.is_sent(prepare_call(t)),
        is_owner_member=s.is_owner_member(o, t),
        owner_is_newer=s.owner_is_newer(o, t),
    )
    need(owner_is_drained=s.owner_is_drained(o), may_stream=s.may_stream(o, t))
    return {"own": s.owner_with(o, att=t, status="prepared")}


def emit_payload(s: Here, o: str, i: str) -> Changes:
    t, status = s.own[o].att, s.own[o].status
    need(status=status in ("prepared", "streaming", "failed"), owns=s.config.owner_of[i] == o)
    need(not_finish=s.mode_of(t) != "finish", not_emitted=not s.is_emitted(t, i), may_stream=s.may_stream(o, t))
    new, after = s.payload(o, t, i), "failed" if status == "failed" else "streaming"
    need(changed=bool(new.delta), may_start_stream=s.told(stream_call(t), s.may_start_stream(t)))
    return {"net": s.net | {stream_call(t), new}, "own": s.owner_with(o, status=after)}


def end_stream(s: Here, o: str) -> Changes:
    t = s.own[o].att
    need(status=s.own[o].status in ("prepared", "streaming"))
    need(not_finish=s.mode_of(t) != "finish", may_stream=s.may_stream(o, t))
    need(may_start_stream=s.told(stream_call(t), s.may_start_stream(t)), all_emitted=s.all_emitted(o, t))
    return {
        "net": s.net | {stream_call(t), EndMessage("end", t, o, s.listed(o, t))},
        "own": s.owner_with(o, status="ended"),
    }


def stop_owner(s: Here, o: str, t: int) -> Changes:
    if t == s.own[o].att:
        calls = [u for u in s.attempts() if s.is_sent(prepare_call(u)) and s.is_owner_member(o, u)]
        newer = any(s.owner_is_newer(o, u) for u in calls)
        ended = s.own[o].status == "failed" or s.is_dead(s.own[o].frozen)
        need(not_drained=not s.owner_is_drained(o), asked=s.is_sent(stop_call(t)) or ended or newer)
        return {"own": s.owner_with(o, status="stopped")}
    need(
        is_sent=s.is_sent(stop_call(t)), is_owner_member=s.is_owner_member(o, t), owner_is_newer=s.owner_is_newer(o, t)
    )
    return {"own": s.owner_with(o, fenced=t)}


def fail_owner(s: Here, o: str) -> Changes:
    need(status=s.own[o].status in ("prepared", "streaming"))
    return {"own": s.owner_with(o, status="failed")}


def update_baseline(s: Here, o: str, cand: int) -> Changes:
    calls = [m for m in s.sent("update") if m.cand == cand and not s.holds_version(o, m.ver)]
    m = only(m for m in calls if s.may_update_baseline(o, m))
    return {"own": s.owner_with(o, kind="updating", filling=m.ver)}


def rebuild_baseline(s: Here, o: str, c: str) -> Changes:
    n = s.coord[c].view
    need(may_ask=s.may_ask(c), view=n > 0, may_rebuild=s.may_rebuild(o, s.record_of(n).cand))
    return {"own": s.owner_with(o, filling=version_of(n))}


def copy_item(s: Here, o: str, i: str) -> Changes:
    need(filling=s.own[o].filling != UNKNOWN, owns=s.config.owner_of[i] == o)
    return {"base": s.base.but(i, s.content[s.source(o)][i])}


def baseline_filled(s: Here, o: str) -> Changes:
    need(filling=s.own[o].filling != UNKNOWN, all_copied=s.all_copied(o))
    return {"own": s.owner_with(o, kind="at", ver=s.own[o].filling, filling=UNKNOWN)}


def lose_baseline(s: Here, o: str) -> Changes:
    need(not_lost=s.own[o].kind != "lost" or s.own[o].filling != UNKNOWN)
    return {"own": s.owner_with(o, kind="lost", ver=0, filling=UNKNOWN), "base": s.lost_base(o)}


def end_transition(s: Here, o: str, cand: int) -> Changes:
    need(frozen=s.own[o].frozen != 0)
    m = only(m for m in s.end_calls() if m.cand == cand and s.may_end_transition(o, m))
    return {"own": s.owner_with(o, frozen=0, live=cand), "net": s.net | {m}}


def drop_candidate(s: Here, o: str) -> Changes:
    need(frozen=s.own[o].frozen != 0, may_drop=s.may_drop(o))
    return {"own": s.owner_with(o, frozen=0)}


# ----------------------------------------------------------------------------------------------- actions: receiver


def start_receiver(s: Here, r: str, known: bool) -> Changes:
    words = s.content[0] if known else mapped(s.config.items, RAW)
    return {"rcv": s.rcv.but(r, new_receiver(s.rcv[r].inc + 1, s.start_tag(r), known)), "store": s.store.but(r, words)}


def endpoint_prepare(s: Here, r: str, t: int) -> Changes:
    need(is_asked=s.is_asked(r, t))
    need(not_restore=s.mode_of(t) != "restore", is_drained=s.is_drained(r), is_eligible=s.is_eligible(r, t))
    return {"rcv": s.rcv.but(r, s.installed(r, t, False))}


def start_restore(s: Here, r: str, t: int, proved: bool) -> Changes:
    need(is_asked=s.is_asked(r, t))
    need(restore=s.mode_of(t) == "restore", is_drained=s.is_drained(r), is_proved=not proved or s.is_proved(r, t))
    acks = {s.ack(r, t, True, frozenset())} if proved else set()
    return {"rcv": s.rcv.but(r, s.installed(r, t, proved)), "net": s.net | acks}


def refuse_prepare(s: Here, e: str) -> Changes:
    need(refuses=any(s.refuses(e, t) for t in s.attempts()))
    return {}


def close_gate(s: Here, r: str, t: int) -> Changes:
    need(may_close_gate=s.may_close_gate(r, t), gate=s.rcv[r].gate)
    need(staged_first=s.staged_first(t), may_close_gates=s.told(close_call(t), s.may_close_gates(t)))
    return {"rcv": s.receiver_with(r, gate=False), "net": s.net | {close_call(t)}}


def open_apply(s: Here, r: str, t: int) -> Changes:
    need(is_running=s.is_running(r, t), not_open=not s.rcv[r].open)
    need(not_finish=s.mode_of(t) != "finish", may_open_apply=s.told(apply_call(t), s.may_open_apply(t)))
    return {"rcv": s.receiver_with(r, open=True), "net": s.net | {apply_call(t)}}


def accept(s: Here, r: str, t: int, i: str, how: str) -> Changes:
    need(payload_is_current=s.payload_is_current(r, t), not_acked=not s.rcv[r].acked, is_intact=s.is_intact(how))
    p = arrived(only(p for p in s.sent("payload") if p.att == t and p.item == i and s.not_duplicate(r, p)), how)
    return {"rcv": s.receiver_with(r, seen=s.rcv[r].seen | {digest(p)}, pending=s.rcv[r].pending | {p})}


def see_manifest(s: Here, r: str, t: int, o: str) -> Changes:
    need(
        end_is_current=s.end_is_current(r, t),
        not_acked=not s.rcv[r].acked,
        first=all(f.owner != o for f in s.rcv[r].ends),
    )
    end = only(e for e in s.sent("end") if e.att == t and e.owner == o)
    return {"rcv": s.receiver_with(r, ends=s.rcv[r].ends | {Manifest(o, end.payloads)})}


def ignore_duplicate(s: Here, r: str) -> Changes:
    need(duplicate=any(s.payload_is_current(r, p.att) and not s.not_duplicate(r, p) for p in s.sent("payload")))
    return {}


def ignore_stale(s: Here, e: str) -> Changes:
    need(is_stale=any(s.is_stale(e, m.att) for m in s.attempt_calls()))
    return {}


def start_apply(s: Here, r: str) -> Changes:
    need(
        is_running=s.is_running(r, s.rcv[r].att),
        not_writing=not s.rcv[r].writing,
        pending=not s.nothing_pending(r),
        may_write=s.may_write(r),
    )
    return {"rcv": s.receiver_with(r, writing=True, tag=s.dirty_tag(r), loaded=False)}


def apply_item(s: Here, r: str, i: str) -> Changes:
    need(writing=s.rcv[r].writing, may_write=s.may_write(r))
    p = only(p for p in s.rcv[r].pending if p.item == i)
    word = xor(s.store[r][i], p.delta) if p.enc == "xor" else overwrite(s.store[r][i], p.delta, p.target)
    return {"store": s.store.but(r, s.store[r].but(i, word)), "rcv": s.receiver_with(r, pending=s.rcv[r].pending - {p})}


def flush(s: Here, r: str) -> Changes:
    need(may_flush=s.may_flush(r))
    t = s.rcv[r].att
    tag = s.rcv[r].tag if s.mode_of(t) == "restore" else done(s.base_version(t), s.row(t).cand, t)
    flushed = s.rcv[r]._replace(acked=True, gate=s.gate_after_flush(r), tag=tag)
    return {"rcv": s.rcv.but(r, flushed), "net": s.net | {s.ack(r, t, False, s.rcv[r].seen)}}


def fail_receiver(s: Here, r: str) -> Changes:
    need(
        att=s.rcv[r].att != 0,
        not_finish=s.mode_at(r) != "finish",
        not_stopped=not s.rcv[r].stopped,
        not_acked=not s.rcv[r].acked,
    )
    return {"rcv": s.receiver_with(r, stopped=True)}


def stop_and_wait(s: Here, r: str, t: int) -> Changes:
    if t == s.rcv[r].att:
        newer = any(s.is_asked(r, u) and s.is_eligible(r, u) for u in s.attempts())
        need(not_drained=not s.is_drained(r), asked=s.is_sent(stop_call(t)) or s.rcv[r].stopped or newer)
        return {"rcv": s.receiver_with(r, stopped=s.stopped_by_stop(r), drained=True, pending=frozenset())}
    need(is_sent=s.is_sent(stop_call(t)), is_member=s.is_member(r, t), is_newer=s.is_newer(r, t))
    return {"rcv": s.receiver_with(r, fenced=t)}


def open_gate(s: Here, r: str, t: int, ver: int) -> Changes:
    need(closed=not s.rcv[r].gate)
    m = only(m for m in s.open_calls() if m.att == t and m.ver == ver and s.may_open_gate(r, m))
    return {"rcv": s.receiver_with(r, gate=True, tag=clean(ver)), "net": s.net | {m}}


def admit_request(s: Here, r: str, q: str) -> Changes:
    need(may_admit=s.may_admit(r), new=q not in s.rcv[r].requests)
    return {"rcv": s.receiver_with(r, requests=s.rcv[r].requests | {q})}


def finish_request(s: Here, r: str, q: str) -> Changes:
    need(runs=q in s.rcv[r].requests)
    return {"rcv": s.receiver_with(r, requests=s.rcv[r].requests - {q})}


def finish_restore(s: Here, r: str, t: int) -> Changes:
    need(may_finish_restore=s.may_finish_restore(r, t))
    need(tag=s.rcv[r].tag != clean(s.base_version(t)), may_send_restored=restored_call(t) in s.restored_calls())
    return {"rcv": s.receiver_with(r, tag=clean(s.base_version(t))), "net": s.net | {restored_call(t)}}
