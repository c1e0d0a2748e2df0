"""The guards of the specification: each operator of DeltaRefit.tla by its name in snake case, in the same order.

`s` is a state together with the constants. Guards call each other as its methods, so a test that replaces a method of
`Here` weakens that guard everywhere, as a configuration of TLC does.
Not handled: what a coordinator decides (model_decisions); steps (model_actions).

Paper: Section 6; Algorithms B.1, B.2   Spec: DeltaRefit
"""
# Side by side with the specification, one definition a line: the formatter would make four of each.
# fmt: off
# ruff: noqa: N805

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_tests.model_state import (
    DELTA,
    NO_RECORD,
    NONE,
    RAW,
    UNKNOWN,
    AckMessage,
    BaselineCall,
    Config,
    Coordinator,
    Digest,
    Map,
    Message,
    OpenMessage,
    Owner,
    PayloadMessage,
    Receiver,
    Record,
    Row,
    State,
    Tag,
    Word,
    clean,
    digest,
    dirty,
    flip,
    item_names,
    prepare_call,
    version_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards(State):
    """A state and its constants, asked about."""

    config: Config

    # ----------------------------------------------------------------------------------------------------- names

    def items_of(s, o: str) -> list[str]: return [i for i in s.config.items if s.config.owner_of[i] == o]
    def record_of(s, n: int) -> Record: return NO_RECORD if n == 0 else s.chain[n - 1]
    def k(s) -> Record: return s.record_of(len(s.chain))
    def committed(s, v: int) -> Map[str, Word]: return s.content[s.chain[v].cand if v < len(s.chain) else 0]
    def last(s) -> int: return len(s.table)
    def row(s, t: int) -> Row: return s.table[t - 1 if t > 0 else len(s.table)]
    def mode_of(s, t: int) -> str: return s.row(t).mode
    def base_version(s, t: int) -> int: return version_of(s.row(t).view)
    def mode_at(s, r: str) -> str: return "none" if s.rcv[r].att == 0 else s.mode_of(s.rcv[r].att)
    def same_incarnation(s, a: int, b: int) -> bool: return a == b
    def is_member(s, r: str, t: int) -> bool:
        return any(m[0] == r and s.same_incarnation(m[1], s.rcv[r].inc) for m in s.row(t).req)
    def is_owner_member(s, o: str, t: int) -> bool: return s.row(t).owners[o] == s.own[o].inc
    def is_sent(s, message: Message) -> bool: return message in s.net
    def sent(s, kind: str) -> list[Any]: return [m for m in s.net if m.type == kind]
    def told(s, message: Message, condition: bool) -> bool: return s.is_sent(message) or condition
    def attempts(s) -> range: return range(1, s.last() + 1)

    # ----------------------------------------------------------------------------------------- guards: control plane

    def holds_epoch(s, e: int) -> bool: return e == s.epoch
    def prepare_holds_epoch(s, c: str) -> bool: return s.holds_epoch(s.coord[c].epoch)
    def commit_holds_epoch(s, t: int) -> bool: return s.holds_epoch(s.row(t).epoch)
    def record_matches(s, view: int) -> bool: return view == len(s.chain)
    def is_latest(s, t: int) -> bool: return t == s.last()
    def in_time(s, t: int) -> bool: return t not in s.late
    def not_dead(s, cand: int) -> bool: return cand not in s.dead
    def not_committed(s, cand: int) -> bool: return cand != s.k().cand
    def may_xor(s, cand: int) -> bool:
        return not any(s.mode_of(t) in DELTA and s.row(t).cand == cand for t in s.attempts())
    def no_record_yet(s) -> bool: return s.chain == ()
    def can_prepare(s, c: str, mode: str, cand: int) -> bool:
        return (s.prepare_holds_epoch(c) and s.record_matches(s.coord[c].view)
                and (mode not in DELTA or (s.not_dead(cand) and s.not_committed(cand)))
                and (mode != "xor" or s.may_xor(cand)))
    def can_commit(s, t: int) -> bool:
        return (s.commit_holds_epoch(t) and s.record_matches(s.row(t).view) and s.is_latest(t)
                and s.not_dead(s.row(t).cand) and s.in_time(t))
    def can_kill(s, c: str, cand: int) -> bool: return s.prepare_holds_epoch(c) and s.not_committed(cand)
    def can_bootstrap(s, c: str) -> bool:
        return s.prepare_holds_epoch(c) and s.no_record_yet() and s.is_latest(s.coord[c].att)

    # ---------------------------------------------------------------------------------------------- guards: receiver

    def is_newer(s, r: str, t: int) -> bool: return t > s.rcv[r].att and t > s.rcv[r].fenced
    def is_current(s, r: str, t: int) -> bool: return t == s.rcv[r].att
    def is_running(s, r: str, t: int) -> bool: return s.is_current(r, t) and not s.rcv[r].stopped
    def is_drained(s, r: str) -> bool: return s.rcv[r].drained
    def is_committed_done(s, tag: Tag, att: int) -> bool: return tag.kind == "done" and tag.att == att
    def is_mixture(s, tag: Tag, v: int, cand: int) -> bool:
        return tag.kind in ("dirty", "done") and tag.ver == v and tag.cand == cand
    def holds_record(s, tag: Tag, view: int) -> bool:
        return tag == clean(version_of(view)) or s.is_committed_done(tag, s.record_of(view).att)
    def fits(s, tag: Tag, mode: str, view: int, cand: int) -> bool:
        return (mode in ("dense", "restore") or s.holds_record(tag, view)
                or (mode == "overwrite" and s.is_mixture(tag, version_of(view), cand)))
    def is_eligible(s, r: str, t: int) -> bool: return s.fits(s.rcv[r].tag, s.mode_of(t), s.row(t).view, s.row(t).cand)
    def is_proved(s, r: str, t: int) -> bool:
        return s.mode_of(t) == "restore" and s.base_version(t) == 0 and s.rcv[r].loaded
    def closes_gate(s, t: int) -> bool:
        return s.mode_of(t) == "restore" or (s.config.gate_mode == "sync" and s.mode_of(t) != "finish")
    def may_close_gate(s, r: str, t: int) -> bool: return s.is_running(r, t) and not s.rcv[r].acked
    def staged_first(s, t: int) -> bool: return s.config.gate_mode == "async" and s.mode_of(t) != "restore"
    def is_quiet(s, r: str) -> bool: return not s.rcv[r].gate and not s.rcv[r].requests
    def is_intact(s, how: str) -> bool: return how != "damaged"
    def end_is_current(s, r: str, t: int) -> bool: return s.is_running(r, t)
    def payload_is_current(s, r: str, t: int) -> bool: return s.is_running(r, t)
    def not_duplicate(s, r: str, p: PayloadMessage) -> bool: return all(d.item != p.item for d in s.rcv[r].seen)
    def may_write(s, r: str) -> bool: return s.rcv[r].open and s.is_quiet(r)
    def flush_permitted(s, r: str) -> bool: return s.may_write(r)
    def seen_of(s, r: str, o: str) -> frozenset[Digest]:
        return frozenset(d for d in s.rcv[r].seen if s.config.owner_of[d.item] == o)
    def same_set(s, a: frozenset[Digest], b: frozenset[Digest]) -> bool: return a == b
    def manifest_agrees(s, r: str, o: str) -> bool:
        return all(s.same_set(s.seen_of(r, o), e.payloads) for e in s.rcv[r].ends if e.owner == o)
    def is_complete(s, r: str, o: str) -> bool:
        return any(e.owner == o and item_names(e.payloads) == item_names(s.seen_of(r, o)) for e in s.rcv[r].ends)
    def is_staged(s, r: str) -> bool: return all(s.is_complete(r, o) for o in s.config.owners)
    def nothing_pending(s, r: str) -> bool: return not s.rcv[r].pending
    def may_flush(s, r: str) -> bool:
        return (s.mode_at(r) in (*DELTA, "restore") and not s.rcv[r].stopped and not s.rcv[r].acked
                and s.flush_permitted(r) and s.is_staged(r) and s.nothing_pending(r)
                and all(s.manifest_agrees(r, o) for o in s.config.owners))
    def may_admit(s, r: str) -> bool: return s.rcv[r].gate
    def is_of_acked_attempt(s, r: str, t: int) -> bool:
        return s.is_current(r, t) and (s.mode_of(t) == "finish" or s.rcv[r].acked)
    def may_open_gate(s, r: str, m: OpenMessage) -> bool:
        tag = s.rcv[r].tag
        return s.is_of_acked_attempt(r, m.att) and (tag == clean(m.ver) or s.is_committed_done(tag, m.record))
    def may_finish_restore(s, r: str, t: int) -> bool:
        return s.is_running(r, t) and s.mode_of(t) == "restore" and s.rcv[r].acked

    def start_tag(s, r: str) -> Tag: return NONE
    def dirty_tag(s, r: str) -> Tag:
        t, tag = s.rcv[r].att, s.rcv[r].tag
        v, c = s.base_version(t), s.row(t).cand
        if s.mode_of(t) in ("dense", "restore"):
            return NONE
        return dirty(v, c) if tag == clean(v) or s.is_mixture(tag, v, c) else NONE
    def tag_at_install(s, r: str, t: int) -> Tag:
        tag = s.rcv[r].tag
        return clean(s.base_version(t)) if s.is_committed_done(tag, s.record_of(s.row(t).view).att) else tag
    def seen_at_install(s, r: str) -> frozenset[Digest]: return frozenset()
    def stopped_by_stop(s, r: str) -> bool: return True
    def gate_after_flush(s, r: str) -> bool: return s.rcv[r].gate

    def is_asked(s, r: str, t: int) -> bool:
        return s.is_sent(prepare_call(t)) and s.is_member(r, t) and s.is_newer(r, t)
    def ack(s, r: str, t: int, proved: bool, payloads: frozenset[Digest]) -> AckMessage:
        return AckMessage("ack", t, r, s.rcv[r].inc, proved, payloads)
    def installed(s, r: str, t: int, proved: bool) -> Receiver:
        return s.rcv[r]._replace(
            att=t, tag=s.tag_at_install(r, t), gate=s.rcv[r].gate and not s.closes_gate(t),
            seen=s.seen_at_install(r), ends=frozenset(), open=False, writing=False, acked=proved, stopped=False,
            drained=s.mode_of(t) == "finish" or proved)
    def refuses(s, e: str, t: int) -> bool:
        if e in s.config.receivers:
            return s.is_asked(e, t) and not s.is_eligible(e, t)
        return (s.is_sent(prepare_call(t)) and s.is_owner_member(e, t) and s.owner_is_newer(e, t)
                and not s.may_stream(e, t))
    def attempt_calls(s) -> list[Any]:
        return [m for m in s.net if m.type in ("prepare", "stop", "apply", "close", "open", "payload", "end")]
    def is_stale(s, e: str, t: int) -> bool:
        if e in s.config.receivers:
            return not s.is_running(e, t) or s.rcv[e].acked
        return t != s.own[e].att or s.own[e].status in ("ended", "stopped", "failed")

    # ------------------------------------------------------------------------------------------------- guards: owner

    def holds_version(s, o: str, v: int) -> bool: return s.own[o].kind == "at" and s.own[o].ver == v
    def has_followed(s, o: str, v: int) -> bool: return s.holds_version(o, v)
    def restore_base(s, o: str, v: int) -> bool: return s.holds_version(o, v)
    def delta_base(s, o: str, v: int) -> bool: return s.holds_version(o, v)
    def is_frozen(s, o: str, cand: int) -> bool: return cand != 0 and s.own[o].frozen == cand
    def update_matches(s, o: str, cand: int) -> bool: return s.is_frozen(o, cand)
    def owner_is_newer(s, o: str, t: int) -> bool: return t > s.own[o].att and t > s.own[o].fenced
    def owner_is_drained(s, o: str) -> bool: return s.own[o].status not in ("prepared", "streaming", "failed")
    def may_stream(s, o: str, t: int) -> bool:
        match s.mode_of(t):
            case "finish":
                return True
            case "dense":
                return s.is_frozen(o, s.row(t).cand) and s.own[o].kind != "updating"
            case "restore":
                return s.restore_base(o, s.base_version(t))
            case _:
                return s.is_frozen(o, s.row(t).cand) and s.delta_base(o, s.base_version(t))
    def may_update_baseline(s, o: str, m: BaselineCall) -> bool:
        return (s.update_matches(o, m.cand) and s.own[o].status != "streaming" and s.own[o].filling == UNKNOWN
                and (s.own[o].kind == "lost" or s.own[o].ver < m.ver))
    def is_committed_resident(s, o: str, cand: int) -> bool:
        return s.own[o].frozen == 0 and s.own[o].began == s.step and s.own[o].live == cand
    def may_rebuild(s, o: str, cand: int) -> bool:
        return s.own[o].kind == "lost" and s.own[o].filling == UNKNOWN and s.is_committed_resident(o, cand)
    def may_end_transition(s, o: str, m: BaselineCall) -> bool:
        return s.is_frozen(o, m.cand) and s.has_followed(o, m.ver)
    def is_dead(s, cand: int) -> bool: return cand in s.dead
    def may_drop(s, o: str) -> bool:
        return (s.is_dead(s.own[o].frozen) and s.own[o].filling == UNKNOWN and s.own[o].kind != "updating"
                and s.own[o].status not in ("streaming", "failed"))
    def next_candidate(s, o: str) -> int:
        if s.own[o].frozen != 0 or s.own[o].filling != UNKNOWN:
            return 0
        if s.own[o].began < s.step:
            return s.step
        all_free = all(p.frozen == 0 and p.began == s.step and p.filling == UNKNOWN for p in s.own.values())
        return s.step + 1 if s.step < s.config.max_candidate and all_free else 0

    def encoding(s, mode: str) -> str: return "xor" if mode == "xor" else "set"
    def everything(s) -> Word: return frozenset(range(s.config.max_candidate + 1))
    def payload(s, o: str, t: int, i: str) -> PayloadMessage:
        mode, new = s.mode_of(t), s.content[s.own[o].frozen][i]
        delta = s.everything() if mode in ("dense", "restore") else flip(s.base[i], new)
        return PayloadMessage("payload", t, i, s.encoding(mode), delta, s.base[i] if mode == "restore" else new)
    def is_emitted(s, t: int, i: str) -> bool: return any(p.att == t and p.item == i for p in s.sent("payload"))
    def all_emitted(s, o: str, t: int) -> bool:
        return all(s.is_emitted(t, i) or not s.payload(o, t, i).delta for i in s.items_of(o))
    def listed(s, o: str, t: int) -> frozenset[Digest]:
        return frozenset(digest(p) for p in s.sent("payload") if p.att == t and s.config.owner_of[p.item] == o)
    def source(s, o: str) -> int: return s.own[o].frozen if s.own[o].frozen != 0 else s.own[o].live
    def all_copied(s, o: str) -> bool: return all(s.base[i] == s.content[s.source(o)][i] for i in s.items_of(o))
    def lost_base(s, o: str) -> Map[str, Word]:
        return Map({i: RAW if s.config.owner_of[i] == o else s.base[i] for i in s.config.items})

    # ------------------------------------------------------------------- what EXCEPT says: one record, some fields

    def owner_with(s, o: str, **new: Any) -> Map[str, Owner]: return s.own.but(o, s.own[o]._replace(**new))
    def receiver_with(s, r: str, **new: Any) -> Map[str, Receiver]: return s.rcv.but(r, s.rcv[r]._replace(**new))
    def coordinator_with(s, c: str, **new: Any) -> Map[str, Coordinator]:
        return s.coord.but(c, s.coord[c]._replace(**new))
