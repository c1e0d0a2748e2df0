"""One chaos run: a system, a few transitions, faults in each, and every check after each of them.

A run is named by its seed and its number, which together draw everything but the timing. A transition has settled when
every process runs, every receiver serves the committed version and every baseline holds it. It must settle within a
limit after the last fault; a candidate that was given up is replaced by another one.

Paper: Section 6.3; Appendix B   Spec: TransitionEnds, AllServe
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path

import msgspec

from nemo_dcr.config import GateMode
from nemo_dcr.errors import NemoDcrError
from nemo_dcr.ids import CandidateId, OwnerId
from nemo_dcr.protocol.tags import Tag, TagKind, TrackerKind, TrackerTag
from nemo_dcr.record import Record
from nemo_dcr.runtime.trace_file import read_log
from nemo_dcr.testing import chaos_checks, chaos_world
from nemo_dcr.testing.chaos_patience import Patience
from nemo_dcr.testing.chaos_payloads import relay_addresses, relay_of
from nemo_dcr.testing.chaos_plans import ACTIVE, ASYNC_ONLY, STANDBY, Case, Faults, all_cases, faults
from nemo_dcr.testing.chaos_points import Kind, Strike
from nemo_dcr.testing.chaos_record import RECORD, record_server
from nemo_dcr.testing.chaos_roles import TRAIN, Train
from nemo_dcr.testing.chaos_source import Lineage, RecordPlace, SystemPlan, write_whole
from nemo_dcr.testing.chaos_system import COORDINATORS, ChaosSystem, SystemState

TRANSITIONS = 4
"""Of one run."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One transition."""

    case: Case
    struck: tuple[str, ...]
    """What took place, in words; empty when no point was reached."""
    reached: bool
    """The case itself took place."""
    committed: bool
    """Under its first candidate; otherwise that one was given up and another was committed."""
    attempts: int
    seconds: float
    recovered_s: float | None
    """From the first fault to settled; None without a fault."""
    double: bool


@dataclass
class RunResult:
    """One run."""

    seed: int
    number: int
    directory: Path
    outcomes: list[Outcome] = field(default_factory=list)
    requests: int = 0
    record: RecordPlace = RecordPlace.SQLITE
    relays: bool = False
    validated: bool = False
    breaches: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How to run it again."""
        places = f"--record {self.record.value} --payloads {'relays' if self.relays else 'files'}"
        return f"--seed {self.seed} --only {self.number} {places}"


def cases_of(seed: int, number: int, *, world: bool = False, server: bool = False, relays: bool = False) -> list[Case]:
    """The cases of a run: runs of one seed go through a shuffled list of all, again and again."""
    cases = all_cases(world=world, server=server, relays=relays)
    random.Random(f"cases {seed}").shuffle(cases)
    first = number * TRANSITIONS
    chosen = [cases[(first + each) % len(cases)] for each in range(TRANSITIONS)]
    # A system that just began proved what it holds: its first transition has no earlier attempt to stop.
    return sorted(chosen, key=lambda case: case.point == "StopAndWait")


def plan_of(
    seed: int,
    number: int,
    directory: Path,
    cases: Sequence[Case],
    place: int | None = None,
    *,
    record: RecordPlace = RecordPlace.SQLITE,
    relays: bool = False,
) -> SystemPlan:
    """Sizes, gate and clocks of a run; `place` numbers the systems of a world of its own."""
    rng = random.Random(f"plan {seed} {number}")
    instances = rng.choice(({"e0": 1, "e1": 1}, {"e0": 1, "e1": 2}))
    names = ["owner-0", "owner-1", *COORDINATORS, *(f"{i}/{rank}" for i, n in instances.items() for rank in range(n))]
    names += [RECORD] if record.is_server else []
    names += [relay_of(instance) for instance in instances] if relays else []
    hosts = {} if place is None else {name: chaos_world.host(place, each) for each, name in enumerate(names)}
    at, keys = record_server(record, hosts.get(RECORD))
    wants_async = any(case.point in ASYNC_ONLY for case in cases)
    return SystemPlan(
        directory=directory,
        seed=rng.randrange(1 << 30),
        owners=2,
        instances=instances,
        gate=GateMode.ASYNC if wants_async or rng.random() < 0.4 else GateMode.SYNC,
        skew_s={name: rng.choice((0.0, 0.0, -0.7, 0.7)) for name in COORDINATORS},
        keeps_baselines=rng.random() < 0.4 and all(case.point != "RebuildBaseline" for case in cases),
        record=record,
        record_at=at,
        record_keys=keys,
        relays=relay_addresses(instances, hosts) if relays else {},
        hosts=hosts,
    )


def run(
    seed: int,
    number: int,
    directory: Path,
    context: ForkServerContext,
    place: int | None = None,
    *,
    record: RecordPlace = RecordPlace.SQLITE,
    relays: bool = False,
) -> RunResult:
    """Carry out one run; `directory` must not exist. Breaches are told, not raised.

    `place` numbers the run among all of a world of its own; None: there is none, so nothing is cut or full.
    """
    result = RunResult(seed, number, directory, record=record, relays=relays)
    cases = cases_of(seed, number, world=place is not None, server=record.is_server, relays=relays)
    plan = plan_of(seed, number, directory, cases, place, record=record, relays=relays)
    directory.mkdir(parents=True)
    rng = random.Random(f"run {seed} {number}")
    try:
        system = ChaosSystem(plan, context, rng)
    except NemoDcrError as problem:
        result.breaches.append(f"it did not start: {type(problem).__name__}: {problem}")
        return result
    try:
        lineage = Lineage(plan)
        _bootstrap(system)
        for transition, case in enumerate(cases):
            receivers, owners = [str(r) for r in chaos_checks.receivers_of(plan)], [f"owner-{o}" for o in range(2)]
            drawn = faults(case, rng, receivers, owners)
            result.outcomes.append(_Transition(system, lineage, transition, drawn).run())
            result.breaches += chaos_checks.wrong_bits(system, lineage, system.control.history()[-1])
            result.breaches += chaos_checks.wrong_records(system.control, plan.traces)
            if result.breaches:
                break
        result.requests, wrong = chaos_checks.wrong_served(system, lineage)
        result.breaches += wrong
    except _Stuck as problem:
        result.breaches.append(str(problem))
    except NemoDcrError as problem:
        result.breaches.append(f"{type(problem).__name__}: {problem}")
    finally:
        try:
            system.close()
        except NemoDcrError as problem:
            result.breaches.append(f"it did not end in order: {type(problem).__name__}: {problem}")
    write_whole(directory / "outcomes.json", msgspec.json.format(msgspec.json.encode(result.outcomes)))
    result.breaches += system.faults
    result.breaches += chaos_checks.wrong_traces(plan.traces)
    return result


class _Stuck(Exception):
    """No progress."""


def _bootstrap(system: ChaosSystem) -> None:
    """Wait until version 0 is served everywhere."""
    patience = Patience(time.monotonic())
    while True:
        system.tick()
        state = system.state()
        if settled(system, state):
            return
        if over := patience.look(time.monotonic(), state.silent):
            raise _Stuck(f"version 0 was not served: {over}: {describe(system)}")
        time.sleep(0.05)


def settled(system: ChaosSystem, state: SystemState, candidate: CandidateId | None = None) -> Record | None:
    """The record that everybody serves and holds, if there is one."""
    record = system.committed()
    if record is None or not system.whole or (candidate is not None and record.candidate != candidate):
        return None
    version = record.version
    serve = all(
        r is not None and r.gate_open and r.tag == Tag(TagKind.CLEAN, version) for r in state.receivers.values()
    )
    hold = all(
        o is not None and o.candidate == "" and o.tracker == TrackerTag(TrackerKind.AT, version)
        for o in state.owners.values()
    )
    return record if serve and hold and system.has_one_active() else None


def describe(system: ChaosSystem) -> str:
    """Where everything stands, in one line."""
    state, view = system.state(), system.coordinator()
    receivers = [
        f"{name} silent" if r is None else f"{name} {r.tag} attempt {r.attempt} {'open' if r.gate_open else 'closed'}"
        for name, r in state.receivers.items()
    ]
    owners = [
        f"owner {name} silent" if o is None else f"owner {name} {o.tracker} {o.candidate or '-'} {o.status}"
        for name, o in state.owners.items()
    ]
    coordinator = "silent" if view is None else f"{view.name} {view.role} {view.phase} {view.held} {view.last_failure}"
    dead = [name for name, process in system.processes.items() if process.child.exitcode is not None]
    return "; ".join([*receivers, *owners, f"coordinator {coordinator}", f"dead {dead}"])


class _Transition:
    """One candidate from its first step to everybody serving it, under faults."""

    def __init__(self, system: ChaosSystem, lineage: Lineage, number: int, drawn: Faults) -> None:
        self._system = system
        self._lineage = lineage
        self._number = number
        self._drawn = drawn
        self._names = 0
        self._aborts = drawn.aborts
        self._candidate = self._name(system.control.history()[-1])

    def _name(self, committed: Record) -> CandidateId:
        """A candidate that nobody had yet, out of the committed one."""
        self._names += 1
        candidate = CandidateId(f"c{self._number + 1}.{self._names}")
        self._lineage.name(candidate, committed.candidate)
        self._lineage.derive(candidate)
        return candidate

    def _process(self, name: str) -> str:
        active = self._system.active()
        if name == ACTIVE:
            return active
        return next(each for each in COORDINATORS if each != active) if name == STANDBY else name

    def run(self) -> Outcome:
        """Let it happen. Raises: _Stuck."""
        system, drawn = self._system, self._drawn
        strikes: dict[str, tuple[Strike, ...]] = {}
        for name, each in drawn.strikes.items():
            strikes[self._process(name)] = strikes.get(self._process(name), ()) + each
        earlier = len(system.struck)
        begin = time.monotonic()
        patience = Patience(begin)
        while not system.arm(strikes):
            system.tick()
            if over := patience.look(time.monotonic(), system.state().silent):
                raise _Stuck(f"could not be armed for {drawn.case}: {over}: {describe(system)}")
        for name, each in drawn.next_life.items():
            system.processes[self._process(name)].next_strikes = each
        begin = time.monotonic()
        patience.begin_anew(begin)
        seen = (earlier, system.deaths)
        outside, split = sorted(drawn.outside), drawn.split
        first_fault: float | None = None
        told: list[str] = []
        disarmed = False
        while True:
            now = time.monotonic()
            system.tick()
            while outside and now - begin >= outside[0][0]:
                _, name, kind, hold = outside.pop(0)
                process = self._process(name)
                first_fault = first_fault or now
                patience.begin_anew(now)
                told.append(f"{kind} of {process} from outside")
                match kind:
                    case Kind.KILL:
                        system.kill(process)
                    case Kind.CUT:
                        system.cut(process, hold)
                    case Kind.FULL:
                        system.fill(hold)
                    case _:
                        system.stop(process, hold)
            if split is not None and now - begin >= split[0]:
                _, some, others, hold = split
                split, first_fault = None, first_fault or now
                system.split([self._process(each) for each in some], [self._process(each) for each in others], hold)
                told.append(f"split {drawn.case.point}")
            if (len(system.struck), system.deaths) != seen or system.is_held:
                seen = (len(system.struck), system.deaths)
                patience.begin_anew(now)
            state = system.state()
            if now - begin >= drawn.train_after_s:
                self._train(state)
            if settled(system, state, self._candidate) and not outside and split is None:
                if disarmed:
                    break
                disarmed = system.arm({})
                for each_process in system.processes.values():
                    each_process.next_strikes = ()
                continue
            if over := patience.look(time.monotonic(), state.silent):
                raise _Stuck(f"stuck in {drawn.case}: {over}: {describe(system)}")
            time.sleep(0.03)
        end = time.monotonic()
        struck = system.struck[earlier:]
        for each_struck in struck:
            first_fault = min(first_fault or each_struck.at, each_struck.at)
            told.append(
                f"{each_struck.strike.kind} of {each_struck.name} {each_struck.strike.edge} {each_struck.strike.point}"
            )
        case = drawn.case
        hits = [
            each
            for each in struck
            if (each.strike.point, each.strike.edge, each.strike.kind) == (case.point, case.edge, case.kind)
        ]
        return Outcome(
            case=case,
            struck=tuple(told),
            reached=bool(hits) or case.edge == "at",
            committed=self._names == 1,
            attempts=self._attempts(),
            seconds=end - begin,
            recovered_s=None if first_fault is None else end - first_fault,
            double=drawn.double or len(told) > 1,
        )

    def _attempts(self) -> int:
        """Attempts of all its candidates."""
        journal = self._system.control.journal()
        names = {f"c{self._number + 1}.{each + 1}" for each in range(self._names)}
        return sum(
            entry.action.value == "Prepare"
            and entry.args["candidate"] in names
            and entry.args["mode"] in ("xor", "overwrite", "dense")
            for entry in journal
        )

    def _train(self, state: SystemState) -> None:
        """Every rank of the trainer takes the candidate, also after it came back without it.

        A candidate that was given up meanwhile is taken and dropped by every rank, before another one is made.
        """
        system, reports = self._system, state.owners
        record = system.committed()
        if record is None or record.candidate == self._candidate:
            return
        dead = any(each is not None and not each.candidate for each in reports.values()) and system.is_dead(
            self._candidate
        )
        if dead:
            self._aborts = False
        missing = [o for o, each in sorted(reports.items()) if each is None or not each.candidate]
        if dead:
            missing = [owner for owner in missing if not self._has_begun(owner)]
            if not missing and all(each is not None and not each.candidate for each in reports.values()):
                self._candidate = self._name(record)
                return
        for owner in missing[:1] if self._aborts else missing:
            if reports[owner] is not None:
                system.ask(f"owner-{owner}", TRAIN, Train(self._candidate))
        if self._aborts and len(missing) < len(reports):
            system.abort()

    def _has_begun(self, owner: OwnerId) -> bool:
        """The owner froze this candidate at some time, as its traces tell."""
        paths = self._system.plan.traces.glob(f"owner-{owner}-*.ndjson")
        events = (event for path in paths for event in read_log(path).events)
        return any(e.action == "BeginTransition" and e.post["frozen"] == self._candidate for e in events)


def numbered(seeds: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Seeds and numbers of the runs of so many transitions, seeds in turn."""
    runs = -(-total // TRANSITIONS)
    return [(seeds[each % len(seeds)], each // len(seeds)) for each in range(runs)]
