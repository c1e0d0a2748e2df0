"""What may happen to the cluster: single moves, and how they are made.

A move is one thing that the environment does: a call is delivered (again, late, out of order), a report is read, a
deadline passes, a payload arrives, a process starts again. Every move is possible in a real run. Calls are sent as soon
as they may be, and stay in the network for ever, as in the model.

Not handled: which move comes next (proposals, replay).

Paper: Appendix B   Spec: Next, Channel
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from model_tests import model
from model_tests.prints import Prints
from nemo_dcr.config import GateMode
from nemo_dcr.ids import CandidateId, OwnerId, ReceiverId
from nemo_dcr.protocol import coordinator_events as ce
from nemo_dcr.protocol import endpoint_report, endpoint_state, owner, owner_state
from nemo_dcr.protocol import messages as ms
from nemo_dcr.protocol.rounds import OWNER_ROUNDS
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.record import CommitRequest
from tests.unit.protocol.cluster import Cluster

Move = tuple[Any, ...]


@dataclass(frozen=True)
class Stage:
    """The cluster that a configuration of the model describes: a payload for each item, an engine for each receiver."""

    config: model.Config
    prints: Prints = field(default_factory=Prints, compare=False)

    def cluster(self, *, proves: bool = True) -> Cluster:
        """A cluster whose receivers loaded the checkpoint that the baselines are; whether they know it is `proves`."""
        config = self.config
        groups = {self.owner(o): tuple((i,) for i in config.items if config.owner_of[i] == o) for o in config.owners}
        return Cluster(
            instances=len(config.receivers),
            groups=groups,
            gate=GateMode.SYNC if config.gate_mode == "sync" else GateMode.ASYNC,
            coordinators=len(config.coordinators),
            bootstrap_instances=1,
            loaded=True,
            proves=proves,
        )

    def receiver(self, r: str) -> ReceiverId:
        return ReceiverId(f"e{self.config.receivers.index(r)}/0")

    def owner(self, o: str) -> OwnerId:
        return OwnerId(self.config.owners.index(o))

    def coordinator(self, c: str) -> int:
        return self.config.coordinators.index(c)

    def node(self, name: str) -> str:
        """The name that a process has in traces."""
        if name in self.config.receivers:
            return self.receiver(name)
        if name in self.config.owners:
            return f"owner {self.owner(name)}"
        return f"coordinator {self.coordinator(name)}"


def perform(cluster: Cluster, stage: Stage, move: Move) -> None:
    """Do one move; what it makes a coordinator send is sent at once."""
    kind, *args = move
    if kind in OWN:
        OWN[kind](cluster, stage, *args)
    else:
        cluster.do(move)
    send_all(cluster)


def send_all(cluster: Cluster) -> None:
    """Put every call that a coordinator wants to make on its way."""
    for c, node in enumerate(cluster.coordinators):
        for call in node.calls:
            cluster.net[c, call] = None


def _deliver(cluster: Cluster, stage: Stage, message: Any) -> None:
    cluster._do_call(message, keep=True)


def _poll(cluster: Cluster, stage: Stage, c: int, name: ReceiverId) -> None:
    cluster._do_poll(c, name)


def _reply(cluster: Cluster, stage: Stage, c: int, i: int) -> None:
    cluster._do_reply(i)


def _tell(cluster: Cluster, stage: Stage, c: int, report: Any) -> None:
    """A report that was pushed arrives, late perhaps, or again."""
    kind = ce.ReceiverReported if isinstance(report, ms.ReceiverReport) else ce.OwnerReported
    cluster._coordinate(c, kind(report))


def _answer(cluster: Cluster, stage: Stage, c: int, only: frozenset[ReceiverId] | None = None) -> None:
    """Endpoints answer the survey, or `only` these receivers; each report is as fresh as can be."""
    node = cluster.coordinators[c]
    heard = {name: r for name, r in cluster.receivers.items() if r.up and (only is None or name in only)}
    receivers = tuple(endpoint_report.report(r.state) for r in heard.values())
    node.survey = ce.Surveyed(receivers, tuple(owner.report(o.state) for o in cluster.owners.values() if o.up))
    cluster._do_survey(c)


def _execute(cluster: Cluster, stage: Stage, request: CommitRequest) -> None:
    """A copy of a commit request reaches the control plane."""
    cluster._execute(request)


def _become(cluster: Cluster, stage: Stage, c: int) -> None:
    cluster.become(c)


def _expire(cluster: Cluster, stage: Stage, c: int) -> None:
    cluster.expire(c)


def _abort(cluster: Cluster, stage: Stage, c: int) -> None:
    cluster.abort(c)


def _unknown(cluster: Cluster, stage: Stage, c: int) -> None:
    cluster.unknown(c)


def _leave(cluster: Cluster, stage: Stage, c: int) -> None:
    """Nobody whom the coordinator waits for can be reached."""
    state = cluster.coordinators[c].state
    if state.phase is Phase.RUNNING and state.attempt is not None:
        for member in state.attempt.plan.required:
            cluster.lose_receiver(c, member.receiver)
        for each in state.attempt.plan.owners:
            cluster.lose_owner(c, each.owner)
    elif state.phase in OWNER_ROUNDS:
        cluster.lose_owner(c, next(iter(cluster.owners)))
    else:
        for name in cluster.receivers:
            cluster.lose_receiver(c, name)


def _take_in(cluster: Cluster, stage: Stage, name: ReceiverId, event: Any) -> None:
    cluster._receive(name, event)


def _payload_of(cluster: Cluster, stage: Stage, name: ReceiverId, key: Any, how: str) -> None:
    digest = cluster.payloads[key].digest
    match how:
        case "sound":
            cluster._receive(name, endpoint_state.PayloadStaged(key, digest))
        case "foreign":
            cluster._receive(name, endpoint_state.PayloadStaged(key, digest[::-1]))


def _permit(cluster: Cluster, stage: Stage, name: ReceiverId, key: Any) -> None:
    """The apply thread asks for one payload."""
    cluster._receive(name, endpoint_state.ApplyRequested(key.attempt, (key,)))


def _break_off(cluster: Cluster, stage: Stage, name: ReceiverId) -> None:
    """The loader fails on what it was permitted to write."""
    cluster.receivers[name].issued.clear()
    cluster._receive(name, endpoint_state.ApplyFailed(cluster.receivers[name].state.attempt, "a loader condition"))


def _write_item(cluster: Cluster, stage: Stage, name: ReceiverId, item: str) -> None:
    issued = cluster.receivers[name].issued
    issued.sort(key=lambda each: each[1] != item)
    cluster._do_write(name)


def _restart(cluster: Cluster, stage: Stage, name: ReceiverId, known: bool) -> None:
    cluster._forget(name)
    cluster.start_receiver(name, loaded=known)


def _begin(cluster: Cluster, stage: Stage, o: str, candidate: int, changed: frozenset[str] | None) -> None:
    """Freeze `candidate`; with `changed` the optimizer makes its step before, on every owner."""
    name = CandidateId(f"c{candidate}")
    if changed is not None:
        words = cluster.current_words()
        cluster.candidates[name] = {i: w ^ (1 << candidate) if i in changed else w for i, w in words.items()}
        for p, own in cluster.owners.items():
            cluster._own(p, owner_state.WeightsChanged())
            own.weights = {i: cluster.candidates[name][i] for i in cluster.items[p]}
    cluster._own(stage.owner(o), owner_state.CandidateFrozen(name))


def _publish(cluster: Cluster, stage: Stage, o: OwnerId, item: str) -> None:
    """Payloads are packed in any order; those that are empty are no payloads."""
    stream = cluster.owners[o].stream
    assert stream is not None
    stream.sort(key=lambda group: item not in group)
    cluster._do_emit(o)


def _end(cluster: Cluster, stage: Stage, o: OwnerId) -> None:
    own, state = cluster.owners[o], cluster.owners[o].state
    while own.stream and not cluster._records(own, own.started, own.stream[0]):
        own.stream.pop(0)
    if not own.stream and state.attempt:
        cluster._do_emit(o)


def _copy_item(cluster: Cluster, stage: Stage, o: OwnerId, item: str) -> None:
    copying = cluster.owners[o].copying
    assert copying is not None
    copying.sort(key=lambda each: each != item)
    cluster._do_copy(o)


def _own(cluster: Cluster, stage: Stage, o: OwnerId, event: Any) -> None:
    cluster._own(o, event)


def _lose_baseline(cluster: Cluster, stage: Stage, o: OwnerId) -> None:
    cluster.lose_baseline(o)


def _crash_owner(cluster: Cluster, stage: Stage, o: OwnerId) -> None:
    cluster.crash_owner(o)


OWN: dict[str, Callable[..., None]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _deliver,
        _poll,
        _reply,
        _tell,
        _answer,
        _execute,
        _become,
        _expire,
        _abort,
        _unknown,
        _leave,
        _take_in,
        _payload_of,
        _permit,
        _break_off,
        _write_item,
        _restart,
        _begin,
        _publish,
        _end,
        _copy_item,
        _own,
        _lose_baseline,
        _crash_owner,
    )
}
"""Moves beside the cluster's own."""
