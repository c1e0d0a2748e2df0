"""The relay tree passes the transport suite: a root and two levels below it; peers read at a leaf."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_dcr.testing.transport_suite import TransportSuite
from nemo_dcr.transport.base import Announcement, Transport
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.store import Body, SpilledBody
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import RelayTree, balanced_tree


def tree_over(nodes: list[RelayNode]) -> RelayTree:
    return balanced_tree([node.place for node in nodes], fan_out=2)


class TestRelayTree(TransportSuite):
    @pytest.fixture
    def transport(self) -> Iterator[RelayTransport]:
        self.nodes = [RelayNode(f"n{number}", run="suite") for number in range(4)]
        self.tree = tree_over(self.nodes)
        self.opened = [RelayTransport(self.tree, local=self.tree.node("n3"), run="suite")]
        yield self.opened[0]
        for each in (*self.opened, *self.nodes):
            each.close()

    def peer(self, transport: Transport) -> RelayTransport:
        local = self.tree.nodes[len(self.opened) % len(self.tree.nodes)]
        self.opened.append(RelayTransport(self.tree, local=local, run="suite"))
        return self.opened[-1]

    def alter(self, transport: Transport, announcement: Announcement) -> None:
        key = announcement.key
        for node in self.nodes:
            body = node._table.find(key.attempt).sets[key.owner].entries[key.payload].body
            assert isinstance(body, Body)
            assert not isinstance(body, SpilledBody)
            body._frames[0] = bytes([body.chunk(0)[0] ^ 1]) + body.chunk(0)[1:]
