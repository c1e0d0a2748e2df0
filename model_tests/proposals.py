"""Which moves of the cluster may bring about a step of the model, or bring the cluster nearer to it.

Those that may be the step itself come first. Moves of coordinators without a step follow, where a call causes the step.

Not handled: how a move is made (moves); whether it is the step (replay).

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from model_tests import model
from model_tests.moves import Move, Stage
from nemo_dcr.ids import ReceiverId
from nemo_dcr.protocol import coordinator_events as ce
from nemo_dcr.protocol import endpoint_state, owner_state
from nemo_dcr.protocol import messages as ms
from nemo_dcr.protocol.attempt import AttemptPhase
from nemo_dcr.protocol.rounds import OWNER_ROUNDS, RECEIVER_ROUNDS
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.record import CommitRequest
from tests.unit.protocol.cluster import Cluster

OF_COORDINATOR = frozenset(
    {
        *("AcquireEpoch", "BecomeCoordinator", "Prepare", "Bootstrap", "KillCandidate", "Conflict", "StartAttempt"),
        *("CompleteAttempt", "FailAttempt", "SendCommit", "ResolveCommit", "StepDown", "RollForward"),
    }
)
CALLED = frozenset(
    {
        *("EndpointPrepare", "StartRestore", "RefusePrepare", "CloseGate", "OpenApply", "OpenGate", "FinishRestore"),
        *("StopAndWait", "OwnerPrepare", "StopOwner", "EmitPayload", "EndStream", "FailOwner", "UpdateBaseline"),
        *("RebuildBaseline", "EndTransition", "DropCandidate"),
    }
)
"""Steps that a call causes, so that a coordinator may have to get on before."""
RECEIVER_CALLS: dict[str, type[Any]] = {
    "CloseGate": ms.CloseGate,
    "OpenApply": ms.OpenApply,
    "OpenGate": ms.OpenGate,
    "FinishRestore": ms.FinishRestore,
}
OWNER_CALLS: dict[str, type[Any]] = {
    "UpdateBaseline": ms.UpdateBaseline,
    "RebuildBaseline": ms.RebuildBaseline,
    "EndTransition": ms.EndTransition,
    "DropCandidate": ms.DropCandidate,
}


ASKS = (Phase.COMMITTING, Phase.PREPARING, Phase.BOOTSTRAPPING)
"""Phases in which a lost reply makes a difference."""


def moves(
    cluster: Cluster, stage: Stage, state: model.State, step: model.Step, requests: tuple[CommitRequest, ...]
) -> Iterator[Move]:
    """Moves that may bring about the step, or bring the cluster nearer to it; the likeliest first."""
    action, parameters = step
    if action == "Commit":
        yield from _for_commit(cluster, parameters[0], requests)
    elif action in OF_COORDINATOR:
        yield from _for_coordinator(cluster, stage, action, stage.coordinator(parameters[0]), requests)
        if action == "Prepare":
            yield from _for_some(cluster, stage, *parameters)
    elif parameters[0] in stage.config.receivers:
        yield from _for_receiver(cluster, stage, action, stage.receiver(parameters[0]), parameters[1:])
    else:
        yield from _for_owner(cluster, stage, state, action, parameters)
    if action in CALLED or (action in OF_COORDINATOR and action not in ("AcquireEpoch", "FailAttempt")):
        for c in range(len(cluster.coordinators)):
            yield from silent(cluster, c)


def silent(cluster: Cluster, c: int) -> Iterator[Move]:
    """Moves by which a coordinator goes on without a step, or with one."""
    node = cluster.coordinators[c]
    phase = node.state.phase
    if not node.up or phase is Phase.OUT:
        return
    if node.control_reply is not None:
        yield "control_reply", c
    if isinstance(node.control, ce.ReadRecord):
        yield "control", c
    if phase is Phase.SURVEYING:
        yield "answer", c
    if phase is Phase.READY:
        yield "look", c
    stopping = node.state.attempt is not None and node.state.attempt.phase is AttemptPhase.STOPPING
    if (phase is Phase.RUNNING and stopping) or phase in OWNER_ROUNDS | RECEIVER_ROUNDS:
        yield "leave", c
    if node.waits is not None:
        yield "wait", c
    asked = node.control is not None and not isinstance(node.control, ce.ReadRecord)
    if asked or (node.control_reply is not None and phase in ASKS):
        yield "unknown", c


def reads(cluster: Cluster, c: int) -> Iterator[Move]:
    """Reports and replies that the coordinator has not seen."""
    node = cluster.coordinators[c]
    for i, (to, call, _) in enumerate(cluster.replies):
        if to == c and call in node.calls:
            yield "reply", c, i
    if node.state.phase not in (Phase.RUNNING, *OWNER_ROUNDS, *RECEIVER_ROUNDS):
        return
    for name, r in cluster.receivers.items():
        if r.up and cluster._fresh(node, name, r.state.member.incarnation, r.state.revision):
            yield "poll", c, name
    for o, own in cluster.owners.items():
        if own.up and cluster._fresh(node, f"owner {o}", own.state.incarnation, own.state.revision):
            yield "poll_owner", c, o


def _for_commit(cluster: Cluster, attempt: int, requests: tuple[CommitRequest, ...]) -> Iterator[Move]:
    for c, node in enumerate(cluster.coordinators):
        if isinstance(node.control, CommitRequest) and node.control.attempt == attempt:
            yield "control", c
    for request in requests:
        if request.attempt == attempt:
            yield "execute", request


def _for_coordinator(
    cluster: Cluster, stage: Stage, action: str, c: int, requests: tuple[CommitRequest, ...]
) -> Iterator[Move]:
    node = cluster.coordinators[c]
    if action == "AcquireEpoch":
        if node.state.phase is Phase.ACQUIRING and node.control is not None:
            yield "control", c
        else:
            yield "become", c
        return
    if action == "Conflict":
        for request in requests:
            if request.epoch == node.state.epoch:
                yield "execute", request
    if action == "FailAttempt":
        yield "expire", c
    if action == "CompleteAttempt" and node.state.attempt is not None:
        running = node.state.attempt.plan.attempt
        yield from (("tell", c, report) for report in cluster.pushes if report.attempt == running)
    if action == "KillCandidate" and not node.state.aborting:
        yield "abort", c
    if node.control is not None:
        yield "control", c
    yield from reads(cluster, c)


def _for_some(
    cluster: Cluster, stage: Stage, c: str, mode: str, cand: int, required: frozenset[tuple[str, int]]
) -> Iterator[Move]:
    """Receivers that an attempt leaves out did not answer the survey before it."""
    node = cluster.coordinators[stage.coordinator(c)]
    heard = frozenset(stage.receiver(r) for r, _ in required)
    if node.state.phase is Phase.SURVEYING and heard < cluster.receivers.keys():
        yield "answer", stage.coordinator(c), heard


def _sent(cluster: Cluster, kind: type[Any], wanted: Callable[[Any], bool]) -> Iterator[Move]:
    for message in cluster.net:
        if isinstance(message[1], kind) and wanted(message[1]):
            yield "deliver", message


def _for_receiver(
    cluster: Cluster, stage: Stage, action: str, name: ReceiverId, rest: tuple[Any, ...]
) -> Iterator[Move]:
    r = cluster.receivers[name]
    state = r.state

    def sent(kind: type[Any], wanted: Callable[[Any], bool] = lambda call: True) -> Iterator[Move]:
        return _sent(cluster, kind, lambda call: call.receiver == name and wanted(call))

    def payloads(attempt: int | None) -> Iterator[Any]:
        return (key for key in cluster.payloads if attempt is None or key.attempt == attempt)

    match action:
        case "EndpointPrepare" | "StartRestore":
            yield from sent(ms.PrepareReceiver, lambda call: call.attempt == rest[0])
        case "RefusePrepare":
            yield from sent(ms.PrepareReceiver, lambda call: call.attempt > state.attempt)
        case "CloseGate" | "OpenApply" | "OpenGate" | "FinishRestore":
            yield from sent(RECEIVER_CALLS[action], lambda call: call.attempt == rest[0])
        case "StopAndWait":
            yield from sent(ms.StopReceiver, lambda call: call.attempt == rest[0])
            if rest[0] == state.attempt:
                yield from sent(ms.PrepareReceiver, lambda call: call.attempt > rest[0])
            if r.draining is not None and r.issued:
                yield "break_off", name
        case "Accept":
            for key in payloads(rest[0]):
                if rest[1] in cluster.items_of(key):
                    yield "payload_of", name, key, rest[2]
        case "SeeManifest":
            yield "manifest", name, (rest[0], stage.owner(rest[1]))
        case "IgnoreDuplicate":
            yield from (("payload_of", name, key, "sound") for key in payloads(state.attempt))
        case "IgnoreStale":
            yield from (("payload_of", name, key, "sound") for key in payloads(None))
            yield from (("manifest", name, which) for which in cluster.manifests)
            for kind in (
                ms.StopReceiver,
                ms.CloseGate,
                ms.OpenApply,
                ms.OpenGate,
                ms.FinishRestore,
                ms.PrepareReceiver,
            ):
                yield from sent(kind)
        case "StartApply":
            yield from (("permit", name, key) for key in sorted(r.staged))
        case "ApplyItem":
            if any(each[1] == rest[0] for each in r.issued):
                yield "write_item", name, rest[0]
            yield from (("permit", name, key) for key in sorted(r.staged) if rest[0] in cluster.items_of(key))
        case "Flush":
            if r.flushing is not None:
                yield "flush", name
        case "FailReceiver":
            yield "take_in", name, endpoint_state.ApplyFailed(state.attempt, "a loader condition")
            if r.issued:
                yield "break_off", name
        case "AdmitRequest":
            yield "take_in", name, endpoint_state.RequestArrived(rest[0])
        case "FinishRequest":
            yield "take_in", name, endpoint_state.RequestDone(rest[0])
        case "StartReceiver":
            yield "restart", name, rest[0]
    if r.draining is not None and not r.issued:
        yield "drain", name


def _for_owner(
    cluster: Cluster, stage: Stage, state: model.State, action: str, parameters: tuple[Any, ...]
) -> Iterator[Move]:
    name, *rest = parameters
    o = stage.owner(name)
    own = cluster.owners[o]

    def sent(kind: type[Any], wanted: Callable[[Any], bool] = lambda call: True) -> Iterator[Move]:
        return _sent(cluster, kind, lambda call: call.owner == o and wanted(call))

    match action:
        case "StartOwner":
            yield "crash_owner", o
        case "BeginTransition":
            first = state.own[name].began == state.step
            candidate = state.step + 1 if first else state.step
            yield "begin", name, candidate, stage.config.changes[candidate] if first else None
        case "OwnerPrepare":
            yield from sent(ms.PrepareOwner, lambda call: call.attempt == rest[0])
        case "RefusePrepare":
            yield from sent(ms.PrepareOwner, lambda call: call.attempt > own.state.attempt)
        case "EmitPayload":
            if own.stream is not None and any(rest[0] in group for group in own.stream):
                yield "publish", o, rest[0]
        case "EndStream":
            if own.stream is not None:
                yield "end", o
        case "StopOwner":
            yield from sent(ms.StopOwner, lambda call: call.attempt == rest[0])
            if rest[0] == own.state.attempt:
                yield from sent(ms.PrepareOwner, lambda call: call.attempt > rest[0])
                yield from sent(ms.DropCandidate)
        case "FailOwner":
            yield "own", o, owner_state.StreamFailed(own.state.attempt, "conversion failed")
        case "LoseBaseline":
            yield "lose_baseline", o
        case "UpdateBaseline" | "RebuildBaseline" | "EndTransition" | "DropCandidate":
            yield from sent(OWNER_CALLS[action])
        case "CopyItem":
            if own.copying is not None and rest[0] in own.copying:
                yield "copy_item", o, rest[0]
        case "BaselineFilled":
            if own.copying == []:
                yield "copy", o
        case "IgnoreStale":
            for kind in (ms.PrepareOwner, ms.StreamOwner, ms.StopOwner, *OWNER_CALLS.values()):
                yield from sent(kind)
    if action in ("EmitPayload", "EndStream", "FailOwner") and own.stream is None:
        yield from sent(ms.StreamOwner, lambda call: call.attempt == own.state.attempt)
    if own.stopping is not None:
        yield "stopped", o
