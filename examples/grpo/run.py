"""The run of all methods, from the command line.

    python -m examples.grpo.run --methods dense,relay --steps 6 --kill 2 --restart 5
    python -m examples.grpo.run --methods dense,store,relay --steps 50 --directory grpo-run
    python -m examples.grpo.run --methods relay --steps 10 --asynchronous

One method after the other, on the same two servers. What is finished stays in the directory, so a run that ended early
goes on with the same command. It ends with exit code 1 when stored bits differ anywhere, or when synchronous runs are
not the same token by token and reward by reward.
Not handled: methods in parallel (two cores hold one).

Paper: Section 8.3, Figures 9 and E.1
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from examples.grpo.asynchronous import run_steps_beside_rollouts
from examples.grpo.curves import Runs, differences, server_differences, write_curves, write_samples
from examples.grpo.dense_digest import DenseDigests
from examples.grpo.kills import KillPlan, every_five_steps, one_kill
from examples.grpo.methods import RefitMethod, methods_named, open_method
from examples.grpo.plot import draw, read_curves
from examples.grpo.records import RunDirectory, Settings, StepRecord
from examples.grpo.refits import Refits
from examples.grpo.servers import GrpoFleet, Servers
from examples.grpo.synchronous import StepLoop, run_steps
from nemo_dcr.errors import InvalidConfig, NemoDcrError
from nemo_dcr.testing.checkpoint import smollm2_checkpoint
from nemo_dcr.trace import LamportClock

INSTANCES = ("left", "right")
SAMPLES, GROUP = 16, 4
LONGEST = 1000
"""Steps that a plan is drawn for, so that a run may be made longer."""
EXIT_DIFFERS, EXIT_FAILED, EXIT_TERMINATED = 1, 4, 143


def settings_of(
    plan: KillPlan, *, seed: int, learning_rate: float, max_tokens: int, asynchronous: bool = False
) -> Settings:
    """The settings of a run. Raises: InvalidConfig for more tokens than the run is meant for."""
    if not 1 <= max_tokens <= 32:
        raise InvalidConfig("--max-tokens", f"must be 1 to 32, got {max_tokens}")
    return Settings(
        seed=seed,
        learning_rate=learning_rate,
        max_tokens=max_tokens,
        samples=SAMPLES,
        group=GROUP,
        kills=plan.kills,
        asynchronous=asynchronous,
    )


def plan_of(schedule: str, kill: int | None, restart: int | None) -> KillPlan:
    """One kill between these steps, or a kill every five steps; who dies is drawn from `schedule`."""
    if kill is not None and restart is not None:
        return one_kill(INSTANCES, kill=kill, restart=restart, seed=schedule)
    return every_five_steps(LONGEST, INSTANCES, schedule)


def run_method(
    method: RefitMethod,
    settings: Settings,
    steps: int,
    directory: Path,
    model: Path,
    servers: Servers,
    known: dict[str, str],
) -> tuple[StepRecord, ...]:
    """Finish the steps of one method; returns all of its records. Raises: NemoDcrError when it cannot go on."""
    begin = time.monotonic()
    records = RunDirectory(directory, settings)
    known.update({record.trainer_digest: next(iter(record.server_digests.values())) for record in records.records()})
    for left in directory.glob("life-*"):
        shutil.rmtree(left)  # of a life that was killed
    if len(records.records()) < steps:
        with tempfile.TemporaryDirectory(prefix="life-", dir=directory) as life, ExitStack() as stack:
            job, store = stack.enter_context(
                open_method(
                    *(method, Path(life), model),
                    learning_rate=settings.learning_rate,
                    seed=settings.seed,
                )
            )
            clock = LamportClock()
            fleet = stack.enter_context(closing(GrpoFleet(job, clock, servers, store.secrets)))
            refits = stack.enter_context(closing(Refits(job, fleet, clock, store)))
            dense = stack.enter_context(closing(DenseDigests(Path(life) / "dense.log")))
            if len(known) < steps:
                dense.start()
            refits.start()
            loop = StepLoop(settings, fleet, refits, dense, known, Path(life), sends_all=method.dense)
            if settings.asynchronous:
                run_steps_beside_rollouts(loop, records, steps, lambda record: tell(method, record, begin))
            else:
                run_steps(loop, records, KillPlan(settings.kills), steps, lambda record: tell(method, record, begin))
    return records.records()


def tell(method: RefitMethod, record: StepRecord, begin: float) -> None:
    """One line for a finished step; `begin` is when the method began."""
    events = [f"killed {record.killed}"] * bool(record.killed)
    events += [f"restored {record.restarted}"] * bool(record.restarted)
    parts = [
        f"{time.monotonic() - begin:5.0f} s",
        f"{method.name:>6} {record.step:>3}",
        f"reward {record.mean_reward:.3f}",
        f"kl {record.divergence:.2e}",
        f"changed {record.change_rate:.3%}",
        f"refit {record.refit_s:.2f} s",
        "+".join(record.modes),
        *events,
    ]
    print("  ".join(parts), flush=True)


def report(runs: Runs, directory: Path, *, same_plan: bool) -> bool:
    """Write tables and picture, say what differs; true when nothing does that must not.

    Runs of one kill plan must be the same; of others, and of asynchronous ones, only the servers' bits are compared.
    """
    write_curves(runs, directory / "curves.csv")
    write_samples(runs, directory / "samples.csv")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(read_curves(directory / "curves.csv"), directory / "curves.png")
    found = [*server_differences(runs), *(differences(runs) if same_plan else ())]
    for line in found:
        print(f"differs: {line}")
    steps = min(len(records) for records in runs.values())
    if not found:
        said = (
            "the same, token by token, reward by reward, bit by bit" if same_plan else "with exact weights everywhere"
        )
        print(f"{', '.join(runs)}: {steps} steps {said}")
    return not found


def main(
    methods: Annotated[str, typer.Option(help="Some of dense, store, s3, relay, with commas.")] = "dense,relay",
    steps: Annotated[int, typer.Option(min=1)] = 6,
    directory: Annotated[Path | None, typer.Option(help="Where records stay; a temporary one without it.")] = None,
    kill: Annotated[int | None, typer.Option(help="Kill one server at this step; else every five steps.")] = None,
    restart: Annotated[int | None, typer.Option(help="Restart it before this step.")] = None,
    schedule: Annotated[int, typer.Option(help="Which servers die is drawn from this.")] = 0,
    seed: Annotated[int, typer.Option(help="Of problems and samples.")] = 0,
    model: Annotated[Path | None, typer.Option(help="A BF16 checkpoint; SmolLM2-135M-Instruct without it.")] = None,
    learning_rate: float = 2e-6,
    max_tokens: int = 16,
    independent: Annotated[bool, typer.Option(help="Draw a kill plan for each method; compare weights only.")] = False,
    asynchronous: Annotated[bool, typer.Option(help="Compute rollouts beside learning; nobody is killed.")] = False,
) -> None:
    """Train SmolLM2-135M by GRPO with each method, and compare the runs."""
    if (kill is None) != (restart is None):
        raise InvalidConfig("--kill", "give --restart as well, or neither")
    chosen = methods_named(methods)
    plans = {
        method.name: KillPlan()
        if asynchronous
        else plan_of(f"{schedule}/{method.name}" if independent else str(schedule), kill, restart)
        for method in chosen
    }
    begin = time.monotonic()
    root = (directory or Path(tempfile.mkdtemp(prefix="nemo-dcr-grpo-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    try:
        checkpoint = smollm2_checkpoint(root / "model") if model is None else model.resolve()
        runs: dict[str, tuple[StepRecord, ...]] = {}
        known: dict[str, str] = {}
        with closing(Servers(checkpoint, root / "logs", {})) as servers:
            for method in chosen:
                settings = settings_of(
                    plans[method.name],
                    seed=seed,
                    learning_rate=learning_rate,
                    max_tokens=max_tokens,
                    asynchronous=asynchronous,
                )
                label = f"{method.name}-async" if asynchronous else method.name
                runs[label] = run_method(method, settings, steps, root / label, checkpoint, servers, known)
        same = report(runs, root, same_plan=len(runs) > 1 and not independent and not asynchronous)
    finally:
        if directory is None:
            shutil.rmtree(root, ignore_errors=True)
    print(f"took {time.monotonic() - begin:.0f} s")
    if not same:
        raise typer.Exit(EXIT_DIFFERS)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # so that what was started is ended
    try:
        typer.run(main)
    except NemoDcrError as problem:
        print(f"grpo: {problem}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
