"""Lines of receivers as steps of the model.

Spec: StartReceiver, EndpointPrepare, StartRestore, CloseGate, OpenApply, Accept, SeeManifest, IgnoreDuplicate,
StartApply, ApplyItem, Flush, FailReceiver, StopAndWait, OpenGate, AdmitRequest, FinishRequest, FinishRestore
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_tests import model
from model_tests.digest_classes import compare_stored
from model_tests.follower_names import Mismatch
from model_tests.follower_stale import SLEEPS
from model_tests.model_state import NONE, RAW, Map, prepare_call
from nemo_dcr.trace import Emit

if TYPE_CHECKING:
    from model_tests.follower import Follower

Step = model.Step

RELEASED = "the engine released its weights"


def receiver_line(f: Follower, node: str, r: str, e: Emit, incarnation: int | None) -> list[Step]:
    rcv, action, t, args = f.state.rcv[r], e.action.value, e.attempt, e.args
    match action:
        case "StartReceiver":
            return _start_receiver(f, node, r, str(args.get("loaded", "")), incarnation)
        case "EndpointPrepare" | "StartRestore":
            f.accepted[r] = set()
            f.same("base", f.here.base_version(t) if t <= len(f.state.table) else None, args["base"])
            if action == "EndpointPrepare":
                f.same("mode", f.here.mode_of(t), args["mode"])
                # Divergence DV14: a finish attempt names the committed candidate in the code.
                named = f.here.record_of(f.here.row(t).view).cand if args["mode"] == "finish" else f.here.row(t).cand
                f.same("candidate", named, f.names.candidate(str(args["candidate"])))
            proved = (bool(args["proved"]),) if action == "StartRestore" else ()
            return f.take((action, (r, t, *proved)))
        case "CloseGate" if args.get("reason") == SLEEPS and rcv.gate:
            # Divergence DV1: an engine that sleeps closes its gate.
            return f.put("DV1", rcv=f.state.rcv.but(r, rcv._replace(gate=False)))
        case "FailReceiver" if args.get("reason") == RELEASED:
            return _released(f, r)
        case "CloseGate" | "OpenApply":
            return f.told((action, (r, t)), r, t)
        case "OpenGate":
            return f.told((action, (r, t, args["version"])), r, t)
        case "FinishRestore":
            f.same("version", f.here.base_version(t), args["version"])
            return f.told((action, (r, t)), r, t)
        case "StopAndWait":
            return _stop_and_wait(f, r, t)
        case "Accept":
            key, items = f.payload(t, args)
            f.accepted.setdefault(r, set()).add(key)
            return f.take(*(("Accept", (r, t, i, "sound")) for i in items))
        case "SeeManifest":
            o = f.names.node(f"owner {args['owner']}")
            count = sum(1 for owner, attempt, _ in f.payloads if (owner, attempt) == (o, t))
            f.same("count", count, args["count"])
            return f.take((action, (r, t, o)))
        case "ApplyItem" if f.names.is_left_out(int(str(args["owner"])), str(args["name"])):
            f.same("may write", rcv.writing and f.here.may_write(r) and rcv.att == t, True)
            return []
        case "StartApply" if not rcv.pending and f.accepted.get(r, set()) & f.partial:
            f.same("may start", f.here.is_running(r, t) and f.here.may_write(r) and not rcv.writing, True)
            started = rcv._replace(writing=True, tag=f.here.dirty_tag(r), loaded=False)
            return f.put("parts", rcv=f.state.rcv.but(r, started))
        case "ApplyItem":
            f.same("attempt", rcv.att, t)
            key, items = f.payload(t, args)
            item = f.names.item(int(args["owner"]), str(args["name"]))  # type: ignore[arg-type]
            if item not in items or key not in f.accepted.get(r, ()):
                raise Mismatch(f"{item} is in no payload that was accepted as {key}")
            return f.take((action, (r, item)))
        case "StartApply" | "Flush" | "FailReceiver":
            f.same("attempt", rcv.att, t)
            return f.take((action, (r,)))
        case "AdmitRequest" | "FinishRequest":
            return f.take((action, (r, str(args["request"]))))
        case "IgnoreDuplicate":
            key, _ = f.payload(t, args)
            if key not in f.accepted.get(r, ()) or not f.here.payload_is_current(r, t):
                raise Mismatch(f"payload {key} was not accepted before")
            return f.take((action, (r,))) if f.payloads[key] else []
        case "IgnoreStale" | "RefusePrepare":
            return f.ignored(node, r, e)
        case other:
            raise Mismatch(f"{other} is no action of a receiver")


def _start_receiver(f: Follower, node: str, r: str, loaded: str, incarnation: int | None) -> list[Step]:
    known = loaded != "" and f.names.checkpoint in ("", loaded)
    steps: list[Step] = []
    if not (r in f.fresh and known):
        steps = f.take(("StartReceiver", (r, known)))
    f.fresh.discard(r)
    f.accepted[r] = set()
    if incarnation is not None:
        f.names.incarnations[node, incarnation] = f.state.rcv[r].inc
    return steps


def _released(f: Follower, r: str) -> list[Step]:
    """Divergence DV1: an engine that released its weights is as one that restarted, without a new incarnation."""
    rcv = f.state.rcv[r]
    stopped = rcv._replace(tag=NONE, loaded=False, gate=False, stopped=True, acked=False, writing=False)
    store = f.state.store.but(r, Map(dict.fromkeys(f.config.items, RAW)))
    return f.put("DV1", rcv=f.state.rcv.but(r, stopped), store=store)


def _stop_and_wait(f: Follower, r: str, t: int) -> list[Step]:
    try:
        return f.take(("StopAndWait", (r, t)))
    except model.NotEnabled:
        rcv, s = f.state.rcv[r], f.here
        began = any(
            s.is_sent(prepare_call(u)) and s.is_member(r, u) and rcv.att < u <= rcv.fenced for u in s.attempts()
        )
        if t != rcv.att or rcv.drained or not began:
            raise
        # Divergence DV21: the drain that a prepare began ends after that prepare was stopped too.
        drained = rcv._replace(stopped=True, drained=True, pending=frozenset())
        return f.put("DV21", rcv=f.state.rcv.but(r, drained))


def compare_receiver(f: Follower, r: str, e: Emit) -> None:
    rcv = f.state.rcv[r]
    f.same("att", rcv.att, e.post["att"])
    f.same("tag", rcv.tag, f.tag(str(e.post["tag"])))
    f.same("gate", rcv.gate, e.post["gate"])
    if "stored" in e.post:
        compare_stored(f, r, str(e.post["stored"]))
