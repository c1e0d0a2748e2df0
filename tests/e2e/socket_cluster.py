"""A small cluster over real sockets, files and SQLite: owners on threads, engines on threads or in own processes.

python -m tests.e2e.socket_cluster DIRECTORY INSTANCE RANKS RANK     (one engine rank, until it is told to stop)
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import RefitConfig
from nemo_dcr.control import SqliteControl
from nemo_dcr.ids import (
    NO_CANDIDATE,
    AttemptId,
    CandidateId,
    Incarnation,
    InstanceId,
    Member,
    OwnerId,
    PayloadKey,
    ReceiverId,
    Version,
    receiver_id,
)
from nemo_dcr.protocol.coordinator_events import CoordinatorEffect, Ready
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address, wait_for_address
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import DUMP, PREWARM, TABLE, Nothing, Prewarm
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.serve import OwnerService, ReceiverService
from nemo_dcr.runtime.trace_file import FileTracer, declare_killed, write_journal
from nemo_dcr.testing.local_oracle import DenseOracle, StoredBits
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Composed, PadRows, Rule, Slice, ToyModel
from nemo_dcr.trace import LamportClock, Tracer
from nemo_dcr.transport.base import Announcement, Buffer, Manifest, Publisher, Subscription, Transport
from nemo_dcr.transport.object_store import FileObjectStore

SEED = 11
TENSORS = (
    TensorMeta("a.w", (8, 4), "BF16"),
    TensorMeta("b.w", (5, 6), "F32"),
    TensorMeta("c.w", (9, 5), "F16"),
    TensorMeta("d.w", (4, 4), "I64"),
)
RULES: dict[str, Rule] = {"a.w": Slice(0), "b.w": Composed(), "c.w": PadRows(4), "d.w": Slice(1)}
REFIT = RefitConfig(heartbeat_s=0.02, call_timeout_s=2.0, lost_after_s=2.0)
TIMEOUT_S = 60.0


class HoldingStore:
    """A transport whose owners stop after so many payloads of an attempt, until `release` or a stop."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.hold_after: int | None = None
        self.released = threading.Event()

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        inner = self._inner.publisher(attempt, owner)
        hold, self.hold_after = self.hold_after, None
        return inner if hold is None else _Holding(inner, hold, self.released)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> Subscription:
        return self._inner.subscribe(attempt, owners)

    def cleanup(self, through: AttemptId) -> None:
        self._inner.cleanup(through)


class _Holding:
    def __init__(self, inner: Publisher, hold: int, released: threading.Event) -> None:
        self._inner = inner
        self._left = hold
        self._released = released

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        if self._left == 0:
            self._released.wait(TIMEOUT_S)
        self._left -= 1
        return self._inner.publish(key, data, digest)

    def close_set(self) -> Manifest:
        return self._inner.close_set()

    def stop(self) -> None:
        self._inner.stop()
        self._released.set()


def source(owners: int = 1) -> LocalSource:
    """The trainer's weights; version 0 is the same in every process."""
    return LocalSource(TENSORS, seed=SEED, owners=owners)


def engine(
    directory: Path,
    instance: InstanceId,
    ranks: int,
    rank: int,
    transport: Transport | None = None,
    told: Callable[[ToyModel, Tracer], Tracer] = lambda model, tracer: tracer,
) -> tuple[ReceiverService, FileTracer]:
    """A started engine rank that holds version 0, and its trace; it reads from the store if no transport is given.

    Lines go through what `told` makes of the tracer.
    """
    receiver = receiver_id(instance, rank)
    model = ToyModel(TENSORS, RULES, rank, ranks)
    DenseOracle(source(), RULES).load(model, NO_CANDIDATE)
    clock, incarnation = LamportClock(), new_incarnation(directory, receiver)
    tracer = tracer_of(directory, receiver, incarnation, clock)
    node = ReceiverNode(
        member=Member(receiver, incarnation),
        ranks=ranks,
        model=model,
        transport=transport or FileObjectStore(directory / "store"),
        loaded_digest=b"version 0",
        tracer=told(model, tracer),
    )
    service = ReceiverService(node, clock)
    service.start()
    publish_address(directory, Address(receiver, service.address, incarnation, os.getpid()))
    return service, tracer


def serve(service: ReceiverService, tracer: FileTracer) -> None:
    """Lend this thread until the service is told to stop."""
    while not service.stopping.is_set():
        service.work(0.05)
    service.close()
    tracer.close()


def tracer_of(directory: Path, node: str, incarnation: Incarnation, clock: LamportClock) -> FileTracer:
    """A tracer that writes one process life to `traces/`."""
    traces = directory / "traces"
    traces.mkdir(exist_ok=True)
    name = node.replace("/", "-").replace(" ", "-")
    return FileTracer(traces / f"{name}-{incarnation}.ndjson", node, incarnation, clock)


class SocketCluster:
    """One owner and any engines. Close it."""

    def __init__(
        self,
        directory: Path,
        instances: dict[str, int],
        *,
        processes: bool,
        transport: Callable[[], Transport] | None = None,
        module: str = "tests.e2e.socket_cluster",
    ) -> None:
        """Start it.

        Args:
            directory: of addresses, record, traces and payloads.
            instances: ranks by instance.
            processes: engines are processes, not threads.
            transport: opens one for each node on threads; without it payloads lie in the directory.
            module: what an engine process runs.
        """
        self._module = module
        self.directory = directory
        self.instances = {InstanceId(name): ranks for name, ranks in instances.items()}
        self.source = source()
        self.oracle = DenseOracle(self.source, RULES)
        self.steps = itertools.count(1)
        self.control = SqliteControl(directory / "record.sqlite")
        self._open = transport or (lambda: FileObjectStore(directory / "store"))
        self.store = self.open_store()
        self.clock = LamportClock()
        self.endpoints = SocketEndpoints(self.clock)
        self.tracers: list[FileTracer] = []
        self.children: dict[ReceiverId, subprocess.Popen[bytes]] = {}
        self.threads: list[threading.Thread] = []
        self.services: list[ReceiverService] = []
        self.rank = self.source.ranks[OwnerId(0)]
        self.owner = self._start_owner()
        self._processes = processes
        self.outcomes: list[CoordinatorEffect] = []
        try:
            self._start()
        except BaseException:
            self.close()  # threads and processes that nobody could end later
            raise

    def _start(self) -> None:
        for instance in self.instances:
            self.start_instance(instance)
        self.coordinator = Coordinator(
            CoordinatorConfig(refit=REFIT, owners=(OwnerId(0),), bootstrap_instances=len(self.instances)),
            self.endpoints,
            self.control,
            self.store,
            classes=self.prewarm(),
            observer=self._observe,
            clock=self.clock,
            tracer=self._trace("coordinator", new_incarnation(self.directory, "coordinator"), self.clock),
        )
        self.coordinator.become()
        self.until(Ready)

    def open_store(self) -> Transport:
        """The transport of owner and coordinator."""
        return HoldingStore(self._open())

    def transport_of(self, instance: InstanceId) -> Transport:
        """The transport of an engine on a thread."""
        return self._open()

    def _observe(self, effect: CoordinatorEffect) -> None:
        self.outcomes.append(effect)

    def _trace(self, node: str, incarnation: Incarnation, clock: LamportClock) -> FileTracer:
        self.tracers.append(tracer_of(self.directory, node, incarnation, clock))
        return self.tracers[-1]

    def _start_owner(self) -> OwnerService:
        delta = self.rank.new_delta()
        delta.capture(Version(0))
        clock, incarnation = LamportClock(), new_incarnation(self.directory, "owner-0")
        node = OwnerNode(
            delta=delta,
            incarnation=incarnation,
            tracker=TrackerTag(TrackerKind.AT, Version(0)),
            resident=NO_CANDIDATE,
            trainer=self.rank,
            transport=self.store,
            codec=self.source.codec,
            baseline_digest=b"version 0",
            tracer=self._trace("owner 0", incarnation, clock),
        )
        service = OwnerService(node, clock)
        service.start()
        self.endpoints.add_owner(OwnerId(0), Address("owner-0", service.address, incarnation, os.getpid()))
        self.node = node
        return service

    def kill(self, name: ReceiverId) -> None:
        """Kill the process of a rank, and note it next to its trace."""
        child = self.children.pop(name)
        child.kill()
        child.wait()
        if life := self.endpoints.receivers().get(name):
            declare_killed(self.directory / "traces", name, life)

    def start_instance(self, instance: InstanceId) -> None:
        """Start all ranks of an instance and wait for their addresses."""
        for rank in range(self.instances[instance]):
            name = receiver_id(instance, rank)
            earlier = self.endpoints.receivers().get(name)
            if name in self.children:
                self.kill(name)
            if self._processes:
                arguments = [str(self.directory), instance, str(self.instances[instance]), str(rank)]
                command = [sys.executable, "-m", self._module, *arguments]
                self.children[name] = subprocess.Popen(command, cwd=Path(__file__).parents[2])
            else:
                transport = self.transport_of(instance)
                service, tracer = engine(self.directory, instance, self.instances[instance], rank, transport)
                thread = threading.Thread(target=serve, args=(service, tracer), daemon=True)
                thread.start()
                self.services.append(service)
                self.threads.append(thread)
            self.endpoints.add_receiver(name, wait_for_address(self.directory, name, TIMEOUT_S, other_than=earlier))

    def prewarm(self, only: Sequence[ReceiverId] | None = None) -> dict[str, str]:
        """Discover loader paths over the socket; the class of each name."""
        tables = self.endpoints.call_owners(TABLE, Nothing(), TIMEOUT_S)
        rows = tuple(row for table, _ in tables.values() for row in table.tensors)
        answers = self.endpoints.call_receivers(PREWARM, Prewarm(rows), TIMEOUT_S, only=only)
        assert [answer.problem for answer, _ in answers.values() if answer.problem] == []
        classes = {str(r): {n: PathClass(c) for n, c in found.classes.items()} for r, (found, _) in answers.items()}
        return {name: path.value for name, path in unite_tables(classes).items()}

    def train(self) -> CandidateId:
        """New weights, frozen."""
        candidate = CandidateId(f"c{next(self.steps)}")
        self.source.draw(candidate, self.rank.committed, 0.4)
        self.node.weights_changed()
        self.rank.load(candidate)
        self.rank.frozen = candidate
        assert self.node.freeze(candidate) == ""
        self.coordinator.look()
        return candidate

    def until(self, kind: type, each_round: Callable[[], None] | None = None) -> CoordinatorEffect:
        """Run until an effect of this kind."""
        return self.coordinator.run_until(lambda effect: isinstance(effect, kind), TIMEOUT_S, each_round=each_round)

    def stored(self) -> dict[ReceiverId, StoredBits]:
        """Every parameter and buffer of every receiver, as dumped over the socket."""
        answers = self.endpoints.call_receivers(DUMP, Nothing(), TIMEOUT_S)
        return {
            name: {
                row.name: (row.dtype, tuple(row.shape), frame)
                for row, frame in zip(storage.tensors, bulk.frames, strict=True)
            }
            for name, (storage, bulk) in answers.items()
        }

    def expected(self) -> dict[ReceiverId, StoredBits]:
        """A dense load of the committed version for each receiver."""
        candidate = self.control.history()[-1].candidate
        return {
            receiver_id(instance, rank): self.oracle.expected(rank, ranks, candidate)
            for instance, ranks in self.instances.items()
            for rank in range(ranks)
        }

    def close(self) -> None:
        """End everything that this cluster started."""
        for name in list(self.children):
            self.kill(name)
        for service in self.services:
            service.stopping.set()
        for thread in self.threads:
            thread.join(10.0)
        self.owner.close()
        self.endpoints.close()
        for tracer in self.tracers:
            tracer.close()
        write_journal(self.directory / "traces" / "control.ndjson", self.control.journal())
        self.control.close()


if __name__ == "__main__":
    serve(*engine(Path(sys.argv[1]), InstanceId(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
