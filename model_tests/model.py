"""The specification as plain Python: its first states, its actions with their parameters, and steps.

The parts carry the names of DeltaRefit.tla in snake case: state, guards, what a coordinator decides, and actions.
Replacing a method of `Here` weakens the guard of that name. test_spec_models shows that this is the specification.
Not handled: bounds and the search for states (explore); fairness.

Paper: Section 6; Algorithms B.1, B.2   Spec: DeltaRefit
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from model_tests import model_actions
from model_tests.model_actions import Changes, NotEnabled
from model_tests.model_decisions import Here
from model_tests.model_state import (
    MODES,
    NONE,
    UNKNOWN,
    VARIABLES,
    AckMessage,
    Config,
    Coordinator,
    Map,
    Owner,
    Record,
    Row,
    State,
    Word,
    changed,
    clean,
    mapped,
    new_receiver,
)

Action = Callable[..., Changes]
Step = tuple[str, tuple[Any, ...]]
"""The name of an action and its parameters, in the order of Next."""

ORDER = (
    "AcquireEpoch",
    "BecomeCoordinator",
    "StartAttempt",
    "CompleteAttempt",
    "FailAttempt",
    "SendCommit",
    "ResolveCommit",
    "StepDown",
    "RollForward",
    "Bootstrap",
    "Conflict",
    "Prepare",
    "KillCandidate",
    "Commit",
    "StartOwner",
    "BeginTransition",
    "EndStream",
    "FailOwner",
    "BaselineFilled",
    "LoseBaseline",
    "DropCandidate",
    "RefusePrepare",
    "IgnoreStale",
    "OwnerPrepare",
    "StopOwner",
    "EmitPayload",
    "CopyItem",
    "RebuildBaseline",
    "UpdateBaseline",
    "EndTransition",
    "StartReceiver",
    "StartApply",
    "Flush",
    "FailReceiver",
    "IgnoreDuplicate",
    "EndpointPrepare",
    "CloseGate",
    "OpenApply",
    "StopAndWait",
    "OpenGate",
    "FinishRestore",
    "StartRestore",
    "Accept",
    "SeeManifest",
    "ApplyItem",
    "AdmitRequest",
    "FinishRequest",
)
"""The actions of Next."""


def snake(name: str) -> str:
    """StopAndWait to stop_and_wait."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


ACTIONS: dict[str, Action] = {name: getattr(model_actions, snake(name)) for name in ORDER}
PARAMETERS = {name: tuple(inspect.signature(action).parameters)[1:] for name, action in ACTIONS.items()}


def here(config: Config, state: State) -> Here:
    """The state together with the constants, to be asked about."""
    return Here(config=config, **{name: getattr(state, name) for name in VARIABLES})


def init(config: Config) -> State:
    """The first state: nothing was ever committed."""
    empty: Map[str, Word] = mapped(config.items, frozenset())
    return State(
        chain=(),
        epoch=0,
        table=(),
        dead=frozenset(),
        late=frozenset(),
        content=mapped(range(config.max_candidate + 1), empty),
        step=0,
        own=mapped(config.owners, Owner(1, 0, 0, "idle", "at", 0, UNKNOWN, 0, 0, 0)),
        base=empty,
        rcv=mapped(config.receivers, new_receiver(1, NONE, True)),
        store=mapped(config.receivers, empty),
        coord=mapped(config.coordinators, Coordinator("out", 0, 0, 0)),
        net=frozenset(),
    )


def warm(config: Config) -> State:
    """StartBootstrapped: after the first commit, everybody serves version 0 and the first coordinator is active."""
    first, everyone = init(config), frozenset((r, 1) for r in config.receivers)
    serving = new_receiver(1, clean(0), True)._replace(att=1, stopped=False, gate=True, acked=True)
    changes = {
        "epoch": 1,
        "table": (Row(1, 0, "restore", 0, everyone, mapped(config.owners, 1)),),
        "chain": (Record(0, 1, everyone, 1, 0),),
        "net": frozenset(AckMessage("ack", 1, r, 1, True, frozenset()) for r in config.receivers),
        "own": Map({o: owner._replace(att=1, status="stopped") for o, owner in first.own.items()}),
        "rcv": mapped(config.receivers, serving),
        "coord": first.coord.but(config.coordinators[0], Coordinator("fenced", 1, 1, 1)),
    }
    return changed(first, changes)


def take(config: Config, state: State, step: Step) -> State:
    """The state after one step.

    Raises: NotEnabled, which names the step and the guard that forbids it.
    """
    name, parameters = step
    s = here(config, state)
    try:
        if any(parameter == "t" and value not in s.attempts() for parameter, value in _named(step)):
            raise NotEnabled("there is no such attempt")
        return changed(state, ACTIONS[name](s, *parameters))
    except NotEnabled as refused:
        raise NotEnabled(f"{name}{parameters} is not enabled: {refused}") from None


def steps(config: Config, state: State) -> Iterator[Step]:
    """Every enabled step with all its parameters, in the order of ACTIONS."""
    for step, _ in successors(config, state):
        yield step


def successors(config: Config, state: State) -> Iterator[tuple[Step, State]]:
    """Every enabled step and the state after it."""
    s = here(config, state)
    ranges = _ranges(s)
    for name, action in ACTIONS.items():
        for parameters in _choices(s, name, ranges):
            try:
                changes = action(s, *parameters)
            except NotEnabled:
                continue
            yield (name, parameters), changed(state, changes)


def _choices(s: Here, name: str, ranges: Mapping[str, Iterable[Any]]) -> Iterable[tuple[Any, ...]]:
    """All parameters of an action that Next tries; an existential inside of the action offers what it may choose."""
    if name == "Prepare":
        asked = product(ranges["c"], MODES, range(s.config.max_candidate + 1))
        return [(*before, members) for before in asked for members in s.wants(*before)]
    if name == "OpenGate":
        calls = {(m.att, m.ver) for m in s.open_calls()}
        return [(r, t, ver) for r, t in product(ranges["r"], ranges["t"]) for att, ver in sorted(calls) if att == t]
    return product(*[ranges[parameter] for parameter in PARAMETERS[name]])


def _ranges(s: Here) -> dict[str, Iterable[Any]]:
    """What the parameters of actions range over in Next."""
    return {
        "c": s.config.coordinators,
        "o": s.config.owners,
        "r": s.config.receivers,
        "e": (*s.config.owners, *s.config.receivers),
        "t": s.attempts(),
        "i": s.config.items,
        "q": s.config.requests,
        "how": s.config.arrivals,
        "cand": range(1, s.config.max_candidate + 1),
        "known": (False, True),
        "proved": (False, True),
    }


def _named(step: Step) -> Iterator[tuple[str, Any]]:
    return zip(PARAMETERS[step[0]], step[1], strict=True)
