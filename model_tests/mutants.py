"""Mutants of the implementation, under the names of the specification's: each is killed, and this says by what.

A mutant is one weakened guard (`weakenings`). It is killed in up to four ways: its own schedule, or drawn walks, make
the property fall that the specification names for it; the specification's counterexample, performed on the weakened
code, makes the same property fall, while sound code gets stuck at the guarded step; and the model, stepped beside a
drawn walk of the weakened code, rejects a line. A mutant of liveness is killed when the cluster does not settle within
a bound.

    .venv/bin/python -m model_tests.mutants [--only NAME ...] [--deep] [--json]

Each mutant is applied in a process of its own and never in the package.

Paper: Appendix B   Spec: Mutants, Properties
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tlc_rows import TABLE, Row, read_table

from model_tests import mutant_schedules as schedules
from model_tests.adversary import Adversary, start, unsettled, walk
from model_tests.cluster_lines import attach
from model_tests.counterexample import NOT_PERFORMED, counterexample, perform
from model_tests.explore import SPEC
from model_tests.follower import Rejected
from model_tests.mutant_schedules import Schedule
from model_tests.nodes import Draw
from model_tests.pair import CALM_STEPS, Pair
from model_tests.patching import Patch, patched
from model_tests.weakenings import PATCHES
from nemo_dcr.config import GateMode
from tests.specification import snake
from tests.unit.protocol.invariants import FINALLY, InvariantBroken

ROWS = {snake(row.name): row for row in read_table(SPEC / TABLE).rows if row.kind == "mutant"}
ONLY_HERE = {"finish_restore_unchecked": "clean_exact"}
"""Mutants of the code that the specification does not have, and what they break."""
REAL = ("end_early",)
"""Mutants of what the simulated cluster plays itself: these run on real owners and engines."""


@dataclass(frozen=True)
class Mutant:
    """One weakening of the code."""

    name: str
    falls: str
    """What falls; of the specification's, by the name in the code."""
    patches: tuple[Patch, ...]
    schedule: Schedule | None
    """Without one, drawn walks find it soon."""

    @property
    def row(self) -> Row | None:
        """The twin's row in the table of runs."""
        return ROWS.get(self.name)

    @property
    def is_live(self) -> bool:
        """Nothing wrong ever happens; something good does not."""
        return self.falls in FINALLY

    @property
    def is_cold(self) -> bool:
        """It shows before the first record."""
        return self.row is not None and "Cold" in str(self.row.base) and self.schedule is None


SCHEDULES: dict[str, Schedule] = {
    "retry_xor": schedules.expire_after_first_write,
    "no_dedup": schedules.payload_arrives_twice,
    "no_drain": schedules.attempt_is_replaced,
    "restore_not_drained": schedules.restore_is_replaced,
    "other_candidate": schedules.abort_then_retry_of_next,
    "no_elig_recheck": schedules.late_payload_after_survey,
    "no_inc_check": schedules.restart_during_dense_prepare,
    "retry_new_cand": schedules.step_inside_transition,
    "foreign_manifest": schedules.manifest_of_the_attempt_before,
    "no_payload_digest": schedules.damaged_payload,
    "no_set_digest": schedules.foreign_payload,
    "ack_of_any_attempt": schedules.prepare_never_arrives,
    "no_cas": schedules.commit_request_arrives_twice,
    "no_epoch_commit": schedules.commit_of_a_zombie,
    "no_epoch_prepare": schedules.prepare_of_a_zombie,
    "no_deadline_wait": schedules.late_commit,
    "commit_dead": schedules.drop_arrives_after_takeover,
    "drop_alive": schedules.abort_while_committing,
    "base_before_commit": schedules.update_overtakes_commit,
    "upd_no_match": schedules.late_update_meets_new_candidate,
    "restore_stale_base": schedules.baseline_lost_before_restore,
    "no_tag_check": schedules.baseline_lost_before_stream,
    "rebuild_from_cand": schedules.late_rebuild_meets_candidate,
    "stream_unfrozen": schedules.zombie_prepares_the_next_candidate,
    "skip_roll_forward": schedules.takeover_after_commit,
    "never_finish": schedules.takeover_after_commit,
    "late_close": schedules.close_arrives_again,
    "never_dense": schedules.owner_restarts_in_transition,
    "finish_restore_unchecked": schedules.late_finish_restore,
}
ASYNC = frozenset({schedules.close_arrives_again})
"""Schedules of an asynchronous gate."""


NOT_IN_LINES = {
    "no_payload_digest": "no line says which bits arrived",
    "no_set_digest": "no line says which bits arrived",
    "never_finish": "the next line never comes",
    "never_restore": "the next line never comes",
    "never_roll_forward": "the next line never comes",
    "never_open": "the next line never comes",
}
"""Mutants whose lines sound code may write too, and why: properties of words and progress tell them apart."""


def _property(name: str) -> str:
    found = snake(str(ROWS[name].violates)) if name in ROWS else ONLY_HERE[name]
    return "refit_steps" if found == "refines_refit" else found  # the same from the first state on


MUTANTS = tuple(Mutant(name, _property(name), patches, SCHEDULES.get(name)) for name, patches in PATCHES.items())
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


# --------------------------------------------------------------------------------------------------- ways to be killed


def served(schedule: Schedule, *, follow: bool = False) -> Adversary:
    """The cluster that a schedule begins with."""
    c = Adversary(gate=GateMode.ASYNC if schedule in ASYNC else GateMode.SYNC)
    if follow:
        attach(c)
    c.become(0)
    c.run()
    return c


def falls_on_schedule(mutant: Mutant) -> bool:
    """Whether the mutant's schedule makes its property fall."""
    assert mutant.schedule is not None
    c = served(mutant.schedule)
    with patched(*mutant.patches), falling(mutant.falls) as fell:
        mutant.schedule(c, () if mutant.is_live else (mutant.falls,))
        fell.update({mutant.falls} if mutant.is_live and not FINALLY[mutant.falls](c) else ())
    return bool(fell)


def falls_on_walk(mutant: Mutant, seed: int) -> bool:
    """Whether one drawn walk makes the mutant's property fall."""
    if mutant.name in REAL:
        return _falls_on_real_nodes(mutant, seed)
    rng = random.Random(seed)
    with _warm_then(mutant, rng) as c, falling(mutant.falls) as fell:
        walk(c, rng, () if mutant.is_live else (mutant.falls,))
        if mutant.is_live:
            fell.update({mutant.falls} & set(unsettled(c, rng)))
    return bool(fell)


def is_rejected_on_schedule(mutant: Mutant) -> bool:
    """Whether the model rejects a line of the mutant's schedule."""
    assert mutant.schedule is not None
    c = served(mutant.schedule, follow=True)
    try:
        with patched(*mutant.patches):
            mutant.schedule(c, ())
    except Rejected:
        return True
    return False


def is_rejected(mutant: Mutant, seed: int) -> bool:
    """Whether the model rejects a line of one drawn walk."""
    rng = random.Random(seed)
    try:
        with _warm_then(mutant, rng, follow=True) as c:
            walk(c, rng, ())
    except Rejected:
        return True
    return False


def _falls_on_real_nodes(mutant: Mutant, seed: int) -> bool:
    rng = random.Random(seed)
    draw = Draw(seed=seed, instances=1, owners=rng.choice((1, 2)), chunk=1, loaded=True)
    pair = Pair(draw, names=(mutant.falls,))
    try:
        pair.act(lambda: pair.world.become(0))
        pair.run(CALM_STEPS, rng)
        with patched(*mutant.patches), falling(mutant.falls) as fell:
            pair.act(lambda: pair.world.train(seed))
            pair.run(CALM_STEPS, rng)
    finally:
        pair.close()
    return bool(fell)


@contextmanager
def falling(name: str) -> Iterator[set[str]]:
    """Collects the property when it falls; that a weakened cluster also gets stuck or stumbles kills nobody."""
    fell: set[str] = set()
    try:
        yield fell
    except InvariantBroken as broken:
        fell.add(broken.name)
    except Rejected:
        raise
    except AssertionError:
        pass
    assert fell <= {name}


@contextmanager
def _warm_then(mutant: Mutant, rng: random.Random, *, follow: bool = False) -> Iterator[Adversary]:
    """A drawn cluster in which the mutation begins after the first record, or at once when it shows only before."""
    if mutant.is_cold:
        with patched(*mutant.patches):
            yield start(rng, warm=False, on_start=attach if follow else None)
        return
    c = start(rng, on_start=attach if follow else None)
    with patched(*mutant.patches):
        yield c


# -------------------------------------------------------------------------------------------------------------- report


@dataclass
class Kill:
    """How one mutant died."""

    name: str
    falls: str
    schedule: str = ""
    """The schedule on which the property falls."""
    walk: int | None = None
    """How many drawn walks it takes until the property falls."""
    rejected: str = ""
    """Where the model that is stepped along rejects a line."""
    twin: str = ""
    """What the specification's counterexample does to code with the mutant and without."""
    both: bool = False
    """It makes the same property fall in the model and in the code, and sound code does not follow it."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def is_killed(self) -> bool:
        """By the property that it names."""
        return bool(self.schedule) or self.walk is not None


def judge(name: str, walks: int, lockstep: int, twin: bool) -> Kill:
    """Try to kill one mutant in every way."""
    mutant, began = BY_NAME[name], time.monotonic()
    kill = Kill(name, mutant.falls)
    if mutant.schedule is not None and falls_on_schedule(mutant):
        kill.schedule = mutant.schedule.__name__
    kill.walk = _first(walks if mutant.schedule is None or walks > WALKS else 0, lambda n: falls_on_walk(mutant, n))
    if mutant.name not in REAL:
        kill.rejected = _rejected(mutant, lockstep)
    if twin and mutant.row is not None and not mutant.is_live:
        _twin(kill, mutant.row)
    kill.seconds = time.monotonic() - began
    return kill


def _rejected(mutant: Mutant, walks: int) -> str:
    if mutant.schedule is not None and is_rejected_on_schedule(mutant):
        return "schedule"
    number = _first(0 if mutant.name in NOT_IN_LINES else walks, lambda n: is_rejected(mutant, n))
    return "" if number is None else f"walk {number}"


def _first(count: int, tries: Callable[[int], bool]) -> int | None:
    return next((number + 1 for number in range(count) if tries(number)), None)


def _twin(kill: Kill, row: Row) -> None:
    config, cold, schedule = counterexample(row)
    weak = perform(row, config, cold, schedule, weak=True)
    sound = perform(row, config, cold, schedule, weak=False)
    kill.both = kill.falls in weak.fallen and sound.done < len(schedule) and kill.falls not in sound.fallen
    kill.twin = f"{weak.done}/{len(schedule)} steps, sound code {sound.done}"
    if not kill.both:
        kill.problems.append(weak.why or f"{', '.join(weak.fallen) or 'nothing'} fell; sound: {sound.fallen}")


WALKS = 60
"""Walks until a mutant without a schedule has to be dead."""
FOLLOWED = 12
"""Walks until the model has rejected a line of a mutant that shows in lines."""


def report(
    names: Sequence[str] = tuple(PATCHES), *, walks: int = WALKS, lockstep: int = FOLLOWED, twins: bool = True
) -> Iterator[Kill]:
    """Judge mutants, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    for name in names:
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(send, name, walks, lockstep, twins and name not in NOT_PERFORMED))
        child.start()
        send.close()
        try:
            yield receive.recv()
        except EOFError:
            yield Kill(name, BY_NAME[name].falls, problems=["its process died"])
        child.join()


def _child(send: Any, *arguments: Any) -> None:
    try:
        send.send(judge(*arguments))
    except Exception as error:
        send.send(Kill(arguments[0], BY_NAME[arguments[0]].falls, problems=[f"{type(error).__name__}: {error}"]))


def environment() -> dict[str, str]:
    """For a process that runs this module: the specification's own tools are on the path."""
    root = SPEC.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(SPEC)))}


def main(arguments: Sequence[str]) -> int:
    """Print how each mutant dies; 1 when one survives."""
    parser = argparse.ArgumentParser(prog="model_tests.mutants")
    parser.add_argument("--only", nargs="*", default=list(PATCHES))
    parser.add_argument("--deep", action="store_true", help="more walks, also with the model beside them")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    walks, lockstep = (1000, 200) if given.deep else (WALKS, FOLLOWED)
    alive = 0
    for kill in report(given.only, walks=walks, lockstep=lockstep):
        alive += not kill.is_killed
        if given.json:
            print(json.dumps(asdict(kill)), flush=True)
            continue
        walk = "" if kill.walk is None else f"walk {kill.walk}"
        rejected = kill.rejected and f"model rejects {kill.rejected}"
        ways = "; ".join(each for each in (kill.schedule, walk, rejected) if each) or "SURVIVES"
        both = f"; counterexample {'kills in both' if kill.both else 'fails'}: {kill.twin}" if kill.twin else ""
        print(
            f"{kill.name:26} {kill.falls:17} {ways}{both} ({kill.seconds:.1f} s) {' '.join(kill.problems)}",
            flush=True,
        )
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
