"""The implementation over real tensors and the model, stepped side by side; everything is compared after every step.

`act` lets one thing happen to the implementation. Every line that it traced takes the model along (`Follower`). Then
the two states must not differ (`abstraction`), the model must have every property of the specification, and the real
bits those of `world_checks`. At the end of a run the proved model takes all of its lines too, alone (`prove`).
`Pair(..., names=...)` is the same without the models, for a chosen set of properties.
Not handled: what may happen and how often (machine).

Paper: Proposition 1; Appendix B   Spec: Next, Properties   Proofs: version_alignment
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from model_tests import model
from model_tests.abstraction import differences
from model_tests.cluster_lines import ClusterLines, changes, config_of, control_line
from model_tests.follower import Follower, Names
from model_tests.model_properties import STATE_PROPERTIES, STEP_PROPERTIES
from model_tests.nodes import Draw
from model_tests.proved_lines import ProvedLines, validate
from model_tests.recorded import record_simulated
from model_tests.world import World
from model_tests.world_checks import CHECKS, check
from nemo_dcr.ids import instance_of
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.trace import Action, Emit
from tests.unit.protocol.invariants import FINALLY

CALM_STEPS = 1500
"""Steps without faults in which everything has to end; sound code needs a third of that."""
NEAR = 12
"""Steps that `reach` takes at most."""


class Differs(AssertionError):
    """Implementation and model are not in the same state."""


class PropertyFalls(AssertionError):
    """A property of the specification does not hold in the model, which went where the implementation went."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


class Unsettled(AssertionError):
    """Without faults, something did not end."""


class Pair:
    """One run of both sides."""

    def __init__(self, draw: Draw, *, names: Iterable[str] | None = None) -> None:
        """Both sides at the start. With `names` there is no model, and only those of `CHECKS` are looked at."""
        self.world = World(draw)
        self.names = tuple(CHECKS if names is None else names)
        self.follower = _follower(self.world) if names is None else None
        self.recorded = record_simulated(self.world, classes=False) if names is None else []
        self.steps = 0
        self.reached: Counter[str] = Counter()
        """Lines by action."""
        self._counted = self._journal = 0
        self._seen: dict[str, tuple[Any, ...]] = {}
        self._before: model.State | None = None
        self._lines = None if self.follower is None else ClusterLines(self.world, self.follower, self._watch)
        self._compare()

    def close(self) -> None:
        """The engines may serve another run."""
        self.world.close()

    # -------------------------------------------------------------------------------------------------- what happens

    def do(self, step: tuple[Any, ...]) -> None:
        """One step of the scheduler."""
        self.act(lambda: self.world.do(step))

    def act(self, happen: Callable[[], object]) -> None:
        """Anything that happens.

        Raises: Rejected, Differs, PropertyFalls, InvariantBroken; or what the implementation itself raises.
        """
        happen()
        self.steps += 1
        self._compare()

    def run(self, count: int, rng: random.Random) -> None:
        """Steps without a fault, in drawn order."""
        for _ in range(count):
            if not self.step(rng):
                break

    def step(self, rng: random.Random) -> bool:
        """One of them; False when there is none."""
        possible = self.world.progress()
        if possible:
            self.do(rng.choice(possible))
        return bool(possible)

    def reach(self, action: Action, rng: random.Random, limit: int = NEAR) -> bool:
        """Steps without a fault until somebody takes this action; false when nobody did within the limit."""
        before = self.reached[action.value]
        for _ in range(limit):
            if self.reached[action.value] > before:
                return True
            if not self.step(rng):
                break
        return self.reached[action.value] > before

    def settle(self, rng: random.Random, limit: int = CALM_STEPS) -> int:
        """No fault happens any more: transitions end and everybody serves, within a bound. Returns the steps it took.

        Raises: Unsettled.
        """
        w = self.world
        for name in sorted({instance_of(name) for name, r in w.receivers.items() if not r.up}):
            self.act(lambda name=name: w.restart_instance(name))
        for number in range(limit):
            if all(node.state.phase is Phase.OUT for node in w.coordinators):
                self.act(lambda: w.become(1))
            for name, r in w.receivers.items():
                for _ in r.state.requests:
                    self.act(lambda name=name: w.finish_request(name))
            if not self.step(rng):
                unmet = [name for name, holds in FINALLY.items() if not holds(w)]
                if unmet:
                    raise Unsettled(f"{unmet} after the last step: {self.where()}")
                return number
        raise Unsettled(f"still busy after {limit} steps: {w.progress()[:3]}; {self.where()}")

    def prove(self) -> ProvedLines:
        """The proved model takes every line of this run. Its theorems hold for all sizes, so they hold here.

        Raises: LineRejected.
        """
        named = {item: f"owner {o}/{tensor.name}" for item, (o, tensor, _) in self.world.faces.owned.items()}
        return validate(self.recorded, lambda new, old: frozenset(named[i] for i in changes(self.world, new, old)))

    def where(self) -> str:
        """Where everybody is, for an error."""
        w = self.world
        coordinators = [(node.state.phase.value, str(node.state.held)) for node in w.coordinators]
        owners = [(str(o.state.tracker), o.state.candidate, o.state.status.value) for o in w.owners.values()]
        receivers = [(name, str(r.state.tag), r.state.gate_open, r.state.attempt) for name, r in w.receivers.items()]
        return f"{coordinators} {owners} {receivers}"

    # ------------------------------------------------------------------------------------------------ both sides

    def _compare(self) -> None:
        w, follower = self.world, self.follower
        if self._lines is not None:
            self._lines.follow()
        same = self._same_as_before()
        if self._new_lines() or len(same) < len(self._seen):
            if follower is not None:
                found = differences(follower.config, follower.state, w, follower, ahead=same)
                if found:
                    raise Differs("; ".join(found))
            check(w, self.names)

    def _new_lines(self) -> bool:
        """Count the lines that came."""
        new = [line for _, line in self.world.lines[self._counted :]]
        new += [control_line(entry) for entry in self.world.control._journal[self._journal :]]
        self._counted = len(self.world.lines)
        self._journal = len(self.world.control._journal)
        self.reached.update(line.action.value for line in new)
        return bool(new)

    def _same_as_before(self) -> set[str]:
        """Nodes that were compared and did not move since, on either side: they need no other look."""
        w, model_state = self.world, None if self.follower is None else self.follower.state
        now: dict[str, tuple[Any, ...]] = {}
        for name, r in w.receivers.items():
            now[name] = (r.state, r.storage, r.up)
            if model_state is not None:
                now[name] += (model_state.rcv[name], model_state.store[name])
        for o, own in w.owners.items():
            now[f"owner {o}"] = (own.state, own.baseline)
            if model_state is not None:
                now[f"owner {o}"] += (model_state.own[f"owner {o}"], model_state.base)
        for c, node in enumerate(w.coordinators):
            now[f"coordinator {c}"] = (node.state, node.control_reply)
            if model_state is not None:
                now[f"coordinator {c}"] += (model_state.coord[f"coordinator {c}"],)
        before, self._seen = self._seen, now
        return {
            name
            for name, parts in now.items()
            if name in before and all(a is b for a, b in zip(parts, before[name], strict=True))
        }

    def _watch(self, node: str, emitted: Emit) -> None:
        """The model took a line: its properties hold in every state that it goes through."""
        assert self.follower is not None
        config, before, state = self.follower.config, self._before, self.follower.state
        if state is before:
            return
        for name, steps_right in STEP_PROPERTIES.items():
            if before is not None and not steps_right(config, before, state):
                raise PropertyFalls(name)
        for name, holds in STATE_PROPERTIES.items():
            if not holds(config, state):
                raise PropertyFalls(name)
        self._before = state


def _follower(w: World) -> Follower:
    """The model at the place where every process is about to start. Lines name tensors, a cluster names items."""
    config, names = config_of(w)
    tensors = {(f"owner {o}", tensor.name): item for item, (o, tensor, _) in w.faces.owned.items()}
    return Follower(config, Names(items={**names.items, **tensors}, changes=names.changes))
