"""The nodes of a local cluster as processes make them, each with a life that a fault can end.

Paper: Section 5; Section 6.3; Appendix B (endpoints)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import QueueConfig, RefitConfig
from nemo_dcr.ids import NO_CANDIDATE, InstanceId, Member, OwnerId, Version, receiver_id
from nemo_dcr.protocol.coordinator_events import CoordinatorEffect
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.record import ControlPlane
from nemo_dcr.runtime.chronicle import Told
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.testing.local_network import Life, LocalControl, LocalEndpoints, LocalTransport, Surroundings
from nemo_dcr.testing.local_oracle import DenseOracle, StoredBits
from nemo_dcr.testing.local_source import LocalRank, LocalSource
from nemo_dcr.testing.toy_loader import Rule, ToyModel
from nemo_dcr.trace import Emit
from nemo_dcr.transport.base import Transport


@dataclass(eq=False)
class LocalReceiver:
    """One life of one rank."""

    life: Life
    node: ReceiverNode
    model: ToyModel
    classes: dict[str, PathClass]
    bits: StoredBits | None = None
    """What the storage held when it was last read; None after a write."""


@dataclass(eq=False)
class LocalOwner:
    """One life of one trainer rank's owner."""

    life: Life
    node: OwnerNode
    rank: LocalRank


@dataclass(eq=False)
class LocalCoordinator:
    """One life of one coordinator; it may be replaced without knowing."""

    life: Life
    coordinator: Coordinator
    out: bool = False

    @property
    def acts(self) -> bool:
        """Alive, and not stepped down."""
        return self.life.alive and not self.out


class _Tracer:
    """Hands on what a node traces; a dead one goes no further."""

    def __init__(self, cluster: Surroundings, life: Life) -> None:
        self._cluster = cluster
        self._life = life

    def emit(self, emitted: Emit) -> None:
        self._life.require()
        self._cluster.traced(self._life, emitted)
        self._life.require()


@dataclass(frozen=True, kw_only=True)
class NodeKit:
    """What all nodes of a cluster are made of."""

    source: LocalSource
    rules: Mapping[str, Rule]
    oracle: DenseOracle
    control: ControlPlane
    transport: Transport
    refit: RefitConfig
    queue: QueueConfig
    digest: bytes
    """Name of the checkpoint of version 0, when receivers and owners shall prove that they hold it; or empty."""
    told: Told
    """Gets the chronicle of every node."""

    def receiver(self, cluster: Surroundings, life: Life, instance: InstanceId, rank: int, ranks: int) -> LocalReceiver:
        """A prewarmed rank that loaded version 0."""
        model = ToyModel(self.source.tensors, self.rules, rank, ranks)
        self.oracle.load(model, NO_CANDIDATE)
        node = ReceiverNode(
            member=Member(receiver_id(instance, rank), life.incarnation),
            ranks=ranks,
            model=model,
            transport=LocalTransport(self.transport, cluster, life),
            tracer=_Tracer(cluster, life),
            refit=self.refit,
            codec=self.source.codec,
            queue=self.queue,
            loaded_digest=self.digest,
            told=self.told,
        )
        classes, _ = node.prewarm(self.source.tensors)
        return LocalReceiver(life, node, model, classes)

    def owner(self, cluster: Surroundings, life: Life, rank: LocalRank, *, first: bool) -> LocalOwner:
        """An owner that tracks version 0 at its first start, and has lost its baseline at every other."""
        delta = rank.new_delta()
        if first:
            delta.capture(Version(0))
        node = OwnerNode(
            delta=delta,
            incarnation=life.incarnation,
            tracker=TrackerTag(TrackerKind.AT, Version(0)) if first else TrackerTag(),
            resident=None if rank.frozen else rank.committed,
            candidate=rank.frozen,
            trainer=rank,
            transport=LocalTransport(self.transport, cluster, life),
            tracer=_Tracer(cluster, life),
            codec=self.source.codec,
            baseline_digest=self.digest if first else b"",
            told=self.told,
        )
        return LocalOwner(life, node, rank)

    def coordinator(
        self,
        cluster: Surroundings,
        life: Life,
        *,
        owners: tuple[OwnerId, ...],
        instances: int,
        classes: Mapping[str, PathClass],
        observer: Callable[[CoordinatorEffect], None],
        monotonic: Callable[[], float],
        skew: float,
    ) -> LocalCoordinator:
        """A coordinator whose wall clock is off by `skew` seconds; it did not take over yet."""
        coordinator = Coordinator(
            CoordinatorConfig(refit=self.refit, owners=owners, bootstrap_instances=instances),
            LocalEndpoints(cluster, life),
            LocalControl(self.control, cluster, life),
            LocalTransport(self.transport, cluster, life),
            classes={name: path.value for name, path in classes.items()},
            tracer=_Tracer(cluster, life),
            observer=observer,
            now=lambda: monotonic() + skew,
            monotonic=monotonic,
            sleep=cluster.ticks,
            told=self.told,
        )
        return LocalCoordinator(life, coordinator)
