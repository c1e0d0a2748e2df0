"""A run of Ray actors: refits, an engine that is killed, and one that comes back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_dcr.config import RefitConfig
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import Version
from tests.e2e.module_refits import until
from tests.ray import plans

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
REFIT = RefitConfig(heartbeat_s=0.05, lost_after_s=5.0)
WAIT_S = 120.0
"""Each actor is a process that imports torch, and all of them do at once."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def test_actors_refit_and_a_killed_engine_is_placed_anew(cluster: None, tmp_path: Path) -> None:
    from nemo_dcr.adapters.ray import EnginePlan, RayRun, TrainerPlan

    trainer = TrainerPlan(make=plans.policy, checkpoint=plans.TABLE, ranks=2)
    engines = {"wide": EnginePlan(make=plans.engine, ranks=2), "whole": EnginePlan(make=plans.engine)}
    with RayRun(tmp_path, trainer, engines, refit=REFIT) as run:

        def differing() -> list[str]:
            full = run.on_trainers(plans.served)[0]
            dense = {
                name: [plans.dense(full, rank, plan.ranks) for rank in range(plan.ranks)]
                for name, plan in engines.items()
            }
            return [name for name in engines if run.on_engine(name, plans.held) != dense[name]]

        for version in (1, 2):
            run.on_trainers(plans.train)
            assert run.refit(WAIT_S) == Version(version)
            assert differing() == []
        run.kill_engine("whole")
        run.on_trainers(plans.train)
        assert run.refit(WAIT_S) == Version(3)
        run.place_engine("whole")
        until(lambda: differing() == [])  # it is restored once the coordinator knows it
        run.on_trainers(plans.train)
        assert run.refit(WAIT_S) == Version(4)
        assert differing() == []


def test_a_run_without_an_engine_is_refused(tmp_path: Path) -> None:
    from nemo_dcr.adapters.ray import RayRun, TrainerPlan

    with pytest.raises(InvalidConfig, match="needs an engine"):
        RayRun(tmp_path, TrainerPlan(make=plans.policy, checkpoint=plans.TABLE), {})
