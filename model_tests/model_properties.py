"""What the specification promises, by the names of Properties.tla: invariants, step properties and the refinement.

`STATE_PROPERTIES` look at one state, `STEP_PROPERTIES` at a state and the next one. `refit_start` and `refit_steps`
together are RefinesRefit: the model seen as level 0, where a refit is one atomic step.
Not handled: liveness (TransitionEnds, AllServe), which only TLC checks.

Paper: Proposition 1; Appendix B   Spec: Properties, Refit   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from model_tests.model import here
from model_tests.model_decisions import Here
from model_tests.model_state import DELTA, UNKNOWN, Config, Map, Member, State, Word, clean, flip

Contents = Map[str, Word]


def still_bound(s: Here, m: Member, t: int) -> bool:
    """Same process, not prepared again since."""
    return s.rcv[m[0]].inc == m[1] and s.rcv[m[0]].att == t


def commit_exact(s: Here) -> bool:
    """A version is what its receivers really store: the point of the whole protocol."""
    bound = [m[0] for m in s.k().req if still_bound(s, m, s.k().att)]
    return all(s.store[r] == s.committed(len(s.chain) - 1) for r in bound)


def commit_acked(s: Here) -> bool:
    """Nobody is bound to a version that it did not acknowledge, payload by payload."""
    acks = s.sent("ack")
    return all(
        any(
            a.att == record.att and (a.receiver, a.inc) == m and (a.proved or a.payloads == s.expected(record.att))
            for a in acks
        )
        for record in s.chain
        for m in record.req
    )


def clean_exact(s: Here) -> bool:
    """A receiver's claim is what later XOR records build on."""
    claims = {r: p.tag.ver for r, p in s.rcv.items() if p.tag.kind == "clean"}
    return all(ver < len(s.chain) and s.store[r] == s.committed(ver) for r, ver in claims.items())


def done_exact(s: Here) -> bool:
    """An acknowledged set is complete before anybody knows whether it is committed."""
    return all(s.store[r] == s.content[p.tag.cand] for r, p in s.rcv.items() if p.tag.kind == "done")


def dirty_repairable(s: Here) -> bool:
    """What an overwrite retry relies on: outside the changed set nothing was touched."""
    for r, p in s.rcv.items():
        if p.tag.kind == "dirty":
            old, new = s.committed(p.tag.ver), s.content[p.tag.cand]
            if not all(flip(s.store[r][i], old[i]) <= flip(new[i], old[i]) for i in s.config.items):
                return False
    return True


def baseline_bound(s: Here) -> bool:
    """Change detection compares with the committed weights, and training goes on from them."""
    now, committed = len(s.chain) - 1, s.k().cand
    for o, p in s.own.items():
        if p.kind == "at":
            if not all(s.base[i] == s.committed(p.ver)[i] for i in s.items_of(o)):
                return False
            if not (p.ver == now or s.chain == () or (p.ver == now - 1 and p.frozen == committed)):
                return False
        if p.filling != UNKNOWN and not (p.filling == now and s.source(o) == committed):
            return False
        if p.frozen not in (0, committed):
            new, old = s.content[p.frozen], s.content[committed]
            if not all(flip(new[i], old[i]) <= {p.frozen} for i in s.items_of(o)):
                return False
        if p.frozen == 0 and p.live != committed:
            return False
    return True


def payload_bound(s: Here) -> bool:
    """Every payload ever sent, also by a zombie, is the difference that its attempt promised."""
    for p in s.sent("payload"):
        old, new = s.committed(s.base_version(p.att))[p.item], s.content[s.row(p.att).cand][p.item]
        match s.mode_of(p.att):
            case "restore":
                right = p.target == old
            case "dense":
                right = p.target == new
            case _:
                right = p.delta == flip(old, new) and p.target == new
        if not right:
            return False
    return True


def fence_safe(s: Here) -> bool:
    """No write of an attempt that was replaced can still land."""
    return all(p.att == receiver.att for receiver in s.rcv.values() for p in receiver.pending)


def single_commit(s: Here) -> bool:
    """One chain: each version follows its predecessor, comes from one attempt, and none of them was given up."""
    for place, record in enumerate(s.chain):
        if record.base != max(0, place - 1) or record.cand in s.dead:
            return False
    for before, after in pairwise(s.chain):
        new, old = s.content[after.cand], s.content[before.cand]
        if not (after.att > before.att and after.cand > before.cand):
            return False
        if not all(flip(new[i], old[i]) <= {after.cand} for i in s.config.items):
            return False
    return True


def gate_safe(s: Here) -> bool:
    """A request never sees a mixture."""
    serving = {r: p.tag for r, p in s.rcv.items() if p.gate or p.requests}
    return all(
        tag.kind == "clean" and tag.ver < len(s.chain) and s.store[r] == s.committed(tag.ver)
        for r, tag in serving.items()
    )


def gate_fresh(s: Here) -> bool:
    """Who is bound to a version does not go back to serving the one before."""
    bound = [m[0] for m in s.k().req if still_bound(s, m, s.k().att)]
    return all(s.rcv[r].tag == clean(len(s.chain) - 1) for r in bound if s.rcv[r].gate)


def gate_transition(s: Here) -> bool:
    """Synchronous refits: no service between prepare and the end of the transition."""
    open_at = {p.att for p in s.rcv.values() if p.gate and p.att != 0}
    refits = [t for t in open_at if s.mode_of(t) in DELTA]
    return s.config.gate_mode != "sync" or all(
        any(record.att == t for record in s.chain) and all(p.frozen != s.row(t).cand for p in s.own.values())
        for t in refits
    )


def takeover_decides(s: Here) -> bool:
    """Who takes over and reads knows the outcome for good."""
    active = [p for p in s.coord.values() if p.epoch == s.epoch and p.phase not in ("out", "acquiring", "committing")]
    return all(p.view == len(s.chain) for p in active)


def attempt_order(s: Here) -> bool:
    """A replaced coordinator fences nobody: later attempts belong to epochs at least as new."""
    return all(before.epoch <= after.epoch for before, after in pairwise(s.table))


def monotone(before: Here, after: Here) -> bool:
    """The record only grows, by one."""
    return after.chain == before.chain or after.chain[:-1] == before.chain


def fence_mono(before: Here, after: Here) -> bool:
    """A receiver never goes back to an older attempt in one incarnation."""
    pairs = [(old, after.rcv[r]) for r, old in before.rcv.items()]
    return all(new.att >= old.att for old, new in pairs if new.inc == old.inc)


def ack_kept(before: Here, after: Here) -> bool:
    """An acknowledgement is never withdrawn."""
    return set(before.sent("ack")) <= set(after.sent("ack"))


def dead_kept(before: Here, after: Here) -> bool:
    """What was given up stays so."""
    return before.dead <= after.dead


class Refit(NamedTuple):
    """Level 0: a history of policies, and receivers with bits and gates."""

    history: tuple[Contents, ...]
    bound: frozenset[str]
    bits: Map[str, Contents]
    open: Map[str, bool]


def abstract(s: Here) -> Refit:
    """The refinement mapping."""
    bound = frozenset(m[0] for m in s.k().req if still_bound(s, m, s.k().att))
    history = tuple(s.content[record.cand] for record in s.chain)
    return Refit(history, bound, s.store, Map({r: p.gate for r, p in s.rcv.items()}))


def refit_start(s: Here) -> bool:
    """The first state of level 0: no policy, nobody bound, every gate closed."""
    a = abstract(s)
    return a.history == () and not a.bound and not any(a.open.values())


def refit_steps(before: Here, after: Here) -> bool:
    """Each step is a step of level 0, or changes nothing that it sees."""
    a, b = abstract(before), abstract(after)
    return a == b or _commits(a, b) or any(_acts(r, a, b) for r in a.bits)


def _commits(a: Refit, b: Refit) -> bool:
    """CommitPolicy: one policy more, and who is bound to it holds it behind a closed gate."""
    more = b.history[:-1] == a.history and len(b.history) == len(a.history) + 1
    return (
        more
        and (a.bits, a.open) == (b.bits, b.open)
        and all(not a.open[r] and a.bits[r] == b.history[-1] for r in b.bound)
    )


def _acts(r: str, a: Refit, b: Refit) -> bool:
    """Write, OpenGate, Release or Crash of one receiver."""
    if a.history != b.history:
        return False
    alone = all(a.bits[other] == b.bits[other] and a.open[other] == b.open[other] for other in a.bits if other != r)
    writes = not a.open[r] and r not in a.bound and a.bound == b.bound and a.open == b.open and alone
    fresh = a.history[-1:] if r in a.bound else a.history
    opens = a.bits[r] in fresh and b.open == a.open.but(r, True) and a.bound == b.bound and a.bits == b.bits
    closed = b.open in (a.open, a.open.but(r, False))
    releases = closed and b.bound in (a.bound, a.bound - {r}) and a.bits == b.bits
    crashes = not b.open[r] and b.bound == a.bound - {r} and alone
    return writes or opens or releases or crashes


def _at(holds: Callable[[Here], bool], config: Config, state: State) -> bool:
    return holds(here(config, state))


def _between(holds: Callable[[Here, Here], bool], config: Config, before: State, after: State) -> bool:
    return holds(here(config, before), here(config, after))


_STATE = (
    commit_exact,
    commit_acked,
    clean_exact,
    done_exact,
    dirty_repairable,
    baseline_bound,
    payload_bound,
    fence_safe,
    single_commit,
    gate_safe,
    gate_fresh,
    gate_transition,
    takeover_decides,
    attempt_order,
)
_STEP = (monotone, fence_mono, ack_kept, dead_kept, refit_steps)
STATE_PROPERTIES: dict[str, Callable[[Config, State], bool]] = {one.__name__: partial(_at, one) for one in _STATE}
STEP_PROPERTIES: dict[str, Callable[[Config, State, State], bool]] = {
    one.__name__: partial(_between, one) for one in _STEP
}
