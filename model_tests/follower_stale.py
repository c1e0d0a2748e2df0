"""Why a line that changes nothing is right: what has to be true in the model when something is ignored or refused.

The code ignores more than the specification has names for (divergence DV15), and tells the reason. Each reason is a
claim about the state, and the claim has to hold in the model.

Not handled: duplicates (follower); conflicts of the control plane (follower).

Spec: IgnoreStale, RefusePrepare   Proofs: fence_stops_old_writes
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from model_tests.model_decisions import Here
from model_tests.model_state import UNKNOWN, prepare_call, stop_call
from nemo_dcr.trace import Emit

if TYPE_CHECKING:
    from model_tests.follower import Follower

SLEEPS = "the engine sleeps"


def why_not_stale(follower: Follower, node: str, name: str, e: Emit) -> str:
    """Why `name` had no reason to ignore or refuse; empty when it had."""
    s, t, reason = follower.here, e.attempt, str(e.args.get("reason", ""))
    receiver = name in s.rcv
    if t > len(s.table):
        return f"attempt {t} was never prepared"
    if e.action.value == "RefusePrepare":
        return _why_not_refused(s, name, t, reason)
    if reason.startswith("incarnation "):
        known = s.is_member(name, t) if receiver else s.is_owner_member(name, t)
        return f"attempt {t} names the incarnation that runs" if known and t else ""
    justified = _receiver_ignores(follower, name, e, reason) if receiver else _owner_ignores(follower, name, t, reason)
    return "" if justified else f"attempt {t} is not stale here, and nothing else explains: {reason}"


def _why_not_refused(s: Here, name: str, t: int, reason: str) -> str:
    """As `Refuses` of the specification, for this attempt."""
    if not t or not s.is_sent(prepare_call(t)):
        return f"attempt {t} did not start"
    if name in s.rcv:
        asked = s.is_member(name, t) and s.is_newer(name, t)
        sleeps = reason == SLEEPS and not s.rcv[name].gate  # Divergence DV1
        fits = s.is_eligible(name, t) and not sleeps
    else:
        asked = s.is_owner_member(name, t) and s.owner_is_newer(name, t)
        fits = s.may_stream(name, t)
    return "" if asked and not fits else f"attempt {t} fits here" if fits else f"attempt {t} is not new here"


def is_being_stopped(s: Here, r: str) -> bool:
    """A stop or a newer prepare may have reached the receiver and waits for the drain; until then nothing tells it."""
    t, rcv = s.rcv[r].att, s.rcv[r]
    newer = any(s.is_sent(prepare_call(u)) and s.is_member(r, u) and u > t for u in s.attempts())
    return s.is_sent(stop_call(t)) or newer or rcv.stopped


def _receiver_ignores(follower: Follower, r: str, e: Emit, reason: str) -> bool:
    s, t = follower.here, e.attempt
    rcv = s.rcv[r]
    over = not s.is_running(r, t) or is_being_stopped(s, r)
    if reason == "payload":
        key = (follower.names.node(f"owner {e.args['owner']}"), t, e.args["payload"])
        return key in follower.payloads and (over or rcv.acked)
    if reason == "manifest":
        return over or rcv.acked
    if reason == "failure":
        return over or rcv.acked or rcv.drained
    if reason == "stop":
        return t < rcv.att and s.is_sent(stop_call(t))
    if "does not open the gate" in reason:
        sent = [m for m in s.open_calls() if m.att == t]
        return not any(s.may_open_gate(r, m) for m in sent) or over
    if reason.startswith("the restore of version"):
        # Divergence DV7: a stop that reached a proved restore makes the code refuse.
        return over or not s.may_finish_restore(r, t)
    if reason.startswith("late: "):
        return rcv.acked
    if reason.startswith("stale: "):
        newer = any(s.is_sent(prepare_call(u)) and s.is_member(r, u) for u in range(t + 1, len(s.table) + 1))
        return not s.is_newer(r, t) or newer
    if reason.startswith(("stopped: ", "not prepared")):
        return over
    return False


def _owner_ignores(follower: Follower, o: str, t: int, reason: str) -> bool:
    s, own = follower.here, follower.state.own[o]
    newer = any(s.is_sent(prepare_call(u)) and s.is_owner_member(o, u) for u in range(t + 1, len(s.table) + 1))
    if reason == "stop":
        return t < own.att and s.is_sent(stop_call(t))
    if reason.startswith("stale: "):
        return not s.owner_is_newer(o, t) or newer
    if reason.startswith(("stopped: ", "not prepared")):
        return t != own.att or own.status in ("stopped", "failed", "ended") or s.mode_of(t) == "finish" or newer
    if reason.startswith("the baseline became"):
        return not s.may_stream(o, t)
    if found := re.match(r"(update to|end of|candidate) '([^']*)'", reason):
        what, candidate = found.group(1), follower.names.candidate(found.group(2))
        return _refuses_round(s, o, what, candidate)
    if reason.startswith("rebuild of version"):
        return not s.may_rebuild(o, s.k().cand)
    return False


def _refuses_round(s: Here, o: str, what: str, candidate: int) -> bool:
    own = s.own[o]
    if what == "candidate":  # a drop of one that is being copied, so it is committed
        return own.filling != UNKNOWN or own.kind == "updating"
    if not s.is_frozen(o, candidate):
        return True
    if what == "end of":
        return not (own.kind == "at" and any(r.cand == candidate and own.ver == v for v, r in enumerate(s.chain)))
    # Divergence DV11: an owner whose stream failed refuses until it was stopped.
    version = next((v for v, r in enumerate(s.chain) if r.cand == candidate), None)
    forward = version is not None and (own.kind == "lost" or own.ver < version)
    return own.status in ("streaming", "failed", "prepared") or own.filling != UNKNOWN or not forward
