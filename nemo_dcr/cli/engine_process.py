"""One rank of one engine instance of the demo: reference engine, receiver node, control socket.

The main thread belongs to the engine: it serves a small stream of requests while the gate is open (on an unsharded
instance), and otherwise lends itself to the receiver for application.

    python -m nemo_dcr.cli.engine_process JOB.json INSTANCE RANK
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_dcr.cli.identity import LoadedDigest
from nemo_dcr.cli.job import DemoJob, load_job
from nemo_dcr.cli.places import CHOOSE, place_of
from nemo_dcr.cli.processes import die_with_parent, end_on_terminate
from nemo_dcr.config import RefitConfig
from nemo_dcr.ids import InstanceId, Member, receiver_id
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.chronicle import Chronicle
from nemo_dcr.runtime.methods import Done
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.rpc import Method, Respond
from nemo_dcr.runtime.serve import ReceiverService
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.testing.checkpoint import read_checkpoint, read_config
from nemo_dcr.testing.dense_check import dump_storage
from nemo_dcr.testing.reference_engine import ReferenceEngine
from nemo_dcr.trace import LamportClock


@dataclass(frozen=True, slots=True)
class DumpToFile:
    """Oracle only: write every parameter and buffer to a file of this host, for a check that no network carries."""

    file: str


DUMP_TO_FILE = Method("DumpToFile", DumpToFile, Done)
PROMPT = [1, 2, 3, 4]
"""Token ids of a short prompt; every vocabulary has these."""
PAUSE_S = 0.25
"""Between requests, so that serving leaves room on two cores."""


def main(job: DemoJob, instance: InstanceId, rank: int) -> None:
    """Run until the driver says stop."""
    model = Path(job.model)
    ranks = job.instances[instance]
    engine = ReferenceEngine(read_config(model), rank, ranks)
    digest = LoadedDigest()
    engine.load_weights((meta.name, tensor) for meta, tensor in digest.watch(read_checkpoint(model)))
    receiver = receiver_id(instance, rank)
    clock, incarnation = LamportClock(), new_incarnation(job.addresses, receiver)
    member = Member(receiver, incarnation)
    name = f"{instance}-{rank}"
    place = place_of(job, receiver)
    tracer = FileTracer(job.traces / f"{name}-{incarnation}.ndjson", member.receiver, incarnation, clock)
    chronicle = Chronicle(job.chronicle, receiver, incarnation)
    node = ReceiverNode(
        member=member,
        ranks=ranks,
        model=engine,
        transport=place.transport,
        tracer=tracer,
        refit=RefitConfig(post_apply_check=job.post_apply_check),
        loaded_digest=digest.value,
        told=chronicle.tell,
    )
    service = ReceiverService(node, clock, place.listen, place.security)
    service.server.answer(CHOOSE, place.transport.choose)

    def dump_to_file(call: DumpToFile, respond: Respond) -> None:
        def run() -> None:
            dump_storage(engine, Path(call.file))
            respond(Done())

        node.on_engine(run)

    service.server.register(DUMP_TO_FILE, dump_to_file)
    end_on_terminate(service.stopping)
    service.start()
    publish_address(job.addresses, Address(member.receiver, service.address, incarnation, os.getpid(), place.key))
    requests = itertools.count()
    next_request = time.monotonic()
    while not service.stopping.is_set():
        if service.work(0.05) or ranks > 1 or time.monotonic() < next_request:
            continue
        request = f"{name}-{next(requests)}"
        if node.admit(request):
            engine.generate(PROMPT, 1)
            node.finish(request)
        next_request = time.monotonic() + PAUSE_S
    service.close()
    place.transport.close()
    tracer.close()
    chronicle.close()


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    main(load_job(Path(sys.argv[1])), InstanceId(sys.argv[2]), int(sys.argv[3]))
