"""Runs for the proved model: traces of sound and of weakened clusters, and traces with one line doctored.

Spec: Next, Mutants
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from model_tests.adversary import Adversary, start, walk
from model_tests.mutants import ASYNC, Mutant
from model_tests.patching import patched
from model_tests.proved_lines import validate
from model_tests.recorded import record_local, record_simulated
from model_tests.trace_export import LineRejected
from model_tests.trace_files import Line
from model_tests.trace_runs import Run, changes_of
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import GateMode
from nemo_dcr.ids import AttemptId
from nemo_dcr.testing.local_cluster import FAST, LocalCluster
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Composed, Slice
from tests.e2e.chaos import COORDINATOR_POINTS, OWNER_POINTS, RECEIVER_POINTS, VICTIMS, Chaos, Fault
from tests.unit.protocol.cluster import Cluster


def rejected(run: Run, *, items_each: int | None = None) -> LineRejected | None:
    """Where the proved model rejects a run, projected or whole."""
    try:
        validate(run.lines, run.changes, items_each=items_each)
    except LineRejected as found:
        return found
    return None


def calm(cluster: Cluster | None = None, *, trainings: int = 2) -> Run:
    """A cluster that boots and refits without a fault."""
    c = cluster or Cluster(owners=2)
    lines = record_simulated(c)
    c.become(0)
    c.run()
    for seed in range(trainings):
        c.train(5 + seed)
        c.run()
    return Run("calm", lines, changes_of(c))


def drawn(seed: int) -> Run:
    """A simulated cluster with restarts, takeovers, aborts, losses, late and repeated messages."""
    rng, kept = random.Random(seed), list[list[Line]]()
    c = start(rng, on_start=lambda cluster: kept.append(record_simulated(cluster)))
    walk(c, rng, ())
    return Run(f"drawn {seed}", kept[0], changes_of(c))


def real(seed: int) -> Run:
    """Real nodes with real tensors, some of which crash."""
    rng = random.Random(seed)
    tensors = (TensorMeta("a", (4, 3), "BF16"), TensorMeta("b", (5,), "F32"), TensorMeta("c", (6,), "F16"))
    cluster = LocalCluster(
        LocalSource(tensors, seed=seed, owners=rng.choice((1, 2))),
        {"a": Slice(0), "b": Composed(), "c": Composed()},
        {"e0": 1, "e1": 2},
        seed=seed,
        refit=replace(FAST, gate=rng.choice(list(GateMode))),
        proved=rng.random() < 0.5,
        serving=rng.choice((0.0, 0.2)),
    )
    lines = record_local(cluster)
    cluster.run(lambda: cluster.serving_all)
    points = ("", *RECEIVER_POINTS, *OWNER_POINTS, *COORDINATOR_POINTS)
    draws = [(rng.choice(VICTIMS), rng.randrange(3), rng.choice(points), rng.randrange(13)) for _ in range(3)]
    chaos = Chaos(cluster, [Fault(*draw) for draw in draws])
    for _ in range(2):
        cluster.run(lambda: cluster.idle, each=chaos.each_round)
        cluster.train(0.4)
        cluster.run(lambda: cluster.idle, each=chaos.each_round)
    chaos.calm_down()
    cluster.run(lambda: cluster.serving_all)
    return Run(f"real {seed}", lines)


def weakened(mutant: Mutant, walks: int = 8) -> Iterator[Run]:
    """Clusters whose code has one guard less, from the first record on: the mutant's own schedule, then drawn walks."""
    if mutant.schedule is not None:
        c = Adversary(gate=GateMode.ASYNC if mutant.schedule in ASYNC else GateMode.SYNC)
        lines = record_simulated(c)
        c.become(0)
        c.run()
        with patched(*mutant.patches), suppress(AssertionError):  # it stumbles; what it did until then is told
            mutant.schedule(c, ())
        yield Run(f"{mutant.name} on its schedule", lines, changes_of(c))
    for seed in range(walks):
        rng, kept = random.Random(seed), list[list[Line]]()
        c = start(rng, on_start=lambda cluster, kept=kept: kept.append(record_simulated(cluster)))  # type: ignore[misc]
        with patched(*mutant.patches), suppress(AssertionError):
            walk(c, rng, ())
        yield Run(f"{mutant.name}, walk {seed}", kept[0], changes_of(c))


# ------------------------------------------------------------------------------------------------------ doctored lines


def fields(line: Line) -> Iterator[tuple[str, str]]:
    """Everything that a line says."""
    yield "attempt", ""
    for where in ("args", "post"):
        for name in getattr(line.emitted, where):
            yield where, name


def altered(run: Run, place: int, where: str, name: str, *, cut: bool = True) -> Run:
    """One field says something else; with `cut` nothing comes after."""
    line = run.lines[place]
    if where == "attempt":
        emitted = replace(line.emitted, attempt=AttemptId(line.emitted.attempt + 1))
    else:
        told = dict(getattr(line.emitted, where))
        told[name] = _other(told[name])
        emitted = replace(line.emitted, args=told) if where == "args" else replace(line.emitted, post=told)
    return replace(
        run, lines=(*run.lines[:place], replace(line, emitted=emitted), *(() if cut else run.lines[place + 1 :]))
    )


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str() if "@" in value:
            return f"{value}1"
        case str():
            return f"{value}x"
        case _:
            return 7


def dropped(run: Run, place: int) -> Run:
    """One line is missing."""
    return replace(run, lines=(*run.lines[:place], *run.lines[place + 1 :]))


def late(run: Run, place: int, after: int) -> Run:
    """One line comes after another one."""
    return replace(run, lines=(*run.lines[:place], *run.lines[place + 1 : after + 1], run.lines[place]))


def pair(lines: Sequence[Line], first: str, then: str) -> tuple[int, int]:
    """Where an action and the next one of another name, of the same attempt, stand."""
    for i, a in enumerate(lines):
        if a.action == first:
            for j, b in enumerate(lines[i + 1 :], i + 1):
                if b.action == then and b.emitted.attempt == a.emitted.attempt:
                    return i, j
    raise LookupError(f"no {then} after {first}")
