"""What lies between the nodes of a local cluster: calls, payloads and control-plane calls that go wrong by seed.

A call reaches its endpoint as the bytes that a socket would carry. It may be lost, lose its reply, arrive twice, or
arrive once more much later, when another life of the endpoint listens. A control-plane call may lose its reply after it
took effect, be lost, or take effect later. A process that died stops at the next thing that it does to the outside.
Not handled: payload faults (`transport.faults` has them); time (the cluster's).

Paper: Table B.2 (failures)   Spec: Channel   Decisions: D5, D14
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from nemo_dcr.errors import ControlPlaneUnavailable
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Epoch, Incarnation, OwnerId, PayloadKey, ReceiverId
from nemo_dcr.protocol.messages import OwnerCall, OwnerReply, ReceiverCall, ReceiverReply
from nemo_dcr.record import (
    Acquired,
    CommitRequest,
    Committed,
    ControlPlane,
    ControlView,
    JournalEntry,
    Killed,
    Prepared,
    PrepareRequest,
    Record,
    Refused,
)
from nemo_dcr.runtime.endpoints import OwnerAnswers, ReceiverAnswers
from nemo_dcr.runtime.rpc import NoReply
from nemo_dcr.trace import Emit
from nemo_dcr.transport.base import Announcement, Buffer, Manifest, Publisher, Subscription, Transport


@dataclass(frozen=True, kw_only=True)
class CallFaults:
    """Probabilities of faults, drawn for each call."""

    lose: float = 0.0
    """The call does not arrive."""
    lose_reply: float = 0.0
    """It arrives and is carried out; the reply does not."""
    repeat: float = 0.0
    """It arrives twice."""
    late: float = 0.0
    """A copy of it arrives again, at any later time."""
    control: float = 0.0
    """A control-plane call gets no reply: half of them took effect, some still will."""


class NodeCrashed(BaseException):
    """Unwinds the frames of a process that died; nothing of the package catches it."""

    def __init__(self, life: Life) -> None:
        self.life = life
        super().__init__(f"{life.name} is dead")


@dataclass(eq=False)
class Life:
    """One process from its start to its end."""

    name: str
    incarnation: Incarnation
    alive: bool = True

    def require(self) -> None:
        """Raises NodeCrashed once the process is dead."""
        if not self.alive:
            raise NodeCrashed(self)


class Surroundings(Protocol):
    """What the network needs of the cluster."""

    faults: CallFaults

    def chance(self, probability: float) -> bool:
        """True with this probability, by seed."""
        ...

    def known_receivers(self) -> dict[ReceiverId, Incarnation]:
        """Announced receivers."""
        ...

    def known_owners(self) -> tuple[OwnerId, ...]:
        """Announced owners."""
        ...

    def deliver(self, call: Any, respond: Callable[[Any], None]) -> bool:
        """Hand a call to the life that listens now; False when there is none."""
        ...

    def reaches(self, call: Any) -> bool:
        """False while the endpoint is silent: alive, and cut off."""
        ...

    def later(self, action: Callable[[], None]) -> None:
        """Do this at some later step."""
        ...

    def ticks(self, seconds: float, until: Callable[[], bool] = lambda: True) -> None:
        """Let time pass and the nodes work, until something holds."""
        ...

    def traced(self, life: Life, emitted: Emit) -> None:
        """A process traced an action."""
        ...

    def reached(self, what: str, node: str) -> None:
        """A control-plane call of `node` is about to be made (`before commit`), or took effect (`after commit`)."""
        ...

    def between_payloads(self) -> None:
        """A payload was published."""
        ...


def on_the_wire(message: Any) -> Any:
    """The message as the other side decodes it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


class LocalEndpoints:
    """`Endpoints` of one coordinator."""

    def __init__(self, cluster: Surroundings, life: Life) -> None:
        self._cluster = cluster
        self._life = life

    def receivers(self) -> dict[ReceiverId, Incarnation]:
        """As `Endpoints.receivers`."""
        self._life.require()
        return self._cluster.known_receivers()

    def owners(self) -> tuple[OwnerId, ...]:
        """As `Endpoints.owners`."""
        return self._cluster.known_owners()

    def ask(
        self, receivers: Mapping[ReceiverId, ReceiverCall], owners: Mapping[OwnerId, OwnerCall], timeout_s: float
    ) -> tuple[ReceiverAnswers, OwnerAnswers]:
        """As `Endpoints.ask`; nodes work while the calls are open."""
        self._life.require()
        to_receivers: dict[ReceiverId, list[ReceiverReply | NoReply]] = {name: [] for name in receivers}
        to_owners: dict[OwnerId, list[OwnerReply | NoReply]] = {owner: [] for owner in owners}
        for receiver, receiver_call in receivers.items():
            self._send(receiver_call, to_receivers[receiver])
        for owner, owner_call in owners.items():
            self._send(owner_call, to_owners[owner])
        answers = [*to_receivers.values(), *to_owners.values()]
        self._cluster.ticks(timeout_s, lambda: all(answers))
        self._life.require()
        silent = NoReply(f"no reply within {timeout_s:g} s")
        return (
            {receiver: (found or [silent])[0] for receiver, found in to_receivers.items()},
            {owner: (found or [silent])[0] for owner, found in to_owners.items()},
        )

    def _send(self, call: Any, answer: list[Any]) -> None:
        cluster, faults = self._cluster, self._cluster.faults
        if cluster.chance(faults.late):
            cluster.later(lambda: _again(cluster, call))
        if cluster.chance(faults.lose) or not cluster.reaches(call):
            return
        keeps = not cluster.chance(faults.lose_reply)
        if not cluster.deliver(on_the_wire(call), lambda reply: answer.append(on_the_wire(reply)) if keeps else None):
            answer.append(NoReply("the connection broke", disconnected=True))
        elif cluster.chance(faults.repeat):
            _again(cluster, call)


def _again(cluster: Surroundings, call: Any) -> None:
    cluster.deliver(on_the_wire(call), lambda reply: None)


class LocalControl:
    """A control plane as one coordinator reaches it. Raises ControlPlaneUnavailable when a reply does not come."""

    def __init__(self, inner: ControlPlane, cluster: Surroundings, life: Life) -> None:
        self._inner = inner
        self._cluster = cluster
        self._life = life

    def _ask(self, operation: str, step: Callable[[], Any]) -> Any:
        cluster = self._cluster
        self._life.require()
        cluster.reached(f"before {operation}", self._life.name)
        self._life.require()
        answered = not cluster.chance(cluster.faults.control)
        if not answered and cluster.chance(0.5):
            if cluster.chance(0.5):
                cluster.later(step)
            raise ControlPlaneUnavailable(operation, "the call was lost")
        reply = step()
        cluster.reached(f"after {operation}", self._life.name)
        self._life.require()
        if not answered:
            raise ControlPlaneUnavailable(operation, "the reply was lost")
        return reply

    def read(self, candidate: CandidateId = NO_CANDIDATE, *, clock: int = 0) -> ControlView:
        """As `ControlPlane.read`."""
        found: ControlView = self._ask("read", lambda: self._inner.read(candidate, clock=clock))
        return found

    def acquire_epoch(self, *, clock: int = 0) -> Acquired:
        """As `ControlPlane.acquire_epoch`."""
        found: Acquired = self._ask("acquire_epoch", lambda: self._inner.acquire_epoch(clock=clock))
        return found

    def prepare(self, request: PrepareRequest, *, clock: int = 0) -> Prepared | Refused:
        """As `ControlPlane.prepare`."""
        found: Prepared | Refused = self._ask("prepare", lambda: self._inner.prepare(request, clock=clock))
        return found

    def commit(self, request: CommitRequest, *, clock: int = 0) -> Committed | Refused:
        """As `ControlPlane.commit`."""
        found: Committed | Refused = self._ask("commit", lambda: self._inner.commit(request, clock=clock))
        return found

    def kill(self, epoch: Epoch, candidate: CandidateId, *, clock: int = 0) -> Killed | Refused:
        """As `ControlPlane.kill`."""
        found: Killed | Refused = self._ask("kill", lambda: self._inner.kill(epoch, candidate, clock=clock))
        return found

    def bootstrap(self, epoch: Epoch, record: Record, *, clock: int = 0) -> Committed | Refused:
        """As `ControlPlane.bootstrap`."""
        found: Committed | Refused = self._ask("bootstrap", lambda: self._inner.bootstrap(epoch, record, clock=clock))
        return found

    def history(self) -> tuple[Record, ...]:
        """As `ControlPlane.history`."""
        return self._inner.history()

    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """As `ControlPlane.journal`."""
        return self._inner.journal(start)


class LocalTransport:
    """A transport as one process reaches it: other nodes work between two payloads of a stream."""

    def __init__(self, inner: Transport, cluster: Surroundings, life: Life) -> None:
        self._inner = inner
        self._cluster = cluster
        self._life = life

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        """As `Transport.publisher`."""
        return _LocalPublisher(self._inner.publisher(attempt, owner), self._cluster, self._life)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> Subscription:
        """As `Transport.subscribe`."""
        return self._inner.subscribe(attempt, owners)

    def cleanup(self, through: AttemptId) -> None:
        """As `Transport.cleanup`."""
        self._life.require()
        self._inner.cleanup(through)

    def close(self) -> None:
        """As `Transport.close`: the processes of a cluster share the inner transport, so it stays open."""


class _LocalPublisher:
    def __init__(self, inner: Publisher, cluster: Surroundings, life: Life) -> None:
        self._inner = inner
        self._cluster = cluster
        self._life = life

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        self._life.require()
        announced = self._inner.publish(key, data, digest)
        self._cluster.between_payloads()
        self._life.require()
        return announced

    def close_set(self) -> Manifest:
        self._life.require()
        return self._inner.close_set()

    def stop(self) -> None:
        self._inner.stop()
