"""The one thread on which a process speaks to relay nodes: a hop to each root and a line to the local node.

Publishers and subscriptions live on callers' threads; they post what they want and wait for what this thread sets.
Connections are shared by all attempts of the process and made anew after a node was lost.
Not handled: what is sent (see publisher, subscription).

Paper: Section 7 (relay tree)   Spec: Channel
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from nemo_dcr.errors import InternalError
from nemo_dcr.transport.relay.channel import Channel, ChannelUser
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.hop import Hop
from nemo_dcr.transport.relay.keys import Security
from nemo_dcr.transport.relay.line import Line
from nemo_dcr.transport.relay.loop import Loop
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.tree import TreeNode


class RelayClient:
    """Connections of one process to relay nodes. Close it."""

    def __init__(self, *, run: str, security: Security, config: RelayConfig) -> None:
        self.security = security
        self.config = config
        self.counters = NodeCounters("client")
        self.fault: BaseException | None = None
        """A fault of our own that ended the thread."""
        self._run = run
        self._hops: dict[TreeNode, Hop] = {}
        self._lines: dict[TreeNode, Line] = {}
        self._loop = Loop("relay-client", self._ended)
        self._loop.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run on the thread, soon. Raises: InternalError when a fault ended the thread."""
        if self.fault is not None:
            raise InternalError("the relay client's thread has ended") from self.fault
        self._loop.post(action)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._loop.close(self._finish)

    # --------------------------------------------------------------------------------------------- the loop's thread

    def hop(self, node: TreeNode) -> Hop:
        """The hop to a root. Raises: as `Channel`."""
        node = replace(node, receivers=0)  # what it delivers to makes no other connection of it
        found = self._hops.get(node)
        if found is None or found.lost is not None:
            if found is not None:
                self._loop.watched.remove(found.channel)
            found = self._hops[node] = Hop(self.counters, lambda user: self._channel(node, user))
            self._loop.watched.append(found.channel)
        return found

    def line(self, node: TreeNode) -> Line:
        """The line to the local node. Raises: as `Channel`."""
        node = replace(node, receivers=0)
        found = self._lines.get(node)
        if found is None or found.channel.lost is not None:
            if found is not None:
                self._loop.watched.remove(found.channel)
            found = self._lines[node] = Line(self.config, lambda user: self._channel(node, user))
            self._loop.watched.append(found.channel)
        return found

    def _channel(self, node: TreeNode, user: ChannelUser) -> Channel:
        return Channel(
            self._loop.context,
            node,
            user,
            run=self._run,
            security=self.security,
            config=self.config,
            now=time.monotonic(),
        )

    def _finish(self) -> None:
        for channel in [hop.channel for hop in self._hops.values()] + [line.channel for line in self._lines.values()]:
            channel.close()

    def _ended(self, fault: BaseException) -> None:
        self.fault = fault
        self._finish()
