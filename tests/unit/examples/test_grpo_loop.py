"""The order of a run's steps, and what ends it: with parts that only note what they were asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.grpo.asynchronous import run_steps_beside_rollouts
from examples.grpo.kills import one_kill
from examples.grpo.records import RunDirectory, Sample, Settings
from examples.grpo.refits import Refit
from examples.grpo.synchronous import Learnt, run_steps
from nemo_dcr.errors import ConditionViolated

PLAN = one_kill(["left"], kill=2, restart=5, seed="0")
SETTINGS = Settings(seed=0, learning_rate=1e-6, max_tokens=4, samples=2, group=2, kills=PLAN.kills)


class Noted:
    """A loop, its fleet and its refits in one: notes every call, and trains by adding up digests."""

    def __init__(self, *, version_told: int | None = None, rate: float = 0.01) -> None:
        self.notes: list[str] = []
        self.settings, self.fleet, self.refits = SETTINGS, self, self
        self.live = ["left", "right"]
        self.version, self.digest = 0, "w"
        self.version_told, self.rate = version_told, rate

    def sample(self, step, *, pinned=True):
        self.notes.append(f"sample {step} on {'+'.join(self.live)}")
        version = self.version if self.version_told is None else self.version_told
        made = Sample((1,), (step,), (-0.1,), " 1", self.live[0], version)
        return (made, replace(made, text=" 2")), (1.0, 0.0)

    def learn(self, samples, rewards, candidate):
        self.notes.append(f"learn {samples[0].tokens[0]} {candidate}".rstrip())
        self.digest += str(samples[0].tokens[0])
        return Learnt(0.1, (0.0, 0.0), self.rate, self.digest)

    def compare(self, digest):
        self.notes.append(f"compare {digest}")
        return dict.fromkeys(self.live, digest)

    def refit(self, *, victim=None, gate=None):
        self.notes.append("refit" + (f" killing {victim}" if victim else "") + (f" {gate}" if gate else ""))
        if victim:
            self.live.remove(victim)
        self.version += 1
        return Refit(self.version, ("xor",), 0.1, 0.2)

    def kill(self, instance):
        self.notes.append(f"kill {instance}")
        self.live.remove(instance)

    def restore(self, instance):
        self.notes.append(f"restore {instance}")
        self.live = sorted([*self.live, instance])

    def start_early(self, instance):
        self.notes.append(f"start {instance}")


def run(loop, directory, steps, plan=PLAN):
    told = []
    run_steps(loop, directory, plan, steps, told.append)
    return told


def test_a_run_kills_and_restores_by_plan_and_compares_after_both(tmp_path):
    loop = Noted()
    told = run(loop, RunDirectory(tmp_path, SETTINGS), 5)
    assert loop.notes == [
        *("sample 1 on left+right", "learn 1 step-1", "refit", "compare w1"),
        *("sample 2 on left+right", "learn 2 step-2", "refit killing left", "compare w12"),
        *("start left", "sample 3 on right", "learn 3 step-3", "refit", "compare w123"),
        *("start left", "sample 4 on right", "learn 4 step-4", "refit", "compare w1234"),
        *("restore left", "compare w1234"),
        *("sample 5 on left+right", "learn 5 step-5", "refit", "compare w12345"),
    ]
    assert [(record.killed, record.restarted) for record in told] == [
        ("", ""),
        ("left", ""),
        *[("", "")] * 2,
        ("", "left"),
    ]
    assert not any(record.resumed for record in told)


def test_a_resumed_run_repeats_finished_steps_sends_one_refit_and_goes_on(tmp_path):
    whole = run(Noted(), RunDirectory(tmp_path / "whole", SETTINGS), 5)
    directory = RunDirectory(tmp_path / "parts", SETTINGS)
    run(Noted(), directory, 2)
    loop = Noted()
    run(loop, directory, 5)
    assert loop.notes[:5] == ["learn 1", "learn 2 resume-2", "refit", "compare w12", "kill left"]
    assert loop.notes[5:7] == ["start left", "sample 3 on right"]
    assert [record.resumed for record in directory.records()] == [False, False, True, False, False]
    for one, two in zip(whole, directory.records(), strict=True):
        assert (one.trainer_digest, one.rewards, one.server_digests) == (
            two.trainer_digest,
            two.rewards,
            two.server_digests,
        )


def test_a_finished_run_has_nothing_to_do_and_one_resumed_at_the_restart_finds_its_server_alive(tmp_path):
    directory = RunDirectory(tmp_path, SETTINGS)
    run(Noted(), directory, 4)
    loop = Noted()
    run(loop, directory, 5)
    assert loop.notes[-4:] == ["sample 5 on left+right", "learn 5 step-5", "refit", "compare w12345"]
    assert not any("kill" in note or "restore" in note for note in loop.notes)


def test_a_repeated_step_that_gives_other_bits_ends_the_run(tmp_path):
    directory = RunDirectory(tmp_path, SETTINGS)
    run(Noted(), directory, 2)
    other = Noted()
    other.digest = "v"
    with pytest.raises(ConditionViolated, match="other weights this time"):
        run(other, directory, 3)


def test_a_step_that_changes_too_little_ends_the_run(tmp_path):
    directory = RunDirectory(tmp_path, SETTINGS)
    with pytest.raises(ConditionViolated, match=r"0\.0500%"):
        run(Noted(rate=0.0005), directory, 1)
    assert directory.records() == ()
    run(Noted(rate=0.000501), directory, 1)
    assert len(directory.records()) == 1


def test_a_sample_of_another_version_ends_a_synchronous_run(tmp_path):
    with pytest.raises(ConditionViolated, match="not computed by version 1"):
        run(Noted(version_told=0), RunDirectory(tmp_path, SETTINGS), 2)


def test_an_asynchronous_run_samples_ahead_and_records_the_lag(tmp_path):
    directory = RunDirectory(tmp_path, replace(SETTINGS, kills=(), asynchronous=True))
    loop = Noted(version_told=0)
    run_steps_beside_rollouts(loop, directory, 3, lambda record: None)
    assert [record.lags for record in directory.records()] == [(0, 0), (1, 1), (2, 2)]
    assert [note for note in loop.notes if "sample" in note] == [f"sample {step} on left+right" for step in (1, 2, 3)]
    assert [note for note in loop.notes if "refit" in note] == ["refit async"] * 3
