"""Lines of owners and receivers as actions of the proved model; every logged field of the state after is compared.

Spec: actions of owners and receivers   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model_tests.digest_classes import items_of, why_not_stored
from model_tests.follower_names import Mismatch
from model_tests.follower_receiver import RELEASED
from model_tests.follower_stale import SLEEPS
from model_tests.model_state import Map, Tag
from model_tests.proved_agreement import tag_of, tracker_of
from model_tests.proved_world import RAW, mode_name
from model_tests.trace_files import Line
from spec.proof.dsl import put, rows

if TYPE_CHECKING:
    from model_tests.proved_lines import ProvedLines


# --------------------------------------------------------------------------------------------------------------- owners


def _items(p: ProvedLines, o: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    tensors = [each for each in str(args["names"]).split(",") if each]
    return tuple(p.names.item(o, each) for each in tensors if not p.names.is_left_out(o, each))


def _count(p: ProvedLines, o: str, t: int) -> int:
    return sum(1 for owner, attempt, _ in p.payloads if (owner, attempt) == (o, t))


def owner_line(p: ProvedLines, o: str, line: Line) -> None:
    e, args, s = line.emitted, line.emitted.args, p.state
    t = p.attempt(e.attempt)
    match line.action:
        case "StartOwner":
            _start_owner(p, o, line)
        case "BeginTransition":
            _begin(p, o, str(e.post["frozen"]))
        case "EmitPayload":
            items = p.payloads[o, t, int(args["payload"])] = _items(p, o, args)  # type: ignore[arg-type]
            p.same("xor", args["xor"] if s.mode(t) == "by_xor" else 0, args["xor"])  # which of them: DV18
            for i in items:
                p.proved.emit(o, t, i)
                if not p.state.carries(t, (o, i), i):
                    raise Mismatch(f"{i} did not change, and has no record")
        case "EndStream":
            p.same("count", _count(p, o, t), args["count"])
            p.proved.end(o, t)
        case "OwnerPrepare":
            p.act("OwnerPrepare", o, t)
            p.same("mode", p.state.mode(t), mode_name(str(args["mode"])))
            p.same("base", p.state.base_version(t), args["base"])
        case "UpdateBaseline":
            p.act("UpdateBaseline", o, args["version"])
        case "RebuildBaseline":
            p.proved.rebuild(o, int(str(args["version"])))
        case "CopyItem" if p.names.is_left_out(o, str(args["name"])):
            p.same("is being filled", s.filling(o), True)
        case "CopyItem":
            p.act("CopyItem", o, p.names.item(o, str(args["name"])))
        case "LoseBaseline" if o in p.lost_early:
            p.lost_early.discard(o)
        case "EndTransition":
            p.act("EndTransition", o, p.proved.version_of(p.names.candidate(str(args["candidate"]))))
        case "DropCandidate":
            p.same("candidate", s.frozen_candidate(o), p.names.candidate(str(args["candidate"])))
            p.act("DropCandidate", o)
        case "StopOwner":
            p.act("StopOwner", o, t)
        case "FailOwner" | "BaselineFilled" | "LoseBaseline":
            p.proved.take((line.action, (o,)))
        case "IgnoreStale" | "RefusePrepare":
            pass
        case other:
            raise Mismatch(f"{other} is no action of an owner")


def _start_owner(p: ProvedLines, o: str, line: Line) -> None:
    post, s = line.emitted.post, p.state
    if o in p.born:
        run, kept = s.run(o) + 1, not s.frozen(o) or str(post["frozen"]) != ""
        p.proved.meet("Run", run)
        p.act("StartOwner", o, run, 0, kept)
        if str(post["tracker"]).startswith("at("):  # Divergence DV16: it kept its baseline
            p.excuses["DV16"] += 1
            kept_rows = {"tracker": put(o, to="at"), "base": rows(to=lambda e: s.base(e))}
            p.proved.state = p.state.after(kept_rows)
    p.born.add(o)
    p.names.incarnations[o, line.incarnation] = p.state.run(o)


def _begin(p: ProvedLines, o: str, candidate: str) -> None:
    s, names = p.state, p.names
    if candidate not in names.candidates:
        number = s.step() + 1
        names.candidates[candidate] = number
        live = s.resident(o) if s.is_resident(o) else s.version_candidate(s.record_version())
        old = {each: name for name, each in names.candidates.items()}[live]
        config = p.proved.config
        changed = names.changes(candidate, old) if names.changes else frozenset(config.items)
        p.proved.config = replace(config, changes=Map({**config.changes, number: changed}))
    if s.began(o):
        for other in s.things["Owner"]:
            # Divergence DV22: the step of all ends the refill of another one, whose line comes later.
            if other != o and s.tracker(other) == "lost" and s.filling(other):
                p.excuses["DV22"] += 1
                p.lost_early.add(other)
                p.act("LoseBaseline", other, 0)
    p.proved.take(("BeginTransition", (o,)))
    p.same("candidate", p.state.frozen_candidate(o), names.candidates[candidate])


def compare_owner(p: ProvedLines, o: str, post: Mapping[str, Any]) -> None:
    s = p.state
    kind, version = tracker_of(s, o)
    if kind == "updating":
        version = 0 if o in p.lost else s.tracker_version(o)
    (p.lost.add if kind == "lost" else p.lost.discard if kind == "at" else bool)(o)
    p.same("att", p.proved.installed(o), post["att"])
    p.same("tracker", "lost" if kind == "lost" else f"{kind}({version})", post["tracker"])
    p.same("frozen", s.frozen_candidate(o) if s.frozen(o) else 0, p.names.candidate(str(post["frozen"])))


# ------------------------------------------------------------------------------------------------------------ receivers


def receiver_line(p: ProvedLines, r: str, line: Line) -> None:
    e, args, s = line.emitted, line.emitted.args, p.state
    t = p.attempt(e.attempt)
    match line.action:
        case "StartReceiver":
            loaded = str(args.get("loaded", ""))
            p.proved.take(("StartReceiver", (r, loaded != "" and p.names.checkpoint in ("", loaded))))
            p.names.incarnations[r, line.incarnation] = p.state.inc(r)
        case "EndpointPrepare":
            p.act("EndpointPrepare", r, t)
            p.same("mode", p.state.mode(t), mode_name(str(args["mode"])))
            p.same("base", p.state.base_version(t), args["base"])
            p.same("candidate", p.state.candidate(t), p.names.candidate(str(args["candidate"])))
        case "StartRestore":
            p.act("StartRestore", r, t, bool(args["proved"]))
            p.same("base", p.state.base_version(t), args["base"])
        case "CloseGate" if args.get("reason") == SLEEPS:
            _outside(p, r, gate=False)  # Divergence DV1: an engine that sleeps
        case "FailReceiver" if args.get("reason") == RELEASED:
            _outside(p, r, gate=False, tag="none", loaded=False, stopped=True, acked=False, permitted=False)
            raw = {"store": rows(r, to=lambda element: RAW)}
            p.proved.state = p.state.after(raw)
        case "Accept":
            key = _payload(p, t, args)
            p.accepted.add((r, t, key[0], key[2]))
            for i in p.payloads[key]:
                p.act("Accept", r, t, (key[0], i))
        case "IgnoreDuplicate":
            key = _payload(p, t, args)
            p.same("accepted before", (r, t, key[0], key[2]) in p.accepted and s.att(r) == t, True)
        case "SeeManifest":
            o = f"owner {args['owner']}"
            p.same("count", _count(p, o, t), args["count"])
            p.act("SeeManifest", r, t, o)
        case "ApplyItem":
            _apply_item(p, r, t, args)
        case "Flush" | "StartApply":
            p.same("attempt", s.att(r), t)
            p.act(line.action, r)
        case "OpenGate":
            p.proved.take(("OpenGate", (r, t, args["version"])))
        case "StopAndWait":
            p.proved.take(("StopAndWait", (r, t)))
        case "AdmitRequest" | "FinishRequest":
            p.proved.meet("Request", args["request"])
            p.act(line.action, r, args["request"])
        case "FinishRestore":
            p.act("FinishRestore", r, t)
            p.same("version", p.state.tag_version(r), args["version"])
        case "CloseGate" | "OpenApply" | "FailReceiver":
            p.act(line.action, r, t)
        case "IgnoreStale" | "RefusePrepare":
            pass
        case other:
            raise Mismatch(f"{other} is no action of a receiver")


def _payload(p: ProvedLines, t: int, args: Mapping[str, Any]) -> tuple[str, int, int]:
    key = (f"owner {args['owner']}", t, int(args["payload"]))
    if key not in p.payloads:
        raise Mismatch(f"payload {key} was never published")
    return key


def _apply_item(p: ProvedLines, r: str, t: int, args: Mapping[str, Any]) -> None:
    if p.names.is_left_out(int(args["owner"]), str(args["name"])):
        return p.same("may write", p.state.permitted(r) and p.state.att(r) == t, True)
    key, item = _payload(p, t, args), p.names.item(int(args["owner"]), str(args["name"]))
    if item not in p.payloads[key] or (r, t, key[0], key[2]) not in p.accepted:
        raise Mismatch(f"{item} is in no payload that was accepted as {key}")
    return p.proved.write(r, t, item)


def _outside(p: ProvedLines, r: str, **fields: Any) -> None:
    """Divergence DV1: what no action of the proof does."""
    p.excuses["DV1"] += 1
    p.proved.state = p.state.after({name: put(r, to=value) for name, value in fields.items()})


def compare_receiver(p: ProvedLines, r: str, post: Mapping[str, Any]) -> None:
    p.same("att", p.state.att(r), post["att"])
    p.same("tag", _told_tag(p, str(post["tag"])), tag_of(p.state, r))
    p.same("gate", p.state.gate(r), post["gate"])
    for item, stored in items_of(p.names, p.proved.config.items, str(post.get("stored", ""))).items():
        word = p.state.store(r, item)
        held = [c for c in p.names.candidates.values() if p.state.word(c, item) == word]
        if why := why_not_stored(item, held, stored, raw=bool(word & RAW)):
            raise Mismatch(why)


def _told_tag(p: ProvedLines, text: str) -> Tag:
    kind, _, rest = text.partition("(")
    parts = rest.removesuffix(")").split(",")
    if kind == "none":
        return Tag("none", 0, 0, 0)
    if kind == "clean":
        return Tag("clean", int(parts[0]), 0, 0)
    if kind == "dirty":
        return Tag("dirty", int(parts[0]), p.names.candidate(",".join(parts[1:])), 0)
    return Tag("done", int(parts[0]), p.names.candidate(",".join(parts[1:-1])), int(parts[-1]))
