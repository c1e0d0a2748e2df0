"""The state machine: Hypothesis chooses what happens, and implementation and model are compared after every step.

There is a rule for each action of the specification, with its name. A rule of an action that fault-free running takes
lets everybody run, in drawn order, until somebody takes it; then the next rule acts at that very place. A rule of an
action that starts with a fault, a process or the trainer makes it happen. Further rules are what the network and the
world do: messages are repeated, lost and late, payloads are damaged, processes die, replies of the control plane do
not come. Faults that cost an attempt have a drawn budget. In the end nothing more happens, and everything settles.
Not handled: engines that sleep (tests/unit/protocol/test_endpoint.py).

Paper: Table B.2 (failures)   Spec: Next, Fairness   Proofs: version_alignment
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from model_tests.draws import SEEDS, draws
from model_tests.engines import tables
from model_tests.nodes import Draw
from model_tests.pair import CALM_STEPS, Pair
from nemo_dcr.ids import OwnerId, ReceiverId, instance_of
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.trace import Action

FAULTS = (4, 8, 6, 12)
"""So many faults that cost an attempt may happen in one run."""
HOW = ("deadline", "abort", "receiver", "owner")
TRAININGS = 3
RECENT = 8
"""Of the calls that were held back, so many may still arrive."""
RULES = 25
"""Rules in a run of CI."""
OPENINGS = ("transition", "serving", "transition", "cold")

OWN_RULE = ("BeginTransition", "StartOwner", "LoseBaseline", "StartReceiver", "AdmitRequest", "FinishRequest")
OWN_RULE += ("FailAttempt", "FailReceiver", "IgnoreDuplicate", "IgnoreStale", "AcquireEpoch", "ApplyItem")
TAKEN = tuple(action for action in Action if action.value not in OWN_RULE)
"""Actions that fault-free running takes; the others have a rule of their own."""


def snake_case(name: str) -> str:
    """The name of an action as a rule has it."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Machine(RuleBasedStateMachine):
    """Rules over one pair. Subclasses choose the properties, or the tables."""

    names: Iterable[str] | None = None
    """Properties to look at without the model; None is the model and everything."""
    totals: ClassVar[Counter[str]] = Counter()
    """What all runs of this process did: examples, steps, and lines by action."""

    def __init__(self) -> None:
        super().__init__()
        self.pair: Pair | None = None
        self.broken = False
        self.faults = self.trainings = 0
        self.delayed: list[Any] = []

    @property
    def w(self) -> Any:
        """The implementation."""
        assert self.pair is not None
        return self.pair.world

    @initialize(data=st.data(), faults=st.sampled_from(FAULTS), opening=st.sampled_from(OPENINGS), seed=SEEDS)
    def start(self, data: st.DataObject, faults: int, opening: str, seed: int) -> None:
        """Everybody starts. The rules begin before the first record, when everybody serves, or with a transition."""
        self.begin(data.draw(draws()), faults=faults, opening=opening, seed=seed)

    def begin(self, draw: Draw, *, faults: int = FAULTS[0], opening: str = "transition", seed: int = 0) -> None:
        """As `start`, without a draw."""
        self.rng = random.Random(seed)
        self.faults, self.trainings = faults, TRAININGS
        self.pair = Pair(draw, names=self.names)
        with self.watched() as pair:
            pair.act(lambda: self.w.become(0))
            if opening != "cold":
                pair.run(CALM_STEPS, self.rng)
        if opening == "transition" and self.may_train():
            self.train(seed)

    @contextmanager
    def watched(self) -> Iterator[Pair]:
        """Something happens; a failure in it ends the run, and nothing settles after it."""
        assert self.pair is not None
        try:
            yield self.pair
        except BaseException:
            self.broken = True
            raise

    def teardown(self) -> None:
        """No more faults: everything ends, and the proved model takes the whole run. The engines go back."""
        if self.pair is None:
            return
        try:
            if not self.broken:
                for message in self.delayed[-RECENT:]:
                    self.pair.run(2, self.rng)
                    self.pair.act(lambda message=message: self.w._do_call(message, keep=True))
                self.pair.settle(self.rng)
                if self.names is None:
                    self.pair.prove()
        finally:
            self.totals["examples"] += 1
            self.totals["steps"] += self.pair.steps
            for action, count in self.pair.reached.items():
                self.totals[action] += count
            self.pair.close()

    def happen(self, what: Callable[[], object]) -> None:
        """One thing happens, and both sides are compared."""
        with self.watched() as pair:
            pair.act(what)

    def choose(self, seed: int, among: Iterable[Any]) -> Any:
        """One of those that are possible now; None when there is none."""
        possible = [*among, None]
        return possible[seed % max(1, len(possible) - 1)]

    # ------------------------------------------------------------------------------------------------ the scheduler

    def reach(self, action: Action, seed: int) -> None:
        """Everybody runs until somebody takes this action; when nothing is left to do, the trainer makes a step."""
        self.go_on(seed)
        with self.watched() as pair:
            pair.reach(action, random.Random(seed))

    @rule(seed=SEEDS, count=st.integers(1, 30))
    def run_on(self, seed: int, count: int) -> None:
        """Everybody runs for a while."""
        self.go_on(seed)
        with self.watched() as pair:
            pair.run(count, random.Random(seed))

    @rule(seed=SEEDS)
    def take_one(self, seed: int) -> None:
        """Any one step."""
        self.go_on(seed)
        step = self.choose(seed, self.w.progress())
        if step is not None:
            with self.watched() as pair:
                pair.do(step)

    @rule(seed=SEEDS, group=st.booleans())
    def apply_item(self, seed: int, group: bool) -> None:
        """A loader takes the next item, or everything that may be written in one call."""
        name = self.choose(seed, (name for name, r in self.w.receivers.items() if r.up and r.issued))
        if name is None:
            self.reach(Action.START_APPLY, seed)
        elif group:
            self.happen(lambda: self.w._do_write(name, count=len(self.w.receivers[name].issued)))
        else:
            self.happen(lambda: self.w._do_write(name))

    # -------------------------------------------------------------------------------------------------- the trainer

    def may_train(self) -> bool:
        """The trainer may make an optimizer step."""
        return self.pair is not None and self.trainings > 0 and self.w.can_train()

    @precondition(may_train)
    @rule(seed=SEEDS)
    def begin_transition(self, seed: int) -> None:
        """An optimizer step: scattered bits, all, none, the shared scale, or one flip in every tensor."""
        self.train(seed)

    def train(self, seed: int) -> None:
        """One optimizer step."""
        self.trainings -= 1
        self.happen(lambda: self.w.train(seed))

    def go_on(self, seed: int) -> None:
        """Do not stand still for want of a candidate."""
        if self.may_train() and not self.w.progress():
            self.train(seed)

    # -------------------------------------------------------------------------------------------------- the network

    @rule(seed=SEEDS)
    def ignore_stale(self, seed: int) -> None:
        """A call arrives late or again: one that was held back, or any of those that were sent before."""
        message = self.choose(seed // 2, self.delayed[-RECENT:] if seed % 2 else self.w.sent)
        if message is not None:
            self.happen(lambda: self.w._do_call(message, keep=True))

    @rule()
    def delay(self) -> None:
        """All calls that are on their way are held back; coordinators call again."""
        self.delayed += self.w.net
        self.w.net.clear()

    @rule(seed=SEEDS, to=SEEDS)
    def ignore_duplicate(self, seed: int, to: int) -> None:
        """A payload arrives that was published at any time before."""
        key = self.choose(seed, self.w.payloads)
        if key is not None:
            self.happen(lambda: self.w._do_payload(self.choose(to, self.w.receivers), key))

    @rule(seed=SEEDS, to=SEEDS)
    def repeat_manifest(self, seed: int, to: int) -> None:
        """A manifest arrives that was published at any time before."""
        which = self.choose(seed, self.w.manifests)
        if which is not None:
            self.happen(lambda: self.w._do_manifest(self.choose(to, self.w.receivers), which))

    @rule(seed=SEEDS, reply=st.booleans())
    def lose_message(self, seed: int, reply: bool) -> None:
        """A call or a reply is lost; the coordinator asks again."""
        if reply and self.w.replies:
            self.happen(lambda: self.w.replies.pop(seed % len(self.w.replies)))
        elif self.w.net:
            self.happen(lambda: self.w.net.pop(self.choose(seed, self.w.net)))

    @rule(seed=SEEDS)
    def late_control(self, seed: int) -> None:
        """A request whose caller has given up reaches the control plane."""
        if self.w.late_control:
            self.happen(lambda: self.w._do_late_control(seed % len(self.w.late_control)))

    # --------------------------------------------------------------------------------------------------- requests

    @rule(seed=SEEDS)
    def admit_request(self, seed: int) -> None:
        """A request arrives at an instance."""
        name = self.choose(seed, (name for name in self._fronts() if not self.w.receivers[name].state.requests))
        if name is not None:
            self.happen(lambda: self.w.request(name))

    @rule(seed=SEEDS)
    def finish_request(self, seed: int) -> None:
        """A running request ends."""
        name = self.choose(seed, (name for name in self._fronts() if self.w.receivers[name].state.requests))
        if name is not None:
            self.happen(lambda: self.w.finish_request(name))

    def _fronts(self) -> list[ReceiverId]:
        return [name for name, r in self.w.receivers.items() if name.endswith("/0") and r.up]

    # ------------------------------------------------------------------------------------------------------ faults

    def may_fault(self) -> bool:
        """The budget is not used up."""
        return self.pair is not None and self.faults > 0

    def may_lose(self) -> bool:
        """A baseline that is lost before the first record is lost for good: nothing committed could refill it."""
        return self.may_fault() and bool(self.w.versions)

    def fault(self, what: Callable[[], object]) -> None:
        """One fault happens."""
        self.faults -= 1
        self.happen(what)

    def _running(self) -> list[int]:
        return [c for c, node in enumerate(self.w.coordinators) if node.state.phase is not Phase.OUT]

    @precondition(may_fault)
    @rule(seed=SEEDS, damage=st.one_of(st.none(), st.integers(0, 1 << 14)))
    def fail_receiver(self, seed: int, damage: int | None) -> None:
        """A payload arrives with one wrong bit, or whole but not as its owner published it."""
        arriving = [
            (name, key)
            for name, r in self.w.receivers.items()
            for key in self.w.payloads
            if r.up and key.attempt == r.state.attempt and not r.state.stopped and not r.state.acked
            if key.payload not in r.state.seen.get(key.owner, {})
        ]
        chosen = self.choose(seed, arriving)
        if chosen is None:
            self.reach(Action.EMIT_PAYLOAD, seed)
        elif damage is None:
            self.fault(lambda: self.w.foreign_payload(*chosen))
        else:
            self.fault(lambda: self.w._do_payload(*chosen, damage=damage))

    @precondition(may_fault)
    @rule(seed=SEEDS, how=st.sampled_from(HOW))
    def fail_attempt(self, seed: int, how: str) -> None:
        """A deadline passes, the operator aborts, or a coordinator takes somebody for lost, rightly or not."""
        c = self.choose(seed, self._running())
        if c is None:
            return
        match how:
            case "deadline":
                self.fault(lambda: self.w.expire(c))
            case "abort":
                self.fault(lambda: self.w.abort(c))
            case "receiver":
                self.fault(lambda: self.w.lose_receiver(c, self.choose(seed // 2, self.w.receivers)))
            case _:
                self.fault(lambda: self.w.lose_owner(c, self.choose(seed // 2, self.w.owners)))

    @precondition(may_fault)
    @rule(seed=SEEDS)
    def lose_control_reply(self, seed: int) -> None:
        """The reply to a commit, or to another request, never comes; the request may still arrive."""
        c = self.choose(seed, (c for c in self._running() if self._asks(c)))
        if c is not None:
            self.fault(lambda: self.w.unknown(c))

    def _asks(self, c: int) -> bool:
        return (self.w.coordinators[c].control or self.w.coordinators[c].control_reply) is not None

    @precondition(may_fault)
    @rule(seed=SEEDS)
    def start_receiver(self, seed: int) -> None:
        """An instance starts: one that is away joins, one that is there restarts."""
        away = [name for name, r in self.w.receivers.items() if not r.up]
        name = instance_of(self.choose(seed, away or self.w.receivers))
        self.fault(lambda: self.w.restart_instance(name))

    @precondition(may_fault)
    @rule(seed=SEEDS)
    def leave(self, seed: int) -> None:
        """An instance dies and stays away."""
        name = self.choose(seed, (name for name, r in self.w.receivers.items() if r.up))
        if name is not None:
            self.fault(lambda: self.w.kill_instance(instance_of(name)))

    @precondition(may_lose)
    @rule(seed=SEEDS)
    def start_owner(self, seed: int) -> None:
        """An owner crashes and starts again; its trackers are lost."""
        self.fault(lambda: self.w.crash_owner(self.choose(seed, self.w.owners)))

    @precondition(may_lose)
    @rule(seed=SEEDS)
    def lose_baseline(self, seed: int) -> None:
        """The memory of an owner's trackers is lost."""
        self.fault(lambda: self.w.lose_baseline(OwnerId(self.choose(seed, self.w.owners))))

    def strike(self, name: str, seed: int) -> None:
        """A fault strikes now, if its rule may be taken."""
        idle = [c for c in range(2) if c not in self._running()]
        drawn = {"acquire_epoch": {"c": self.choose(seed, idle or range(2))}}
        drawn["fail_receiver"] = {"seed": seed, "damage": seed}
        drawn["fail_attempt"] = {"seed": seed, "how": HOW[seed % len(HOW)]}
        drawn["delay"] = {}
        if name == "delay" or (self.may_lose() if name in ("start_owner", "lose_baseline") else self.may_fault()):
            getattr(self, name)(**drawn.get(name, {"seed": seed}))

    @precondition(may_fault)
    @rule(c=st.integers(0, 1))
    def acquire_epoch(self, c: int) -> None:
        """A coordinator starts and takes over; the other one goes on until it notices."""
        self.fault(lambda: self.w.become(c))
        with self.watched() as pair:
            pair.do(("control", c))


STRIKES = ("start_receiver", "start_receiver", "leave", "start_owner", "lose_baseline", "acquire_epoch")
STRIKES += ("lose_control_reply", "fail_receiver", "fail_attempt", "delay")
"""Rules by which a fault strikes where an action was just taken."""
STRIKE = st.sampled_from(("",) * len(STRIKES) + STRIKES)


def _taken(action: Action) -> Callable[..., None]:
    def reach(self: Machine, seed: int, strike: str) -> None:
        self.reach(action, seed)
        if strike:
            self.strike(strike, seed)

    reach.__name__ = reach.__qualname__ = snake_case(action.value)
    reach.__doc__ = f"Everybody runs until somebody takes {action.value}; a fault may strike at that place."
    return rule(seed=SEEDS, strike=STRIKE)(reach)


for _action in TAKEN:
    setattr(Machine, snake_case(_action.value), _taken(_action))


def run_machine(machine: type[Machine], chosen: settings, *, with_seed: int | None = None) -> None:
    """Let Hypothesis run a machine; the tables are drawn before, for they are drawn by Hypothesis too.

    Raises: what the machine finds.
    """
    tables()
    run_state_machine_as_test(machine if with_seed is None else seed(with_seed)(machine), settings=chosen)
