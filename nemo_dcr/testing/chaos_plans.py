"""Which faults strike which transition of a chaos run, drawn from a seed.

Every pair of a point and a kind is a case. A case is reached on its own, or behind a first fault that leads there: a
restore needs a receiver that died, a takeover a coordinator that did. On top of its case a transition may be struck a
second time, at another point or at any time from outside.
Not handled: carrying it out (chaos_run).

Paper: Section 6.3; Appendix B   Spec: Next
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from nemo_dcr.testing.chaos_payloads import relay_of
from nemo_dcr.testing.chaos_points import Edge, Kind, Strike
from nemo_dcr.testing.chaos_record import RECORD

ACTIVE, STANDBY = "active", "standby"
RELAY, NETWORK = "relay", "network"
"""The roles of relay nodes and of splits."""
HOLDS_S = (0.2, 0.8, 2.0)
"""How long a process is stopped: not noticed, counted as lost, and replaced where it is the coordinator."""

RECEIVER_POINTS = (
    "EndpointPrepare",
    "Accept",
    "SeeManifest",
    "OpenApply",
    "StartApply",
    "ApplyItem",
    "Flush",
    "StopAndWait",
    "OpenGate",
    "CloseGate",
    "AdmitRequest",
    "FinishRequest",
)
RESTARTED_RECEIVER_POINTS = ("StartReceiver", "StartRestore", "FinishRestore")
OWNER_POINTS = (
    "BeginTransition",
    "OwnerPrepare",
    "EmitPayload",
    "EndStream",
    "UpdateBaseline",
    "CopyItem",
    "BaselineFilled",
    "EndTransition",
)
COORDINATOR_POINTS = (
    "StartAttempt",
    "CompleteAttempt",
    "SendCommit",
    "ResolveCommit",
    "RollForward",
    "record read",
    "record prepare",
    "record commit",
)
TAKEOVER_POINTS = ("BecomeCoordinator", "record acquire")
MANY = frozenset({"EmitPayload", "CopyItem", "Accept", "ApplyItem", "record read"})
"""Points that a transition reaches several times."""
GROUPS = (
    ("owners", "coordinators"),
    ("owners", ACTIVE),
    ("receivers", "coordinators"),
    ("receivers", ACTIVE),
    ("one instance", ACTIVE),
    ("one owner", "coordinators"),
    (ACTIVE, STANDBY),
    ("one instance", "everybody"),
    ("one owner", "everybody"),
)
"""Groups that a split keeps apart."""
RELAY_GROUPS = (("owners", "relays"), ("receivers", "relays"), ("one relay", "every process"))
RECORD_GROUPS = (("coordinators", RECORD), (ACTIVE, RECORD))
ASYNC_ONLY = frozenset({"CloseGate"})


@dataclass(frozen=True, slots=True)
class Case:
    """One point and what happens there."""

    role: str
    point: str
    edge: str
    kind: str

    def __str__(self) -> str:
        return f"{self.role}: {self.edge} {self.point}, {self.kind}".replace(":  ", ": ")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Everything that strikes one transition. Processes are named, the coordinators by what they are just then."""

    case: Case
    strikes: dict[str, tuple[Strike, ...]] = field(default_factory=dict)
    next_life: dict[str, tuple[Strike, ...]] = field(default_factory=dict)
    """Armed in the life that follows a death."""
    outside: tuple[tuple[float, str, Kind, float], ...] = ()
    """After so many seconds, this process: kill it, or do this to it for so long."""
    split: tuple[float, tuple[str, ...], tuple[str, ...], float] | None = None
    """After so many seconds these two groups do not reach each other for so long."""
    aborts: bool = False
    """Only owner 0 freezes the candidate, then an abort is asked for."""
    train_after_s: float = 0.0
    """The trainer steps only then."""
    double: bool = False


def apart(some: str, others: str) -> str:
    """The point of a split, in words."""
    return f"between {some} and {others}"


def relays_of(receivers: list[str]) -> list[str]:
    """The relay nodes of their instances."""
    return sorted({relay_of(name.partition("/")[0]) for name in receivers})


def members(group: str, rng: random.Random, receivers: list[str], owners: list[str]) -> tuple[str, ...]:
    """The processes of a group; of one instance or one owner a drawn one."""
    match group:
        case "owners":
            return tuple(owners)
        case "receivers":
            return tuple(receivers)
        case "coordinators":
            return ACTIVE, STANDBY
        case "relays":
            return tuple(relays_of(receivers))
        case "one relay":
            return (rng.choice(relays_of(receivers)),)
        case "one owner":
            return (rng.choice(owners),)
        case "one instance":
            instance = rng.choice(receivers).partition("/")[0]
            return tuple(name for name in receivers if name.startswith(f"{instance}/"))
        case "everybody":
            return (*owners, *receivers, ACTIVE, STANDBY)
        case "every process":
            return (*owners, *receivers, *relays_of(receivers), ACTIVE, STANDBY)
        case _:
            return (group,)


def all_cases(*, world: bool = False, server: bool = False, relays: bool = False) -> list[Case]:
    """Every pair that `faults` can lead to; with a `world` of its own also cuts, splits and full disks.

    With `server` the one of the record is struck too, with `relays` their nodes; they hold no payload on a disk.
    """
    kinds = (Kind.KILL, Kind.STOP)
    roles = {
        "receiver": (*RECEIVER_POINTS, *RESTARTED_RECEIVER_POINTS),
        "owner": (*OWNER_POINTS, "StopOwner", "StartOwner", "RebuildBaseline", "DropCandidate"),
        "coordinator": (*COORDINATOR_POINTS, *TAKEOVER_POINTS, "FailAttempt", "StepDown", "record kill"),
    }
    cases = [
        Case(role, point, edge.value, kind.value)
        for role, points in roles.items()
        for point, edge, kind in itertools.product(points, Edge, kinds)
    ]
    calls = [point for point in roles["coordinator"] if point.startswith("record ")]
    cases += [Case("coordinator", point, edge.value, Kind.LOST.value) for point in calls for edge in Edge]
    cases += [Case(role, "any time", "at", kind.value) for role in roles for kind in kinds]
    if world:
        cases += [Case(role, "any time", "at", Kind.CUT.value) for role in roles]
        cases += [] if relays else [Case("owner", "any time", "at", Kind.FULL.value)]
        cases += [Case(NETWORK, apart(*groups), "at", Kind.SPLIT.value) for groups in GROUPS]
    if relays:
        cases += [Case(RELAY, "any time", "at", kind.value) for kind in kinds]
    if relays and world:
        cases += [Case(RELAY, "any time", "at", Kind.CUT.value)]
        cases += [Case(NETWORK, apart(*groups), "at", Kind.SPLIT.value) for groups in RELAY_GROUPS]
    if server:
        cases += [Case(RECORD, "any time", "at", kind.value) for kind in kinds]
    if server and world:
        cases += [Case(RECORD, "any time", "at", Kind.CUT.value)]
        cases += [Case(NETWORK, apart(*groups), "at", Kind.SPLIT.value) for groups in RECORD_GROUPS]
    return cases


def faults(case: Case, rng: random.Random, receivers: list[str], owners: list[str]) -> Faults:
    """What has to happen for a case, on drawn victims."""
    if case.role == NETWORK:
        groups = next(each for each in (*GROUPS, *RELAY_GROUPS, *RECORD_GROUPS) if apart(*each) == case.point)
        some, others = (members(group, rng, receivers, owners) for group in groups)
        begin, hold = rng.uniform(0.0, 1.2), rng.choice(HOLDS_S[1:])
        others = tuple(name for name in others if name not in some)
        return _second(Faults(case=case, split=(begin, some, others, hold)), rng, receivers, owners)
    receiver, owner = rng.choice(receivers), rng.choice(owners)
    victim = {"receiver": receiver, "owner": owner, "coordinator": ACTIVE}.get(case.role, case.role)
    if case.role == RELAY:
        victim = rng.choice(relays_of(receivers))
    if case.edge == "at":
        where = victim if victim != ACTIVE else rng.choice((ACTIVE, STANDBY))
        kind, hold = Kind(case.kind), rng.choice(HOLDS_S if case.kind != Kind.CUT else HOLDS_S[1:])
        return _second(Faults(case=case, outside=((rng.uniform(0.0, 1.2), where, kind, hold),)), rng, receivers, owners)
    strike = Strike(
        case.point,
        Edge(case.edge),
        Kind(case.kind),
        nth=rng.randint(1, 3) if case.point in MANY else 1,
        hold_s=rng.choice(HOLDS_S),
    )
    plain = Faults(case=case, strikes={victim: (strike,)})
    match case.point:
        case point if point in RESTARTED_RECEIVER_POINTS:
            first = Strike(rng.choice(("EndpointPrepare", "ApplyItem", "Flush", "OpenGate")), Edge.AFTER, Kind.KILL)
            return Faults(case=case, strikes={victim: (first,)}, next_life={victim: (strike,)})
        case "StartOwner":
            first = Strike(rng.choice(("BeginTransition", "OwnerPrepare", "EndStream")), Edge.AFTER, Kind.KILL)
            return Faults(case=case, strikes={victim: (first,)}, next_life={victim: (strike,)})
        case "RebuildBaseline":
            first = Strike("EndTransition", Edge.AFTER, Kind.KILL)
            return Faults(case=case, strikes={victim: (first,)}, next_life={victim: (strike,)})
        case "StopOwner" | "FailAttempt":
            first = _death("EndpointPrepare")
            return Faults(case=case, strikes={victim: (strike,), receiver: (first,)}, double=True)
        case "AdmitRequest" | "FinishRequest":
            return replace(plain, train_after_s=0.4)
        case point if point in TAKEOVER_POINTS:
            first = _death(rng.choice(("StartAttempt", "CompleteAttempt", "SendCommit", "RollForward")))
            return Faults(case=case, strikes={ACTIVE: (first,), STANDBY: (strike,)}, double=True)
        case "StepDown":
            first = Strike(rng.choice(COORDINATOR_POINTS[:5]), Edge(rng.choice(list(Edge))), Kind.STOP, hold_s=2.0)
            return Faults(case=case, strikes={ACTIVE: (first, strike)}, double=True)
        case "DropCandidate":
            return replace(plain, strikes={owners[0]: (strike,)}, aborts=True)
        case "record kill":
            return replace(plain, aborts=True)
        case _:
            return _second(plain, rng, receivers, owners)


def _death(point: str) -> Strike:
    return Strike(point, Edge.AFTER, Kind.KILL)


def _second(plain: Faults, rng: random.Random, receivers: list[str], owners: list[str]) -> Faults:
    """Sometimes strike somebody else too."""
    drawn = rng.random()
    if drawn < 0.65:
        return plain
    others = [name for name in (*receivers, *owners, ACTIVE) if name not in plain.strikes]
    other = rng.choice(others)
    kind, hold = rng.choice((Kind.KILL, Kind.STOP)), rng.choice(HOLDS_S)
    if drawn < 0.8:
        return replace(plain, outside=(*plain.outside, (rng.uniform(0.0, 1.5), other, kind, hold)), double=True)
    points = RECEIVER_POINTS[:8] if "/" in other else OWNER_POINTS if other in owners else COORDINATOR_POINTS
    point = rng.choice(points)
    second = Strike(point, Edge(rng.choice(list(Edge))), kind, nth=1, hold_s=hold)
    return replace(plain, strikes={**plain.strikes, other: (second,)}, double=True)
