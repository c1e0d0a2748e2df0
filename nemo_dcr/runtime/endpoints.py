"""How the coordinator reaches receivers and owners: one interface, and its implementation over control sockets.

Each round asks every endpoint at most one call and returns what came back in time. Calls are idempotent and replies
are values, so a round may be repeated. An engine with an API of its own gets another implementation.

Paper: Appendix B (control calls)   Decisions: D5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import zmq

from nemo_dcr.ids import Incarnation, OwnerId, ReceiverId
from nemo_dcr.protocol.messages import OwnerCall, OwnerReply, ReceiverCall, ReceiverReply
from nemo_dcr.runtime.addresses import Address
from nemo_dcr.runtime.methods import OWNER_METHODS, RECEIVER_METHODS
from nemo_dcr.runtime.rpc import PLAINTEXT, Bulk, Method, NoReply, Peer, exchange, require
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import Security

ReceiverAnswers = dict[ReceiverId, ReceiverReply | NoReply]
OwnerAnswers = dict[OwnerId, OwnerReply | NoReply]


class Endpoints(Protocol):
    """Receivers and owners that a coordinator knows; membership may change between rounds."""

    def receivers(self) -> dict[ReceiverId, Incarnation]:
        """Known receivers and the incarnation that each was last announced with."""
        ...

    def owners(self) -> tuple[OwnerId, ...]:
        """Known owners, sorted."""
        ...

    def ask(
        self, receivers: Mapping[ReceiverId, ReceiverCall], owners: Mapping[OwnerId, OwnerCall], timeout_s: float
    ) -> tuple[ReceiverAnswers, OwnerAnswers]:
        """Make these calls at once; every key has an answer or a NoReply after at most `timeout_s` seconds."""
        ...


class SocketEndpoints:
    """Endpoints behind control sockets. Used by one thread."""

    def __init__(self, clock: LamportClock, security: Security = PLAINTEXT) -> None:
        """`security`: what this process proves itself with to endpoints whose address carries a key."""
        self._clock = clock
        self._security = security
        self.context: zmq.Context[Any] = zmq.Context()
        """For further connections of the same thread."""
        self._receivers: dict[ReceiverId, tuple[Peer, Incarnation]] = {}
        self._owners: dict[OwnerId, Peer] = {}

    def add_receiver(self, receiver: ReceiverId, address: Address) -> None:
        """Know a receiver from now on, in the place of an earlier life of it.

        Raises: InvalidConfig for an address that may not be called.
        """
        self.remove_receiver(receiver)
        self._receivers[receiver] = (self._peer(receiver, address), address.incarnation)

    def remove_receiver(self, receiver: ReceiverId) -> None:
        """Forget a receiver. Idempotent."""
        known = self._receivers.pop(receiver, None)
        if known is not None:
            known[0].close()

    def add_owner(self, owner: OwnerId, address: Address) -> None:
        """Know an owner from now on. Raises: InvalidConfig for an address that may not be called."""
        if owner in self._owners:
            self._owners[owner].close()
        self._owners[owner] = self._peer(f"owner-{owner}", address)

    def _peer(self, name: str, address: Address) -> Peer:
        return Peer(name, address.address, self._clock, self.context, security=self._security, key=address.key)

    def receivers(self) -> dict[ReceiverId, Incarnation]:
        """Known receivers and their announced incarnations."""
        return {receiver: incarnation for receiver, (_, incarnation) in self._receivers.items()}

    def owners(self) -> tuple[OwnerId, ...]:
        """Known owners, sorted."""
        return tuple(sorted(self._owners))

    def broken(self) -> tuple[str, ...]:
        """Names of the endpoints whose connection broke: receivers, and owners as `owner-N`."""
        peers = [*(peer for peer, _ in self._receivers.values()), *self._owners.values()]
        return tuple(peer.name for peer in peers if peer.disconnected)

    def ask(
        self, receivers: Mapping[ReceiverId, ReceiverCall], owners: Mapping[OwnerId, OwnerCall], timeout_s: float
    ) -> tuple[ReceiverAnswers, OwnerAnswers]:
        """As `Endpoints.ask`."""
        calls: dict[str, tuple[Peer, Method, Any]] = {}
        for receiver, receiver_call in receivers.items():
            calls[f"r/{receiver}"] = (
                self._receivers[receiver][0],
                RECEIVER_METHODS[type(receiver_call)],
                receiver_call,
            )
        for owner, owner_call in owners.items():
            calls[f"o/{owner}"] = (self._owners[owner], OWNER_METHODS[type(owner_call)], owner_call)
        answers = exchange(calls, timeout_s)
        return (
            {receiver: _reply(answers[f"r/{receiver}"]) for receiver in receivers},
            {owner: _reply(answers[f"o/{owner}"]) for owner in owners},
        )

    def call_receivers(
        self, method: Method, argument: Any, timeout_s: float, only: Iterable[ReceiverId] | None = None
    ) -> dict[ReceiverId, tuple[Any, Bulk]]:
        """Make one runtime call to all receivers, or to some, at once.

        Raises: EndpointLost naming the first that did not answer in time.
        """
        names = list(self._receivers if only is None else only)
        answers = exchange({name: (self._receivers[name][0], method, argument) for name in names}, timeout_s)
        return {ReceiverId(name): answer for name, answer in require(answers).items()}

    def call_owners(self, method: Method, argument: Any, timeout_s: float) -> dict[OwnerId, tuple[Any, Bulk]]:
        """Make one runtime call to all owners at once.

        Raises: EndpointLost naming the first that did not answer in time.
        """
        answers = exchange({peer.name: (peer, method, argument) for peer in self._owners.values()}, timeout_s)
        found = require(answers)
        return {owner: found[peer.name] for owner, peer in self._owners.items()}

    def close(self) -> None:
        """Release all sockets."""
        for peer, _ in self._receivers.values():
            peer.close()
        for owner in self._owners.values():
            owner.close()
        self._receivers.clear()
        self._owners.clear()
        self.context.term()


def _reply(answer: tuple[Any, Bulk] | NoReply) -> Any:
    return answer if isinstance(answer, NoReply) else answer[0]
