"""Whose words the ranks of a local cluster hold, read from their storage and compared with dense loads.

What an item is at a rank, and what each candidate gives it there, are the faces of `contents`; a cluster with instances
of one and of two ranks has two sets of them. Nothing is read but for a line that is recorded.
Not handled: processes, whose storage is out of reach; simulated clusters, which know their words.

Paper: Section 6.2 (reference)   Spec: store, content
"""

from __future__ import annotations

from model_tests import digest_classes
from model_tests.contents import Contents, Faces
from model_tests.engines import Table
from nemo_dcr.ids import CandidateId, ReceiverId, instance_of
from nemo_dcr.testing.local_cluster import LocalCluster
from nemo_dcr.testing.local_network import Life
from nemo_dcr.testing.local_oracle import stored_bits


class StorageOracle:
    """Digest classes of one cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._faces: dict[int, Faces] = {}
        self._contents: dict[tuple[int, CandidateId], Contents] = {}

    def stored(self, life: Life) -> str | None:
        """The classes of all items at a rank; None for a life that the cluster does not know, as one that starts."""
        receiver = self._cluster.receivers.get(ReceiverId(life.name))
        if receiver is None or receiver.life is not life:
            return None
        ranks = self._cluster.instances[instance_of(ReceiverId(life.name))]
        faces, candidates = self.faces(ranks), self._cluster.source.weights
        held = faces.held(receiver.model.rank, stored_bits(receiver.model))
        return digest_classes.told(
            {
                (int(owner), tensor.name): [c for c in candidates if held[item] == self.contents(ranks, c)[item]]
                for item, (owner, tensor, _) in faces.owned.items()
            }
        )

    def changes(self, new: str, old: str) -> frozenset[str]:
        """Items in which one candidate differs from another, named as in a trace."""
        ranks = min(self._cluster.instances.values())
        before, after = self.contents(ranks, CandidateId(old)), self.contents(ranks, CandidateId(new))
        owned = self.faces(ranks).owned
        return frozenset(
            f"owner {owner}/{tensor.name}" for item, (owner, tensor, _) in owned.items() if after[item] != before[item]
        )

    def faces(self, ranks: int) -> Faces:
        """Where the items lie at the ranks of an instance."""
        if ranks not in self._faces:
            source = self._cluster.source
            self._faces[ranks] = Faces(source, Table(source.tensors, self._cluster._kit.rules, {}), ranks)
        return self._faces[ranks]

    def contents(self, ranks: int, candidate: CandidateId) -> Contents:
        """What a candidate gives to each item there."""
        if (ranks, candidate) not in self._contents:
            self._contents[ranks, candidate] = self.faces(ranks).contents(candidate)
        return self._contents[ranks, candidate]
