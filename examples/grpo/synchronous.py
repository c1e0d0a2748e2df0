"""The synchronous loop of one method: sample, learn, refit, compare all stored bits, record.

Every server computes a step's samples with the version before it, in batches that are the same for every method. After
each refit, and after each restore, the checksums of every live server must be those of a dense load of the trainer's
weights. A resumed run first repeats its recorded steps on the trainer alone and then sends one refit.
Not handled: several optimizer steps between two refits.

Paper: Section 8.3, Figures 9 and E.1
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.grpo.arithmetic import problems, reward
from examples.grpo.dense_digest import DenseDigests, server_digest
from examples.grpo.kills import KillPlan, shares
from examples.grpo.objective import advantages
from examples.grpo.policy import Learned, Row
from examples.grpo.records import RunDirectory, Sample, Settings, StepRecord, digest_of
from examples.grpo.refits import Refits
from examples.grpo.rollouts import sample_all
from examples.grpo.servers import GrpoFleet
from examples.grpo.trainer_rank import LEARN, Learn
from nemo_dcr.cli.fleet import CALL_S
from nemo_dcr.cli.trainer_process import GATHER, Gather
from nemo_dcr.errors import ConditionViolated, OperatorNeeded
from nemo_dcr.ids import InstanceId

LEAST_CHANGE = 0.0005
"""Below this change rate of a step, equal curves would prove nothing."""
SEEDS_OF_A_STEP = 1000
LEARN_S = 600.0
"""Limit of one optimizer step; seconds on an idle machine."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """One optimizer step of all ranks."""

    loss: float
    divergences: tuple[float, ...]
    """Mean over the tokens of each sample."""
    change_rate: float
    digest: str


class StepLoop:
    """The parts of a step, on the processes of one method."""

    def __init__(
        self,
        settings: Settings,
        fleet: GrpoFleet,
        refits: Refits,
        dense: DenseDigests,
        known: MutableMapping[str, str],
        scratch: Path,
        *,
        sends_all: bool,
    ) -> None:
        """`known`: the server digest that belongs to a trainer digest, of all methods so far."""
        self.settings, self.fleet, self.refits = settings, fleet, refits
        self._dense, self._known, self._scratch, self._sends_all = dense, known, scratch, sends_all

    def sample(self, step: int, *, pinned: bool = True) -> tuple[tuple[Sample, ...], tuple[float, ...]]:
        """The samples of a step by all live servers, and their rewards."""
        settings, servers = self.settings, self.fleet.rollout_servers()
        asked = problems(seed=settings.seed, step=step, count=settings.samples // settings.group)
        samples = sample_all(
            servers,
            [servers[0].tokenize(problem.prompt) for problem in asked],
            shares(settings.samples, settings.group, [server.instance for server in servers]),
            members=settings.group,
            max_tokens=settings.max_tokens,
            seed=(settings.seed * SEEDS_OF_A_STEP + step) * SEEDS_OF_A_STEP,
            pinned=pinned,
        )
        rewards = (reward(asked[number // settings.group], sample.text) for number, sample in enumerate(samples))
        return samples, tuple(rewards)

    def learn(self, samples: Sequence[Sample], rewards: Sequence[float], candidate: str) -> Learnt:
        """One optimizer step on all ranks; the weights are frozen as `candidate` unless it is empty.

        Raises: OperatorNeeded when an owner does not begin the transition.
        """
        weights = advantages(rewards, self.settings.group)
        rows = tuple(
            Row(sample.prompt, sample.tokens, sample.logprobs, advantage)
            for sample, advantage in zip(samples, weights, strict=True)
        )
        call = Learn(rows, candidate, self._sends_all and bool(candidate))
        ranks: list[Learned] = [
            learned for _, (learned, _) in sorted(self.fleet.endpoints.call_owners(LEARN, call, LEARN_S).items())
        ]
        for learned in ranks:
            if learned.problem:
                raise OperatorNeeded(f"an owner did not begin: {learned.problem}", "see the logs of the trainer ranks")
        sums = [value for learned in ranks for value in learned.divergences]
        return Learnt(
            loss=sum(learned.loss for learned in ranks),
            divergences=tuple(value / len(sample.tokens) for value, sample in zip(sums, samples, strict=True)),
            change_rate=sum(learned.changed for learned in ranks) / sum(learned.elements for learned in ranks),
            digest=digest_of([learned.digest for learned in ranks]),
        )

    def compare(self, trainer_digest: str) -> dict[str, str]:
        """The digest of every live server. Raises: ConditionViolated when one is not that of a dense load."""
        if trainer_digest not in self._known:
            target = self._scratch / "weights"
            self.fleet.endpoints.call_owners(GATHER, Gather(str(target)), CALL_S)
            self._known[trainer_digest] = self._dense.of(target)
            shutil.rmtree(target)
        expected = self._known[trainer_digest]
        found = {instance: server_digest(sums) for instance, sums in self.fleet.checksums().items()}
        for instance, digest in found.items():
            if digest != expected:
                raise ConditionViolated("SC3", instance, "its stored bits are not those of a dense load")
        return found


def resume(loop: StepLoop, records: Sequence[StepRecord], plan: KillPlan) -> str:
    """Bring trainer and servers to where the recorded steps ended; returns the trainer's digest, empty at the start.

    Raises: ConditionViolated when a repeated step gives other bits.
    """
    for record in records:
        candidate = f"resume-{record.step}" if record is records[-1] else ""
        learnt = loop.learn(record.samples, record.rewards, candidate)
        if learnt.digest != record.trainer_digest:
            raise ConditionViolated("SC3", f"step {record.step}", "its recorded samples gave other weights this time")
    if not records:
        return ""
    loop.refits.refit()
    loop.compare(records[-1].trainer_digest)
    down = plan.down_at(len(records) + 1)
    if down is not None:
        loop.refits.kill(InstanceId(down))
    return records[-1].trainer_digest


def require_change(learnt: Learnt, step: int) -> Learnt:
    """The same step. Raises: ConditionViolated when it changed too few elements to prove anything."""
    if learnt.change_rate <= LEAST_CHANGE:
        raise ConditionViolated("SC4", f"step {step}", f"only {learnt.change_rate:.4%} of the elements changed")
    return learnt


def run_steps(
    loop: StepLoop, directory: RunDirectory, plan: KillPlan, steps: int, tell: Callable[[StepRecord], None]
) -> None:
    """Finish the steps up to `steps`; those that are recorded are repeated, not sampled.

    Raises: ConditionViolated when stored bits differ, or a step changed too little to prove anything.
    """
    records = directory.records()
    digest, version, resumed = resume(loop, records, plan), min(1, len(records)), bool(records)
    for step in range(len(records) + 1, steps + 1):
        killed, restarted, down = plan.killed_at(step), plan.restarted_at(step), plan.down_at(step)
        if restarted is not None and InstanceId(restarted) not in loop.fleet.live:
            loop.refits.restore(InstanceId(restarted))
            loop.compare(digest)
        if down is not None:
            loop.fleet.start_early(InstanceId(down))
        samples, rewards = loop.sample(step)
        if {sample.version for sample in samples} != {version}:
            raise ConditionViolated("SC3", f"step {step}", f"a sample was not computed by version {version}")
        learnt = require_change(loop.learn(samples, rewards, f"step-{step}"), step)
        refit = loop.refits.refit(victim=None if killed is None else InstanceId(killed))
        digest, version = learnt.digest, refit.version
        record = StepRecord(
            step=step,
            samples=samples,
            rewards=rewards,
            divergences=learnt.divergences,
            lags=(0,) * len(samples),
            loss=learnt.loss,
            change_rate=learnt.change_rate,
            trainer_digest=digest,
            server_digests=loop.compare(digest),
            version=version,
            modes=refit.modes,
            refit_s=refit.refit_s,
            transition_s=refit.transition_s,
            killed=killed or "",
            restarted=restarted or "",
            resumed=resumed,
        )
        directory.finish(record)
        tell(record)
        resumed = False
