"""Takes the proved model along with a trace alone: no other model decides first, and no JVM is needed.

Each line becomes the proof's action of its name with the parameters of the line, and every logged field of the state
after it is compared. A line whose guard is false is rejected with its number and the conditions that are false. What
an attempt carries from the beginning is read ahead: the runs of its owners are in the line that starts it.
Where the proved model is freer, a line is not rejected here but by the follower: calls out of the blue (CloseGate,
OpenApply before everything is staged, EndTransition, stops), Conflict, IgnoreStale and RefusePrepare, which change
nothing, and the digests of payload sets (A4).

Paper: Appendix B   Spec: Next   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from model_tests.follower_control import NOBODY
from model_tests.follower_names import Mismatch, Names
from model_tests.model_state import Config
from model_tests.proved import Proved
from model_tests.proved_nodes import compare_owner, compare_receiver, owner_line, receiver_line
from model_tests.proved_world import NotDue, Rejected, mode_name, unborn
from model_tests.trace_export import Changes, LineRejected, constants, coordinator_name
from model_tests.trace_files import Line
from spec.proof.dsl import Concrete
from spec.proof.model import ACTIONS

PHASES = {"StartAttempt": "preparing", "CompleteAttempt": "acked", "FailAttempt": "stopping"}


def validate(lines: Sequence[Line], changes: Changes | None = None, *, items_each: int | None = None) -> ProvedLines:
    """Let the proved model take every line of a run, projected to `items_each` tensors of each owner or with all.

    Raises: LineRejected.
    """
    config, names = constants(lines, changes, items_each=items_each)
    taker = ProvedLines(config, names)
    for line in lines:
        if line.action == "StartAttempt":
            taker.runs_of[line.emitted.attempt] = str(line.emitted.args.get("owners") or "")
            taker.sync[line.emitted.attempt] = line.emitted.args.get("gate", config.gate_mode) == "sync"
    for number, line in enumerate(lines, 1):
        before = taker.proved.state
        try:
            taker.line(line)
        except (NotDue, Rejected, Mismatch) as problem:
            taker.proved.state = before
            raise LineRejected(line, number, str(problem)) from problem
        except (KeyError, ValueError) as problem:
            taker.proved.state = before
            raise LineRejected(line, number, f"a field of it means nothing ({problem})") from problem
    return taker


class ProvedLines:
    """The proved model, at the place where a run is."""

    def __init__(self, config: Config, names: Names) -> None:
        self.proved = Proved(config, unborn(config))
        self.sync: dict[int, bool] = {}
        """Gate mode of each attempt: closed from prepare on."""
        self.proved.state.defaults = {
            **self.proved.state.defaults,
            "survives": lambda: False,
            "sync": lambda t: self.sync.get(t, config.gate_mode == "sync"),
        }
        self.names = names
        self.excuses: Counter[str] = Counter()
        """What the proved model has no action for, by the number of its divergence."""
        self.runs_of: dict[int, str] = {}
        """Owners and their runs that an attempt asks for, by the line that starts it."""
        self.payloads: dict[tuple[str, int, int], tuple[str, ...]] = {}
        """(owner, attempt, number): items of a published payload."""
        self.accepted: set[tuple[str, int, str, int]] = set()
        """(receiver, attempt, owner, number)."""
        self.born: set[str] = set()
        self.lost_early: set[str] = set()
        self.lost: set[str] = set()
        """Owners without a baseline since their tracker claimed one: `updating` names version 0 then."""
        self._replaced: dict[int, Concrete] = {}
        """The state before an epoch was replaced."""

    # ------------------------------------------------------------------------------------------------------- one line

    def line(self, line: Line) -> None:
        """Take the next line.

        Raises: NotDue, Mismatch.
        """
        config = self.proved.config
        if line.node == "control":
            self._control(line)
        elif line.node in config.receivers:
            receiver_line(self, line.node, line)
            compare_receiver(self, line.node, line.emitted.post)
        elif line.node in config.owners:
            owner_line(self, line.node, line)
            compare_owner(self, line.node, line.emitted.post)
        else:
            self._coordinator(coordinator_name(line), line)
        self.proved.report()

    @property
    def state(self) -> Concrete:
        """Where the proved model is."""
        return self.proved.state

    def act(self, name: str, *arguments: Any) -> None:
        """Take one action of the proof."""
        self.proved.act(name, *arguments)

    def same(self, what: str, modelled: Any, told: Any) -> None:
        """Compare one thing.

        Raises: Mismatch.
        """
        if modelled != told:
            raise Mismatch(f"{what} is {told!r}, in the proved model {modelled!r}")

    def _members(self, text: str) -> set[tuple[str, int]]:
        found = set()
        for each in text.split(","):
            receiver, _, real = each.rpartition("@")
            found.add((receiver, self.names.incarnation(receiver, int(real))))
        return found

    def _bound(self, t: int) -> set[tuple[str, int]]:
        s = self.state
        return {(r, n) for r in s.things["Receiver"] for n in s.things["Incarnation"] if s.bound(t, r, n)}

    def attempt(self, t: int) -> int:
        """An attempt that exists.

        Raises: Mismatch.
        """
        if t not in self.state.things["Attempt"]:
            raise Mismatch(f"attempt {t} does not exist")
        return t

    # -------------------------------------------------------------------------------------------------- control plane

    def _control(self, line: Line) -> None:
        e, args, post = line.emitted, line.emitted.args, line.emitted.post
        match line.action:
            case "AcquireEpoch":
                epoch = int(str(post["epoch"]))
                self._replaced[self.state.epoch()] = self.state
                self.proved.acquire_epoch(self.names.acquirers.get(epoch, NOBODY))
                self.same("epoch", self.state.epoch(), epoch)
            case "Prepare":
                self._prepare(self._holder(args["epoch"]), e.attempt, args)
                self.same("last", self.state.last_attempt(), post["last"])
            case "Commit" | "Bootstrap":
                t, s = self.attempt(e.attempt), self.state
                if line.action == "Commit":
                    self.proved.commit(t)
                else:
                    c = self._holder(args["epoch"])
                    self.act("Bootstrap", c, t)
                    if self.proved.may("ReadRecord", c):
                        self.act("ReadRecord", c)
                s = self.state
                self.same("version", s.record_version(), post["version"])
                self.same("baseline", s.base_version(t), post["baseline"])
                self.same("candidate", s.candidate(t), self.names.candidate(str(args["candidate"])))
                self.same("epoch", s.attempt_epoch(t), args["epoch"])
                self.same("required", self._bound(t), self._members(str(args["required"])))
            case "KillCandidate":
                self.act("KillCandidate", self._holder(args["epoch"]), self.names.candidate(str(args["candidate"])))
                self.same("epoch", self.state.epoch(), post["epoch"])
            case "Conflict":
                self.same("epoch", self.state.epoch(), post["epoch"])
                self.same("last", self.state.last_attempt(), post["last"])
            case other:
                raise Mismatch(f"{other} is no action of the control plane")

    def _holder(self, epoch: Any) -> str:
        s = self.state
        for c in s.things["Coordinator"]:
            if s.viewing(c) and s.coordinator_epoch(c) == epoch:
                return str(c)
        raise Mismatch(f"nobody acts under epoch {epoch}")

    def _prepare(self, c: str, t: int, args: Mapping[str, Any]) -> None:
        self.same("attempt", self.state.last_attempt() + 1, t)
        mode, candidate = str(args["mode"]), self.names.candidate(str(args["candidate"]))
        told = {
            f"owner {o}": n for o, _, n in (each.rpartition("@") for each in self.runs_of.get(t, "").split(",")) if o
        }
        runs = {o: self.names.incarnation(o, int(n)) for o, n in told.items()}
        self.proved.prepare(c, mode, candidate, self._members(str(args["required"])), runs)
        s = self.state
        self.same("baseline", s.base_version(t) if s.booted() else None, args["baseline"])

    # ---------------------------------------------------------------------------------------------------- coordinators

    def _coordinator(self, c: str, line: Line) -> None:
        e, args, post = line.emitted, line.emitted.args, line.emitted.post
        self.proved.meet("Coordinator", c)
        if e.attempt:
            self.attempt(e.attempt)
        match line.action:
            case "BecomeCoordinator":
                self.act("BecomeCoordinator", c, post["epoch"])
                return self.same("epoch", self.state.coordinator_epoch(c), post["epoch"])
            case "StartAttempt":
                self._start_attempt(c, e.attempt, args)
            case "CompleteAttempt" | "FailAttempt" | "SendCommit":
                self.act(line.action, c, e.attempt)
            case "ResolveCommit":
                self._resolve(c, e.attempt, str(args["outcome"]) == "committed")
            case "StepDown":
                return self.act("StepDown", c)
            case "RollForward":
                self.act("RollForward", c, self.state.view_version(c))
                committed = self.state.version_candidate(self.state.view_version(c))
                self.same("candidate", committed, self.names.candidate(str(args["candidate"])))
            case other:
                raise Mismatch(f"{other} is no action of a coordinator")
        s = self.state
        if "epoch" not in post:
            return self.same("phase", PHASES.get(line.action), post["phase"])
        self.same("epoch", s.coordinator_epoch(c), post["epoch"])
        if s.coordinator_epoch(c) == s.epoch():
            self.same("version", s.view_version(c) if s.views_record(c) else -1, post["version"])
        return None

    def _start_attempt(self, c: str, t: int, args: Mapping[str, Any]) -> None:
        self.act("StartAttempt", c, t)
        s = self.state
        self.same("mode", s.mode(t), mode_name(str(args["mode"])))
        self.same("base", s.base_version(t), args["base"])
        if args.get("gate", "sync") not in ("sync", "async"):
            raise Mismatch(f"{args['gate']!r} is no gate mode")
        required = {(r, s.member_inc(t, r)) for r in s.things["Receiver"] if s.required(t, r)}
        self.same("required", required, self._members(str(args["required"])))

    def _resolve(self, c: str, t: int, committed: bool) -> None:
        """A read that came just before another coordinator took over decides as of then: nothing of it can change."""
        s = self.state
        won = [v for v in s.things["Version"] if s.committed(v, t)]
        self.same("outcome", bool(won), committed)
        v = won[0] if won else s.record_version()
        then = self._replaced.get(s.coordinator_epoch(c), s)
        for seen in (s, then):
            guard, post = ACTIONS["ResolveCommit"](seen, c, t, v)
            if guard is True:
                self.proved.state = s.after(post)
                return
        self.act("ResolveCommit", c, t, v)
