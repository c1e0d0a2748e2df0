"""The asynchronous loop: the next step's samples are computed while this step learns and its refit is staged.

The gate closes only when everything is staged, and a request that is admitted before keeps its version to its last
token. So a sample may be behind the policy that learns from it; its lag is the number of committed versions between
the two, told by the response itself. The clipped ratio corrects for it, and the divergence contains it.
Not handled: kills (the synchronous loop has them); batches that are the same in two runs.

Paper: Section 7 (asynchronous gate); Section 8.3 (asynchronous training)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from examples.grpo.kills import KillPlan
from examples.grpo.records import RunDirectory, Sample, StepRecord
from examples.grpo.synchronous import StepLoop, require_change, resume
from nemo_dcr.config import GateMode
from nemo_dcr.errors import ConditionViolated


def lags(samples: tuple[Sample, ...], version: int) -> tuple[int, ...]:
    """How many versions each sample is behind `version`. Raises: ConditionViolated for one that is ahead of it."""
    found = tuple(version - sample.version for sample in samples)
    if min(found) < 0:
        raise ConditionViolated("SC3", f"version {version}", "a sample was computed by a version that is not committed")
    return found


def run_steps_beside_rollouts(
    loop: StepLoop, directory: RunDirectory, steps: int, tell: Callable[[StepRecord], None]
) -> None:
    """Finish the steps up to `steps`. Raises: as `synchronous.run_steps`."""
    records = directory.records()
    resume(loop, records, KillPlan())
    version, resumed = min(1, len(records)), bool(records)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(loop.sample, len(records) + 1, pinned=False)
        for step in range(len(records) + 1, steps + 1):
            samples, rewards = ahead.result()
            if step < steps:
                ahead = pool.submit(loop.sample, step + 1, pinned=False)
            behind = lags(samples, version)
            learnt = require_change(loop.learn(samples, rewards, f"step-{step}"), step)
            refit = loop.refits.refit(gate=GateMode.ASYNC)
            version = refit.version
            record = StepRecord(
                step=step,
                samples=samples,
                rewards=rewards,
                divergences=learnt.divergences,
                lags=behind,
                loss=learnt.loss,
                change_rate=learnt.change_rate,
                trainer_digest=learnt.digest,
                server_digests=loop.compare(learnt.digest),
                version=version,
                modes=refit.modes,
                refit_s=refit.refit_s,
                transition_s=refit.transition_s,
                resumed=resumed,
            )
            directory.finish(record)
            tell(record)
            resumed = False
