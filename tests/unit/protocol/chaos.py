"""Seeded random walks: fault-free steps in any order, duplicates and late deliveries at will, a budget of faults."""

from __future__ import annotations

import random
from collections.abc import Callable

from nemo_dcr.config import GateMode
from nemo_dcr.ids import instance_of
from nemo_dcr.protocol.coordinator_events import AttemptEnded
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.testing.chaos_checks import FAILURE
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.invariants import FINALLY, INVARIANTS, InvariantBroken, check

ALL_FAULTS = ("kill", "restart", "owner", "baseline", "takeover", "lost", "lost_owner", "expire", "unknown", "abort")


WINDOW = (Phase.COMMITTING, Phase.UPDATING, Phase.ENDING, Phase.OPENING)


def fault(c: Cluster, kind: str, rng: random.Random) -> bool:
    """Inject one fault if it is possible now."""
    active = [n for n, node in enumerate(c.coordinators) if node.state.phase is not Phase.OUT]
    instances = sorted({instance_of(name) for name in c.receivers})
    down = sorted({instance_of(name) for name, r in c.receivers.items() if not r.up})
    match kind:
        case "kill" | "restart" if rng.random() < 0.5 and not down:
            c.kill_instance(rng.choice(instances))
        case "kill" | "restart":
            c.restart_instance(rng.choice(down or instances))
        case "owner":
            c.crash_owner(rng.choice(list(c.owners)))
        case "baseline" if c.record() is not None:
            c.lose_baseline(rng.choice(list(c.owners)))
        case "takeover":
            c.become(rng.randrange(2))
        case "lost" if active:
            c.lose_receiver(rng.choice(active), rng.choice(list(c.receivers)))
        case "lost_owner" if active:
            c.lose_owner(rng.choice(active), rng.choice(list(c.owners)))
        case "expire" if active:
            c.expire(rng.choice(active))
        case "unknown" if active:
            c.unknown(rng.choice(active))
        case "abort" if active:
            c.abort(rng.choice(active))
        case _:
            return False
    return True


def disturb(c: Cluster, rng: random.Random) -> None:
    """A duplicate or late delivery, a lost message, a request: free and without bound."""
    match rng.randrange(7):
        case 0 if c.sent:
            c._do_call(rng.choice(c.sent), keep=True)
        case 1 if c.payloads:
            c._do_payload(rng.choice(list(c.receivers)), rng.choice(list(c.payloads)))
        case 2 if c.manifests:
            c._do_manifest(rng.choice(list(c.receivers)), rng.choice(list(c.manifests)))
        case 3 if c.net:
            del c.net[rng.choice(list(c.net))]
        case 4 if c.replies:
            c.replies.pop(rng.randrange(len(c.replies)))
        case 5 if c.late_control:
            c._do_late_control(rng.randrange(len(c.late_control)))
        case 6:
            name = rng.choice([name for name in c.receivers if name.endswith("/0")])
            if c.receivers[name].up:
                (c.finish_request if c.receivers[name].state.requests else c.request)(name)


def in_window(c: Cluster) -> bool:
    """Some coordinator is between its commit and the end of the transition: a short time in which much can go wrong."""
    return any(node.state.phase in WINDOW for node in c.coordinators)


def walk(
    seed: int,
    *,
    steps: int = 250,
    faults: tuple[str, ...] = ALL_FAULTS,
    budget: int = 3,
    names: tuple[str, ...] = tuple(INVARIANTS),
    settle: bool = True,
    trainings: int = 3,
    on_start: Callable[[Cluster], None] = lambda c: None,
) -> Cluster:
    """One random run; every invariant in `names` is checked after every step.

    Raises: InvariantBroken.
    """
    rng = random.Random(seed)
    c = Cluster(
        instances=rng.choice((2, 3)),
        ranks=rng.choice((1, 1, 2)),
        owners=rng.choice((1, 2)),
        gate=rng.choice((GateMode.SYNC, GateMode.ASYNC)),
    )
    on_start(c)
    c.become(0)
    c.run()
    check(c, names)
    for _ in range(steps):
        if trainings and c.can_train() and rng.random() < 0.1:
            trainings -= 1
            c.train(rng.randrange(1, 1 << 9))
        elif budget and faults and rng.random() < (0.1 if in_window(c) else 0.02):
            budget -= fault(c, rng.choice(faults), rng)
        elif rng.random() < 0.2:
            disturb(c, rng)
        elif possible := c.progress():
            c.do(rng.choice(possible))
        check(c, names)
    if settle:
        settle_down(c, rng, names)
    for outcome in c.outcomes:
        if isinstance(outcome, AttemptEnded) and outcome.reason and not FAILURE.fullmatch(outcome.reason):
            raise InvariantBroken(f"a failure names its process and phase: {outcome.reason!r}")
    return c


def settle_down(c: Cluster, rng: random.Random, names: tuple[str, ...] = tuple(INVARIANTS), limit: int = 6000) -> None:
    """No more faults: finally every receiver serves the committed version and no transition is open.

    Raises: InvariantBroken for a safety property; AssertionError when it does not settle.
    """
    for name, r in c.receivers.items():
        if not r.up:
            c.restart_instance(instance_of(name))
    for _ in range(limit):
        if all(node.state.phase is Phase.OUT for node in c.coordinators):
            c.become(1)
        for name, r in c.receivers.items():
            if r.state.requests:
                c.finish_request(name)
        possible = c.progress()
        if not possible:
            break
        c.do(rng.choice(possible))
        check(c, names)
    assert [name for name, holds in FINALLY.items() if not holds(c)] == [], [
        [(node.state.phase, node.state.held) for node in c.coordinators],
        [(str(o.state.tracker), o.state.candidate, o.state.resident, o.state.status) for o in c.owners.values()],
        [(n, str(r.state.tag), r.state.gate_open, r.state.attempt) for n, r in c.receivers.items()],
        c.outcomes[-3:],
    ]
