"""The processes of a demo run and the ways to reach them: start, find, prewarm, kill, restart, dump.

Trainer ranks and engine ranks are processes of their own; this class holds their addresses and sockets. It decides
nothing about refits.

Paper: Section 3 (trainer ranks, receivers); Section 6.1 (prewarm call)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.cli.check import DumpedReceiver, DumpedTrackers
from nemo_dcr.cli.job import DemoJob
from nemo_dcr.cli.processes import Child
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import AttemptId, InstanceId, OwnerId, ReceiverId, instance_of, receiver_id
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.runtime.addresses import Address, wait_for_address
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import DUMP, PREWARM, TABLE, Nothing, Prewarm, Table
from nemo_dcr.runtime.serve import metas, rows
from nemo_dcr.runtime.trace_file import declare_killed, read_trace
from nemo_dcr.trace import Action, LamportClock

START_S = 180.0
"""Limit for a process to load the model and answer, and for a prewarm."""
CALL_S = 120.0
"""Limit for a training step, a gather or a dump."""


class Fleet:
    """Trainer and engine processes of one run; `close` ends all of them."""

    def __init__(
        self,
        job: DemoJob,
        clock: LamportClock,
        endpoints: SocketEndpoints | None = None,
        secrets: Mapping[str, str] | None = None,
        within: Callable[[str], Sequence[str]] = lambda name: (),
        start_s: float = START_S,
        trainer: str = "nemo_dcr.cli.trainer_process",
    ) -> None:
        """`secrets` go to every process as environment variables: credentials of the payload store.

        `within` gives, by process name, the command that puts a process on its host; see `Child`. `start_s` limits
        how long a process may take to load the model and answer, and to prewarm. `trainer` is the module of a trainer
        rank; it takes the job's file and the rank.
        """
        self.job = job
        self.secrets = secrets or {}
        self._within = within
        self._start_s = start_s
        self._trainer = trainer
        self.endpoints = endpoints or SocketEndpoints(clock)
        self.tensors: tuple[TensorMeta, ...] = ()
        """The canonical tensor table of the trainers."""
        self.baseline_bytes = 0
        """Host memory of all trackers."""
        self._children: dict[str, Child] = {}
        self._addresses: dict[str, Address] = {}
        self._classes: dict[str, dict[str, PathClass]] = {}
        self._reasons: dict[str, dict[str, tuple[str, str]]] = {}

    def close(self) -> None:
        """End every child process and release the sockets."""
        self.endpoints.close()
        for child in self._children.values():
            child.stop()

    def receivers(self, instances: Iterable[str] | None = None) -> list[ReceiverId]:
        """All ranks of all instances, or of some."""
        wanted = self.job.instances if instances is None else instances
        return [receiver_id(InstanceId(i), rank) for i in wanted for rank in range(self.job.instances[i])]

    def start(self, ready: Callable[[], object]) -> None:
        """Start everything and wait until it answers; `ready` is called once for each process."""
        for rank in range(self.job.owners):
            self._spawn(f"owner-{rank}", self._trainer, str(rank))
        for instance in self.job.instances:
            self._spawn_instance(InstanceId(instance))
        for rank in range(self.job.owners):
            self.endpoints.add_owner(OwnerId(rank), self._wait(f"owner-{rank}"))
            ready()
        for instance in self.job.instances:
            for _ in self._join(InstanceId(instance)):
                ready()
        tables: list[Table] = [table for table, _ in self.endpoints.call_owners(TABLE, Nothing(), CALL_S).values()]
        self.tensors = tuple(sorted({meta for table in tables for meta in metas(table.tensors)}))
        self.baseline_bytes = sum(table.baseline_bytes for table in tables)

    def prewarm(self, receivers: list[ReceiverId]) -> dict[str, PathClass]:
        """Let these ranks discover their loader paths; returns the class of each name over all ranks known by now.

        Raises: UnsupportedLoaderPath; OperatorNeeded when a rank could not be prewarmed.
        """
        answers = self.endpoints.call_receivers(PREWARM, Prewarm(rows(self.tensors)), self._start_s, only=receivers)
        for receiver, (answer, _) in answers.items():
            if answer.problem:
                raise OperatorNeeded(f"{receiver} was not prewarmed: {answer.problem}", "repair that engine")
            self._classes[receiver] = {name: PathClass(path) for name, path in answer.classes.items()}
            self._reasons[receiver] = answer.reasons
        return unite_tables(self._classes, self._reasons)

    def kill(self, instance: InstanceId) -> None:
        """SIGKILL every process of one instance."""
        for receiver in self.receivers([instance]):
            self._children[receiver].kill()
            declare_killed(self.job.traces, receiver, self._addresses[receiver].incarnation)

    def restart(self, instance: InstanceId) -> list[ReceiverId]:
        """Start a killed instance again and wait until it answers under a new incarnation."""
        self._spawn_instance(instance)
        return self._join(instance)

    def applied(self, receiver: ReceiverId, attempt: AttemptId) -> int:
        """Items that a rank's present life applied in an attempt, by its trace."""
        events = read_trace(self._trace(receiver))
        return sum(event.action == Action.APPLY_ITEM and event.attempt == attempt for event in events)

    def acknowledged(self, receiver: ReceiverId, attempt: AttemptId) -> bool:
        """True when the rank flushed the attempt, by its trace."""
        events = read_trace(self._trace(receiver))
        return any(event.action == Action.FLUSH and event.attempt == attempt for event in events)

    def dump_receivers(self, receivers: list[ReceiverId]) -> list[DumpedReceiver]:
        """Every stored parameter and buffer of these ranks."""
        answers = self.endpoints.call_receivers(DUMP, Nothing(), CALL_S, only=receivers)
        return [DumpedReceiver(receiver, storage, bulk.frames) for receiver, (storage, bulk) in answers.items()]

    def dump_trackers(self) -> list[DumpedTrackers]:
        """Every tracker of every owner."""
        answers = self.endpoints.call_owners(DUMP, Nothing(), CALL_S)
        return [DumpedTrackers(owner, storage, bulk.frames) for owner, (storage, bulk) in answers.items()]

    def complete(self, prompt: str) -> dict[str, str]:
        """What each instance that can read answers to a prompt; the reference engine only knows token ids."""
        return {}

    def survivors(self, killed: Iterable[InstanceId]) -> list[ReceiverId]:
        """Ranks of the instances that were not killed."""
        dead = set(killed)
        return [receiver for receiver in self.receivers() if instance_of(receiver) not in dead]

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        log = self.job.directory / "logs" / f"{name.replace('/', '-')}.log"
        self._children[name] = Child(
            name, module, [str(self.job.file), *arguments], log, self.secrets, self._within(name)
        )

    def _spawn_instance(self, instance: InstanceId) -> None:
        for rank in range(self.job.instances[instance]):
            self._spawn(receiver_id(instance, rank), "nemo_dcr.cli.engine_process", instance, str(rank))

    def _join(self, instance: InstanceId) -> list[ReceiverId]:
        """Wait until every rank of a started instance answers, and know it."""
        for receiver in self.receivers([instance]):
            self.endpoints.add_receiver(receiver, self._wait(receiver))
        return self.receivers([instance])

    def _wait(self, name: str) -> Address:
        child, earlier = self._children[name], self._addresses.get(name)
        address = wait_for_address(
            self.job.addresses,
            name,
            self._start_s,
            other_than=None if earlier is None else earlier.incarnation,
            require_alive=child.require_alive,
        )
        self._addresses[name] = address
        return address

    def _trace(self, receiver: ReceiverId) -> Path:
        name = receiver.replace("/", "-")
        return self.job.traces / f"{name}-{self._addresses[receiver].incarnation}.ndjson"
