"""A run of Ray actors: refits, an engine that is killed, and one that comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_dcr.config import RefitConfig
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import Version
from tests.ray import plans

pytestmark = pytest.mark.ray
REFIT = RefitConfig(heartbeat_s=0.05, lost_after_s=5.0)


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

        def require_equal() -> None:
            full = run.on_trainers(plans.served)[0]
            for instance, plan in engines.items():
                wanted = [plans.dense(full, rank, plan.ranks) for rank in range(plan.ranks)]
                assert run.on_engine(instance, plans.held) == wanted, instance

        for version in (1, 2):
            run.on_trainers(plans.train)
            assert run.refit(60.0) == Version(version)
            require_equal()
        run.kill_engine("whole")
        run.on_trainers(plans.train)
        assert run.refit(60.0) == Version(3)
        run.place_engine("whole")
        deadline = time.monotonic() + 60.0
        while True:  # it is restored once the coordinator knows it
            try:
                require_equal()
                break
            except AssertionError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        run.on_trainers(plans.train)
        assert run.refit(60.0) == Version(4)
        require_equal()


def test_a_run_without_an_engine_is_refused(tmp_path: Path) -> None:
    from nemo_dcr.adapters.ray import RayRun, TrainerPlan

    with pytest.raises(InvalidConfig, match="needs an engine"):
        RayRun(tmp_path, TrainerPlan(make=plans.policy, checkpoint=plans.TABLE), {})
