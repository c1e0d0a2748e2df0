"""The proved model of spec/proof as a machine that takes steps of the specification: each becomes a few of its actions.

One step is the action of the same name and, where the proved model is finer, the actions that write no line: a report,
a read, the begin of a stream or of a drain. Reports are taken as soon as they are true: they are never withdrawn, so
that allows the most. A step whose guard is false is rejected by name.
Not handled: digests, so payloads arrive sound (A4); what is allowed in the specification alone (test_proved).

Paper: Appendix B   Spec: Next   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model_tests.model_state import Config
from model_tests.proved_world import NotDue, Rejected, Step, false_guards, mode_name, snake, unborn
from spec.proof import owners, receiver_guards
from spec.proof.dsl import Concrete
from spec.proof.model import ACTIONS
from spec.proof.walk import choose, choose_members, written_word


@dataclass
class Proved:
    """The proved model, at the place where the steps led it."""

    config: Config
    state: Concrete
    asked: dict[str, int] = field(default_factory=dict)
    """The epoch that a coordinator acquired last."""
    runs: dict[str, int] = field(default_factory=dict)
    """The attempt that it prepared last."""
    done: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Actions of the proof that the last step took."""

    @classmethod
    def start(cls, config: Config) -> Proved:
        """Every receiver runs and holds the checkpoint that training began with: Init of the specification."""
        proved = cls(config, unborn(config))
        for r in config.receivers:
            proved.meet("Incarnation", 1)
            proved.act("StartReceiver", r, 1, 0, True)
        return proved

    @classmethod
    def warm(cls, config: Config) -> Proved:
        """After the first commit, with everybody serving version 0: StartBootstrapped of the specification."""
        proved, c = cls.start(config), config.coordinators[0]
        everyone = frozenset((r, 1) for r in config.receivers)
        steps: list[Step] = [("AcquireEpoch", (c,)), ("BecomeCoordinator", (c,))]
        steps += [("Prepare", (c, "restore", 0, everyone)), ("StartAttempt", (c,))]
        steps += [("StartRestore", (r, 1, True)) for r in config.receivers]
        steps += [(name, (o, 1)) for o in config.owners for name in ("OwnerPrepare", "StopOwner")]
        steps += [("CompleteAttempt", (c,)), ("Bootstrap", (c,))]
        steps += [("FinishRestore", (r, 1)) for r in config.receivers]
        steps += [("OpenGate", (r, 1, 0)) for r in config.receivers]
        for step in steps:
            proved.take(step)
        return proved

    def fork(self) -> Proved:
        """Another machine at the same place."""
        return Proved(self.config, self.state, dict(self.asked), dict(self.runs))

    # ------------------------------------------------------------------------------------------------------- one step

    def take(self, step: Step) -> None:
        """Take one step of the specification; its action takes every parameter of `Next`.

        Raises: Rejected when the proved model does not allow it.
        """
        self.done = []
        name, parameters = step
        taken = getattr(self, f"_{snake(name)}", None) or getattr(self, snake(name), None)
        try:
            if taken is None:
                self.act(name, *parameters)
            else:
                taken(*parameters)
            self.report()
        except NotDue as problem:
            raise Rejected(step, str(problem)) from None

    def act(self, name: str, *arguments: Any) -> None:
        """Take one action of the proof."""
        guard, post = ACTIONS[name](self.state, *arguments)
        if guard is not True:
            guards = ", ".join(false_guards(self.state, name, arguments)) or "a condition on the actor's own state"
            raise NotDue(f"{name}{arguments} may not be taken in the proved model ({guards})")
        self.state = self.state.after(post)
        self.done.append((name, arguments))

    def may(self, name: str, *arguments: Any) -> bool:
        """The guard of an action is true."""
        return ACTIONS[name](self.state, *arguments)[0] is True

    def meet(self, sort: str, thing: Any) -> None:
        """A thing that nobody spoke of before; in the proof it was there all the time, without a row of its own."""
        s = self.state
        if thing not in s.things[sort]:
            self.state = Concrete(s.table, {**s.things, sort: [*s.things[sort], thing]}, s.values, s.defaults, s.swaps)

    def report(self) -> None:
        """What is true and may be told, is told. A report is never withdrawn, so this allows the most."""
        s, t = self.state, 0
        for r in self.config.receivers:
            t = s.att(r)
            if t and not s.stopped(r) and s.required(t, r):
                if not s.reported(t, r):
                    self.act("ReportPrepared", r, t)
                if not s.reported_quiet(t, r) and self.may("ReportQuiet", r, t):
                    self.act("ReportQuiet", r, t)
        if s.booted():
            v, last = s.record_version(), s.last_attempt()
            for o in self.config.owners:
                if not s.thawed(v, o) and self.may("ReportThawed", o, v):
                    self.act("ReportThawed", o, v)
            for c in self.config.coordinators:
                if s.mode(last) == "restore" and not s.confirmed(last) and self.may("ConfirmRestore", c, last):
                    self.act("ConfirmRestore", c, last)

    # --------------------------------------------------------------------------------------------------- control plane

    def acquire_epoch(self, c: str) -> None:
        """An epoch is handed out to a coordinator, which gives up its earlier one."""
        epoch = self.state.epoch() + 1
        if self.state.viewing(c):
            self.act("StepDown", c)
        self.meet("Epoch", epoch)
        self.act("AcquireEpoch", epoch)
        self.asked[c] = epoch

    def _become_coordinator(self, c: str) -> None:
        self.act("BecomeCoordinator", c, self.asked.get(c, 0))

    def prepare(
        self, c: str, mode: str, cand: int, members: Iterable[tuple[str, int]], runs: Mapping[str, int] | None = None
    ) -> None:
        """The next attempt, with what it carries from the beginning: its members and, if told, the runs of owners."""
        s, t = self.state, self.state.last_attempt() + 1
        self.meet("Attempt", t)
        required = dict(members)
        self.state = choose_members(self.state, t, list(required))
        self.state = choose(self.state, "member_inc", {(t, r): inc for r, inc in required.items()})
        self.state = choose(self.state, "member_run", {(t, o): run for o, run in (runs or {}).items()})
        candidate = s.version_candidate(s.record_version()) if mode in ("restore", "finish") else cand
        self.act("Prepare", c, t, mode_name(mode), candidate)
        self.runs[c] = t

    def commit(self, t: int) -> None:
        """The record becomes its successor."""
        v = self.state.record_version() + 1
        self.meet("Version", v)
        self.act("Commit", t, v)

    def _bootstrap(self, c: str) -> None:
        self.act("Bootstrap", c, self.runs.get(c, 0))
        self.act("ReadRecord", c)

    # ----------------------------------------------------------------------------------------------------- coordinator

    def _start_attempt(self, c: str) -> None:
        self.act("StartAttempt", c, self.runs.get(c, 0))

    def _complete_attempt(self, c: str) -> None:
        self.act("CompleteAttempt", c, self.runs.get(c, 0))

    def _fail_attempt(self, c: str) -> None:
        self.act("FailAttempt", c, self.runs.get(c, 0))

    def _send_commit(self, c: str) -> None:
        self.act("SendCommit", c, self.runs.get(c, 0))

    def _resolve_commit(self, c: str) -> None:
        s, t = self.state, self.state.waits_for(c)
        won = [v for v in s.things["Version"] if s.committed(v, t)]
        self.act("ResolveCommit", c, t, won[0] if won else s.record_version())

    def _roll_forward(self, c: str) -> None:
        self.act("RollForward", c, self.state.view_version(c))

    # ---------------------------------------------------------------------------------------------------------- owners

    def installed(self, o: str) -> int:
        """The attempt that an owner has installed."""
        return next((t for t in self.state.things["Attempt"] if self.state.owner_att(o, t)), 0)

    def version_of(self, candidate: int) -> int:
        """The version that a candidate is."""
        s = self.state
        found = [v for v in s.things["Version"] if s.version_candidate(v) == candidate and v <= s.record_version()]
        if not found:
            raise NotDue(f"candidate {candidate} is no version")
        return int(found[0])

    def _start_owner(self, o: str) -> None:
        run = self.state.run(o) + 1
        self.meet("Run", run)
        self.act("StartOwner", o, run, 0, True)

    def _begin_transition(self, o: str) -> None:
        s = self.state
        c = s.step() if not s.began(o) else s.step() + 1
        if c not in s.things["Candidate"]:
            self.meet("Candidate", c)
            live = {
                q: s.resident(q) if s.is_resident(q) else s.version_candidate(s.record_version())
                for q in self.config.owners
            }
            old = {e: s.word(live[s.owner_of(e)], e) for e in self.config.items}
            changes = self.config.changes[c]
            self.state = choose(self.state, "word", {(c, e): old[e] ^ ((1 << c) if e in changes else 0) for e in old})
        self.act("BeginTransition", o, c)

    def emit(self, o: str, t: int, i: str) -> None:
        """An item is published."""
        if self.state.ready(o):
            self.act("StartStream", o, t)
        self.act("EmitPayload", o, t, (o, i))

    def end(self, o: str, t: int) -> None:
        """The manifest is published."""
        if self.state.ready(o):
            self.act("StartStream", o, t)
        self.act("EndStream", o, t)

    def _emit_payload(self, o: str, i: str) -> None:
        self.emit(o, self.installed(o), i)

    def _end_stream(self, o: str) -> None:
        self.end(o, self.installed(o))

    def _update_baseline(self, o: str, cand: int) -> None:
        self.act("UpdateBaseline", o, self.version_of(cand))

    def rebuild(self, o: str, v: int) -> None:
        """A lost baseline is refilled from live weights, which were loaded again before if they had to be."""
        if not self.state.is_resident(o):
            self.act("ReloadWeights", o)
        self.act("RebuildBaseline", o, v)

    def _rebuild_baseline(self, o: str, c: str) -> None:
        self.rebuild(o, self.state.view_version(c))

    def _baseline_filled(self, o: str) -> None:
        s = self.state
        for e in self.config.items:  # what is equal anyhow is copied without a line
            if s.owner_of(e) == o and not s.copied(e) and s.base(e) == s.word(owners.copy_source(s, o), e):
                self.act("CopyItem", o, e)
        self.act("BaselineFilled", o)

    def _lose_baseline(self, o: str) -> None:
        self.act("LoseBaseline", o, 0)

    def _end_transition(self, o: str, cand: int) -> None:
        self.act("EndTransition", o, self.version_of(cand))

    # ------------------------------------------------------------------------------------------------------- receivers

    def _start_receiver(self, r: str, known: bool) -> None:
        inc = self.state.inc(r) + 1
        self.meet("Incarnation", inc)
        self.act("StartReceiver", r, inc, 0, known)

    def _accept(self, r: str, t: int, i: str, how: str) -> None:
        if how != "sound":
            raise NotDue(f"a payload that arrives {how} is outside")
        self.act("Accept", r, t, (self.config.owner_of[i], i))

    def _apply_item(self, r: str, i: str) -> None:
        waiting = [t for t in self.state.things["Attempt"] if self.state.pending(r, t, i)]
        self.write(r, waiting[0] if waiting else self.state.att(r), i)

    def write(self, r: str, t: int, i: str) -> None:
        """A record is written: XOR, or the new word."""
        self.act("ApplyItem", r, t, i, written_word(self.state, r, t, i))

    def _fail_receiver(self, r: str) -> None:
        self.act("FailReceiver", r, self.state.att(r))

    def _stop_and_wait(self, r: str, t: int) -> None:
        if self.state.att(r) == t and not self.state.stopped(r):
            self.act("BeginDrain", r)
        self.act("StopAndWait", r, t)

    def _open_gate(self, r: str, t: int, ver: int) -> None:
        by = [u for u in self.state.things["Attempt"] if self.state.committed(ver, u)]
        self.act("OpenGate", r, t, ver, by[0] if by else 0)

    # --------------------------------------------------------------------------------------- lines that change nothing

    def _any(self, what: str, found: Iterable[bool]) -> None:
        if not any(found):
            raise NotDue(f"there is {what}")

    def _refuse_prepare(self, e: str) -> None:
        s = self.state
        if e in self.config.receivers:
            found = (
                s.started(t) and receiver_guards.is_newer(s, e, t) and self.may("RefusePrepare", e, t)
                for t in s.things["Attempt"]
            )
        else:
            found = (
                s.started(t)
                and owners.is_owner_member(s, e, t)
                and owners.owner_is_newer(s, e, t)
                and not owners.may_stream(s, e, t)
                for t in s.things["Attempt"]
            )
        self._any("no prepare to refuse", found)

    def _ignore_stale(self, e: str) -> None:
        s = self.state
        made = [t for t in s.things["Attempt"] if s.started(t)]
        if e in self.config.receivers:
            found = (self.may("IgnoreStale", e, t) for t in made)
        else:
            found = (not s.owner_att(e, t) or s.owner_failed(e) or owners.owner_is_drained(s, e) for t in made)
        self._any("nothing stale", found)

    def _ignore_duplicate(self, r: str) -> None:
        t = self.state.att(r)
        self._any("no duplicate", (self.may("IgnoreDuplicate", r, t, p) for p in self.state.things["Payload"]))
