"""Whole refits over a relay tree: nodes of the runtime, real tensors, a node lost on the way, every bit compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_dcr.ids import AttemptId, InstanceId, OwnerId, PayloadKey
from nemo_dcr.protocol.coordinator_events import AttemptEnded, Ready, TransitionEnded
from nemo_dcr.transport.base import Announcement, Buffer, Transport
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.publisher import RelayPublisher
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import RelayTree, balanced_tree
from tests.e2e.socket_cluster import SocketCluster
from tests.e2e.test_socket_walks import failed_modes

pytestmark = pytest.mark.slow
QUICK = RelayConfig(patience_s=0.3)
RANKS = {"e0": 1, "e1": 2, "e2": 1}


class StrikingTransport(RelayTransport):
    """What `strike` does happens after the next payload was published."""

    strike = staticmethod(lambda: None)

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> RelayPublisher:
        transport = self

        class Striking(RelayPublisher):
            def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
                announced = super().publish(key, data, digest)
                transport.strike()
                return announced

        return Striking(self._client, attempt, owner, self._tree(attempt))


class RelayCluster(SocketCluster):
    """Three relay nodes; the receivers of instance e<i> read at node n<i>."""

    def open_store(self) -> Transport:
        self.nodes = [RelayNode(f"n{number}", run="refit", config=QUICK) for number in range(3)]
        self.trees: dict[int, RelayTree] = {}
        self.opened = [StrikingTransport(self.tree, run="refit", config=QUICK)]
        return self.opened[0]

    def tree(self, attempt: AttemptId) -> RelayTree:
        """The tree of an attempt stays; a new attempt gets one over the nodes of now, with n0 as the root."""
        ranks = [replace(node.place, receivers=RANKS[f"e{node.name[1:]}"]) for node in self.nodes]
        return self.trees.setdefault(attempt, balanced_tree(ranks, fan_out=1))

    def transport_of(self, instance: InstanceId) -> Transport:
        self.opened.append(LocalNode(self, int(instance[1:])))
        return self.opened[-1]

    def replace_node(self, number: int) -> None:
        """The node dies, and another takes its place: in the next tree it comes last."""
        self.nodes[number].close()
        started = RelayNode(f"n{number}", run="refit", config=QUICK)
        self.nodes = [*(node for node in self.nodes if node.name != started.name), started]

    def close(self) -> None:
        super().close()
        for each in (*self.opened, *self.nodes):
            each.close()


class LocalNode(RelayTransport):
    """The transport of an engine, whose node may be started anew under its name."""

    def __init__(self, cluster: RelayCluster, number: int) -> None:
        super().__init__(cluster.tree, run="refit", config=QUICK)
        self._cluster = cluster
        self._number = number

    def subscribe(self, attempt: AttemptId, owners: object) -> object:
        self._local = next(node.place for node in self._cluster.nodes if node.name == f"n{self._number}")
        return super().subscribe(attempt, owners)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RelayCluster]:
    started = RelayCluster(tmp_path, RANKS, processes=False)
    try:
        yield started
    finally:
        started.close()


def test_refits_over_a_relay_tree_with_a_lost_node_and_a_retry_leave_no_wrong_bit(cluster: RelayCluster) -> None:
    """A node is lost in an attempt: it fails by name, the overwrite retry runs over another tree, and commits."""
    cluster.train()
    cluster.until(TransitionEnded)
    cluster.until(Ready)
    assert cluster.stored() == cluster.expected()
    transport = cluster.opened[0]
    assert isinstance(transport, StrikingTransport)
    struck: list[int] = []

    def strike() -> None:
        if not struck:
            struck.append(1)
            cluster.replace_node(1)

    transport.strike = strike
    cluster.train()
    failed = cluster.until(AttemptEnded)
    assert isinstance(failed, AttemptEnded)
    assert "relay node n1 is lost" in failed.reason
    cluster.until(TransitionEnded)
    cluster.until(Ready)
    assert failed_modes(cluster)[1] == ["xor", "xor", "overwrite"]
    shapes = [tuple(node.name for node in tree.nodes) for _, tree in sorted(cluster.trees.items())]
    assert ("n0", "n1", "n2") in shapes
    assert shapes[-1] == ("n0", "n2", "n1")
    assert cluster.control.history()[-1].version == 2
    assert cluster.stored() == cluster.expected()
    for node in cluster.nodes:
        counters = node.counters()
        assert (counters.memory_bytes, counters.spilled_bytes, counters.attempts, counters.waiting) == (0, 0, 0, 0)
    for node in cluster.nodes[:2]:
        assert node.counters().owners[0].received_again == 0
