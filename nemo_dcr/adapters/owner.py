"""The owner of a trainer rank in one call: tasks, baseline, control socket, and on rank 0 the coordinator.

Every rank of a trainer calls `Owner.from_module` with the model as it trains it. After each optimizer step `refit`
freezes the weights as a candidate and returns once they are committed, or raises and the weights are those of the
committed version again. `freeze` and `wait` are its two halves, for trainers that do something else meanwhile: rollouts
of their own, or a checkpoint. A step while the weights are frozen is refused where the optimizer is watched.
Not handled: engines that are driven over an API of their own (give `coordinate=False` and see adapters.vllm).

Paper: Section 5; Section 6.3   Spec: BeginTransition, EndTransition, DropCandidate   Conditions: SC1, SC2, SC4
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import distributed as dist
from torch import nn

from nemo_dcr.adapters.coordinator_thread import CoordinatorThread
from nemo_dcr.adapters.first_version import first_digest
from nemo_dcr.adapters.kept_baseline import take_over
from nemo_dcr.adapters.policy_weights import PolicyWeights
from nemo_dcr.adapters.prometheus import open_metrics
from nemo_dcr.adapters.trainer_group import trainer_group
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.directory import Checkpoint, open_checkpoint
from nemo_dcr.config import BaselineConfig, CodecConfig, QueueConfig, RefitConfig
from nemo_dcr.errors import Conflict, EndpointLost, OperatorNeeded
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, OwnerId, Version
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.change_log import DIRECTORY as CHANGES
from nemo_dcr.runtime.change_log import ChangeLog, Holding
from nemo_dcr.runtime.chronicle import DIRECTORY as CHRONICLE
from nemo_dcr.runtime.chronicle import Chronicle, Told, tell_all, tell_nobody
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT
from nemo_dcr.runtime.serve import OwnerService
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.source.delta import Counts
from nemo_dcr.source.tasks import ResidualInput, ResidualTask
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import read_security
from nemo_dcr.transport.urls import open_transport

POLL_S = 0.02


class Owner:
    """One trainer rank; make it with `from_module`, and close it or use it as a context manager."""

    def __init__(self, weights: PolicyWeights, node: OwnerNode, service: OwnerService, prefix: str) -> None:
        """See `from_module`; `prefix` begins the names of its candidates."""
        self.node = node
        self._weights = weights
        self._service = service
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._candidate = NO_CANDIDATE
        self._coordinator: CoordinatorThread | None = None
        self.metrics_port: int | None = None
        """Where this rank answers Prometheus; None when it does not."""
        self._opened = ExitStack()

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        *,
        checkpoint: Path | str | Iterable[TensorMeta],
        directory: Path | str,
        transport: str = "",
        record: str = "",
        coordinate: bool = True,
        instances: int = 1,
        run: str = "run",
        group: dist.ProcessGroup | None = None,
        committed: str | None = NO_CANDIDATE,
        inputs: Sequence[ResidualInput] = (),
        conversions: Sequence[ResidualTask] = (),
        restore: Callable[[], None] | None = None,
        refit: RefitConfig | None = None,
        codec: CodecConfig | None = None,
        queue: QueueConfig | None = None,
        baseline: BaselineConfig | None = None,
        listen: str = LOOPBACK,
        keys: Path | str | None = None,
        metrics: str = "",
    ) -> Self:
        """Make this rank an owner, capture its baseline, and begin to answer. All ranks of `group` call it together.

        Args:
            model: as it is trained: plain, DDP, FSDP2, HSDP, tensor parallel, compiled; a `transformers` model keeps
                the names of its checkpoint. FP32 masters of a BF16 checkpoint are served as their BF16 cast.
            checkpoint: a directory of safetensors files, or its tensor table: what is served, by canonical name.
            directory: of the run, one that all its processes reach: addresses, traces, and what has no URL below.
            transport: URL of the payloads (`nemo_dcr.transport.urls`); default: `store` in `directory`.
            record: URL of the commit record (`nemo_dcr.control.urls`), for the coordinator; default: a file in
                `directory`.
            coordinate: rank 0 coordinates in this process; False when a coordinator runs elsewhere.
            instances: the first version waits for so many engine instances.
            run: name of the run, the same in all its processes.
            group: the trainer ranks, by default all; owners talk over process groups of their own.
            committed: which committed candidate the weights are, as `Owner.committed` told it before a restart. Empty:
                they are the run's first. None: they are no committed version, and the next refit sends everything.
            inputs: what residual conversions of this rank read, each under the name of its parameter.
            conversions: residual conversions of this rank.
            restore: sets model and optimizer back to the last committed version when a candidate is given up; it runs
                on the owner's thread. By default the served values are written into the parameters.
            refit: the protocol's times and choices, for the coordinator.
            codec: how payloads are cut and coded.
            queue: bounds between the stages of an owner.
            baseline: files that outlive this process: a trainer that starts again, with whatever weights, sends the
                difference to the committed version where they hold it. All ranks must reach `record` then.
            listen: where this rank answers control calls; beyond loopback it needs `keys`.
            keys: key directory of this rank (`nemo-dcr keys new`).
            metrics: `PORT` or `HOST:PORT` at which rank 0 answers Prometheus, rank r at the r-th port after it; empty
                for none (docs/metrics.md).

        Raises: InvalidConfig; UnsupportedMapping (SC1, SC2, SC5, SC6) for a model that does not make the checkpoint;
        ConditionViolated (SC2) for replicas that differ; CheckpointInvalid; TransportFailed; EndpointLost.
        """
        place, codec, security = Path(directory), codec or CodecConfig(), PLAINTEXT
        for name in ("addresses", "traces", "store"):
            (place / name).mkdir(parents=True, exist_ok=True)
        if keys is not None:
            security = read_security(Path(keys))
        files, table = _table(checkpoint)
        ranks = trainer_group(group)
        with ExitStack() as opened:
            weights = PolicyWeights(
                model,
                table,
                ranks,
                codec=codec,
                committed=CandidateId(committed or NO_CANDIDATE),
                inputs=inputs,
                conversions=conversions,
                restore=restore,
                baseline=baseline,
            )
            url = record or f"sqlite:///{(place / 'record.sqlite').resolve()}"
            tracker, digest = TrackerTag(), b""
            if committed == NO_CANDIDATE:
                weights.delta.capture(Version(0))
                tracker = TrackerTag(TrackerKind.AT, Version(0))
                digest = b"" if files is None else first_digest(files, ranks.calls, weights.delta)
            elif baseline is not None and baseline.dir:
                tracker = take_over(weights.delta, url)
            rank = OwnerId(ranks.calls.rank)
            name, clock = f"owner-{rank}", LamportClock()
            incarnation = new_incarnation(place / "addresses", name)
            prefix = f"{run}-{ranks.agree(incarnation)}"  # the last call of all ranks: what fails now fails alone
            payloads = open_transport(transport or (place / "store").resolve().as_uri(), run=run)
            opened.callback(payloads.close)
            trace = place / "traces" / f"{name}-{incarnation}.ndjson"
            tracer = FileTracer(trace, f"owner {rank}", incarnation, clock)
            opened.callback(tracer.close)
            holding = Holding(rank, incarnation, weights.delta.source_elements, weights.delta.elements_by_tensor())
            changes = ChangeLog(place / CHANGES, holding)
            opened.callback(changes.close)
            chronicle = Chronicle(place / CHRONICLE, name, incarnation)
            opened.callback(chronicle.close)
            endpoint = open_metrics(metrics, rank) if metrics else None
            told: Told = chronicle.tell
            if endpoint is not None:
                opened.callback(endpoint.close)
                told = tell_all(chronicle.tell, endpoint.metrics.teller(name))
            node = OwnerNode(
                delta=weights.delta,
                incarnation=incarnation,
                tracker=tracker,
                resident=None if committed is None else CandidateId(committed),
                trainer=weights,
                transport=payloads,
                tracer=tracer,
                codec=codec,
                queue=queue,
                baseline_digest=digest,
                changes=changes,
                told=told,
            )
            if endpoint is not None:
                endpoint.metrics.watch(name, lambda: node.queue_depths)
            service = OwnerService(node, clock, listen, security)
            opened.callback(service.close)
            owner = cls(weights, node, service, prefix)
            owner.metrics_port = None if endpoint is None else endpoint.port
            service.start()
            opened.callback(weights.stopping.set)
            key = security.keys.public if security.keys is not None else ""
            publish_address(place / "addresses", Address(name, service.address, incarnation, os.getpid(), key))
            if coordinate and rank == 0:
                owner._coordinator = CoordinatorThread(
                    place,
                    url,
                    payloads,
                    owners=ranks.calls.world,
                    instances=instances,
                    refit=refit or RefitConfig(),
                    listen=listen,
                    security=security,
                    told=tell_nobody if endpoint is None else endpoint.metrics.tell,
                )
                opened.callback(owner._coordinator.close)
            owner._opened = opened.pop_all()
        return owner

    @property
    def committed(self) -> str:
        """The committed candidate that the weights were last; save it with the trainer's checkpoint."""
        return self._weights.committed

    @property
    def version(self) -> Version | None:
        """The version that the baseline holds; None while it is lost or being copied."""
        tracker = self.node.report.tracker
        return tracker.version if tracker.kind is TrackerKind.AT else None

    @property
    def counts(self) -> Counts:
        """What this rank compared and sent in the last stream."""
        return self.node.counts

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse steps of this optimizer while the weights are a frozen candidate, by raising ConditionViolated."""
        optimizer.register_step_pre_hook(lambda *_: self.weights_changed())

    def weights_changed(self) -> None:
        """The weights are about to change, also without an optimizer.

        Raises: ConditionViolated (SC4) while they are frozen or being restored; leave them as they are then.
        """
        self.node.weights_changed()

    def check_replicas(self) -> None:
        """Compare the stored bits of all replicas, as at set-up. All ranks together; reads every replicated shard.

        Raises: ConditionViolated (SC2) that names tensors and ranks; EndpointLost.
        """
        self._weights.settle()
        self._weights.check_replicas()

    def refit(self, candidate: str = "", *, timeout_s: float = 600.0) -> Version:
        """Freeze the weights, and return the version that they were committed as. Raises: as `freeze` and `wait`."""
        self.freeze(candidate)
        return self.wait(timeout_s)

    def freeze(self, candidate: str = "") -> str:
        """Offer the weights as the next candidate, on every rank; they stay as they are until `wait` returned.

        Args:
            candidate: its name, equal on all ranks and never used before in this run; by default made up.

        Raises: ConditionViolated (SC4) while a candidate is frozen; OperatorNeeded when the owner refuses the name.
        """
        number = next(self._numbers)
        name = CandidateId(candidate or f"{self._prefix}-{number}")
        self._weights.settle()
        self.node.weights_changed()
        refusal = self.node.freeze(name)
        if refusal:
            raise OperatorNeeded(f"the weights were not taken: {refusal}", "wait, or give another name")
        self._candidate = name
        return name

    def wait(self, timeout_s: float = 600.0) -> Version:
        """Wait until the transition of the frozen candidate ended; the version that it is committed as.

        Raises: OperatorNeeded when it was given up, and the weights are the committed ones again; EndpointLost after
        `timeout_s` seconds (it is still frozen: wait again), or when owner or coordinator of this process ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            report = self.node.report
            if report.candidate == NO_CANDIDATE and report.resident is not None:
                break
            self._require_alive()
            if time.monotonic() > deadline:
                raise EndpointLost("coordinator", f"candidate {self._candidate!r} has no end after {timeout_s:g} s")
            time.sleep(POLL_S)
        if report.resident != self._candidate:
            reason = f"candidate {self._candidate!r} was given up, the weights are {report.resident!r} again"
            raise OperatorNeeded(reason, "see the coordinator's log, repair what it names, and train on")
        return Version(report.tracker.version)

    def close(self) -> None:
        """Stop answering. Idempotent. Raises: the fault that ended this owner before, if one did."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_alive(self) -> None:
        if self._service.stopping.is_set():
            raise EndpointLost(f"owner of {self._candidate!r}", "it ended; close it to see why")
        problem = None if self._coordinator is None else self._coordinator.problem
        if problem is not None and not isinstance(problem, Conflict):  # a coordinator that replaced it carries on
            raise EndpointLost("coordinator", f"{type(problem).__name__}: {problem}") from problem


def _table(checkpoint: Path | str | Iterable[TensorMeta]) -> tuple[Checkpoint | None, list[TensorMeta]]:
    if isinstance(checkpoint, (Path, str)):
        files = open_checkpoint(Path(checkpoint))
        return files, sorted(stored.stored for stored in files.tensors.values())
    return None, sorted(checkpoint)
