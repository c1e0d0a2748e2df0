"""Lines of owners as steps of the model.

Spec: StartOwner, BeginTransition, OwnerPrepare, EmitPayload, EndStream, StopOwner, FailOwner, UpdateBaseline,
CopyItem, BaselineFilled, RebuildBaseline, LoseBaseline, EndTransition, DropCandidate
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from model_tests import model
from model_tests.follower_names import Mismatch
from model_tests.model_state import UNKNOWN, Map, prepare_call
from nemo_dcr.trace import Emit

if TYPE_CHECKING:
    from model_tests.follower import Follower

Step = model.Step


def owner_line(f: Follower, node: str, o: str, e: Emit, incarnation: int | None) -> list[Step]:
    own, action, t = f.state.own[o], e.action.value, e.attempt
    match action:
        case "StartOwner":
            return _start_owner(f, node, o, e, incarnation)
        case "BeginTransition":
            return _begin(f, o, str(e.post["frozen"]))
        case "EmitPayload":
            tensors = [each for each in str(e.args["names"]).split(",") if each]
            items = tuple(f.names.item(node, each) for each in tensors if not f.names.is_left_out(node, each))
            key = (o, t, int(str(e.args["payload"])))
            f.same("payload", sum(1 for owner, attempt, _ in f.payloads if (owner, attempt) == (o, t)), key[2])
            masks = range(len(tensors) + 1) if f.here.encoding(f.here.mode_of(t)) == "xor" else (0,)
            if e.args["xor"] not in masks:  # which of them are masks: DV18
                raise Mismatch(f"{e.args['xor']} of {len(tensors)} items are XOR masks in mode {f.here.mode_of(t)}")
            f.payloads[key] = items
            if len(items) < len(tensors):
                f.partial.add(key)
            f.same("attempt", own.att, t)
            return [step for i in items for step in f.told(("EmitPayload", (o, i)), o, t)]
        case "EndStream":
            f.same("attempt", own.att, t)
            count = sum(1 for owner, attempt, _ in f.payloads if (owner, attempt) == (o, t))
            f.same("count", count, e.args["count"])
            return f.told(("EndStream", (o,)), o, t)
        case "OwnerPrepare":
            f.same("mode", f.here.mode_of(t), e.args["mode"])
            f.same("base", f.here.base_version(t), e.args["base"])
            return f.take((action, (o, t)))
        case "StopOwner":
            return _stop_owner(f, o, t)
        case "UpdateBaseline":
            steps = f.take((action, (o, own.frozen)))
            f.same("version", f.state.own[o].filling, e.args["version"])
            return steps
        case "RebuildBaseline":
            return _rebuild(f, o, int(e.args["version"]))  # type: ignore[arg-type]
        case "CopyItem" if f.names.is_left_out(node, str(e.args["name"])):
            f.same("is being filled", own.filling != UNKNOWN, True)
            return []
        case "CopyItem":
            return f.take((action, (o, f.names.item(node, str(e.args["name"])))))
        case "EndTransition":
            cand = f.names.candidate(str(e.args["candidate"]))
            try:
                return f.told((action, (o, cand)), o, 0)
            except model.NotEnabled:
                return _end_without_a_fence(f, o, cand)
        case "DropCandidate":
            f.same("candidate", own.frozen, f.names.candidate(str(e.args["candidate"])))
            return f.take((action, (o,)))
        case "LoseBaseline" if o in f.lost_early:
            f.lost_early.discard(o)
            return []
        case "IgnoreStale" | "RefusePrepare":
            return f.ignored(node, o, e)
        case "FailOwner" | "BaselineFilled" | "LoseBaseline":
            return f.take((action, (o,)))
        case other:
            raise Mismatch(f"{other} is no action of an owner")


def _start_owner(f: Follower, node: str, o: str, e: Emit, incarnation: int | None) -> list[Step]:
    kept, frozen = str(e.post["tracker"]), str(e.post["frozen"])
    steps: list[Step] = []
    if not (o in f.fresh and kept == "at(0)" and not frozen):
        before, base = f.state.own[o], f.state.base
        steps = f.take(("StartOwner", (o,)))
        own = f.state.own[o]
        if kept == f"at({before.ver})" and before.kind == "at":  # Divergence DV16: it kept its baseline
            own = own._replace(kind="at", ver=before.ver)
            f.put("DV16", base=base, own=f.state.own.but(o, own))
        if f.names.candidate(frozen) != own.frozen and not frozen:  # Divergence DV16: the candidate is gone
            f.put("DV16", own=f.state.own.but(o, own._replace(frozen=0)))
    f.fresh.discard(o)
    if incarnation is not None:
        f.names.incarnations[node, incarnation] = f.state.own[o].inc
    return steps


def _begin(f: Follower, o: str, candidate: str) -> list[Step]:
    if candidate not in f.names.candidates:
        number = f.state.step + 1
        f.names.candidates[candidate] = number
        live = {number: name for name, number in f.names.candidates.items()}[f.state.own[o].live]
        changes = frozenset(f.config.items)
        if f.names.changes is not None:
            changes = f.names.changes(candidate, live)
        if f.config.changes.get(number) != changes or number > f.config.max_candidate:
            top = max(f.config.max_candidate, number)
            f.config = replace(f.config, max_candidate=top, changes=Map({**f.config.changes, number: changes}))
    for other, each in f.state.own.items():
        # Divergence DV22: the optimizer step of all owners ends the refill of another one, whose line comes later.
        if other != o and f.state.own[o].began == f.state.step and each.kind == "lost" and each.filling != UNKNOWN:
            f.excuses["DV22"] += 1
            f.lost_early.add(other)
            f.take(("LoseBaseline", (other,)))
    steps = f.take(("BeginTransition", (o,)))
    f.same("candidate", f.state.own[o].frozen, f.names.candidates[candidate])
    return steps


def _stop_owner(f: Follower, o: str, t: int) -> list[Step]:
    try:
        return f.take(("StopOwner", (o, t)))
    except model.NotEnabled:
        own, s = f.state.own[o], f.here
        began = any(
            s.is_sent(prepare_call(u)) and s.is_owner_member(o, u) and own.att < u <= own.fenced for u in s.attempts()
        )
        if t != own.att or s.owner_is_drained(o) or not began:
            raise
        # Divergence DV21: the stop that a prepare began ends after that prepare was stopped too.
        return f.put("DV21", own=f.state.own.but(o, own._replace(status="stopped")))


def _rebuild(f: Follower, o: str, version: int) -> list[Step]:
    problem = model.NotEnabled("rebuild_calls")
    for c in f.config.coordinators:
        if f.state.coord[c].view == version + 1:
            try:
                return f.take(("RebuildBaseline", (o, c)))
            except model.NotEnabled as found:
                problem = found
    for c in f.config.coordinators:
        try:
            f.state = f.hindsight.told(f.config, f.state, ("RebuildBaseline", (o, c)), o, 0)
        except model.NotEnabled:
            continue
        f.same("version", f.state.own[o].filling, version)
        return [("RebuildBaseline", (o, c))]
    raise problem


def compare_owner(f: Follower, o: str, e: Emit) -> None:
    own, tracker = f.state.own[o], str(e.post["tracker"])
    f.same("att", own.att, e.post["att"])
    f.same("tracker", "lost" if own.kind == "lost" else f"{own.kind}({own.ver})", tracker)
    f.same("frozen", own.frozen, f.names.candidate(str(e.post["frozen"])))


def _end_without_a_fence(f: Follower, o: str, cand: int) -> list[model.Step]:
    """Divergence DV33: a coordinator that rolled forward with nobody to fence ends the transition too."""
    s = f.here
    for c, at in s.coord.items():
        call = s.end_call(at.view)
        rolled = at.phase == "ready" and not s.holders(c) and s.is_sent(s.update_call(at.view))
        if rolled and call.cand == cand and s.all_followed(call.ver, cand) and s.may_end_transition(o, call):
            return f.put("DV33", own=s.owner_with(o, frozen=0, live=cand), net=s.net | {call})
    raise Mismatch(f"no coordinator may have ended the transition of {o}")
