"""The specification's own counterexample of a mutant, performed on the implementation with the same mutant.

The shortest path of the weakened model to a state or step in which the named property falls is a schedule. The cluster
with the weakened code performs it step by step, so the same property has to fall there, or a few steps later where the
property of the code looks at a later moment. The cluster with sound code gets stuck at the step that the guard forbids.
Not handled: liveness, which no finite path refutes; the search for moves (replay).

Spec: Mutants, Properties
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tlc_rows import Row

from model_tests import model, replay
from model_tests.explore import permits, read_bounds
from model_tests.model import Config, State, Step
from model_tests.model_mutants import MUTANTS, weakened
from model_tests.model_properties import STATE_PROPERTIES, STEP_PROPERTIES
from model_tests.patching import patched
from model_tests.weakenings import PATCHES
from tests.specification import snake
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.invariants import INVARIANTS

NOT_PERFORMED = {
    "dedup_across_attempts": "the search takes minutes; its walk finds it",
    "no_elig_recheck": "the search takes minutes; its schedule finds it",
    "other_candidate": "the search takes minutes; its schedule finds it",
    "no_drain": "what is accepted may land in the model, in the code only what is issued; its schedule issues",
    "restore_not_drained": "as for NoDrain",
    "prepare_not_monotone": "replay offers a receiver no prepare that is older than the installed one",
    "no_inc_check": "it is about the first record; CommitAcked of the cluster begins with the second",
    "retry_new_cand": "the candidate is frozen again in the model; in the code it stays frozen and its weights change",
    "foreign_manifest": "a baseline that does not change is filled without a copy; the code copies every item",
    "end_early": "the simulated cluster plays the stream itself; real owners show it",
    "no_payload_digest": "replay has no damaged payload; its schedule has",
    "no_set_digest": "replay has no foreign payload; its schedule has",
    "ack_of_any_attempt": "the coordinator of the code completes by its newest reports, which are of this attempt",
    "join_mid_attempt": "the coordinator of the code leaves no eligible receiver out; a walk does it with a restart",
    "no_cas": "a record carries its version, so the second commit repeats it; the model counts",
    "no_epoch_commit": "the new coordinator of the code reads the record later than the model's (DV8)",
    "no_epoch_prepare": "a coordinator of the code reads before it asks; its schedule holds the request back",
    "commit_dead": "a coordinator of the code kills between attempts, the model's at any time; its schedule takes over",
    "drop_alive": "an owner of the code drops when told; the model's does by itself",
    "base_before_commit": "the code has no line RollForward before the commit",
    "upd_no_match": "the line UpdateBaseline does not say which candidate was called for",
    "restore_stale_base": "the coordinator of the code rebuilds first; its schedule loses the baseline later",
    "rebuild_from_cand": "only a late call does this in the code; the model needs no sender",
    "stream_unfrozen": "as for CommitDead",
    "skip_roll_forward": "after its own commit the coordinator of the code does not ask whether to roll forward",
    "refit_ack_before_flush": "from the cold start; ack_before_flush is the same mutant",
}
"""Counterexamples that the code can not perform although it has the mutant, and why."""


@dataclass(frozen=True)
class Outcome:
    """What became of the schedule on the implementation."""

    schedule: tuple[Step, ...]
    done: int
    """Steps that the cluster performed."""
    fallen: tuple[str, ...]
    """Properties that fell on the cluster."""
    why: str = ""
    """What stopped it."""


def property_of(row: Row) -> str:
    """The property that the mutant makes fall, by its name in the code. A warm start has no first state of level 0."""
    return model.snake("RefitSteps" if row.violates == "RefinesRefit" else str(row.violates))


def counterexample(row: Row) -> tuple[Config, bool, tuple[Step, ...]]:
    """Constants, whether the start is cold, and the shortest path to the fall of the property.

    Raises: LookupError when the property does not fall.
    """
    ((guard, mutant),) = row.override.items()
    name = property_of(row)
    config, bounds = read_bounds(row.cfg)
    first = model.init(config) if bounds.cold else model.warm(config)
    with weakened(model.snake(guard), MUTANTS[mutant]):
        came: dict[State, tuple[State, Step] | None] = {first: None}
        waiting = deque([first])
        while waiting:
            state = waiting.popleft()
            s = model.here(config, state)
            for step, after in model.successors(config, state):
                if not permits(bounds, s, step):
                    continue
                new = after not in came
                if new:
                    came[after] = (state, step)
                    waiting.append(after)
                if name in STEP_PROPERTIES:
                    falls = not STEP_PROPERTIES[name](config, state, after)
                else:
                    falls = new and not STATE_PROPERTIES[name](config, after)
                if falls:
                    return config, bounds.cold, (*_path(came, state), step)
    raise LookupError(f"{row.name}: {name} does not fall")


def _path(came: dict[State, tuple[State, Step] | None], state: State) -> list[Step]:
    steps: list[Step] = []
    while (before := came[state]) is not None:
        state, step = before
        steps.append(step)
    return steps[::-1]


def perform(row: Row, config: Config, cold: bool, schedule: tuple[Step, ...], *, weak: bool) -> Outcome:
    """Perform the schedule on the cluster; `weak`: with the mutant. The model that is followed has it either way."""
    ((guard, mutant),) = row.override.items()
    fallen: list[str] = []
    done, why = 0, ""
    sends = any(step[0] == "StartRestore" and not step[1][2] for step in schedule)
    with weakened(model.snake(guard), MUTANTS[mutant]):
        here = replay.cold(config, proves=not sends) if cold else replay.warm(config)
        # Weak code may differ from the weak model in what the property does not speak of; the lines may not.
        with patched(*((*PATCHES[snake(row.name)], (replay, "_finished", lambda there, step: there)) if weak else ())):
            for holds in INVARIANTS.values():
                holds(here.cluster)
            for step in schedule:
                try:
                    here = replay.realise(here, step)
                except (replay.Unrealised, replay.Diverged, model.NotEnabled) as found:
                    why = f"{type(found).__name__}: {found}"
                    break
                done += 1
                fallen += _fallen(here.cluster)
            if done == len(schedule) and property_of(row) not in fallen:
                fallen += _later(here.cluster)
    return Outcome(schedule, done, tuple(dict.fromkeys(fallen)), why)


LATER = 60
"""Steps after the schedule, without a fault."""


def _fallen(cluster: Cluster) -> list[str]:
    return [name for name, holds in INVARIANTS.items() if not holds(cluster)]


def _later(cluster: Cluster) -> list[str]:
    for _ in range(LATER):
        steps = cluster.progress()
        if not steps or _fallen(cluster):
            break
        cluster.do(steps[0])
    return _fallen(cluster)
