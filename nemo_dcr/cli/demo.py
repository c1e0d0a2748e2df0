"""The main job, end to end, on one machine: real model, real trainer, engines, faults, and an independent check.

This process is the coordinator and the driver. Data passes only through sockets, the payload store and the commit
record. After every transition another process compares every stored bit of every rank, and of the trackers, with a
dense load of the same weights. In one transition a link stalls and an engine is killed between its first and its last
applied item; the run fails unless the traces show that, and unless the survivors held mixed storage before the retry.

Paper: Section 8 (bit-exactness, receivers killed mid-refit); Figure 9
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nemo_dcr.cli.check import Oracle
from nemo_dcr.cli.fleet import CALL_S, Fleet
from nemo_dcr.cli.job import VLLM, DemoJob
from nemo_dcr.cli.payload_store import FILES, PayloadStore
from nemo_dcr.cli.places import place_of
from nemo_dcr.cli.report import AttemptRow, DemoReport, Kill, TransitionRow
from nemo_dcr.cli.trainer_process import GATHER, STALL, TRAIN_STEP, Gather, Stall, TrainStep
from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.control import open_control
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import AttemptId, CandidateId, InstanceId
from nemo_dcr.protocol.coordinator_events import (
    AttemptEnded,
    CallReceiver,
    CoordinatorEffect,
    Held,
    Ready,
    SteppedDown,
    TransitionAborted,
    TransitionEnded,
    VersionCommitted,
)
from nemo_dcr.protocol.messages import PrepareReceiver
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.record import DELTA_MODES, AttemptMode
from nemo_dcr.runtime.addresses import new_incarnation
from nemo_dcr.runtime.chronicle import Chronicle
from nemo_dcr.runtime.coordinator import Coordinator
from nemo_dcr.runtime.methods import TIMINGS
from nemo_dcr.runtime.timeline import RefitTimeline, chrome_trace
from nemo_dcr.runtime.timings import Timings, TimingsOf
from nemo_dcr.runtime.trace_file import FileTracer, write_journal
from nemo_dcr.trace import LamportClock

TRANSITION_S = 180.0
PROMPT = "The capital of France is"
"""Completed by every instance after every version."""
KILL_IN = 3
"""The transition in which an engine is killed."""
ASYNC_IN = 2
"""The transition that runs with the asynchronous gate."""


@dataclass
class _Watched:
    """What the coordinator did in one transition, in order."""

    modes: dict[AttemptId, AttemptMode] = field(default_factory=dict)
    reasons: dict[AttemptId, str] = field(default_factory=dict)
    committed: AttemptId | None = None
    receivers: int = 0
    kill: Kill | None = None

    def see(self, effect: CoordinatorEffect) -> None:
        """Take note of one effect."""
        match effect:
            case CallReceiver(PrepareReceiver() as call):
                self.modes[call.attempt] = call.mode
            case AttemptEnded(attempt, reason):
                self.reasons[attempt] = reason
            case VersionCommitted(record):
                self.committed, self.receivers = record.attempt, len(record.required)
            case _:
                pass

    @property
    def running(self) -> AttemptId | None:
        """The latest attempt, unless it has ended."""
        latest = max(self.modes, default=None)
        return latest if latest not in self.reasons else None

    def rows(self) -> list[AttemptRow]:
        """One row for each attempt that could commit."""
        return [
            AttemptRow(
                id=attempt,
                mode=mode.value,
                outcome="committed" if attempt == self.committed else "failed",
                reason=self.reasons.get(attempt, ""),
            )
            for attempt, mode in self.modes.items()
            if mode in DELTA_MODES
        ]


class Demo:
    """One run; use it as a context manager so that every child process ends."""

    def __init__(self, job: DemoJob, *, quiet: bool = False, store: PayloadStore = FILES) -> None:
        self.job = job
        self._transport = place_of(job, "coordinator", store.credentials).transport
        self._quiet = quiet
        self._clock = LamportClock()
        self._fleet = _fleet(job, self._clock, store)
        self._oracle = Oracle(job)
        self.completions: list[dict[str, str]] = []
        self.timelines: list[RefitTimeline] = []
        """Each committed refit."""
        self._watched = _Watched()
        self._on_failure: Callable[[AttemptId], None] = lambda attempt: None
        self._control = open_control(job.record)
        self._coordinator: Coordinator | None = None
        self._tracer: FileTracer | None = None
        self._chronicle: Chronicle | None = None
        self._payloads_per_owner = 0

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()
        self._oracle.close()
        self._transport.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._chronicle is not None:
            self._chronicle.close()
        write_journal(self.job.traces / "control.ndjson", self._control.journal())

    def start(self) -> None:
        """Start all processes, discover loader paths on shadows, and write the first record."""
        fleet = self._fleet
        with self._bar("start trainer and engines", self.job.owners + len(fleet.receivers())) as bar:
            fleet.start(bar.update)
        with self._bar("prewarm: discover loader paths on shadows", 1) as bar:
            classes = _names(fleet.prewarm(fleet.receivers()))
            bar.update()
        refit = RefitConfig(attempt_deadline_s=TRANSITION_S, lost_after_s=10.0, post_apply_check=True)
        incarnation = new_incarnation(self.job.addresses, "coordinator")
        self._tracer = FileTracer(self.job.traces / "coordinator.ndjson", "coordinator", incarnation, self._clock)
        self._chronicle = Chronicle(self.job.chronicle, "coordinator", incarnation)
        self._coordinator = Coordinator(
            CoordinatorConfig(
                refit=refit, owners=fleet.endpoints.owners(), bootstrap_instances=len(self.job.instances)
            ),
            fleet.endpoints,
            self._control,
            self._transport,
            classes=classes,
            tracer=self._tracer,
            told=self._chronicle.tell,
            clock=self._clock,
            observer=self._observe,
        )
        with self._bar("bootstrap: prove every receiver equal to the baseline", 1) as bar:
            self._coordinator.become()
            self._run_until(Ready)
            bar.update()
        self.completions.append(fleet.complete(PROMPT))

    def transition(self, number: int) -> TransitionRow:
        """One optimizer step, its refit, the restart of what was killed, and the check of every bit."""
        gate = GateMode.ASYNC if number == ASYNC_IN else GateMode.SYNC
        victim = InstanceId(next(iter(self.job.instances)))
        kill = number == KILL_IN and len(self.job.instances) > 1
        self._watched = _Watched()
        loss = self._train(number)
        if kill:
            payloads = max(1, self._payloads_per_owner // 2)
            self._fleet.endpoints.call_owners(STALL, Stall(payloads), CALL_S)
            self._on_failure = lambda attempt: self._see_mixture(number, victim, attempt)
        coordinator = self._require_coordinator()
        coordinator.set_gate(gate)
        with self._bar(f"step {number}: refit ({gate})", None) as bar:

            def each_round() -> None:
                sent = sum(owner.payloads for owner in coordinator.owner_reports())
                if sent != bar.n:
                    bar.n = sent
                    bar.refresh()
                if kill and self._watched.kill is None:
                    self._kill_when_everyone_wrote(victim)

            coordinator.look()
            self._run_until(TransitionEnded, each_round)
            self._run_until(Ready, each_round)
        self._on_failure = lambda attempt: None
        restored = self._restart(victim) if kill else []
        self.completions.append(self._fleet.complete(PROMPT))
        with self._bar(f"step {number}: compare every stored bit", 1) as bar:
            dumps, trackers = self._fleet.dump_receivers(self._fleet.receivers()), self._fleet.dump_trackers()
            mismatched = sum(self._oracle.check(dumps, trackers, self._weights(number)).values())
            bar.update()
        return self._row(number, gate, loss, restored, mismatched)

    def _train(self, number: int) -> float:
        """One optimizer step on every trainer rank, and the oracle's own copy of the result."""
        with self._bar(f"step {number}: train", 2) as bar:
            step = TrainStep(CandidateId(f"step-{number}"))
            trained = self._fleet.endpoints.call_owners(TRAIN_STEP, step, CALL_S)
            for owner, (answer, _) in trained.items():
                if answer.problem:
                    raise OperatorNeeded(f"owner {owner} did not begin: {answer.problem}", "see its log")
            bar.update()
            self._fleet.endpoints.call_owners(GATHER, Gather(str(self._weights(number))), CALL_S)
            bar.update()
        return float(sum(answer.loss for answer, _ in trained.values()) / len(trained))

    def _kill_when_everyone_wrote(self, victim: InstanceId) -> None:
        """Once every rank applied an item of the running attempt, kill the victim; its trace tells how far it was."""
        attempt = self._watched.running
        if attempt is None or not all(self._fleet.applied(r, attempt) for r in self._fleet.receivers()):
            return
        self._fleet.kill(victim)
        ranks = self._fleet.receivers([victim])
        if any(self._fleet.acknowledged(rank, attempt) for rank in ranks):
            raise OperatorNeeded(f"{victim} was killed after its last item", "run the demo again")
        applied = {str(rank): self._fleet.applied(rank, attempt) for rank in ranks}
        self._watched.kill = Kill(instance=victim, attempt=attempt, applied_items=applied)

    def _see_mixture(self, number: int, victim: InstanceId, attempt: AttemptId) -> None:
        """Before the retry: count the bits by which each survivor differs from the old and from the new version."""
        kill = self._watched.kill
        if kill is None or kill.attempt != attempt:
            return
        dumps = self._fleet.dump_receivers(self._fleet.survivors([victim]))
        old = self._oracle.check(dumps, [], self._weights(number - 1))
        new = self._oracle.check(dumps, [], self._weights(number))
        kill.mixed_bits.update({name: [old[name], new[name]] for name in old})
        if not all(old.values()) or not all(new.values()):
            raise OperatorNeeded(f"a survivor does not hold mixed storage: {kill.mixed_bits}", "run the demo again")

    def _restart(self, victim: InstanceId) -> list[str]:
        """Start the killed instance again and let the coordinator restore it densely."""
        with self._bar(f"restart {victim} and restore it densely", 2) as bar:
            receivers = self._fleet.restart(victim)
            coordinator = self._require_coordinator()
            coordinator.classes = _names(self._fleet.prewarm(receivers))
            bar.update()
            coordinator.look()
            self._run_until(Ready)
            bar.update()
        return [str(receiver) for receiver in receivers]

    def _weights(self, number: int) -> Path:
        """The whole weights after step `number`, as the trainer's ranks gathered them for the oracle."""
        return Path(self.job.model) if number == 0 else self.job.directory / "oracle" / f"v{number}"

    def _row(self, number: int, gate: GateMode, loss: float, restored: list[str], mismatched: int) -> TransitionRow:
        watched, endpoints = self._watched, self._fleet.endpoints
        if watched.committed is None:
            raise OperatorNeeded(f"step {number} did not commit", "see the coordinator's trace")
        call = TimingsOf(watched.committed)
        owners: list[Timings] = [timing for timing, _ in endpoints.call_owners(TIMINGS, call, CALL_S).values()]
        receivers: list[Timings] = [timing for timing, _ in endpoints.call_receivers(TIMINGS, call, CALL_S).values()]
        name = f"refit of version {number}, attempt {watched.committed}"
        self.timelines.append(RefitTimeline(name, tuple(owners), tuple(receivers)))
        self._payloads_per_owner = min(timing.counts.get("payloads", 0) for timing in owners)
        return TransitionRow(
            version=number,
            gate=gate.value,
            attempts=watched.rows(),
            changed_elements=_sum(owners, "changed_elements"),
            total_elements=_sum(owners, "source_elements"),
            emitted_destinations=_sum(owners, "emitted"),
            changed_destinations=_sum(owners, "emitted_changed"),
            canonical_elements=sum(meta.numel for meta in self._fleet.tensors),
            xor_items=_sum(owners, "xor_items"),
            overwrite_items=_sum(owners, "overwrite_items"),
            payloads=_sum(owners, "payloads"),
            payload_bytes=_sum(owners, "payload_bytes"),
            checkpoint_bytes=sum(meta.nbytes for meta in self._fleet.tensors),
            baseline_bytes=self._fleet.baseline_bytes,
            seconds=_seconds(self.timelines[-1]),
            waits=_waits(owners + receivers),
            loss=loss,
            kill=watched.kill,
            restored=restored,
            receivers=watched.receivers,
            mismatched_bits=mismatched,
        )

    def _require_coordinator(self) -> Coordinator:
        if self._coordinator is None:
            raise OperatorNeeded("the demo was not started", "call start() first")
        return self._coordinator

    def _observe(self, effect: CoordinatorEffect) -> None:
        self._watched.see(effect)
        if isinstance(effect, Held) and not self._quiet:
            tqdm.write(f"waiting: {effect.reason}", file=sys.stderr)
        if isinstance(effect, AttemptEnded) and effect.reason:
            self._on_failure(effect.attempt)

    def _run_until(self, kind: type, each_round: Callable[[], None] | None = None) -> None:
        end = self._require_coordinator().run_until(
            lambda effect: isinstance(effect, (kind, SteppedDown, TransitionAborted)),
            TRANSITION_S,
            each_round=each_round,
        )
        if isinstance(end, (SteppedDown, TransitionAborted)):
            raise OperatorNeeded(f"the coordinator gave up: {end.reason}", "see the coordinator's trace")

    @contextmanager
    def _bar(self, text: str, total: int | None) -> Iterator[tqdm[Any]]:
        unit = "" if total is not None else " payloads"
        with tqdm(total=total, desc=text, unit=unit, disable=self._quiet, file=sys.stderr) as bar:
            yield bar


def _fleet(job: DemoJob, clock: LamportClock, store: PayloadStore) -> Fleet:
    if job.engine != VLLM:
        return Fleet(job, clock, secrets=store.secrets)
    from nemo_dcr.cli.vllm_fleet import VllmFleet

    return VllmFleet(job, clock, store.secrets)


def _names(classes: Mapping[str, PathClass]) -> dict[str, str]:
    return {name: path.value for name, path in classes.items()}


def _sum(timings: list[Timings], count: str) -> int:
    return sum(timing.counts.get(count, 0) for timing in timings)


def _seconds(refit: RefitTimeline) -> dict[str, float]:
    """Each stage on its slowest node; `refit` is the timed window t1 - t0 without the post-apply checks."""

    def slowest(timings: Sequence[Timings], stage: str) -> float:
        return max((timing.seconds.get(stage, 0.0) for timing in timings), default=0.0)

    found = {
        **{stage: slowest(refit.owners, stage) for stage in ("construct", "encode", "publish")},
        **{stage: slowest(refit.receivers, stage) for stage in ("fetch", "verify", "decode", "apply", "check")},
        "baseline": slowest(refit.owners, "baseline"),
        "refit": refit.latency_s,
    }
    return {stage: round(seconds, 4) for stage, seconds in found.items()}


def _waits(timings: Sequence[Timings]) -> dict[str, int]:
    """How often the stages of all nodes waited for room or for work."""
    found: Counter[str] = Counter()
    for timing in timings:
        found.update(timing.waits)
    return dict(sorted(found.items()))


def run_demo(
    job: DemoJob, steps: int, *, quiet: bool = False, store: PayloadStore = FILES, timeline: Path | None = None
) -> DemoReport:
    """Run `steps` transitions and return the report; mismatched bits make it not ok. `timeline` gets a Chrome trace."""
    job.save()
    with Demo(job, quiet=quiet, store=store) as demo:
        demo.start()
        rows = [demo.transition(number) for number in range(1, steps + 1)]
        if timeline is not None:
            timeline.write_bytes(chrome_trace(demo.timelines))
    return DemoReport(
        ok=all(row.mismatched_bits == 0 for row in rows),
        model=job.model,
        transitions=rows,
        engine=job.engine,
        prompt=PROMPT if any(demo.completions) else "",
        completions=[answers for answers in demo.completions if answers],
    )
