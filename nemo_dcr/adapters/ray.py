"""A run as Ray actors: trainer ranks with their owners, engine ranks with their receivers, and a coordinator.

For people whose trainers and engines are actors anyway. The actors find each other as other processes do, by address
files in a directory that all hosts reach; Ray starts them, says where, and brings calls to them. An engine whose actors
died is placed anew under its name, and the coordinator restores it. Hosts other than this one need keys, as elsewhere:
give `listen` and `keys` with the owners' and the receivers' arguments.
Not handled: a trainer actor that died (the job starts anew, as with torchrun); vLLM's own actors.

Paper: Section 3 (processes of a run)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
import torch.distributed as dist
from torch import nn

from nemo_dcr.adapters.coordinator_thread import CoordinatorThread
from nemo_dcr.adapters.owner import Owner
from nemo_dcr.adapters.receiver import Receiver
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import RefitConfig
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import Version
from nemo_dcr.receiver.residents import NativeModel
from nemo_dcr.transport.urls import open_transport


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """The trainer ranks."""

    make: Callable[[], nn.Module]
    """Makes the model as it is trained, on each rank, once torch.distributed is ready there."""
    checkpoint: str | tuple[TensorMeta, ...]
    """As `Owner.from_module` takes it."""
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of each actor, as Ray takes them: `num_cpus`, `num_gpus`, ..."""
    owner: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `Owner.from_module`."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """One engine instance."""

    make: Callable[[int, int], NativeModel]
    """Makes the model of a rank, from its number and how many there are."""
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    receiver: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `Receiver`."""


class TrainerActor:
    """One trainer rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def meet(self) -> tuple[str, int]:
        """Rank 0 opens the store at which all ranks meet; its address."""
        host = ray.util.get_node_ip_address()
        # torch re-exports its stores without saying so to type checkers.
        self._store = dist.TCPStore(host, 0, self._ranks, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return host, self._store.port

    def begin(self, meeting: tuple[str, int], plan: TrainerPlan, arguments: Mapping[str, Any]) -> None:
        """Make model and owner, all ranks together. Raises: as `Owner.from_module`."""
        if self._rank:
            self._store = dist.TCPStore(*meeting, self._ranks, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=self._ranks)
        self._model = plan.make()
        self._owner = Owner.from_module(self._model, checkpoint=plan.checkpoint, coordinate=False, **arguments)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """`function(model, owner, *arguments)`."""
        return function(self._model, self._owner, *arguments)

    def end(self) -> None:
        """Close the owner and leave the process group."""
        self._owner.close()
        dist.destroy_process_group()


class EngineActor:
    """One engine rank."""

    def __init__(self, instance: str, rank: int, plan: EnginePlan, arguments: Mapping[str, Any]) -> None:
        """Raises: as `Receiver`."""
        self._model = plan.make(rank, plan.ranks)
        self._receiver = Receiver(self._model, instance=instance, rank=rank, ranks=plan.ranks, **arguments)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """`function(model, *arguments)`, on the thread that applies, so that no refit is halfway meanwhile."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(function(self._model, *arguments))
            except Exception as problem:
                answer.set_exception(problem)

        self._receiver.node.on_engine(run)
        return answer.result()

    def end(self) -> None:
        """Close the receiver."""
        self._receiver.close()


class CoordinatorActor:
    """The coordinator."""

    def __init__(
        self, directory: str, record: str, transport: str, run: str, owners: int, instances: int, refit: RefitConfig
    ) -> None:
        """Raises: as `CoordinatorThread`."""
        self._transport = open_transport(transport, run=run)
        self._thread = CoordinatorThread(
            Path(directory), record, self._transport, owners=owners, instances=instances, refit=refit
        )

    def end(self) -> None:
        """Close it."""
        self._thread.close()
        self._transport.close()


class RayRun:
    """All actors of a run; `ray.init` was called before. Close it or use it as a context manager."""

    def __init__(
        self,
        directory: Path | str,
        trainer: TrainerPlan,
        engines: Mapping[str, EnginePlan],
        *,
        transport: str = "",
        record: str = "",
        run: str = "run",
        refit: RefitConfig | None = None,
    ) -> None:
        """Place the actors and wait until owners and receivers answer.

        Args:
            directory: of the run, one that all hosts reach.
            trainer: the trainer ranks.
            engines: engine instances by name.
            transport: URL of the payloads; default: `store` in `directory`.
            record: URL of the commit record; default: a file in `directory`, for a coordinator on that host.
            run: name of the run.
            refit: the protocol's times and choices.

        Raises: InvalidConfig without an engine; whatever an actor raised, as Ray hands it on.
        """
        if not engines:
            raise InvalidConfig("engines", "a run needs an engine; give at least one EnginePlan")
        place = Path(directory).resolve()
        for name in ("addresses", "traces", "store"):
            (place / name).mkdir(parents=True, exist_ok=True)
        self._trainer, self._engines = trainer, dict(engines)
        payloads = transport or (place / "store").as_uri()
        self._shared = {"directory": str(place), "transport": payloads, "run": run}
        self._receivers: dict[str, list[Any]] = {}
        for instance in engines:  # they come up while the trainer does
            self.place_engine(instance)
        record = record or f"sqlite:///{place / 'record.sqlite'}"
        self._coordinator = ray.remote(CoordinatorActor).remote(
            *(str(place), record, payloads, run), trainer.ranks, len(engines), refit or RefitConfig()
        )
        actor = ray.remote(TrainerActor)
        self._owners = [actor.options(**trainer.options).remote(rank, trainer.ranks) for rank in range(trainer.ranks)]
        meeting = ray.get(self._owners[0].meet.remote())
        arguments = {**self._shared, **trainer.owner}
        ray.get([owner.begin.remote(meeting, trainer, arguments) for owner in self._owners])

    def place_engine(self, instance: str) -> None:
        """Start the actors of an engine, in the place of earlier ones of this name, which are killed."""
        for old in self._receivers.pop(instance, []):
            ray.kill(old)
        plan = self._engines[instance]
        actor = ray.remote(EngineActor).options(**plan.options)
        arguments = {**self._shared, **plan.receiver}
        self._receivers[instance] = [actor.remote(instance, rank, plan, arguments) for rank in range(plan.ranks)]

    def kill_engine(self, instance: str) -> None:
        """End the actors of an engine at once, wherever they are."""
        for receiver in self._receivers[instance]:
            ray.kill(receiver)

    def on_trainers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(model, owner, *arguments)` on every trainer rank at the same time; the results by rank."""
        results: list[Any] = ray.get([owner.call.remote(function, arguments) for owner in self._owners])
        return results

    def on_engine(self, instance: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(model, *arguments)` on every rank of an engine, between two steps of a refit; by rank."""
        results: list[Any] = ray.get([each.call.remote(function, arguments) for each in self._receivers[instance]])
        return results

    def refit(self, timeout_s: float = 600.0) -> Version:
        """Refit all engines to the trainer's weights; the committed version. Raises: as `Owner.refit`, over Ray."""
        versions: list[Version] = self.on_trainers(_refit, timeout_s)
        return versions[0]

    def close(self) -> None:
        """End all actors: coordinator, engines, trainers."""
        self._end([self._coordinator])
        self._end(receiver for receivers in self._receivers.values() for receiver in receivers)
        self._end(self._owners)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _end(actors: Iterable[Any]) -> None:
        for actor, ended in [(actor, actor.end.remote()) for actor in actors]:
            try:
                ray.get(ended)
            except ray.exceptions.RayActorError:
                continue  # it is dead already
            ray.kill(actor)


def _refit(model: nn.Module, owner: Owner, timeout_s: float) -> Version:
    return owner.refit(timeout_s=timeout_s)
