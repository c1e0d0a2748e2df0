"""One node of a relay tree: it listens, takes payloads from above, passes them on, and serves its local receivers.

Everything runs on one thread. The node's connections to its children are shared by all attempts and closed once no
attempt uses them. Clean-up goes down the trees of the attempts that it ends and is answered when every reachable node
below has answered; what an unreachable node still holds, it drops when it is told with its next attempt.
Not handled: choosing the tree (see tree), starting processes (see the command `nemo-dcr relay`).

Paper: Section 7 (relay tree); Appendix B (transports)   Spec: Channel
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zmq

from nemo_dcr.errors import AttemptFailed
from nemo_dcr.ids import AttemptId
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.attempts import AttemptTable
from nemo_dcr.transport.relay.channel import Channel
from nemo_dcr.transport.relay.counters import NodeCounters, Traffic
from nemo_dcr.transport.relay.delivery import Delivery
from nemo_dcr.transport.relay.hop import Hop
from nemo_dcr.transport.relay.keys import Security
from nemo_dcr.transport.relay.listener import Listener, Peer
from nemo_dcr.transport.relay.loop import Loop
from nemo_dcr.transport.relay.relaying import Relaying
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.store import Store
from nemo_dcr.transport.relay.tree import RelayTree, TreeNode

logger = logging.getLogger(__name__)


class RelayNode:
    """A running node, in a process of its own or beside others in one. Close it."""

    def __init__(
        self,
        name: str,
        address: str = "tcp://127.0.0.1:*",
        *,
        run: str = "",
        known: RelayTree | None = None,
        security: Security | None = None,
        config: RelayConfig | None = None,
        spill_directory: Path | None = None,
        on_fault: Callable[[BaseException], None] = lambda fault: None,
    ) -> None:
        """Listen on `address` and begin to serve.

        Args:
            run: name of the run, the same for all who speak to each other; another run's connections are refused.
            known: the nodes that a tree may name; None takes any, which is for tests.
            spill_directory: where spill files are made; None takes the system's temporary directory.
            on_fault: told when a fault of our own ended the node's thread.

        Raises: InvalidConfig for an address that is taken or not allowed.
        """
        self.name = name
        self.ended = threading.Event()
        """Set by a fault of our own; whoever runs the node ends the process then."""
        self._run = run
        self._security = security or Security()
        self._config = config or RelayConfig()
        self._counters = NodeCounters(name)
        self._hops: dict[TreeNode, Hop] = {}
        self._on_fault = on_fault
        self._loop = Loop(f"relay-{name}", self._fault)
        store = Store(self._config.memory_bytes, self._config.spill_bytes, spill_directory, self._counters)
        self._table = AttemptTable(store, self._counters, self._config.max_attempts)
        try:
            self._listener = Listener(
                self._loop.context,
                address,
                self,
                welcome=wire.Welcome(wire.RELAY_VERSION, name, time.time_ns()),
                run=run,
                security=self._security,
                config=self._config,
                counters=self._counters,
            )
        except BaseException:
            self._loop.close(lambda: None)
            raise
        self._delivery = Delivery(
            table=self._table,
            counters=self._counters,
            send=self._listener.send,
            read=lambda attempt, entry: self._relaying.let_go_if_read(attempt, entry),
        )
        self._relaying = Relaying(
            name,
            table=self._table,
            store=store,
            counters=self._counters,
            config=self._config,
            known=known,
            send=self._listener.send,
            hop_to=self._hop_to,
            published=self._delivery.published,
        )
        self._loop.watched.append(self._listener)
        self._loop.start()

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen."""
        return self._listener.address

    @property
    def place(self) -> TreeNode:
        """This node as a tree names it."""
        keys = self._security.keys
        return TreeNode(self.name, self.address, keys.public if keys is not None else "")

    def counters(self) -> NodeCounters:
        """A copy of the counters as they stand."""
        owners = {owner: replace(traffic) for owner, traffic in tuple(self._counters.owners.items())}
        return replace(self._counters, owners=owners)

    def close(self) -> None:
        """Stop serving and free everything. Idempotent."""
        self._loop.close(self._finish)

    def _finish(self) -> None:
        for hop in self._hops.values():
            hop.channel.close()
        self._listener.close()
        for attempt in self._table:
            self._table.free(attempt)

    def _fault(self, fault: BaseException) -> None:
        self._finish()  # ZeroMQ's own thread would go on answering heartbeats for a node that does nothing
        self.ended.set()
        self._on_fault(fault)

    # --------------------------------------------------------------------------------------------- the loop's thread

    def on_message(self, peer: Peer, message: wire.ToNode, body: zmq.Frame | None) -> None:
        """As `ListenerUser.on_message`."""
        match message:
            case wire.Open():
                if message.cleaned > self._table.cleaned:
                    self._drop_through(message.cleaned)
                self._relaying.open(peer, message)
            case wire.Put():
                self._relaying.put(peer, message, body)
            case wire.Data():
                self._relaying.data(peer, message, body)
            case wire.Withdraw():
                self._relaying.withdraw(peer, message)
            case wire.End():
                self._relaying.end(peer, message)
            case wire.Abandon():
                self._relaying.abandon(message)
            case wire.Next():
                self._delivery.next(peer, message)
            case wire.Fetch():
                self._delivery.fetch(peer, message)
            case wire.Fetched():
                self._delivery.fetched(message)
            case wire.Clean():
                self._clean(peer, message)
            case wire.Ask(call=call):
                self._listener.send(peer, wire.Counted(call, self._counters))

    def on_gone(self, peer: Peer) -> None:
        """As `ListenerUser.on_gone`."""
        for attempt in self._table:
            attempt.upstream.pop(peer, None)
            for session in [session for session, waiting in attempt.waiting.items() if waiting.peer == peer]:
                del attempt.waiting[session]

    def _hop_to(self, node: TreeNode) -> Hop:
        """The connection to a child, made anew after it was lost."""
        node = replace(node, receivers=0)
        hop = self._hops.get(node)
        if hop is None or hop.lost is not None:
            if hop is not None:
                self._loop.watched.remove(hop.channel)
            hop = self._hops[node] = Hop(self._counters, lambda user: self._channel(node, user))
            self._loop.watched.append(hop.channel)
        return hop

    def _channel(self, node: TreeNode, user: Hop) -> Channel:
        return Channel(
            self._loop.context,
            node,
            user,
            run=self._run,
            security=self._security,
            config=self._config,
            now=time.monotonic(),
        )

    def _clean(self, peer: Peer, message: wire.Clean) -> None:
        through = AttemptId(message.through)
        ending = [attempt for attempt in self._table if attempt.number <= through]
        below = {id(hop): hop for attempt in ending for hop in attempt.hops if hop.lost is None}
        open_below = set(below)
        self._drop_through(through)

        def cleaned(which: int) -> Callable[[AttemptFailed | wire.FromNode], None]:
            def answer(_: AttemptFailed | wire.FromNode) -> None:  # a lost child holds nothing that anyone can reach
                open_below.discard(which)
                if not open_below:
                    self._listener.send(peer, wire.Cleaned(message.call))
                    self._close_idle()

            return answer

        for which, hop in below.items():
            hop.clean(through, cleaned(which))
        if not below:
            self._listener.send(peer, wire.Cleaned(message.call))
            self._close_idle()

    def _drop_through(self, through: int) -> None:
        for attempt in self._relaying.drop_through(through):
            self._delivery.dropped(attempt)

    def _close_idle(self) -> None:
        for node, hop in tuple(self._hops.items()):
            if hop.idle or hop.lost is not None:
                hop.channel.close()
                self._loop.watched.remove(hop.channel)
                del self._hops[node]


def traffic_of(counters: NodeCounters, owner: int) -> Traffic:
    """The traffic of one owner; zeros when there was none."""
    return counters.owners.get(owner, Traffic())
