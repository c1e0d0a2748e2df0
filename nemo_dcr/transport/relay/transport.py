"""The relay tree as a transport: owners stream to the root of the attempt's tree, receivers read at their local node.

Whoever opens an attempt says over which tree it runs, so a retry may leave a lost node out. A set is closed, and a
payload published, when every node of the tree has it; so an attempt whose publishers all ended has every payload at
every node, and without breaks of the connection each payload crossed the boundary once.
Not handled: which receivers read at which node; `local` says it for this process.

Paper: Section 7 (relay tree); Appendix B (transports)   Spec: Channel
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from nemo_dcr.errors import AttemptFailed, InvalidConfig, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.client import RelayClient
from nemo_dcr.transport.relay.counters import NodeCounters, Traffic
from nemo_dcr.transport.relay.hop import Answer, Hop
from nemo_dcr.transport.relay.keys import Security
from nemo_dcr.transport.relay.publisher import RelayPublisher
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.subscription import RelaySubscription
from nemo_dcr.transport.relay.tree import RelayTree, TreeNode

Shape = Callable[[AttemptId], RelayTree]


class RelayTransport:
    """A transport over relay nodes; one for each process. Close it."""

    def __init__(
        self,
        shape: RelayTree | Shape,
        *,
        local: TreeNode | None = None,
        run: str = "",
        security: Security | None = None,
        config: RelayConfig | None = None,
    ) -> None:
        """Nothing is connected before it is needed.

        Args:
            shape: the tree of each attempt, or one for all of them; publishers of one attempt must give the same.
            local: the node of this process's receivers; None for a process that only publishes.
            run: name of the run, the same at every node.
            security: what this process proves itself with; None speaks plaintext, on loopback addresses only.
        """
        self._shape = shape
        self._local = local
        self._client = RelayClient(run=run, security=security or Security(), config=config or RelayConfig())

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> RelayPublisher:
        """Open the owner's side of an attempt. Raises: InvalidConfig when the root may not be spoken to."""
        return RelayPublisher(self._client, attempt, owner, self._tree(attempt))

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> RelaySubscription:
        """Open the receiver's side of an attempt at the local node; sees everything published before and after.

        Raises: InvalidConfig without a local node, or when it may not be spoken to.
        """
        if self._local is None:
            raise InvalidConfig("relay.local", "name the node at which this process receives")
        return RelaySubscription(self._client, attempt, owners, self._local)

    def cleanup(self, through: AttemptId) -> None:
        """Delete everything of attempts up to `through` at the root and every node that it reaches. Idempotent.

        Raises: EndpointLost when the root is lost; TransportFailed when it does not answer in time.
        """
        self._call(self._tree(through).root_node, lambda hop, answer: hop.clean(through, answer))

    def counters(self, node: TreeNode) -> NodeCounters:
        """What a node has counted. Raises: EndpointLost when it is lost; TransportFailed when it does not answer."""
        found = self._call(node, lambda hop, answer: hop.ask(answer))
        if not isinstance(found, wire.Counted):
            raise TransportFailed("relay", f"node {node.name} answered with {type(found).__name__}")
        return found.counters

    def sent(self, owner: OwnerId) -> Traffic:
        """Payload bytes that this process sent for `owner`."""
        return self._client.counters.of(owner)

    def close(self) -> None:
        """Close every connection; stop publishers and subscriptions before. Idempotent."""
        self._client.close()

    def _tree(self, attempt: AttemptId) -> RelayTree:
        return self._shape if isinstance(self._shape, RelayTree) else self._shape(attempt)

    def _call(self, node: TreeNode, begin: Callable[[Hop, Answer], None]) -> wire.FromNode:
        client = self._client
        client.security.check_connect(node)
        answered = threading.Event()
        found: list[AttemptFailed | wire.FromNode] = []

        def answer(reply: AttemptFailed | wire.FromNode) -> None:
            found.append(reply)
            answered.set()

        def run() -> None:
            try:
                begin(client.hop(node), answer)
            except AttemptFailed as problem:
                answer(problem)

        client.post(run)
        if not answered.wait(client.config.call_s):
            raise TransportFailed("relay", f"node {node.name} did not answer within {client.config.call_s:g} s")
        if isinstance(found[0], AttemptFailed):
            raise found[0]
        return found[0]
