"""The main job, end to end, on one machine: real model, real trainer, engines, faults, and an independent check.

Trainer ranks and engine ranks are processes of their own; this one is the coordinator and the driver. Data passes only
through sockets, the payload store and the commit record. After every transition another process compares every stored
bit of every rank, and of the trackers, with a dense load of the same weights.

Paper: Section 8 (bit-exactness, receivers killed mid-refit); Figure 9
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.cli.check import DumpedReceiver, DumpedTrackers, check_storage
from nemo_dcr.cli.job import DemoJob
from nemo_dcr.cli.processes import Child
from nemo_dcr.cli.report import AttemptRow, DemoReport, TransitionRow
from nemo_dcr.cli.trainer_process import GATHER, STALL, TRAIN_STEP, Gather, Stall, TrainStep
from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.control import open_control
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import AttemptId, CandidateId, InstanceId, OwnerId, ReceiverId, instance_of, receiver_id
from nemo_dcr.protocol.coordinator_events import (
    AttemptEnded,
    CallReceiver,
    CoordinatorEffect,
    Ready,
    SteppedDown,
    TransitionAborted,
    TransitionEnded,
    VersionCommitted,
)
from nemo_dcr.protocol.messages import PrepareReceiver
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.runtime.addresses import Address, new_incarnation, wait_for_address
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import DUMP, PREWARM, TABLE, TIMINGS, Nothing, Prewarm, Table
from nemo_dcr.runtime.serve import metas, rows
from nemo_dcr.runtime.timings import Timings, TimingsOf
from nemo_dcr.runtime.trace_file import FileTracer, read_trace
from nemo_dcr.trace import Action, LamportClock
from nemo_dcr.transport.object_store import FileObjectStore

START_S = 180.0
"""Limit for a process to load the model and answer."""
STEP_S = 120.0
TRANSITION_S = 180.0
KILL_IN = 3
"""The transition in which an engine is killed."""
ASYNC_IN = 2
"""The transition that runs with the asynchronous gate."""


@dataclass
class _Attempts:
    """What the coordinator did in one transition, in order."""

    modes: dict[AttemptId, str] = field(default_factory=dict)
    reasons: dict[AttemptId, str] = field(default_factory=dict)
    committed: AttemptId | None = None
    receivers: int = 0

    def watch(self, effect: CoordinatorEffect) -> None:
        """Take note of one effect."""
        match effect:
            case CallReceiver(PrepareReceiver() as call):
                self.modes[call.attempt] = call.mode.value
            case AttemptEnded(attempt, reason):
                self.reasons[attempt] = reason
            case VersionCommitted(record):
                self.committed, self.receivers = record.attempt, len(record.required)
            case _:
                pass

    def rows(self) -> list[AttemptRow]:
        """One row for each attempt that could commit."""
        found = []
        for attempt, mode in self.modes.items():
            if mode in ("xor", "overwrite", "dense"):
                outcome = "committed" if attempt == self.committed else "failed"
                found.append(AttemptRow(id=attempt, mode=mode, outcome=outcome, reason=self.reasons.get(attempt, "")))
        return found


class Demo:
    """One run; use it as a context manager so that every child process ends."""

    def __init__(self, job: DemoJob, *, quiet: bool = False) -> None:
        self.job = job
        self._quiet = quiet
        self._children: dict[str, Child] = {}
        self._addresses: dict[str, Address] = {}
        self._clock = LamportClock()
        self._endpoints = SocketEndpoints(self._clock)
        self._attempts = _Attempts()
        self._on_failure: Callable[[AttemptEnded], None] | None = None
        self._coordinator: Coordinator | None = None
        self._metas: tuple[TensorMeta, ...] = ()
        self._tables: dict[OwnerId, Table] = {}
        self._payloads_per_owner = 0

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self._endpoints.close()
        for child in self._children.values():
            child.stop()

    # ------------------------------------------------------------------------------------------------------ set-up

    def start(self) -> None:
        """Start all processes, discover loader paths on shadows, and write the first record."""
        with self._bar("start trainer and engines", self.job.owners + sum(self.job.instances.values())) as bar:
            for rank in range(self.job.owners):
                self._spawn(f"owner-{rank}", "nemo_dcr.cli.trainer_process", str(rank))
            for instance in self.job.instances:
                self._spawn_instance(InstanceId(instance))
            for rank in range(self.job.owners):
                self._endpoints.add_owner(OwnerId(rank), self._address(f"owner-{rank}"))
                bar.update()
            for receiver in self._receivers():
                self._endpoints.add_receiver(receiver, self._address(receiver))
                bar.update()
        with self._bar("prewarm: discover loader paths on shadows", 1) as bar:
            tables = self._endpoints.call_owners(TABLE, Nothing(), STEP_S)
            self._tables = {owner: table for owner, (table, _) in tables.items()}
            self._metas = tuple(sorted({meta for table in self._tables.values() for meta in metas(table.tensors)}))
            classes = self._prewarm(self._receivers())
            bar.update()
        refit = RefitConfig(attempt_deadline_s=TRANSITION_S, lost_after_s=10.0, post_apply_check=True)
        config = CoordinatorConfig(
            refit=refit, owners=self._endpoints.owners(), bootstrap_instances=len(self.job.instances)
        )
        incarnation = new_incarnation(self.job.addresses, "coordinator")
        self._coordinator = Coordinator(
            config,
            self._endpoints,
            open_control(self.job.record),
            FileObjectStore(self.job.store),
            classes={name: path.value for name, path in classes.items()},
            tracer=FileTracer(self.job.traces / "coordinator.ndjson", "coordinator", incarnation, self._clock),
            clock=self._clock,
            observer=self._observe,
        )
        with self._bar("bootstrap: prove every receiver equal to the baseline", 1) as bar:
            self._coordinator.become()
            self._run_until(Ready)
            bar.update()

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        log = self.job.directory / "logs" / f"{name.replace('/', '-')}.log"
        self._children[name] = Child(name, module, [str(self.job.file), *arguments], log)

    def _spawn_instance(self, instance: InstanceId) -> None:
        for rank in range(self.job.instances[instance]):
            self._spawn(receiver_id(instance, rank), "nemo_dcr.cli.engine_process", instance, str(rank))

    def _address(self, name: str) -> Address:
        child, earlier = self._children[name], self._addresses.get(name)
        address = wait_for_address(
            self.job.addresses,
            name,
            START_S,
            other_than=None if earlier is None else earlier.incarnation,
            require_alive=child.require_alive,
        )
        self._addresses[name] = address
        return address

    def _receivers(self) -> list[ReceiverId]:
        return [
            receiver_id(InstanceId(instance), rank)
            for instance, ranks in self.job.instances.items()
            for rank in range(ranks)
        ]

    def _prewarm(self, receivers: list[ReceiverId]) -> dict[str, PathClass]:
        answers = self._endpoints.call_receivers(PREWARM, Prewarm(rows(self._metas)), START_S, only=receivers)
        for receiver, (answer, _) in answers.items():
            if answer.problem:
                raise OperatorNeeded(f"{receiver} was not prewarmed: {answer.problem}", "repair that engine")
        return unite_tables(
            {str(r): {n: PathClass(c) for n, c in answer.classes.items()} for r, (answer, _) in answers.items()},
            {str(r): answer.reasons for r, (answer, _) in answers.items()},
        )

    # ------------------------------------------------------------------------------------------------- transitions

    def transition(self, number: int) -> TransitionRow:
        """One optimizer step and its refit; the row is complete but for what a restart restores afterwards."""
        coordinator = self._require_coordinator()
        candidate = CandidateId(f"step-{number}")
        gate = GateMode.ASYNC if number == ASYNC_IN else GateMode.SYNC
        kill = number == KILL_IN and len(self.job.instances) > 1
        with self._bar(f"step {number}: train", 2) as bar:
            trained = self._endpoints.call_owners(TRAIN_STEP, TrainStep(candidate), STEP_S)
            for owner, (answer, _) in trained.items():
                if answer.problem:
                    raise OperatorNeeded(f"owner {owner} did not begin: {answer.problem}", "see its log")
            bar.update()
            oracle = self.job.directory / "oracle" / f"v{number}"
            self._endpoints.call_owners(GATHER, Gather(str(oracle)), STEP_S)
            bar.update()
        coordinator.set_gate(gate)
        self._attempts = _Attempts()
        mixed: dict[str, list[int]] = {}
        killed: list[InstanceId] = []
        if kill:
            self._endpoints.call_owners(STALL, Stall(max(1, self._payloads_per_owner // 2)), STEP_S)
            self._on_failure = lambda ended: mixed.update(self._survivors(number, killed))
        with self._bar(f"step {number}: refit ({gate})", None) as bar:

            def each_round() -> None:
                self._show_progress(bar)
                if kill and not killed and self._everyone_has_applied():
                    killed.append(self._kill())

            coordinator.look()
            self._run_until(TransitionEnded, each_round)
            self._run_until(Ready, each_round)
        self._on_failure = None
        restored: list[str] = []
        for instance in killed:
            restored += self._restart(instance)
        with self._bar(f"step {number}: compare every stored bit", 1) as bar:
            mismatched = self._check(number)
            bar.update()
        return self._row(number, gate, trained, restored, mixed, mismatched)

    def _everyone_has_applied(self) -> bool:
        """Every receiver traced an applied item of the running attempt (the latest one)."""
        attempt = max(self._attempts.modes, default=AttemptId(0))
        return attempt != 0 and all(
            any(event.action == Action.APPLY_ITEM and event.attempt == attempt for event in read_trace(self._trace(r)))
            for r in self._receivers()
        )

    def _trace(self, receiver: ReceiverId) -> Path:
        name = receiver.replace("/", "-")
        return self.job.traces / f"{name}-{self._addresses[receiver].incarnation}.ndjson"

    def _kill(self) -> InstanceId:
        """SIGKILL every process of the first instance."""
        instance = InstanceId(next(iter(self.job.instances)))
        for rank in range(self.job.instances[instance]):
            self._children[receiver_id(instance, rank)].kill()
        return instance

    def _survivors(self, number: int, killed: list[InstanceId]) -> dict[str, list[int]]:
        """Bits by which each surviving rank differs from the old and from the new version, before the retry."""
        alive = [receiver for receiver in self._receivers() if instance_of(receiver) not in killed]
        dumps = self._dump_receivers(alive)
        old = check_storage(self.job, dumps, [], self._oracle(number - 1))
        new = check_storage(self.job, dumps, [], self._oracle(number))
        return {receiver: [old[receiver], new[receiver]] for receiver in alive}

    def _restart(self, instance: InstanceId) -> list[str]:
        """Start a killed instance again and let the coordinator restore it densely."""
        coordinator = self._require_coordinator()
        receivers = [r for r in self._receivers() if instance_of(r) == instance]
        with self._bar(f"restart {instance} and restore it densely", 2) as bar:
            self._spawn_instance(instance)
            addresses = {receiver: self._address(receiver) for receiver in receivers}
            for receiver, address in addresses.items():
                self._endpoints.add_receiver(receiver, address)
            self._prewarm(receivers)
            bar.update()
            coordinator.look()
            self._run_until(Ready)
            bar.update()
        return [str(receiver) for receiver in receivers]

    # ------------------------------------------------------------------------------------------------------ checks

    def _oracle(self, number: int) -> Path:
        return Path(self.job.model) if number == 0 else self.job.directory / "oracle" / f"v{number}"

    def _dump_receivers(self, receivers: list[ReceiverId]) -> list[DumpedReceiver]:
        answers = self._endpoints.call_receivers(DUMP, Nothing(), STEP_S, only=receivers)
        return [DumpedReceiver(receiver, storage, bulk.frames) for receiver, (storage, bulk) in answers.items()]

    def _check(self, number: int) -> int:
        receivers = self._dump_receivers(self._receivers())
        owners = self._endpoints.call_owners(DUMP, Nothing(), STEP_S)
        trackers = [DumpedTrackers(owner, storage, bulk.frames) for owner, (storage, bulk) in owners.items()]
        return sum(check_storage(self.job, receivers, trackers, self._oracle(number)).values())

    def _row(
        self,
        number: int,
        gate: GateMode,
        trained: dict[OwnerId, Any],
        restored: list[str],
        mixed: dict[str, list[int]],
        mismatched: int,
    ) -> TransitionRow:
        committed = self._attempts.committed
        if committed is None:
            raise OperatorNeeded(f"step {number} did not commit", "see the coordinator's trace")
        call = TimingsOf(committed)
        owners: list[Timings] = [t for t, _ in self._endpoints.call_owners(TIMINGS, call, STEP_S).values()]
        receivers: list[Timings] = [t for t, _ in self._endpoints.call_receivers(TIMINGS, call, STEP_S).values()]
        total = _sums(owners)
        self._payloads_per_owner = min(timing.counts.get("payloads", 0) for timing in owners)
        check = _longest(receivers, "check")
        window = max(t.marks["baseline_updated"] for t in owners) - min(t.marks["construct_began"] for t in owners)
        seconds = {
            "refit": window - check,
            **{stage: _longest(owners, stage) for stage in ("construct", "encode", "publish", "baseline")},
            **{stage: _longest(receivers, stage) for stage in ("fetch", "verify", "decode", "apply")},
            "check": check,
        }
        seconds["apply"] = max(0.0, seconds["apply"] - check)
        return TransitionRow(
            version=number,
            gate=gate.value,
            attempts=self._attempts.rows(),
            changed_elements=total["changed_elements"],
            total_elements=total["source_elements"],
            emitted_destinations=total["emitted"],
            changed_destinations=total["emitted_changed"],
            canonical_elements=sum(meta.numel for meta in self._metas),
            xor_items=total["xor_items"],
            overwrite_items=total["overwrite_items"],
            payloads=total["payloads"],
            payload_bytes=total["payload_bytes"],
            checkpoint_bytes=sum(meta.nbytes for meta in self._metas),
            baseline_bytes=sum(table.baseline_bytes for table in self._tables.values()),
            seconds={name: round(value, 4) for name, value in seconds.items()},
            loss=sum(answer.loss for answer, _ in trained.values()) / len(trained),
            restored=restored,
            mixed_bits=mixed,
            receivers=self._attempts.receivers,
            mismatched_bits=mismatched,
        )

    # ------------------------------------------------------------------------------------------------- coordinator

    def _require_coordinator(self) -> Coordinator:
        if self._coordinator is None:
            raise OperatorNeeded("the demo was not started", "call start() first")
        return self._coordinator

    def _observe(self, effect: CoordinatorEffect) -> None:
        self._attempts.watch(effect)
        if isinstance(effect, AttemptEnded) and effect.reason and self._on_failure is not None:
            self._on_failure(effect)

    def _run_until(self, kind: type, each_round: Callable[[], None] | None = None) -> CoordinatorEffect:
        end = self._require_coordinator().run_until(
            lambda effect: isinstance(effect, (kind, SteppedDown, TransitionAborted)),
            TRANSITION_S,
            each_round=each_round,
        )
        if isinstance(end, (SteppedDown, TransitionAborted)) and not isinstance(end, kind):
            raise OperatorNeeded(f"the coordinator gave up: {end.reason}", "see the coordinator's trace")
        return end

    # ---------------------------------------------------------------------------------------------------- progress

    @contextmanager
    def _bar(self, text: str, total: int | None) -> Iterator[tqdm[Any]]:
        with tqdm(total=total, desc=text, disable=self._quiet, file=sys.stderr, leave=True) as bar:
            yield bar

    def _show_progress(self, bar: tqdm[Any]) -> None:
        owners = self._require_coordinator().owner_reports()
        bar.set_postfix_str(" ".join(f"owner {o.owner}: {o.payloads} payloads" for o in owners), refresh=False)
        bar.update(0)
        bar.refresh()


def _sums(timings: list[Timings]) -> dict[str, int]:
    names = {name for timing in timings for name in timing.counts}
    return {name: sum(timing.counts.get(name, 0) for timing in timings) for name in names}


def _longest(timings: list[Timings], stage: str) -> float:
    return max((timing.seconds.get(stage, 0.0) for timing in timings), default=0.0)


def run_demo(job: DemoJob, steps: int, *, quiet: bool = False) -> DemoReport:
    """Run `steps` transitions and return the report; mismatched bits make it not ok."""
    job.save()
    rows: list[TransitionRow] = []
    with Demo(job, quiet=quiet) as demo:
        demo.start()
        for number in range(1, steps + 1):
            rows.append(demo.transition(number))
    ok = all(row.mismatched_bits == 0 for row in rows)
    return DemoReport(ok=ok, model=job.model, transitions=rows)
