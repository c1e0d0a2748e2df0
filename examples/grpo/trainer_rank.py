"""One trainer rank of the run: a GRPO policy under FSDP2, its owner, and a control socket.

The main thread belongs to the policy. `Learn` takes one step and freezes the result as the candidate of a transition;
without a candidate it only learns, which is how a resumed run repeats finished steps. For the dense method the owner
gives up its baseline after every freeze, so that the attempt sends every element.

    python -m examples.grpo.trainer_rank JOB.json RANK

Paper: Section 3 (trainer ranks, owners); Section 8.3 (dense refit as the reference)
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from examples.grpo.policy import GrpoTrainer, Learned, Row
from nemo_dcr.cli.faults import StallingTransport
from nemo_dcr.cli.job import DemoJob, load_job
from nemo_dcr.cli.places import place_of
from nemo_dcr.cli.processes import die_with_parent, end_on_terminate
from nemo_dcr.cli.trainer_process import GATHER, STALL, DemoTrainer, Gather, Stall, owned_tasks, prove_baseline
from nemo_dcr.config import CodecConfig
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, OwnerId, Version
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.chronicle import Chronicle
from nemo_dcr.runtime.methods import Done
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.rpc import Method, Respond
from nemo_dcr.runtime.serve import OwnerService
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import GroupExchange
from nemo_dcr.testing.checkpoint import read_checkpoint
from nemo_dcr.trace import LamportClock


@dataclass(frozen=True, slots=True)
class Learn:
    """Take one step on these rows, and freeze the weights as `candidate` unless it is empty."""

    rows: tuple[Row, ...]
    candidate: str = ""
    dense: bool = False
    """Give up the baseline afterwards: the refit sends everything."""


LEARN = Method("Learn", Learn, Learned)


class GrpoRank(DemoTrainer):
    """The policy as its owner sees it."""

    def __init__(self, policy: GrpoTrainer) -> None:
        super().__init__(policy)
        self._policy = policy

    def learn(self, call: Learn) -> Learned:
        """One step, and the freeze that it was asked for."""
        if self.node is None:
            return Learned(0.0, (), 0, 0, "", "the owner is not ready")
        self.node.weights_changed()
        learned = self._policy.learn(call.rows)
        if not call.candidate:
            return learned
        self._policy.freeze()
        problem = self.node.freeze(CandidateId(call.candidate))
        if call.dense and not problem:
            self.node.lose_baseline("the method sends every element")
        return replace(learned, problem=problem)


def main(job: DemoJob, rank: int) -> None:
    """Run until the driver says stop."""
    # torch re-exports its stores without saying so to type checkers.
    store = dist.FileStore(str(job.directory / "rendezvous"), job.owners)  # type: ignore[attr-defined]
    group = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=group, rank=rank, world_size=job.owners)
    policy = GrpoTrainer(Path(job.model), rank, job.owners, lr=job.learning_rate, seed=job.seed)
    codec = CodecConfig(chunk_target_bytes=job.chunk_target_bytes, bucket_target_bytes=job.bucket_target_bytes)
    delta = DeltaOwner(OwnerId(rank), owned_tasks(policy, GroupExchange(store)), config=codec)
    delta.capture(Version(0))
    digest = prove_baseline(delta, read_checkpoint(Path(job.model)))
    name = f"owner-{rank}"
    clock, incarnation = LamportClock(), new_incarnation(job.addresses, name)
    place = place_of(job, name)
    transport = StallingTransport(place.transport)
    tracer = FileTracer(job.traces / f"{name}-{incarnation}.ndjson", f"owner {rank}", incarnation, clock)
    chronicle = Chronicle(job.chronicle, name, incarnation)
    trainer = GrpoRank(policy)
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
        told=chronicle.tell,
    )
    trainer.node = node
    service = OwnerService(node, clock, place.listen, place.security)
    steps: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def on_main(work: Callable[..., object]) -> Callable[[object, Respond], None]:
        return lambda argument, respond: steps.put(lambda: respond(work(argument)))

    def gather(call: Gather) -> Done:
        policy.gather_canonical(Path(call.directory))
        return Done()

    def stall(call: Stall) -> Done:
        transport.arm(call.payloads)
        return Done()

    service.server.register(LEARN, on_main(trainer.learn))
    service.server.register(GATHER, on_main(gather))
    service.server.answer(STALL, stall)
    end_on_terminate(service.stopping)
    service.start()
    publish_address(job.addresses, Address(name, service.address, incarnation, os.getpid(), place.key))
    while not service.stopping.is_set():
        try:
            steps.get(timeout=0.1)()
        except queue.Empty:
            continue
    service.close()
    transport.close()
    tracer.close()
    chronicle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    main(load_job(Path(sys.argv[1])), int(sys.argv[2]))
