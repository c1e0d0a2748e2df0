"""Lines of the control plane and of coordinators as steps of the model.

Spec: AcquireEpoch, Prepare, Commit, KillCandidate, Bootstrap, Conflict, BecomeCoordinator, StartAttempt,
CompleteAttempt, FailAttempt, SendCommit, ResolveCommit, StepDown, RollForward
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from model_tests import model
from model_tests.follower_names import Mismatch
from model_tests.model_actions import need
from model_tests.model_state import DELTA, Coordinator, Map, Member, Row
from nemo_dcr.trace import Emit

if TYPE_CHECKING:
    from model_tests.follower import Follower

Step = model.Step

NOBODY = "nobody"
"""A coordinator that acquired an epoch and never heard of it."""
PHASES: dict[str, tuple[set[str], set[str]]] = {
    "BecomeCoordinator": ({"surveying"}, {"ready"}),
    "StartAttempt": ({"preparing"}, {"running"}),
    "CompleteAttempt": ({"acked"}, {"acked", "fenced"}),
    "FailAttempt": ({"stopping"}, {"ready"}),
    "SendCommit": ({"committing"}, {"committing"}),
    "ResolveCommit": (set(), set()),
    "StepDown": ({"out"}, {"out"}),
    "RollForward": ({"updating"}, {"fenced", "ready"}),
}
"""Phases after a line: those that it tells, those of the model."""
RESOLVED = {"committing", "resolving"}


def control_line(f: Follower, e: Emit, by: str | None) -> list[Step]:
    args, post = e.args, e.post
    match e.action.value:
        case "AcquireEpoch":
            who = by or f.names.acquirers.get(int(post["epoch"]), NOBODY)  # type: ignore[arg-type]
            name = f.names.node(who)
            if name not in f.state.coord:
                f.add_coordinator(name)
            steps = f.take(("AcquireEpoch", (name,)))
            f.same("epoch", f.state.epoch, post["epoch"])
        case "Prepare":
            c, mode = f.coordinator_of(int(args["epoch"])), str(args["mode"])  # type: ignore[arg-type]
            # Divergence DV14: a finish attempt names the committed candidate in the code.
            cand = 0 if mode == "finish" else f.names.candidate(str(args["candidate"]))
            now = f.here
            steps = _prepare(f, c, mode, cand, f.members(str(args["required"])))
            _require_now(now, f.state.table[-1], int(args["epoch"]))  # type: ignore[arg-type]
            f.same("attempt", len(f.state.table), e.attempt)
            f.same("last", len(f.state.table), post["last"])
            base = f.here.base_version(e.attempt) if f.here.row(e.attempt).view else None
            f.same("baseline", base, args["baseline"])
        case "Commit" | "Bootstrap":
            parameter = e.attempt if e.action.value == "Commit" else f.coordinator_of(int(args["epoch"]))  # type: ignore[arg-type]
            steps = f.take((e.action.value, (parameter,)))
            record = f.state.chain[-1]
            f.same("candidate", record.cand, f.names.candidate(str(args["candidate"])))
            f.same("required", record.req, f.members(str(args["required"])))
            f.same("attempt", record.att, e.attempt)
            f.same("epoch", record.epoch, args["epoch"])
            f.same("version", len(f.state.chain) - 1, post["version"])
            f.same("baseline", record.base, post["baseline"])
        case "KillCandidate":
            c = f.coordinator_of(int(args["epoch"]))  # type: ignore[arg-type]
            steps = _kill(f, c, f.names.candidate(str(args["candidate"])))
            f.same("epoch", f.state.epoch, post["epoch"])
        case "Conflict":
            steps = _conflict(f, e)
            f.same("epoch", f.state.epoch, post["epoch"])
            f.same("last", len(f.state.table), post["last"])
        case other:
            raise Mismatch(f"{other} is no action of the control plane")
    return steps


def _prepare(f: Follower, c: str, mode: str, cand: int, members: frozenset[Member]) -> list[Step]:
    step: Step = ("Prepare", (c, mode, cand, members))
    try:
        return f.take(step)
    except model.NotEnabled:
        f.state, excuses = f.hindsight.prepared(f.config, f.state, step)
        f.excuses.update(excuses)
        return [step]


def _require_now(s: model.Here, row: Row, epoch: int) -> None:
    """A coordinator may have looked long ago; the control plane looks when it answers (CanPrepare)."""
    delta = row.mode in DELTA
    need(
        prepare_holds_epoch=row.epoch == epoch and s.holds_epoch(epoch),
        record_matches=s.record_matches(row.view),
        not_dead=not delta or s.not_dead(row.cand),
        not_committed=not delta or s.not_committed(row.cand),
        may_xor=row.mode != "xor" or s.may_xor(row.cand),
    )


def _kill(f: Follower, c: str, cand: int) -> list[Step]:
    try:
        return f.take(("KillCandidate", (c, cand)))
    except model.NotEnabled:
        if not f.here.can_kill(c, cand) or cand in f.state.dead or cand == 0:
            raise
        # Divergence DV19: the request was late, and its coordinator went on or the owners dropped the candidate.
        return f.put("DV19", dead=f.state.dead | {cand})


def _conflict(f: Follower, e: Emit) -> list[Step]:
    s, reason, epoch = f.here, str(e.args["reason"]), int(e.args["epoch"])  # type: ignore[arg-type]
    mine = [c for c, each in s.coord.items() if each.epoch == epoch and each.epoch]
    for c in mine:
        try:
            return f.take(("Conflict", (c,)))
        except model.NotEnabled:
            pass
    # Divergence DV15: requests are refused for more reasons; each of them has to be true.
    t = e.attempt
    asked = 0 < t <= len(s.table)
    holds = {
        "stale_epoch": not s.holds_epoch(epoch),
        "record_moved": bool(s.chain) and (s.chain[-1].epoch == epoch or not s.holds_epoch(epoch)),
        "not_latest": not s.is_latest(t),
        "dead_candidate": not s.not_dead(s.row(t).cand) if asked else bool(s.dead),
        "committed_candidate": bool(s.chain) and s.k().cand != 0,
        "xor_retry": any(row.mode in DELTA for row in s.table),
        "deadline": asked and s.is_sent(s.commit_call(t)),
    }
    if not holds.get(reason, False):
        raise Mismatch(f"the control plane had no reason to refuse ({reason})")
    return f.excuse("DV15")


def coordinator_line(f: Follower, c: str, e: Emit) -> list[Step]:
    own = f.state.coord[c]
    action, step = e.action.value, (e.action.value, (c,))
    if e.attempt and action in ("CompleteAttempt", "FailAttempt", "SendCommit", "ResolveCommit"):
        f.same("attempt", own.att, e.attempt)
    match action:
        case "StartAttempt":
            return _start_attempt(f, c, e)
        case "RollForward":
            return _roll_forward(f, c, e)
        case "StepDown" if own.phase == "prepared" and not f.here.prepare_holds_epoch(c):
            # Divergence DV20: the reply of a prepare was lost, and the next look shows another coordinator.
            return f.put("DV20", coord=f.state.coord.but(c, Coordinator("out", 0, 0, 0)))
        case "CompleteAttempt" | "ResolveCommit":
            try:
                steps = f.take(step)
            except model.NotEnabled:
                f.excuses["seen"] += 1
                f.state = f.hindsight.seen(f.config, f.state, step, c)
                steps = [step]
            if action == "ResolveCommit":
                f.same("outcome", f.state.coord[c].phase == "fenced", e.args["outcome"] == "committed")
            return steps
        case "BecomeCoordinator" | "FailAttempt" | "SendCommit" | "StepDown":
            return f.take(step)
        case other:
            raise Mismatch(f"{other} is no action of a coordinator")


def _start_attempt(f: Follower, c: str, e: Emit) -> list[Step]:
    t, s, own = e.attempt, f.here, f.state.coord[c]
    if not 0 < t <= len(s.table) or s.row(t).epoch != own.epoch:
        raise Mismatch(f"{c} did not prepare attempt {t}")
    row = s.row(t)
    f.same("mode", row.mode, e.args["mode"])
    if e.args.get("gate", f.config.gate_mode) != f.config.gate_mode:
        # Divergence DV31: the gate mode is told anew for each attempt.
        f.config = replace(f.config, gate_mode=str(e.args["gate"]))
        f.excuses["DV31"] += 1
    f.same("base", s.base_version(t), e.args["base"])
    f.same("required", row.req, f.members(str(e.args["required"])))
    if own.phase == "prepared" and own.att != t:  # Divergence DV19: a late request came after the one that is answered
        f.put("DV19", coord=f.state.coord.but(c, own._replace(att=t)))
    owners = str(e.args.get("owners") or "")
    if owners:
        told = {node: real for node, _, real in (each.rpartition("@") for each in owners.split(","))}
        bound = {f.names.node(f"owner {o}"): f.names.incarnation(f"owner {o}", int(n)) for o, n in told.items()}
        if Map(bound) != row.owners:  # Divergence DV13: an owner restarted after it was surveyed
            rows = (*f.state.table[: t - 1], row._replace(owners=Map(bound)), *f.state.table[t:])
            f.put("DV13", table=rows)
    return f.take(("StartAttempt", (c,)))


def _roll_forward(f: Follower, c: str, e: Emit) -> list[Step]:
    own = f.state.coord[c]
    if own.view:
        f.same("candidate", f.here.record_of(own.view).cand, f.names.candidate(str(e.args["candidate"])))
    try:
        return f.take(("RollForward", (c,)))
    except model.NotEnabled as problem:
        if own.view and f.here.is_sent(f.here.update_call(own.view)):
            return f.excuse("DV2")  # Divergence DV2: after another look; the calls were sent before
        try:
            f.excuses["seen"] += 1
            f.state = f.hindsight.seen(f.config, f.state, ("RollForward", (c,)), c)
        except model.NotEnabled:
            raise problem from None
        return [("RollForward", (c,))]


def compare_coordinator(f: Follower, c: str, e: Emit) -> None:
    own, post, action = f.state.coord[c], e.post, e.action.value
    told, modelled = PHASES[action]
    if action == "ResolveCommit":
        committed = e.args["outcome"] == "committed"
        told, modelled = (RESOLVED, {"fenced"}) if committed else ({"surveying"}, {"ready"})
    if str(post["phase"]) not in told or own.phase not in modelled:
        raise Mismatch(f"phase is {post['phase']}, in the model {own.phase}")
    if "epoch" not in post or own.phase == "out":
        return
    f.same("epoch", own.epoch, post["epoch"])
    # A coordinator reads the record a little after it became one, and a replaced one may not know.
    if action == "BecomeCoordinator":
        f.same("version", -1, post["version"])
    elif own.epoch == f.state.epoch:
        f.same("version", own.view - 1, post["version"])
