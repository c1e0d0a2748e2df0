"""Concrete runs of the model: the same action functions over a small cluster with real 16-bit words and real XOR.

A `Cluster` is a finite world with a state in its first values. `take` checks an action's guard and returns the state
after it. What an attempt carries from the beginning (its members, their incarnations) is written down when the attempt
is made, since such symbols are arbitrary in the proof. `wander` takes random enabled steps.

Spec: Init and Next of DeltaRefit   Proofs: none
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from spec.proof.dsl import Claim, Concrete, closed, parameters, symbols_read
from spec.proof.invariants import STEP_PROPERTIES
from spec.proof.model import ACTIONS
from spec.proof.prove import INVARIANTS
from spec.proof.receiver_guards import sent_as_xor
from spec.proof.vocabulary import KINDS, MODES, TABLE


class NotEnabled(Exception):
    """The guard of the action is false in this state: the script or the trace asks for a step that may not be taken."""


@dataclass(frozen=True, slots=True)
class World:
    """How large the finite world is."""

    instances: int = 2
    ranks: int = 1
    owners: int = 2
    elements: int = 4
    coordinators: int = 2
    attempts: int = 12
    versions: int = 5
    candidates: int = 6
    epochs: int = 6
    restarts: int = 6
    sync: Callable[[int], bool] = lambda attempt: True
    survives: bool = True

    def things(self) -> dict[str, list[Any]]:
        """The members of every sort."""
        return {
            "Coordinator": [f"k{number}" for number in range(self.coordinators)],
            "Receiver": [f"r{number}" for number in range(self.instances * self.ranks)],
            "Instance": [f"i{number}" for number in range(self.instances)],
            "Owner": [f"o{number}" for number in range(self.owners)],
            "Attempt": list(range(self.attempts + 1)),
            "Element": list(range(self.elements)),
            "Payload": [(f"o{owner}", number) for owner in range(self.owners) for number in range(2)],
            "Run": list(range(self.restarts)),
            "Incarnation": list(range(self.restarts)),
            "Epoch": list(range(self.epochs)),
            "Version": list(range(self.versions)),
            "Candidate": list(range(self.candidates)),
            "Request": ["q0"],
            "Seed": [0, 1],
            "Mode": list(MODES),
            "Kind": list(KINDS),
            "Bool": [False, True],
            "Word": [],
        }

    def instance(self, receiver: str) -> str:
        """Ranks are dealt out to instances in turn; the first ones lead."""
        return f"i{int(receiver[1:]) % self.instances}"

    def owner(self, element: int) -> str:
        """Elements are dealt out to owners in turn."""
        return f"o{element % self.owners}"


def word(candidate: int, element: int) -> int:
    """16-bit words; each candidate changes about half of them."""
    changes = [each for each in range(1, candidate + 1) if (each + element) % 2]
    return 0x3F80 + element if not changes else 0x3F80 + element ^ (changes[-1] * 0x0111)


def first(world: World) -> Concrete:
    """The first state: everything that `first_state` says, as defaults of rows that nobody wrote yet."""
    same: dict[str, Callable[..., Any]] = {name: (lambda *key, name=name: name) for name in (*MODES, *KINDS)}
    zero: tuple[str, ...] = (
        "no_attempt",
        "first_version",
        "first_candidate",
        "record_version",
        "record_attempt",
        "last_attempt",
        "epoch",
    )
    zero = (
        *zero,
        "version_candidate",
        "base_version",
        "candidate",
        "attempt_epoch",
        "coordinator_epoch",
        "view_version",
    )
    zero = (*zero, "view_attempt", "waits_for", "step", "run", "frozen_candidate", "resident", "tracker_version")
    zero = (*zero, "fill_version", "record_old", "record_new", "inc", "att", "fenced", "tag_version", "tag_candidate")
    zero = (*zero, "tag_attempt", "opened", "member_inc", "member_run")
    true = ("began", "is_resident", "stopped", "drained", "required", "coded_xor")
    defaults: dict[str, Callable[..., Any]] = {
        **same,
        **{name: (lambda *key: 0) for name in zero},
        **{name: (lambda *key: True) for name in true},
        **{name: (lambda left, right: left <= right) for name in ("attempt_le", "version_le", "epoch_le")},
        **{name: (lambda *key: key[-1] == 0) for name in ("stepped", "chosen", "run_used", "inc_used")},
        "succ": lambda left, right: right == left + 1,
        "word": word,
        "trash": lambda seed, element: 0xDEA0 + 0x11 * seed + element,
        "store": lambda receiver, element: 0xBAD0 + element,
        "base": lambda element: word(0, element),
        "owner_of": world.owner,
        "instance": world.instance,
        "leads": lambda receiver: int(receiver[1:]) < world.instances,
        "owns": lambda payload, owner: payload[0] == owner,
        "packed": lambda attempt, run, element: (world.owner(element), (element // world.owners + run) % 2),
        "mode": lambda attempt: "finish",
        "tag": lambda receiver: "none",
        "tracker": lambda owner: "at",
        "sync": lambda attempt: world.sync(attempt),
        "survives": lambda: world.survives,
    }
    return Concrete(TABLE, world.things(), {}, defaults)


def enabled(state: Concrete, name: str, arguments: Sequence[Any]) -> bool:
    """The guard is true."""
    return bool(ACTIONS[name](state, *arguments)[0])


def take(state: Concrete, name: str, *arguments: Any) -> Concrete:
    """The state after the action.

    Raises: NotEnabled when its guard is false.
    """
    guard, post = ACTIONS[name](state, *arguments)
    if guard is not True:
        raise NotEnabled(f"{name}{arguments} may not be taken here")
    return state.after(post)


def choose(state: Concrete, symbol: str, rows: Mapping[tuple[Any, ...], Any]) -> Concrete:
    """Write down what an attempt that is not made yet carries from the beginning."""
    values = {**state.values, symbol: {**state.values.get(symbol, {}), **rows}}
    return Concrete(state.table, state.things, values, state.defaults, state.swaps)


def choose_members(state: Concrete, attempt: int, receivers: Sequence[str] | None = None) -> Concrete:
    """The attempt requires these receivers (all by default) and owners as they run now."""
    chosen = state.things["Receiver"] if receivers is None else receivers
    state = choose(state, "required", {(attempt, r): r in chosen for r in state.things["Receiver"]})
    state = choose(state, "member_inc", {(attempt, r): state.inc(r) for r in state.things["Receiver"]})
    return choose(state, "member_run", {(attempt, o): state.run(o) for o in state.things["Owner"]})


def written_word(state: Concrete, receiver: str, attempt: int, element: Any) -> int:
    """What the write of this record leaves: real XOR, or the new word."""
    if sent_as_xor(state, attempt, element):
        stored, old, new = state.store(receiver, element), *_record(state, attempt, element)
        return int(stored ^ old ^ new)
    return int(state.record_new(attempt, element))


def _record(state: Concrete, attempt: int, element: Any) -> tuple[int, int]:
    return state.record_old(attempt, element), state.record_new(attempt, element)


def broken(state: Concrete, claims: Sequence[Claim] = INVARIANTS) -> list[str]:
    """Names of the claims that are false in this state."""
    return [claim.__name__ for claim in claims if closed(state, claim) is not True]


@cache
def _reads() -> Mapping[str, set[str]]:
    return symbols_read(TABLE, INVARIANTS)


def newly_broken(before: Concrete, after: Concrete) -> list[str]:
    """Names of the claims that are false in `after`, among those that look at a symbol which changed."""
    changed = {name for name, rows in after.values.items() if before.values.get(name) is not rows}
    return broken(after, [claim for claim in INVARIANTS if _reads()[claim.__name__] & changed])


def broken_steps(state: Concrete, after: Concrete) -> list[str]:
    """Names of the step properties that this step breaks."""
    found = []
    for step in STEP_PROPERTIES:
        sorts = tuple(parameters(step).values())
        if state.every(sorts, lambda *each, step=step: step(state, after, *each)) is not True:
            found.append(step.__name__)
    return found


def choices(state: Concrete, name: str) -> Iterator[tuple[Any, ...]]:
    """Arguments worth trying for an action: all things, but fresh ids in order and words as they would be written."""
    sorts = parameters(ACTIONS[name])
    pools: list[list[Any]] = []
    pool: Sequence[Any]
    for parameter, sort in sorts.items():
        pool = state.things[sort.name]
        if name == "AcquireEpoch":
            pool = [state.epoch() + 1]
        elif name == "Prepare" and parameter == "t":
            pool = [state.last_attempt() + 1]
        elif sort.name == "Word":
            pool = [None]
        elif sort.name == "Attempt":
            pool = range(max(0, state.last_attempt() - 2), state.last_attempt() + 1)
        elif sort.name == "Version":
            pool = range(state.record_version() + 2)
        elif sort.name == "Candidate":
            pool = range(max(0, state.step() - 1), state.step() + 2)
        pools.append([each for each in pool if each in state.things[sort.name] or each is None])
    for arguments in product(*pools):
        if _leads_nowhere(state, name, arguments):
            continue
        if name == "ApplyItem":
            r, t, e, _ = arguments
            yield (r, t, e, written_word(state, r, t, e))
        else:
            yield arguments


def _leads_nowhere(state: Concrete, name: str, arguments: tuple[Any, ...]) -> bool:
    """Steps that are allowed but would end most random attempts: stops out of the blue, a commit given up too early."""
    match name, arguments:
        case "StopAndWait", (r, t):
            return bool(state.att(r) != t)
        case "StopOwner", (o, t):
            return not state.owner_att(o, t) or t == state.last_attempt()
        case "BeginDrain", (r,):
            return bool(state.stopped(r) or state.drained(r) or state.att(r) == state.last_attempt())
        case "ResolveCommit", (_, t, _):
            return bool(not state.won(t) and t == state.last_attempt())
        case "StartOwner", (o, run, _, _):
            return bool(run != state.run(o) + 1)
        case "StartReceiver", (i, incarnation, _, _):
            ranks = [r for r in state.things["Receiver"] if state.instance(r) == i]
            return bool(incarnation != state.inc(ranks[0]) + 1)
        case _:
            return False


FAULTS: tuple[str, ...] = (
    "StartReceiver",
    "StartOwner",
    "LoseBaseline",
    "StepDown",
    "KillCandidate",
    "FailReceiver",
    "FailOwner",
)
FAULTS = (*FAULTS, "FailAttempt", "AcquireEpoch", "CloseGate", "ReadRecord", "Prepare")
IDLE = ("Conflict", "RefusePrepare", "IgnoreStale", "IgnoreDuplicate", "AdmitRequest", "BeginTransition")
RESTS = ("Prepare", "AcquireEpoch")
"""What a walk does when nothing else goes on."""


def wander(start: Concrete, seed: int, steps: int) -> Iterator[tuple[str, tuple[Any, ...], Concrete]]:
    """A random walk: each step with its arguments and the state after it.

    One step in twenty is a fault, one in ten one that leads nowhere; so that most attempts come to an end.
    """
    chance = random.Random(seed)
    state = start
    progress = [name for name in ACTIONS if name not in (*FAULTS, *IDLE)]
    for _ in range(steps):
        chance.shuffle(progress)
        drawn = chance.random()
        odd = [chance.choice(FAULTS)] if drawn < 0.05 else [chance.choice(IDLE)] if drawn < 0.15 else []
        names = [*odd, *progress, "BeginTransition", *RESTS]
        taken = next(((name, each) for name in names if (each := _pick(state, name, chance)) is not None), None)
        if taken is None:
            return
        name, arguments = taken
        if name == "Prepare":
            state = choose_members(state, arguments[1])
        state = take(state, name, *arguments)
        yield name, arguments, state


def _pick(state: Concrete, name: str, chance: random.Random) -> tuple[Any, ...] | None:
    """Arguments under which the action may be taken and changes something."""
    tried = list(choices(state, name))
    chance.shuffle(tried)
    for arguments in tried:
        guard, post = ACTIONS[name](state, *arguments)
        if guard is True and (not post or _changes(state, post)):
            return arguments
    return None


def _changes(state: Concrete, post: Mapping[str, Any]) -> bool:
    for symbol, change in post.items():
        rest = TABLE[symbol].args[len(change.prefix) :]
        for key in product(*[state.things[sort.name] for sort in rest]):
            if state.lookup(symbol)(*change.prefix, *key) != change.value(*key):
                return True
    return False
