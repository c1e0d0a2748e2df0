"""A trainer that hands out whole tensors: one owner with a host copy of them, and the coordinator of a few engines.

For trainers that gather their weights before a refit, as those that use vLLM's own trainer API do. Memory: the weights
of the candidate and the baseline, once each, on this host. A trainer whose ranks keep their shards runs owners of its
own instead.
Not handled: several owners; takeover by another process (a new one with the same record may start).

Paper: Section 5; Section 6.3
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_dcr.adapters.vllm.endpoints import EngineEndpoints
from nemo_dcr.adapters.vllm.engine_api import EngineApi
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.bits import Words, equal_words
from nemo_dcr.bits.tensors import copied_words, dtype_name
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.digests import content_digest, tensor_digest
from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import CodecConfig, GateMode, RefitConfig
from nemo_dcr.control import open_control
from nemo_dcr.errors import ConditionViolated, OperatorNeeded
from nemo_dcr.ids import (
    NO_CANDIDATE,
    CandidateId,
    Incarnation,
    InstanceId,
    OwnerId,
    ReceiverId,
    Version,
    instance_of,
    receiver_id,
)
from nemo_dcr.protocol.coordinator_events import (
    CoordinatorEffect,
    Ready,
    SteppedDown,
    TransitionAborted,
    TransitionEnded,
)
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.runtime.addresses import Address, new_incarnation
from nemo_dcr.runtime.change_log import DIRECTORY as CHANGES
from nemo_dcr.runtime.change_log import ChangeLog, Holding
from nemo_dcr.runtime.chronicle import DIRECTORY as CHRONICLE
from nemo_dcr.runtime.chronicle import Chronicle
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.methods import PREWARM, Prewarm
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.rpc import PLAINTEXT
from nemo_dcr.runtime.serve import OwnerService, rows
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import LoneExchange
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.source.tasks import AffineTask
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.object_store import FileObjectStore
from nemo_dcr.transport.relay.keys import Security

OWNER = OwnerId(0)
PREWARM_S = 600.0


class WholeWeights:
    """The trainer's weights by canonical name, as its owner reads them."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._words: dict[str, Words] = {}
        self.metas: dict[str, TensorMeta] = {}
        for name, tensor in tensors:
            self.metas[name] = TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            self._words[name] = copied_words(tensor)
        self.committed = NO_CANDIDATE

    @property
    def digest(self) -> bytes:
        """Digest of all names, dtypes, shapes and bits."""
        return content_digest({name: tensor_digest(meta, self._words[name]) for name, meta in self.metas.items()})

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hold other weights of the same names, dtypes and shapes.

        Raises: ConditionViolated (SC4) for others.
        """
        for name, tensor in tensors:
            meta = TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            if self.metas.get(name) != meta:
                raise ConditionViolated("SC4", name, f"{meta} is not what the first weights declared")
            self._words[name] = copied_words(tensor)

    def tasks(self) -> list[AffineTask]:
        """One task for each tensor."""
        return [AffineTask.identity(BoxMap.whole(meta), self._reader(name)) for name, meta in self.metas.items()]

    def _reader(self, name: str) -> Callable[[], Words]:
        return lambda: self._words[name]

    # As a FrozenTrainer.

    def end_transition(self, candidate: CandidateId) -> None:
        """The candidate is committed."""
        self.committed = candidate

    def reload(self, delta: DeltaOwner) -> CandidateId:
        """Back to the baseline."""
        for tensor, _, words in delta.tracker_words():
            if not equal_words(self._words[tensor.name], words):
                self._words[tensor.name] = words.copy()
        return self.committed


class WholeTrainer:
    """Owner and coordinator in this process; call `close` at the end."""

    def __init__(
        self,
        directory: Path,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        record: str = "",
        run: str = "run",
        refit: RefitConfig | None = None,
        codec: CodecConfig | None = None,
        security: Security = PLAINTEXT,
    ) -> None:
        """Open the record and the store, and capture version 0.

        Args:
            directory: of the run, shared with the engines.
            tensors: version 0.
            record: URL of the commit record, by default a file in `directory`.
            run: name of the run in the store.
            refit: the protocol's times and choices.
            codec: how payloads are cut and coded.
            security: the coordinator's key pair, where engines answer beyond loopback (`Settings.listen`, `keys`).
        """
        self.directory = Path(directory)
        self._run = run
        self._refit = refit or RefitConfig()
        self.outcomes: list[CoordinatorEffect] = []
        for name in ("addresses", "traces", "store"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self.weights = WholeWeights(tensors)
        self._tracers: list[FileTracer] = []
        self._chronicles: list[Chronicle] = []
        self._clock = LamportClock()
        self.endpoints = EngineEndpoints(self._clock, security)
        self._store = FileObjectStore(self.directory / "store", run=run)
        self._control = open_control(record or f"sqlite:///{self.directory / 'record.sqlite'}")
        self._classes: dict[ReceiverId, dict[str, PathClass]] = {}
        self._reasons: dict[str, dict[str, tuple[str, str]]] = {}
        self._coordinator: Coordinator | None = None
        self._node, self._owner = self._start_owner(codec or CodecConfig())

    def settings(self, instance: str, **options: Any) -> Settings:
        """What an engine of this run is told; `options` are further fields of `Settings`."""
        return Settings(
            instance=instance,
            directory=str(self.directory),
            store=str(self.directory / "store"),
            run=self._run,
            **options,
        )

    def add_engine(self, engine: EngineApi, instance: str, ranks: int = 1, **options: Any) -> None:
        """Attach and prewarm an engine, in the place of an earlier life of it.

        Raises: UnsupportedLoaderPath; EngineTrouble; EndpointLost; OperatorNeeded when a rank was not prewarmed.
        """
        self.endpoints.add_engine(engine, self.settings(instance, **options), ranks)
        receivers = [receiver_id(InstanceId(instance), rank) for rank in range(ranks)]
        call = Prewarm(rows(self.weights.metas.values()))
        for receiver, (answer, _) in self.endpoints.call_receivers(PREWARM, call, PREWARM_S, only=receivers).items():
            if answer.problem:
                raise OperatorNeeded(f"{receiver} was not prewarmed: {answer.problem}", "repair that engine")
            self._classes[receiver] = {name: PathClass(path) for name, path in answer.classes.items()}
            self._reasons[receiver] = answer.reasons
        classes = {name: path.value for name, path in unite_tables(self._classes, self._reasons).items()}
        if self._coordinator is not None:
            self._coordinator.classes = classes
            self._coordinator.look()

    def remove_engine(self, instance: str) -> None:
        """Forget an engine."""
        self.endpoints.remove_engine(instance)
        self._classes = {name: found for name, found in self._classes.items() if instance_of(name) != instance}

    def begin(self, timeout_s: float = 300.0) -> None:
        """Write the first record, or take up an old one, and open every gate. Raises: as `run`."""
        incarnation = new_incarnation(self.directory / "addresses", "coordinator")
        instances = {instance_of(receiver) for receiver in self._classes}
        self._coordinator = Coordinator(
            CoordinatorConfig(refit=self._refit, owners=(OWNER,), bootstrap_instances=len(instances)),
            self.endpoints,
            self._control,
            self._store,
            classes={name: path.value for name, path in unite_tables(self._classes, self._reasons).items()},
            tracer=self._tracer("coordinator", incarnation),
            clock=self._clock,
            observer=self.outcomes.append,
            told=self._chronicle("coordinator", incarnation).tell,
        )
        self._coordinator.become()
        self.run(timeout_s)

    def freeze(self, tensors: Iterable[tuple[str, Tensor]], gate: GateMode = GateMode.SYNC) -> CandidateId:
        """Take new weights and open their transition; `run` carries it out. Raises: OperatorNeeded when one is open."""
        coordinator = self._require_coordinator()
        candidate = CandidateId(f"{self._run}-{new_incarnation(self.directory / 'addresses', 'candidate')}")
        self._node.weights_changed()
        self.weights.take(tensors)
        problem = self._node.freeze(candidate)
        if problem:
            raise OperatorNeeded(f"the owner did not take the weights: {problem}", "finish the open transition first")
        coordinator.set_gate(gate)
        coordinator.look()
        return candidate

    def run(self, timeout_s: float = 300.0, each_round: Callable[[], None] | None = None) -> None:
        """Drive the coordinator until every engine serves the committed version.

        Raises: OperatorNeeded when it gave up or was replaced; EndpointLost after `timeout_s` seconds.
        """
        self._until(Ready, timeout_s, each_round)
        self.endpoints.wait_until_in_step(timeout_s)

    def refit(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        gate: GateMode = GateMode.SYNC,
        timeout_s: float = 300.0,
        each_round: Callable[[], None] | None = None,
    ) -> Version:
        """One whole transition; returns the committed version. Raises: as `freeze` and `run`."""
        self.freeze(tensors, gate)
        self._until(TransitionEnded, timeout_s, each_round)
        self.run(timeout_s, each_round)
        return self.version

    def _until(self, kind: type, timeout_s: float, each_round: Callable[[], None] | None) -> None:
        end = self._require_coordinator().run_until(
            lambda effect: isinstance(effect, (kind, SteppedDown, TransitionAborted)), timeout_s, each_round=each_round
        )
        if isinstance(end, (SteppedDown, TransitionAborted)):
            raise OperatorNeeded(f"the coordinator gave up: {end.reason}", "see its trace")

    @property
    def version(self) -> Version:
        """The committed version."""
        return self._control.history()[-1].version

    def close(self) -> None:
        """End the owner and the drivers; engines go on with what they serve."""
        self.endpoints.close()
        self._owner.close()
        self._changes.close()
        for tracer in self._tracers:
            tracer.close()
        for chronicle in self._chronicles:
            chronicle.close()

    def _chronicle(self, name: str, incarnation: Incarnation) -> Chronicle:
        self._chronicles.append(Chronicle(self.directory / CHRONICLE, name, incarnation))
        return self._chronicles[-1]

    def _tracer(self, name: str, incarnation: Incarnation) -> FileTracer:
        file = self.directory / "traces" / f"{name}-{incarnation}.ndjson"
        self._tracers.append(FileTracer(file, name, incarnation, self._clock))
        return self._tracers[-1]

    def _start_owner(self, codec: CodecConfig) -> tuple[OwnerNode, OwnerService]:
        tasks = self.weights.tasks()
        plan = agree_plan(LoneExchange(), tasks, expected=self.weights.metas.values())
        delta = DeltaOwner(OWNER, plan.owned_affine(OWNER, tasks), config=codec)
        delta.capture(Version(0))
        name, incarnation = "owner-0", new_incarnation(self.directory / "addresses", "owner-0")
        self._changes = ChangeLog(
            self.directory / CHANGES,
            Holding(OWNER, incarnation, delta.source_elements, delta.elements_by_tensor()),
        )
        node = OwnerNode(
            delta=delta,
            incarnation=incarnation,
            tracker=TrackerTag(TrackerKind.AT, Version(0)),
            resident=NO_CANDIDATE,
            trainer=self.weights,
            transport=self._store,
            tracer=self._tracer(name, incarnation),
            codec=codec,
            baseline_digest=self.weights.digest,
            changes=self._changes,
            told=self._chronicle(name, incarnation).tell,
        )
        service = OwnerService(node, self._clock)
        service.start()
        self.endpoints.add_owner(OWNER, Address(name, service.address, incarnation, os.getpid()))
        return node, service

    def _require_coordinator(self) -> Coordinator:
        if self._coordinator is None:
            raise OperatorNeeded("the trainer did not begin", "call begin() first")
        return self._coordinator
