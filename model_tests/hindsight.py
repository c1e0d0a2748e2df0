"""What a coordinator saw, and which calls were on their way: steps whose condition held at an earlier state.

The specification lets a coordinator look and call at the moment at which that takes effect. The implementation acts on
reports and sends calls that are older then. Nothing new can happen in between (spec/README.md, "How things are
modelled"), so such a step is one of the specification at an earlier place. Here that place is searched for: endpoints
as they were at any moment since the coordinator's last line, each at its own. A step is accepted only if one is found
where the action of the specification is enabled, and only its own effect is carried over.

Not handled: anything that an endpoint decides; it sees itself as it is.

Spec: Told, Wants
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

from model_tests import model
from model_tests.model_state import Config, Member, State, changed

Step = model.Step

LIMIT = 4000
"""Mixtures of endpoint states that are tried before a line is rejected."""


class Hindsight:
    """The states that a run went through, with the places that matter to coordinators."""

    def __init__(self, state: State) -> None:
        self._past = [state]
        self._looked: dict[str, int] = {}
        """Coordinator: place of its last line."""
        self._started: dict[int, int] = {}
        """Attempt: place at which it started."""
        self._epochs: dict[int, list[tuple[str, int]]] = {}

    def note(self, state: State, coordinator: str | None, action: str, attempt: int) -> None:
        """One line was taken."""
        self._past.append(state)
        here_ = len(self._past) - 1
        if coordinator is not None:
            self._looked[coordinator] = here_
        if action == "StartAttempt":
            self._started[attempt] = here_
        if action == "AcquireEpoch":
            for name, each in state.coord.items():
                if each.epoch == state.epoch:
                    self._epochs.setdefault(state.epoch, []).append((name, each.epoch))

    def fork(self) -> Hindsight:
        """Another one with the same past."""
        other = copy.copy(self)
        other._past, other._looked, other._started = list(self._past), dict(self._looked), dict(self._started)
        other._epochs = {epoch: list(holders) for epoch, holders in self._epochs.items()}
        return other

    def holders_of(self, epoch: int) -> list[tuple[str, int]]:
        """Who ever held an epoch."""
        return self._epochs.get(epoch, [])

    # --------------------------------------------------------------------------------------- steps of a coordinator

    def seen(self, config: Config, state: State, step: Step, coordinator: str) -> State:
        """A coordinator's step that is enabled for what it saw since its last line; the look may be older.

        Raises: NotEnabled when it is so for no look.
        """
        problem: model.NotEnabled | None = None
        for view in self._views(state, coordinator):
            try:
                after = model.take(config, view, step)
            except model.NotEnabled as found:
                problem = problem or found
                continue
            coord = state.coord.but(coordinator, after.coord[coordinator])
            return changed(state, {"coord": coord, "late": state.late | after.late, "net": state.net | after.net})
        raise problem or model.NotEnabled("a look")

    def prepared(self, config: Config, state: State, step: Step) -> tuple[State, Counter[str]]:
        """Prepare, by an older look of its coordinator. Returns also the divergences that were needed.

        Raises: NotEnabled when no look leads to that request.
        """
        c = step[1][0]
        try:
            return self._prepared(config, state, step)
        except model.NotEnabled as problem:
            if state.coord[c].phase != "fenced":
                raise
            # Divergence DV4: a coordinator that takes an endpoint for lost in a round gives up its calls and looks.
            looks = state.coord.but(c, state.coord[c]._replace(phase="ready"))
            try:
                after, used = self._prepared(config, changed(state, {"coord": looks}), step)
            except model.NotEnabled:
                raise problem from None
            return after, used + Counter({"DV4": 1})

    def _prepared(self, config: Config, state: State, step: Step) -> tuple[State, Counter[str]]:
        c, mode, cand, members = step[1]
        first: model.NotEnabled | None = None
        # Divergence DV19: a request that comes after its coordinator went on without it is as one asked from "ready".
        asking = model.here(config, state).may_ask(c)
        coord = state.coord if asking else state.coord.but(c, state.coord[c]._replace(phase="ready"))
        names = tuple(r for r in config.receivers if any(r == m[0] for m in members))
        # Divergence DV23: who does not answer the survey is left out; in the specification it would be seen.
        for silent in (False, True):
            seen_by = replace(config, receivers=names) if silent else config
            for view in self._views(changed(state, {"coord": coord}), c, late=not asking):
                for asked, excuse in _as_ranks(seen_by, view, c, mode, members):
                    try:
                        after = model.take(seen_by, view, ("Prepare", (c, mode, cand, asked)))
                    except model.NotEnabled as found:
                        first = first or found
                        continue
                    used = Counter({"DV13": 1})
                    used.update({excuse: 1} if excuse else {})
                    used.update({"DV23": 1} if silent else {})
                    used.update({} if asking else {"DV19": 1})
                    row = after.table[-1]._replace(req=members)
                    after_coord = state.coord.but(c, after.coord[c]) if asking else state.coord
                    return changed(state, {"table": (*state.table, row), "coord": after_coord}), used
        raise first or model.NotEnabled("wants")

    def _views(self, state: State, coordinator: str, *, late: bool = False) -> Iterator[State]:
        """The state with endpoints and control plane as they were at some moment since the coordinator's last line."""
        since = 0 if late else self._looked.get(coordinator, 0)
        for place in range(len(self._past) - 1, since - 1, -1):
            old = self._past[place]
            yield changed(state, {"rcv": old.rcv, "own": old.own})
            if (old.chain, old.epoch, old.table) != (state.chain, state.epoch, state.table):
                control = {"chain": old.chain, "epoch": old.epoch, "table": old.table, "dead": old.dead}
                if len(old.table) >= state.coord[coordinator].att and len(old.chain) >= state.coord[coordinator].view:
                    yield changed(state, {"rcv": old.rcv, "own": old.own, **control})
        for rcv, own in self._mixtures(state, since, len(self._past) - 1):
            yield changed(state, {"rcv": rcv, "own": own})

    # ------------------------------------------------------------------------------------------ steps that calls cause

    def told(self, config: Config, state: State, step: Step, node: str, attempt: int) -> State:
        """A step of `node` caused by a call that could be sent at an earlier state; the node itself is as it is now.

        Raises: NotEnabled when it never could.
        """
        since = self._started.get(attempt, 0)
        problem: model.NotEnabled | None = None
        for view in self._senders(state, since, node):
            try:
                after = model.take(config, view, step)
            except model.NotEnabled as found:
                problem = problem or found
                continue
            own = "own" if node in state.own else "rcv"
            before: Any = getattr(state, own)
            changes = {own: before.but(node, getattr(after, own)[node]), "net": state.net | after.net}
            return changed(state, changes)
        raise problem or model.NotEnabled("a call")

    def _senders(self, state: State, since: int, node: str) -> Iterator[State]:
        """Earlier states with `node` as it is; then the same with endpoints from several moments before."""
        now: dict[str, Any] = {"net": state.net, "base": state.base, "store": state.store, "content": state.content}
        now |= {"step": state.step}

        def with_node(old: State, rcv: Any, own: Any) -> State:
            rcv = rcv.but(node, state.rcv[node]) if node in state.rcv else rcv
            own = own.but(node, state.own[node]) if node in state.own else own
            return changed(old, {**now, "rcv": rcv, "own": own})

        last = None
        for place in range(len(self._past) - 1, since - 1, -1):
            old = self._past[place]
            if last is None or (old.coord, old.rcv, old.own, old.epoch) != (last.coord, last.rcv, last.own, last.epoch):
                yield with_node(old, old.rcv, old.own)
            last = old
        last = None
        for place in range(len(self._past) - 1, since - 1, -1):
            old = self._past[place]
            if last is None or old.coord != last.coord:
                for rcv, own in self._mixtures(old, since, place):
                    yield with_node(old, rcv, own)
            last = old

    def _mixtures(self, state: State, since: int, until: int) -> Iterator[tuple[Any, Any]]:
        """Every endpoint at its own moment, later ones first."""
        rcv = [self._moments("rcv", r, since, until) for r in state.rcv]
        own = [self._moments("own", o, since, until) for o in state.own]
        for mixed in islice(product(*rcv, *own), LIMIT):
            receivers, owners = mixed[: len(rcv)], mixed[len(rcv) :]
            yield (
                type(state.rcv)(zip(state.rcv, receivers, strict=True)),
                type(state.own)(zip(state.own, owners, strict=True)),
            )

    def _moments(self, variable: str, name: str, since: int, until: int) -> list[Any]:
        """Values of an endpoint that a report can tell apart."""
        found: dict[Any, Any] = {}
        for place in range(until, since - 1, -1):
            value = getattr(self._past[place], variable)[name]
            if variable == "rcv":
                key = (*value[:9], len(value.ends), value.acked)
            else:
                key = tuple(value)
            found.setdefault(key, value)
        return list(found.values())


def _as_ranks(config: Config, view: State, c: str, mode: str, members: frozenset[Member]) -> Iterator[Any]:
    """The members, and those whose own rank asks for the attempt.

    Divergence DV6: an instance takes part with all its ranks. A restore or a finish attempt takes a rank along that
    does not need it, when another rank of its instance does.
    """
    yield members, ""
    if mode not in ("restore", "finish"):
        return
    s = model.here(config, view)
    need = members & (s.strays(c) if mode == "restore" else s.closed(c))
    instances = {r.rpartition("/")[0] for r, _ in need}
    if need and need != members and all(r.rpartition("/")[0] in instances for r, _ in members):
        yield need, "DV6"
