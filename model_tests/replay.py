"""Performs steps of the specification on the implementation: the simulated cluster over the real machines.

For the next step of a schedule the search looks for moves of the cluster whose trace lines are exactly that step. Moves
without a line may come before it, as few as possible; a move with any other line is not taken. The follower reads the
lines, and its state must be the model's after the step, so nothing is accepted in hindsight. When nothing is found, the
step is `Unrealised`.

One event may cause two steps (docs/trace.md). The second line is then `owed`: the process is ahead of the schedule
until the schedule takes that step. A process that starts again owes nothing: it died between the two.

Not handled: which steps to perform (schedules); which moves there are (moves).

Paper: Appendix B   Spec: Next   Proofs: none, this is evidence
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model_tests import model
from model_tests.abstraction import differences
from model_tests.follower import Follower, Names, Rejected
from model_tests.moves import Move, Stage, perform, send_all
from model_tests.proposals import moves, reads
from nemo_dcr.protocol import messages as ms
from nemo_dcr.record import CommitRequest
from nemo_dcr.trace import Emit
from tests.unit.protocol.cluster import Cluster

DEPTH = 8
"""Moves without a line before the one that is the step."""
OF_COORDINATORS = frozenset(
    {
        *("control_reply", "control", "answer", "look", "leave", "wait", "unknown", "expire", "abort", "become"),
        *("poll", "poll_owner", "tell", "reply"),
    }
)
"""Moves whose first parameter is a coordinator."""
RESTARTS = {"StartReceiver", "StartOwner", "AcquireEpoch"}
OF_CONTROL = {"Prepare", "Commit", "KillCandidate", "Bootstrap", "Conflict"}
CONTROL = "control"
"""Node of the control plane's lines."""
Line = tuple[str, Emit]


class Unrealised(Exception):
    """The cluster can not do this step."""

    def __init__(self, step: model.Step, why: str, *, one_event: bool = False) -> None:
        super().__init__(f"{step}: {why}")
        self.step, self.why = step, why
        self.one_event = one_event
        """The process that acts is in the middle of an event that is two steps."""


class Diverged(Exception):
    """The cluster did the step, and is in another state than the model."""


@dataclass
class Realisation:
    """A cluster in a state of the model."""

    stage: Stage
    cluster: Cluster
    follower: Follower
    owed: tuple[Line, ...] = ()
    """Lines that the cluster wrote and the schedule has not come to."""
    requests: tuple[CommitRequest, ...] = ()
    """Commit requests that were sent; they may arrive at any time, and again."""

    @property
    def state(self) -> model.State:
        """The model's."""
        return self.follower.state

    @property
    def ahead(self) -> set[str]:
        """Nodes that are ahead of the model."""
        return {node for node, _ in self.owed}

    def fork(self, *, past: bool = False) -> Realisation:
        """A copy that goes its own way; without its past, nothing is accepted in hindsight."""
        return Realisation(self.stage, self.cluster.fork(), _fork(self.follower, past), self.owed, self.requests)

    def lines_of(self, move: Move) -> list[Line]:
        """Perform a move; the lines that it wrote."""
        lines, journal = len(self.cluster.lines), len(self.cluster.control._journal)
        perform(self.cluster, self.stage, move)
        found = [(CONTROL, Emit(j.action, j.attempt, j.args, j.post)) for j in self.cluster.control.journal(journal)]
        for node in self.cluster.coordinators:
            if isinstance(node.control, CommitRequest) and node.control not in self.requests:
                self.requests += (node.control,)
        return found + self.cluster.lines[lines:]

    def take(self, line: Line, by: str | None = None) -> list[model.Step]:
        """Let the follower take one line.

        Raises: Rejected.
        """
        node, emitted = line
        return self.follower.line(node, emitted, _incarnation(self.cluster, node), by)

    def differences(self) -> list[str]:
        """In what the cluster is not the model, leaving out who is ahead."""
        return differences(self.stage.config, self.state, self.cluster, self.follower, ahead=self.ahead)


def _fork(follower: Follower, past: bool) -> Follower:
    names = copy.copy(follower.names)
    names.candidates, names.incarnations = dict(names.candidates), dict(names.incarnations)
    other = Follower(follower.config, names, follower.state)
    other.payloads = dict(follower.payloads)
    other.accepted = {r: set(keys) for r, keys in follower.accepted.items()}
    if past:
        other.hindsight = copy.copy(follower.hindsight)
        for name, value in vars(follower.hindsight).items():
            if isinstance(value, (list, dict, set)):
                setattr(other.hindsight, name, value.copy())
    return other


def _incarnation(cluster: Cluster, node: str) -> int | None:
    for name, r in cluster.receivers.items():
        if name == node:
            return r.state.member.incarnation
    for o, own in cluster.owners.items():
        if f"owner {o}" == node:
            return own.state.incarnation
    return None


# --------------------------------------------------------------------------------------------------------------- starts


def names_of(stage: Stage, cluster: Cluster) -> Names:
    """Names of the model for everything in the cluster, which runs already."""
    config = stage.config
    every = (*config.receivers, *config.owners, *config.coordinators)
    lives = {(name, r.state.member.incarnation): 1 for name, r in cluster.receivers.items()}
    lives |= {(f"owner {o}", own.state.incarnation): 1 for o, own in cluster.owners.items()}
    return Names(
        nodes={stage.node(name): name for name in every},
        items={(f"owner {stage.owner(config.owner_of[i])}", i): i for i in config.items},
        candidates={"": 0, **{f"c{n}": n for n in range(1, config.max_candidate + 1)}},
        incarnations=lives,
    )


def cold(config: model.Config, *, proves: bool = True) -> Realisation:
    """Nothing happened yet; a restore of what was loaded already is proved, or has to be sent."""
    stage = Stage(config)
    cluster = stage.cluster(proves=proves)
    return Realisation(stage, cluster, Follower(config, names_of(stage, cluster), model.init(config)))


def warm(config: model.Config) -> Realisation:
    """After the first commit, everybody serving version 0, and the owners stopped."""
    stage = Stage(config)
    cluster = stage.cluster()
    cluster.become(0)
    cluster.run()
    for o, own in cluster.owners.items():
        cluster._do_call((0, ms.StopOwner(o, own.state.incarnation, own.state.attempt)), keep=True)
    cluster.replies.clear()
    cluster.net.update(dict.fromkeys(cluster.sent))
    send_all(cluster)
    return Realisation(stage, cluster, Follower(config, names_of(stage, cluster), model.warm(config)))


# --------------------------------------------------------------------------------------------------------------- search


def realise(start: Realisation, step: model.Step, after: model.State | None = None) -> Realisation:
    """The cluster after `step`, with as few moves before it as there can be.

    Raises: Unrealised; Diverged when the step was done and the states differ.
    """
    if after is None:
        after = model.take(start.stage.config, start.state, step)
    node = CONTROL if step[0] in OF_CONTROL else start.stage.node(step[1][0])
    if node in start.ahead:
        if step[0] not in RESTARTS:
            return _pay(start, node, step, after)
        start = start.fork()
        start.owed = tuple(line for line in start.owed if line[0] != node)
    whys: list[str] = []
    seen = set[Any]()
    todo = deque([(start, 0)])
    while todo:
        here, depth = todo.popleft()
        for move in _moves(here, step):
            there = here.fork()
            outcome = _try(there, move, step, after, whys)
            if outcome == "done":
                return _finished(there, step)
            if outcome == "silent" and depth < DEPTH:
                key = start.stage.prints.of(there.cluster)
                if key not in seen:
                    seen.add(key)
                    todo.append((there, depth + 1))
    raise Unrealised(step, "; ".join(dict.fromkeys(whys)) or "no move leads there")


def _moves(here: Realisation, step: model.Step) -> Iterator[Move]:
    found = moves(here.cluster, here.stage, here.state, step, here.requests)
    return (move for move in found if not _is_ahead(here, move))


def _is_ahead(here: Realisation, move: Move) -> bool:
    """A process that owes a line goes on with that line."""
    return bool(here.owed) and any(_acts(move, node) for node in here.ahead)


def _acts(move: Move, node: str) -> bool:
    """The move lets that node take a step."""
    kind, who = move[0], move[1]
    if kind == "deliver":
        return node == _callee(who[1])
    if kind in OF_COORDINATORS:
        return node == f"coordinator {who}"
    return node == (who if isinstance(who, str) else f"owner {who}")


def _callee(call: Any) -> str:
    return str(call.receiver) if hasattr(call, "receiver") else f"owner {call.owner}"


def _try(there: Realisation, move: Move, step: model.Step, after: model.State, whys: list[str]) -> str:
    """Perform the move on `there`: is it the step, is it silent, or is it another step?"""
    lines = there.lines_of(move)
    if not lines:
        return "silent" if move[0] not in ("restart", "crash_owner") else "other"
    by = there.stage.node(step[1][0]) if step[0] == "AcquireEpoch" else None
    before = there.state
    try:
        taken = there.take(lines[0], by)
    except Rejected as rejected:
        whys.append(str(rejected))
        return "other"
    if taken == [step] and there.state == after:
        there.owed += tuple(lines[1:])
        saturate(there)
        return "done"
    if not taken and lines[0][1].action == "RollForward" and len(lines) == 1:  # Divergence DV2: it says so again
        if step[0] == "RollForward" and there.state == after:
            return "done"
        return "silent"
    if move[0] == "break_off" and lines[0][1].action == "IgnoreStale" and there.state == before:
        return "silent"
    whys.append(f"{move[0]} is {taken or lines[0][1].action}")
    return "other"


def _pay(start: Realisation, node: str, step: model.Step, after: model.State) -> Realisation:
    """The line that the node owes is the step; or it is a step before it that ends in the same state."""
    there = start.fork()
    line = next(line for line in there.owed if line[0] == node)
    try:
        taken = there.take(line)
    except Rejected as rejected:
        raise Unrealised(step, f"{node} is in the middle of an event: {rejected}", one_event=True) from rejected
    owed = list(there.owed)
    owed.remove(line)
    there.owed = tuple(owed)
    if taken == [step] and there.state == after:
        saturate(there)
        return _finished(there, step)
    try:
        return realise(there, step, after)
    except Unrealised as found:
        why = f"{node} is in the middle of an event and does {taken} next; then: {found.why}"
        raise Unrealised(step, why, one_event=True) from found


def _finished(there: Realisation, step: model.Step) -> Realisation:
    if found := there.differences():
        raise Diverged(f"after {step}: {'; '.join(found)}")
    return there


def saturate(there: Realisation) -> None:
    """Let coordinators read every report and reply that makes them write no line."""
    cluster = there.cluster
    again = True
    while again:
        again = False
        for c in range(len(cluster.coordinators)):
            if f"coordinator {c}" in there.ahead:
                continue
            for move in list(reads(cluster, c)):
                told_by = _callee(cluster.replies[move[2]][1]) if move[0] == "reply" else move[2]
                if (f"owner {told_by}" if move[0] == "poll_owner" else told_by) in there.ahead:
                    continue
                trial = cluster.fork()
                lines = len(trial.lines)
                perform(trial, there.stage, move)
                if len(trial.lines) == lines:
                    there.cluster = cluster = trial
                    again = True
                    break
