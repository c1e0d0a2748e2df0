"""What the processes of a chaos system run: an engine rank, a trainer rank, a coordinator.

Each is made of the parts that a deployment uses, with small tensors and a toy loader, and with points at which it can
be struck. An engine also serves: every request notes the bits that it saw at its beginning and at its end.
Not handled: starting and ending them (chaos_system).

Paper: Section 3; Appendix B
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from nemo_dcr.config import QueueConfig
from nemo_dcr.errors import Conflict, ControlPlaneUnavailable
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, Incarnation, InstanceId, Member, OwnerId, Version, receiver_id
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.record import Record
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.coordinator_node import CoordinatorNode
from nemo_dcr.runtime.methods import Done
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.rpc import Method, Respond, Server
from nemo_dcr.runtime.serve import OwnerService, ReceiverService
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.source.baseline_files import BaselineFiles
from nemo_dcr.testing import chaos_world
from nemo_dcr.testing.chaos_payloads import close_payloads, open_payloads, run_relay
from nemo_dcr.testing.chaos_points import Arm, Strike, Striker, StrikingControl, StrikingTracer
from nemo_dcr.testing.chaos_record import close_record, open_record
from nemo_dcr.testing.chaos_source import RULES, TENSORS, ChaosTrainer, Lineage, SystemPlan
from nemo_dcr.testing.local_oracle import StoredBits, stored_bits
from nemo_dcr.testing.toy_loader import ToyModel
from nemo_dcr.trace import Emit, LamportClock

ARM = Method("Arm", Arm, Done)
DIGEST_OF_FIRST = b"version 0"
REQUEST_S = 0.03
PAUSE_S = 0.1
REPLACED = 5
"""Exit code of a coordinator that was replaced."""


@dataclass(frozen=True, slots=True)
class Train:
    """Call: take an optimizer step to this candidate, and freeze it."""

    candidate: CandidateId


TRAIN = Method("Train", Train, Done)


@dataclass(frozen=True, slots=True)
class Served:
    """One request: digests of all stored bits at its beginning and its end."""

    request: str
    clock: int
    """Lamport clock after it was admitted."""
    first: str
    last: str


def bits_digest(bits: StoredBits) -> str:
    """One digest of every stored bit of a rank."""
    digest = blake2b(digest_size=16)
    for name, (dtype, shape, words) in sorted(bits.items()):
        digest.update(f"{name} {dtype} {shape}\n".encode())
        digest.update(words)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Life:
    """What every process of a system has."""

    plan: SystemPlan
    name: str
    node: str
    """Its name in the trace."""
    incarnation: Incarnation
    clock: LamportClock
    striker: Striker
    file: FileTracer

    def tracer(self, written: Callable[[Emit], None] = lambda emitted: None) -> StrikingTracer:
        """Its tracer."""
        return StrikingTracer(self.file, self.striker, written)

    def answer(self, server: Server) -> None:
        """Answer the call that arms it."""

        def arm(call: Arm) -> Done:
            self.striker.arm(call.strikes)
            return Done()

        server.answer(ARM, arm)

    def publish(self, address: str) -> None:
        """Say where it answers."""
        publish_address(self.plan.addresses, Address(self.name, address, self.incarnation, os.getpid()))


def begin_process(plan: SystemPlan, name: str) -> None:
    """Live in the namespace of its address, if it has one, and write to a log."""
    if name in plan.hosts:
        chaos_world.live_in(plan.hosts[name])
    log = os.open(plan.directory / f"{name.replace('/', '-')}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def begin_life(plan: SystemPlan, name: str, node: str, strikes: tuple[Strike, ...]) -> Life:
    """A new process life, with its log and its trace."""
    begin_process(plan, name)
    torch.set_num_threads(1)
    clock, incarnation = LamportClock(), new_incarnation(plan.addresses, name)
    striker = Striker(name, plan.strikes, strikes)
    file = FileTracer(plan.traces / f"{name.replace('/', '-')}-{incarnation}.ndjson", node, incarnation, clock)
    return Life(plan, name, node, incarnation, clock, striker, file)


def engine_role(plan: SystemPlan, instance: str, rank: int, strikes: tuple[Strike, ...] = ()) -> None:
    """One rank of an engine that serves while its gate is open."""
    receiver, ranks = receiver_id(InstanceId(instance), rank), plan.instances[instance]
    life = begin_life(plan, receiver, receiver, strikes)
    transport = open_payloads(plan, instance)
    model = ToyModel(TENSORS, RULES, rank, ranks)
    Lineage(plan).oracle.load(model, NO_CANDIDATE)
    node = ReceiverNode(
        member=Member(receiver, life.incarnation),
        ranks=ranks,
        model=model,
        transport=transport,
        tracer=life.tracer(),
        queue=QueueConfig(group_payloads=2),
        loaded_digest=DIGEST_OF_FIRST,
    )
    service = ReceiverService(node, life.clock, plan.listen(receiver), plan.security)
    life.answer(service.server)
    service.start()
    life.publish(service.address)
    signal.signal(signal.SIGTERM, lambda *_: service.stopping.set())
    _serve(service, node, model, life)
    service.close()
    close_payloads(transport)
    life.file.close()


def _serve(service: ReceiverService, node: ReceiverNode, model: ToyModel, life: Life) -> None:
    """Lend this thread, with one request at a time that stays open over several turns."""
    names, running, begun = itertools.count(), "", 0.0
    first, clock = "", 0
    file = (life.plan.served / f"{life.name.replace('/', '-')}-{life.incarnation}.ndjson").open("ab", buffering=0)
    with file:
        while not service.stopping.is_set():
            service.work(0.02)
            now = time.monotonic()
            if not running and now - begun >= PAUSE_S:
                request, begun = f"{life.name}-{next(names)}", now
                if node.admit(request):
                    running, clock, first = request, life.clock.tick(), bits_digest(stored_bits(model))
            elif running and now - begun >= REQUEST_S:
                last = bits_digest(stored_bits(model))
                file.write(msgspec.json.encode(Served(running, clock, first, last)) + b"\n")
                node.finish(running)
                running = ""


def read_served(path: Path) -> list[Served]:
    """What the requests of one engine life saw; a torn last line is dropped."""
    lines = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Served) for line in lines[:-1]]


def _committed(plan: SystemPlan) -> Record:
    """What the record says, once it answers; a trainer that comes back has to know."""
    while True:
        control = open_record(plan)
        try:
            record = control.peek().record
        except ControlPlaneUnavailable:
            record = None
        finally:
            close_record(control)
        if record is not None:
            return record
        time.sleep(0.05)


def owner_role(plan: SystemPlan, rank: int, strikes: tuple[Strike, ...] = ()) -> None:
    """One trainer rank with its owner."""
    owner = OwnerId(rank)
    life = begin_life(plan, f"owner-{rank}", f"owner {rank}", strikes)
    trainer = ChaosTrainer(plan, owner)
    local = trainer.rank
    delta = local.new_delta(BaselineFiles(plan.directory / "baselines", owner) if plan.keeps_baselines else None)
    tracker = TrackerTag()
    if trainer.is_first:
        delta.capture(Version(0))
        tracker = TrackerTag(TrackerKind.AT, Version(0))
    elif plan.keeps_baselines:
        record = _committed(plan)
        if delta.recover(record.version, record.candidate, record.digest):
            tracker = TrackerTag(TrackerKind.AT, record.version)
    transport = open_payloads(plan)
    node = OwnerNode(
        delta=delta,
        incarnation=life.incarnation,
        tracker=tracker,
        resident=None if local.frozen else local.committed,
        candidate=local.frozen,
        trainer=trainer,
        transport=transport,
        tracer=life.tracer(trainer.written),
        codec=trainer.lineage.source.codec,
        baseline_digest=DIGEST_OF_FIRST if trainer.is_first else b"",
    )
    trainer.node = node
    service = OwnerService(node, life.clock, plan.listen(life.name), plan.security)
    life.answer(service.server)
    commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def train(call: Train, respond: Respond) -> None:
        commands.put(lambda: respond(Done(trainer.train(call.candidate))))

    service.server.register(TRAIN, train)
    service.start()
    life.publish(service.address)
    signal.signal(signal.SIGTERM, lambda *_: service.stopping.set())
    while not service.stopping.is_set():
        try:
            commands.get(timeout=0.1)()
        except queue.Empty:
            continue
    service.close()
    close_payloads(transport)
    life.file.close()


def coordinator_role(plan: SystemPlan, name: str, standby: bool, strikes: tuple[Strike, ...] = ()) -> None:
    """A coordinator; it ends with REPLACED when another one took over."""
    life = begin_life(plan, name, name, strikes)
    skew = plan.skew_s.get(name, 0.0)
    control, transport = open_record(plan), open_payloads(plan)
    node = CoordinatorNode(
        name=name,
        incarnation=life.incarnation,
        config=CoordinatorConfig(
            refit=plan.refit,
            owners=tuple(OwnerId(rank) for rank in range(plan.owners)),
            bootstrap_instances=len(plan.instances),
        ),
        directory=plan.addresses,
        control=StrikingControl(control, life.striker),
        transport=transport,
        tracer=life.tracer(),
        clock=life.clock,
        standby=standby,
        takeover_after_s=plan.takeover_after_s,
        prewarm_s=20.0,
        listen=plan.listen(name),
        security=plan.security,
        now=lambda: time.time() + skew,
    )
    life.answer(node.server)
    signal.signal(signal.SIGTERM, lambda *_: node.stopping.set())
    try:
        node.run()
    except Conflict as problem:
        logging.getLogger(__name__).warning("%s", problem)
        sys.exit(REPLACED)
    finally:
        life.file.close()
        close_record(control)
        close_payloads(transport)


def relay_role(plan: SystemPlan, name: str, strikes: tuple[Strike, ...] = ()) -> None:
    """One relay node. It writes no trace, so it has no points: it is struck from outside."""
    begin_process(plan, name)
    run_relay(plan, name)
