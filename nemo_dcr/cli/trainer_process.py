"""One trainer rank of the demo: FSDP2 model, owner of conversion tasks, control socket.

The main thread belongs to the trainer: it runs the optimizer steps and the oracle's gathers that the driver asks for.
The owner's streams run on their own thread while the weights are frozen.

    python -m nemo_dcr.cli.trainer_process JOB.json RANK
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.cli.faults import StallingTransport
from nemo_dcr.cli.identity import LoadedDigest
from nemo_dcr.cli.job import DemoJob, load_job
from nemo_dcr.cli.places import CHOOSE, place_of
from nemo_dcr.cli.processes import die_with_parent, end_on_terminate
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, OwnerId, Version
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.change_log import DIRECTORY as CHANGES
from nemo_dcr.runtime.change_log import ChangeLog, Holding
from nemo_dcr.runtime.chronicle import Chronicle
from nemo_dcr.runtime.methods import Done
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.rpc import Method, Respond
from nemo_dcr.runtime.serve import OwnerService
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.dtensor import dtensor_tasks
from nemo_dcr.source.exchange import Exchange, GroupExchange
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.source.tasks import AffineTask
from nemo_dcr.testing.changes import inject
from nemo_dcr.testing.checkpoint import read_checkpoint, tensor_table
from nemo_dcr.testing.trainer import STORED_DTYPE, Fsdp2Trainer
from nemo_dcr.trace import LamportClock


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Do one optimizer step and freeze the weights as `candidate`."""

    candidate: str
    inject_rate: float = 0.0
    """Instead of a step, change this fraction of the elements (Section 8.1)."""
    seed: int = 0
    """Of the injected changes."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The step's loss; `problem` says why the transition may not begin."""

    loss: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Gather:
    """Oracle only: write the full checkpoint of the current weights to `directory`."""

    directory: str


@dataclass(frozen=True, slots=True)
class Stall:
    """Stall the link of the next attempt after so many payloads."""

    payloads: int


TRAIN_STEP = Method("TrainStep", TrainStep, Trained)
GATHER = Method("Gather", Gather, Done)
STALL = Method("Stall", Stall, Done)


class DemoTrainer:
    """The trainer as the owner sees it, and the commands of the driver."""

    def __init__(self, trainer: Fsdp2Trainer) -> None:
        self.trainer = trainer
        self.node: OwnerNode | None = None
        self._committed = NO_CANDIDATE

    def end_transition(self, candidate: CandidateId) -> None:
        """Allow steps again."""
        self._committed = candidate
        self.trainer.release()

    def reload(self, delta: DeltaOwner) -> CandidateId:
        """Set the shards back to the committed baseline."""
        for tensor, _, words in delta.tracker_words():
            self.trainer.restore_words(tensor.name, words)
        self.trainer.release()
        return self._committed

    def step(self, call: TrainStep) -> Trained:
        """One real optimizer step, or injected changes; then the weights are frozen as the candidate."""
        if self.node is None:
            return Trained(0.0, "the owner is not ready")
        self.node.weights_changed()
        loss = 0.0
        if call.inject_rate > 0:
            inject(self.trainer.local_shards(), call.inject_rate, seed=call.seed, stored=STORED_DTYPE)
        else:
            loss = self.trainer.step()
        self.trainer.freeze()
        return Trained(loss, self.node.freeze(CandidateId(call.candidate)))


def owned_tasks(trainer: Fsdp2Trainer, exchange: Exchange) -> tuple[AffineTask, ...]:
    """The affine tasks that this rank owns: geometry is exchanged once, weights never are.

    Raises: UnsupportedMapping when shards do not cover the canonical tensors exactly once.
    """
    metas = {meta.name: meta for meta in tensor_table(trainer.checkpoint_dir)}
    tasks = dtensor_tasks((metas[name], parameter) for name, parameter in trainer.local_shards())
    plan = agree_plan(exchange, tasks, expected=metas.values())
    return plan.owned_affine(OwnerId(exchange.rank), tasks)


def prove_baseline(delta: DeltaOwner, tensors: Iterable[tuple[TensorMeta, Tensor]]) -> bytes:
    """Compare every tracker with the checkpoint that the trainer started from; returns the checkpoint's digest.

    Raises: ConditionViolated (SC3) when a stored bit differs.
    """
    digest = LoadedDigest()
    trackers = {(tensor.name, box): words for tensor, box, words in delta.tracker_words()}
    boxes = {name: [box for other, box in trackers if other == name] for name, _ in trackers}
    for meta, tensor in digest.watch(tensors):
        for box in boxes.get(meta.name, []):
            shaped = tensor.reshape(box.view)
            for axis, (start, size) in enumerate(zip(box.start, box.extent, strict=True)):
                shaped = shaped.narrow(axis, start, size)
            if not equal_words(copied_words(shaped.permute(box.axes)), trackers[meta.name, box]):
                raise ConditionViolated("SC3", meta.name, "the trainer's stored bits are not those of its checkpoint")
    return digest.value


def main(job: DemoJob, rank: int) -> None:
    """Run until the driver says stop."""
    # torch re-exports its stores without saying so to type checkers.
    store = dist.FileStore(str(job.directory / "rendezvous"), job.owners)  # type: ignore[attr-defined]
    group = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=group, rank=rank, world_size=job.owners)
    model = Path(job.model)
    trainer = DemoTrainer(Fsdp2Trainer(model, rank, job.owners, lr=job.learning_rate, seed=job.seed))
    codec = CodecConfig(chunk_target_bytes=job.chunk_target_bytes, bucket_target_bytes=job.bucket_target_bytes)
    delta = DeltaOwner(OwnerId(rank), owned_tasks(trainer.trainer, GroupExchange(store)), config=codec)
    delta.capture(Version(0))
    digest = prove_baseline(delta, read_checkpoint(model))
    name = f"owner-{rank}"
    clock, incarnation = LamportClock(), new_incarnation(job.addresses, name)
    place = place_of(job, name)
    transport = StallingTransport(place.transport)
    tracer = FileTracer(job.traces / f"{name}-{incarnation}.ndjson", f"owner {rank}", incarnation, clock)
    holding = Holding(OwnerId(rank), incarnation, delta.source_elements, delta.elements_by_tensor())
    changes = ChangeLog(job.directory / CHANGES, holding)
    chronicle = Chronicle(job.chronicle, name, incarnation)
    node = OwnerNode(
        delta=delta,
        incarnation=incarnation,
        tracker=TrackerTag(TrackerKind.AT, Version(0)),
        resident=NO_CANDIDATE,
        trainer=trainer,
        transport=transport,
        tracer=tracer,
        codec=codec,
        baseline_digest=digest,
        changes=changes,
        told=chronicle.tell,
    )
    trainer.node = node
    service = OwnerService(node, clock, place.listen, place.security)
    service.server.answer(CHOOSE, place.transport.choose)
    commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def on_main(work: Callable[[object], object]) -> Callable[[object, Respond], None]:
        return lambda argument, respond: commands.put(lambda: respond(work(argument)))

    def gather(call: Gather) -> Done:
        trainer.trainer.gather_canonical(Path(call.directory))
        return Done()

    def stall(call: Stall) -> Done:
        transport.arm(call.payloads)
        return Done()

    service.server.register(TRAIN_STEP, on_main(trainer.step))  # type: ignore[arg-type]
    service.server.register(GATHER, on_main(gather))  # type: ignore[arg-type]
    service.server.answer(STALL, stall)
    end_on_terminate(service.stopping)
    service.start()
    publish_address(job.addresses, Address(name, service.address, incarnation, os.getpid(), place.key))
    while not service.stopping.is_set():
        try:
            commands.get(timeout=0.1)()
        except queue.Empty:
            continue
    service.close()
    transport.close()
    tracer.close()
    changes.close()
    chronicle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    main(load_job(Path(sys.argv[1])), int(sys.argv[2]))
