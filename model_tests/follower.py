"""Takes the model along with a running implementation: a line of its trace becomes steps of the model.

`Follower.line` takes one line, finds the model's step of that name with the parameters of the line, takes it, and
compares the state after it with the line's. A line that is no step is rejected with its number and the guard that does
not hold. A line that covers several items is one step for each. Where code and specification differ (the divergences
in spec/README.md), the place carries the number, and `excuses` counts how often it was needed.

Receivers of the model are the ranks of the implementation, an item is one tensor of one owner.
Not handled: what a coordinator saw before it acted (hindsight); lines that change nothing (follower_stale); reading
files (trace_export).

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model_tests import model
from model_tests.follower_control import compare_coordinator, control_line, coordinator_line
from model_tests.follower_names import Mismatch, Names, Rejected
from model_tests.follower_owner import compare_owner, owner_line
from model_tests.follower_receiver import compare_receiver, receiver_line
from model_tests.follower_stale import why_not_stale
from model_tests.hindsight import Hindsight
from model_tests.model_decisions import Here
from model_tests.model_state import NONE, Config, Coordinator, Member, State, Tag, changed, clean, dirty, done
from nemo_dcr.trace import Emit

Step = model.Step

__all__ = ["Follower", "Mismatch", "Names", "Rejected"]


class Follower:
    """The model, at the place where the implementation is."""

    def __init__(self, config: Config, names: Names, state: State | None = None) -> None:
        """Without `state` everything is about to start; with it, the processes in it run already."""
        self.config = config
        self.names = names
        self.state = model.init(config) if state is None else state
        self.number = 0
        """Lines so far."""
        self.excuses: Counter[str] = Counter()
        """Divergences that were needed, by number."""
        self.payloads: dict[tuple[str, int, int], tuple[str, ...]] = {}
        """(owner, attempt, number): items of a published payload."""
        self.partial = set[tuple[str, int, int]]()
        """Payloads with tensors that are no items of the model."""
        self.accepted: dict[str, set[tuple[str, int, int]]] = {}
        """Payloads that a receiver accepted under its installed attempt."""
        self.fresh = {*config.receivers, *config.owners} if state is None else set[str]()
        self.lost_early: set[str] = set()
        self.hindsight = Hindsight(self.state)

    # ----------------------------------------------------------------------------------------------------- one line

    def line(self, node: str, emitted: Emit, incarnation: int | None = None, by: str | None = None) -> list[Step]:
        """Take the next line.

        Args:
            node: who acted, as the trace names it.
            incarnation: of that process; needed for lines that start one.
            by: for AcquireEpoch, the coordinator that asked, if known.

        Raises: Rejected when it is no step of the specification; the state is then the one before.
        """
        before, fresh = self.state, set(self.fresh)
        try:
            steps = self._dispatch(node, emitted, incarnation, by)
        except (model.NotEnabled, Mismatch, ValueError, LookupError) as problem:
            self.state, self.fresh = before, fresh
            why = str(problem) if isinstance(problem, model.NotEnabled | Mismatch) else f"nonsense: {problem!r}"
            raise Rejected(self.number, node, emitted.action.value, why) from problem
        self.number += 1
        coordinator = self.names.node(node) if self.names.node(node) in self.state.coord else None
        if emitted.action.value == "Prepare":
            coordinator = self.state.coord and self.coordinator_of(int(emitted.args["epoch"]))  # type: ignore[arg-type]
        self.hindsight.note(self.state, coordinator, emitted.action.value, emitted.attempt)
        return steps

    def _dispatch(self, node: str, e: Emit, incarnation: int | None, by: str | None) -> list[Step]:
        name = self.names.node(node)
        if node == "control":
            return control_line(self, e, by)
        if name in self.fresh and e.action.value not in ("StartReceiver", "StartOwner"):
            raise Mismatch("it did not start")
        if name in self.config.receivers:
            steps = receiver_line(self, node, name, e, incarnation)
            compare_receiver(self, name, e)
            return steps
        if name in self.config.owners:
            steps = owner_line(self, node, name, e, incarnation)
            compare_owner(self, name, e)
            return steps
        if name not in self.state.coord:
            self.add_coordinator(name)
        steps = coordinator_line(self, name, e)
        compare_coordinator(self, name, e)
        return steps

    def fork(self) -> Follower:
        """Another one at the same place, with the same past."""
        other = copy.copy(self)
        other.names = replace(
            self.names, candidates=dict(self.names.candidates), incarnations=dict(self.names.incarnations)
        )
        other.excuses, other.payloads = Counter(self.excuses), dict(self.payloads)
        other.partial = set(self.partial)
        other.accepted = {r: set(keys) for r, keys in self.accepted.items()}
        other.fresh, other.lost_early = set(self.fresh), set(self.lost_early)
        other.hindsight = self.hindsight.fork()
        return other

    @property
    def here(self) -> Here:
        """The state with the constants."""
        return model.here(self.config, self.state)

    def take(self, *steps: Step) -> list[Step]:
        """Take steps of the specification as it is written."""
        for step in steps:
            self.state = model.take(self.config, self.state, step)
        return list(steps)

    def put(self, divergence: str, **changes: Any) -> list[Step]:
        """Change the state as no step of the specification does, in the name of a divergence."""
        self.excuses[divergence] += 1
        self.state = changed(self.state, changes)
        return []

    def excuse(self, divergence: str) -> list[Step]:
        """The line changes nothing in the model, in the name of a divergence."""
        self.excuses[divergence] += 1
        return []

    def told(self, step: Step, node: str, attempt: int) -> list[Step]:
        """A step that a call causes: the condition to send the call held at some moment since its attempt started."""
        try:
            return self.take(step)
        except model.NotEnabled:
            self.state = self.hindsight.told(self.config, self.state, step, node, attempt)
            self.excuses["told"] += 1
            return [step]

    def coordinator_of(self, epoch: int) -> str:
        for name, each in self.state.coord.items():
            if each.epoch == epoch and epoch:
                return name
        for name, each in reversed(self.hindsight.holders_of(epoch)):
            if name in self.state.coord and each:
                return name
        raise Mismatch(f"nobody holds epoch {epoch}")

    def add_coordinator(self, name: str) -> None:
        self.config = replace(self.config, coordinators=(*self.config.coordinators, name))
        self.state = changed(self.state, {"coord": self.state.coord.but(name, Coordinator("out", 0, 0, 0))})

    def members(self, text: str) -> frozenset[Member]:
        found = set[Member]()
        for each in text.split(","):
            receiver, _, real = each.rpartition("@")
            name = self.names.node(receiver)
            if name not in self.state.rcv:
                raise Mismatch(f"{receiver} is no receiver")
            known = (receiver, int(real)) in self.names.incarnations or name in self.fresh
            if not known and not any(
                node == receiver and inc == self.state.rcv[name].inc
                for (node, _), inc in self.names.incarnations.items()
            ):
                self.names.incarnations[receiver, int(real)] = self.state.rcv[name].inc  # first time that we hear of it
            found.add((name, self.names.incarnation(receiver, int(real))))
        return frozenset(found)

    def payload(self, t: int, args: Mapping[str, Any]) -> tuple[tuple[str, int, int], tuple[str, ...]]:
        key = (self.names.node(f"owner {args['owner']}"), t, int(args["payload"]))
        if key not in self.payloads:
            raise Mismatch(f"payload {key} was never published")
        return key, self.payloads[key]

    def ignored(self, node: str, name: str, e: Emit) -> list[Step]:
        """A line that changes nothing: the model has to say why."""
        why = why_not_stale(self, node, name, e)
        if why:
            raise Mismatch(why)
        try:
            return self.take((e.action.value, (name,)))
        except model.NotEnabled:
            return self.excuse("DV15")

    def same(self, what: str, modelled: Any, told: Any) -> None:
        if modelled != told:
            raise Mismatch(f"{what} is {told!r}, in the model {modelled!r}")

    def candidate(self, name: str) -> int:
        """The number of a candidate."""
        return self.names.candidate(name)

    def tag(self, text: str) -> Tag:
        kind, _, rest = text.partition("(")
        rest = rest.removesuffix(")")
        match kind:
            case "none":
                return NONE
            case "clean":
                return clean(int(rest))
            case "dirty":
                version, _, candidate = rest.partition(",")
                return dirty(int(version), self.names.candidate(candidate))
            case _:
                version, _, rest = rest.partition(",")
                candidate, _, attempt = rest.rpartition(",")
                return done(int(version), self.names.candidate(candidate), int(attempt))
