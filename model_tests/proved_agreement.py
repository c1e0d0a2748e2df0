"""Where the proved model and the specification stand at different places: every difference, in words.

Compared is everything that both have: control plane, what coordinators believe and said, owners with their baselines,
receivers with their claims and stored words, and all messages. Words are compared bit by bit.
Not handled: what a coordinator or an owner keeps after it stepped down, and the payload digests.

Paper: Appendix B   Spec: vars   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from model_tests.model_state import UNKNOWN, State, Tag
from model_tests.proved import Proved
from model_tests.proved_world import bits, mode_name
from spec.proof.dsl import Concrete

Pair = tuple[str, Any, Any]
"""What is compared, in the specification, in the proved model."""
DELTA = ("xor", "overwrite", "dense")


def agreement(proved: Proved, state: State, *, silent: frozenset[int] = frozenset()) -> list[str]:
    """Differences; empty when the two are at the same place.

    `silent` are attempts of which the specification forgot the messages: it starts after them.
    """
    s = proved.state
    pairs = [*_control(s, state), *_said(s, state, silent), *_rows(s, state)]
    for c in state.coord:
        pairs += [(f"{c} {what}", left, right) for what, left, right in _coordinator(s, state, c)]
    for o in state.own:
        pairs += [(f"{o} {what}", left, right) for what, left, right in _owner(s, state, o)]
    for r in state.rcv:
        pairs += [(f"{r} {what}", left, right) for what, left, right in _receiver(s, state, r)]
    return [
        f"{what}: {left!r} in the specification, {right!r} in the proved model"
        for what, left, right in pairs
        if left != right
    ]


def tag_of(s: Concrete, r: str) -> Tag:
    """The claim of a receiver, with nothing in the fields that do not count."""
    kind = s.tag(r)
    named = kind in ("dirty", "done")
    return Tag(
        kind,
        0 if kind == "none" else s.tag_version(r),
        s.tag_candidate(r) if named else 0,
        s.tag_attempt(r) if kind == "done" else 0,
    )


def tracker_of(s: Concrete, o: str) -> tuple[str, int]:
    """The claim of an owner; `updating` and `lost` name no version."""
    return s.tracker(o), s.tracker_version(o) if s.tracker(o) == "at" else 0


def _control(s: Concrete, state: State) -> Iterator[Pair]:
    chain = state.chain
    yield "there is a record", bool(chain), s.booted()
    yield "version", max(0, len(chain) - 1), s.record_version()
    yield "attempt of the record", chain[-1].att if chain else 0, s.record_attempt()
    yield "candidates", [k.cand for k in chain] or [0], [s.version_candidate(v) for v in range(s.record_version() + 1)]
    for v, k in enumerate(chain):
        bound = {(r, n) for r in state.rcv for n in s.things["Incarnation"] if s.bound(k.att, r, n)}
        yield f"members of version {v}", k.req, bound
    yield "epoch", state.epoch, s.epoch()
    yield "last attempt", len(state.table), s.last_attempt()
    yield "dead candidates", state.dead, {c for c in s.things["Candidate"] if s.dead(c)}
    yield "late attempts", state.late, {t for t in s.things["Attempt"] if s.late(t)}
    yield "last step", state.step, s.step()
    for c in range(state.step + 1):
        yield f"candidate {c}", {i: bits(w) for i, w in state.content[c].items()}, {i: s.word(c, i) for i in state.base}
    yield "baselines", {i: bits(w) for i, w in state.base.items()}, {i: s.base(i) for i in state.base}


def _rows(s: Concrete, state: State) -> Iterator[Pair]:
    for t, row in enumerate(state.table, start=1):
        version, by = (row.view - 1, state.chain[row.view - 1].att) if row.view else (0, 0)
        yield f"mode of {t}", mode_name(row.mode), s.mode(t)
        yield f"base of {t}", version, s.base_version(t)
        yield f"attempt before {t}", {by}, {u for u in s.things["Attempt"] if s.base_attempt(t, u)}
        yield f"epoch of {t}", row.epoch, s.attempt_epoch(t)
        yield f"members of {t}", row.req, {(r, s.member_inc(t, r)) for r in state.rcv if s.required(t, r)}
        yield f"owners of {t}", dict(row.owners), {o: s.member_run(t, o) for o in state.own}
        if row.mode in DELTA:
            yield f"candidate of {t}", row.cand, s.candidate(t)


def _said(s: Concrete, state: State, silent: frozenset[int]) -> Iterator[Pair]:
    sent: dict[str, list[Any]] = {}
    for m in state.net:
        sent.setdefault(m.type, []).append(m)
    attempts = [t for t in s.things["Attempt"] if t not in silent]
    for kind, relation in (("prepare", s.started), ("stop", s.failed), ("commit", s.commit_asked)):
        yield kind, {m.att for m in sent.get(kind, [])}, {t for t in attempts if relation(t)}
    yield "update", {m.ver for m in sent.get("update", [])}, {v for v in s.things["Version"] if s.rolled(v)}
    runs = s.things["Incarnation"]
    acks = {(t, r, n) for t in s.things["Attempt"] for r in state.rcv for n in runs if s.ack(t, r, n)}
    yield "acknowledgements", {(m.att, m.receiver, m.inc) for m in sent.get("ack", [])}, acks
    ends = {(t, o) for t in attempts for o in state.own if s.ended(t, o)}
    yield "manifests", {(m.att, m.owner) for m in sent.get("end", [])}, ends
    listed = {(m.att, p.item) for m in sent.get("end", []) for p in m.payloads}
    yield "listed", listed, {(t, p[1]) for t in attempts for p in s.things["Payload"] if s.listed(t, p)}
    payloads = {
        (m.att, m.item): (m.enc, bits(m.delta) if m.enc == "xor" else 0, bits(m.target))
        for m in sent.get("payload", [])
    }
    yield (
        "payloads",
        payloads,
        {(t, p[1]): _record(s, t, p[1]) for t in attempts for p in s.things["Payload"] if s.sent(t, p)},
    )


def _record(s: Concrete, t: int, e: str) -> tuple[str, int, int]:
    difference = s.mode(t) == "by_xor" and s.coded_xor(t, e)
    return (
        "xor" if difference else "set",
        s.record_old(t, e) ^ s.record_new(t, e) if difference else 0,
        s.record_new(t, e),
    )


def _coordinator(s: Concrete, state: State, c: str) -> Iterator[Pair]:
    own = state.coord[c]
    views = own.phase not in ("out", "acquiring")
    yield "reads", views, s.viewing(c)
    if not views:
        return
    yield "epoch", own.epoch, s.coordinator_epoch(c)
    yield "knows a record", own.view > 0, s.views_record(c)
    if own.view:
        yield "view", (own.view - 1, state.chain[own.view - 1].att), (s.view_version(c), s.view_attempt(c))
    yield "waits", own.phase == "committing", s.committing(c)
    if own.phase == "committing":
        yield "waits for", own.att, s.waits_for(c)
    if own.phase in ("acked", "committing", "fenced"):
        yield "complete", True, s.completed(own.att)


def _owner(s: Concrete, state: State, o: str) -> Iterator[Pair]:
    own = state.own[o]
    attempts = s.things["Attempt"]
    yield "incarnation", own.inc, s.run(o)
    yield "attempt", {own.att} - {0}, {t for t in attempts if s.owner_att(o, t)}
    fence = max([t for t in attempts if s.owner_knew(o, t) or s.owner_fenced(o, t)], default=0)
    yield "fence", max(own.att, own.fenced), fence
    open_one = own.status in ("prepared", "streaming", "failed")
    yield "streams", open_one, s.ready(o) or s.streaming(o)
    if open_one:
        yield "failed", own.status == "failed", s.owner_failed(o)
    if own.status in ("prepared", "streaming"):
        yield "status", own.status, "prepared" if s.ready(o) else "streaming"
    yield "tracker", (own.kind, own.ver if own.kind == "at" else 0), tracker_of(s, o)
    yield "fills", own.filling, s.fill_version(o) if s.filling(o) else UNKNOWN
    yield "frozen", own.frozen, s.frozen_candidate(o) if s.frozen(o) else 0
    yield "took part", own.began == state.step, s.began(o)
    if own.frozen == 0 and own.began == state.step and s.is_resident(o):
        yield "live weights", own.live, s.resident(o)


def _receiver(s: Concrete, state: State, r: str) -> Iterator[Pair]:
    rcv = state.rcv[r]
    for name in ("inc", "att", "fenced", "stopped", "drained", "loaded", "gate", "acked"):
        yield name, getattr(rcv, name), s.lookup(name)(r)
    yield "tag", rcv.tag, tag_of(s, r)
    yield "open", rcv.open, s.open_apply(r)
    yield "requests", rcv.requests, {q for q in s.things["Request"] if s.serves(r, q)}
    yield "seen", {d.item for d in rcv.seen}, {p[1] for p in s.things["Payload"] if s.seen(r, p)}
    yield "manifests", {e.owner for e in rcv.ends}, {o for o in s.things["Owner"] if s.sees_end(r, o)}
    pending = {(t, e) for t in s.things["Attempt"] for e in s.things["Element"] if s.pending(r, t, e)}
    yield "pending", {(p.att, p.item) for p in rcv.pending}, pending
    if not rcv.acked and not rcv.drained:
        yield "writing", rcv.writing, s.permitted(r)
    yield "stores", {i: bits(w) for i, w in state.store[r].items()}, {e: s.store(r, e) for e in s.things["Element"]}
