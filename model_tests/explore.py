"""Every state that the model reaches within the bounds of a configuration of TLC.

Constants and bounds are read from the configuration files of the specification, so both sides explore the same. Bounds
only forbid steps, as the `Bounded` operators of MCDeltaRefit do.
Not handled: symmetry, which would make states equal that are not; liveness.

Spec: MCDeltaRefit, *.cfg
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tlc_cfg import read_cfg

from model_tests import model
from model_tests.model import Step
from model_tests.model_decisions import Here
from model_tests.model_state import Config, Member, State

SPEC = Path(__file__).resolve().parents[1] / "spec"
Edge = tuple[State, Step, State]

_CHANGES: dict[str, Callable[[int, frozenset[str]], frozenset[str]]] = {
    "All": lambda candidate, items: items,
    "Nothing": lambda candidate, items: frozenset(),
    "Alternating": lambda candidate, items: frozenset({"i1"}) if candidate == 1 else items,
    "SecondOnly": lambda candidate, items: frozenset() if candidate == 1 else items,
}
_OWNERS: dict[str, Callable[[str], str]] = {
    "OneOwner": lambda item: "o1",
    "TwoOwners": lambda item: "o1" if item == "i1" else "o2",
}
_ARRIVALS = {"Sound": ("sound",), "AnyArrival": ("sound", "damaged", "foreign")}
_SOME = {"Largest": True, "AnyOf": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What MCDeltaRefit adds to the constants."""

    max_attempt: int
    max_faults: int
    max_restart: int
    max_owner_restart: int
    max_epoch: int
    max_dead: int
    max_attempt_to_fail: int
    may_lose: bool
    may_fail: bool
    largest: bool
    """A coordinator takes every receiver that it may take, not any of them."""
    cold: bool
    """Start from nothing, not after the first commit."""


def read_bounds(cfg: str) -> tuple[Config, Bounds]:
    """Constants and bounds of a configuration file of the specification.

    Raises: ValueError when it has symmetry; KeyError for a constant or an operator that the model does not know.
    """
    read = read_cfg(SPEC / cfg)
    settings = dict(read.settings)
    if "SYMMETRY" in settings:
        raise ValueError(f"{cfg} has symmetry, so TLC does not visit every state")
    given = {name: text.split(" ", 1)[1] for name, text in read.constants.items()}
    items, candidates = _names(given["Items"]), int(given["MaxCandidate"])
    changes, owner = _CHANGES[given["Changes"]], _OWNERS[given["OwnerOf"]]
    config = Config(
        receivers=_names(given["Receivers"]),
        owners=_names(given["Owners"]),
        items=items,
        owner_of={item: owner(item) for item in items},
        coordinators=_names(given["Coordinators"]),
        max_candidate=candidates,
        changes={candidate: changes(candidate, frozenset(items)) for candidate in range(1, candidates + 1)},
        gate_mode=given["GateMode"].strip('"'),
        requests=_names(given["Requests"]),
        arrivals=_ARRIVALS[given["Arrivals"]],
    )
    bounds = Bounds(
        max_attempt=int(given["MaxAttempt"]),
        max_faults=int(given["MaxFaults"]),
        max_restart=int(given["MaxRestart"]),
        max_owner_restart=int(given["MaxOwnerRestart"]),
        max_epoch=int(given["MaxEpoch"]),
        max_dead=int(given["MaxDead"]),
        max_attempt_to_fail=int(given["MaxAttemptToFail"]),
        may_lose=given["MayLose"] == "TRUE",
        may_fail=given["MayFail"] == "TRUE",
        largest=_SOME[given["SomeOf"]],
        cold=settings["SPECIFICATION"] in ("Spec", "FairSpec"),
    )
    return config, bounds


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.strip("{}").replace(" ", "").split(",") if name)


def edges(config: Config, bounds: Bounds) -> Iterator[Edge]:
    """Every step from every state within the bounds, breadth first, each state's steps together."""
    first = model.init(config) if bounds.cold else model.warm(config)
    seen, waiting = {first: first}, deque([first])
    while waiting:
        state = waiting.popleft()
        s = model.here(config, state)
        for step, after in model.successors(config, state):
            if permits(bounds, s, step):
                if after not in seen:
                    seen[after] = after
                    waiting.append(after)
                yield state, step, seen[after]


def states(config: Config, bounds: Bounds) -> set[State]:
    """Every state within the bounds."""
    found = {model.init(config) if bounds.cold else model.warm(config)}
    found.update(after for _, _, after in edges(config, bounds))
    return found


def permits(bounds: Bounds, s: Here, step: Step) -> bool:
    """Whether an enabled step stays within the bounds: the `Bounded` operators of MCDeltaRefit."""
    name, parameters = step
    match name, parameters:
        case "StartReceiver", (_, known):
            return _restarts(s) < bounds.max_restart and _faults(s) < bounds.max_faults and not known
        case "StartOwner", _:
            return _owner_restarts(s) < bounds.max_owner_restart and _faults(s) < bounds.max_faults
        case "AcquireEpoch", _:
            return s.epoch < bounds.max_epoch and (s.epoch == 0 or _faults(s) < bounds.max_faults)
        case "KillCandidate", _:
            return len(s.dead) < bounds.max_dead and _faults(s) < bounds.max_faults
        case "Prepare", (c, mode, cand, members):
            again = s.coord[c].phase != "prepared" or _may_go_wrong(bounds, s, c)
            chosen = not bounds.largest or members == _largest(s, c, mode, cand)
            return s.last() < bounds.max_attempt and again and chosen
        case "FailAttempt", (c,):
            return _may_go_wrong(bounds, s, c) or s.is_stuck(c)
        case "ResolveCommit", (c,):
            t = s.coord[c].att
            return s.k().att == t or _may_go_wrong(bounds, s, c) or not s.can_commit(t)
        case "LoseBaseline", _:
            return bounds.may_lose
        case "FailOwner" | "FailReceiver", _:
            return bounds.may_fail
    return True


def _largest(s: Here, c: str, mode: str, cand: int) -> frozenset[Member]:
    return frozenset[Member]().union(*s.wants(c, mode, cand))


def _may_go_wrong(bounds: Bounds, s: Here, c: str) -> bool:
    return s.coord[c].att <= bounds.max_attempt_to_fail


def _restarts(s: Here) -> int:
    return sum(p.inc - 1 for p in s.rcv.values())


def _owner_restarts(s: Here) -> int:
    return sum(p.inc - 1 for p in s.own.values())


def _faults(s: Here) -> int:
    return _restarts(s) + _owner_restarts(s) + max(0, s.epoch - 1) + len(s.dead)
