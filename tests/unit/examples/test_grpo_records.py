"""Records survive a kill of the run, tables hold what was recorded, and a comparison finds the smallest difference."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from examples.grpo.curves import CURVES, differences, server_differences, write_curves, write_samples
from examples.grpo.methods import methods_named
from examples.grpo.records import RunDirectory, Sample, Settings, StepRecord
from nemo_dcr.errors import InvalidConfig

SETTINGS = Settings(
    seed=0, learning_rate=1e-6, max_tokens=32, samples=2, group=2, kills=((2, 5, "left"),), asynchronous=False
)


def record(step: int, **changes) -> StepRecord:
    first = Sample((1, 2), (3, 4, 5), (-0.1, -1 / 3, -2.5e-7), " 12", "left", step - 1)
    second = replace(first, tokens=(3,), logprobs=(-0.5,), text=" 1", instance="right")
    made = StepRecord(
        step=step,
        samples=(first, second),
        rewards=(1.0, 0.25),
        divergences=(0.5, 0.1),
        lags=(0, 0),
        loss=-0.125,
        change_rate=0.01,
        trainer_digest=f"t{step}",
        server_digests={"left": f"s{step}", "right": f"s{step}"},
        version=step,
        modes=("xor",),
        refit_s=0.5,
        transition_s=0.75,
    )
    return replace(made, **changes)


def test_records_come_back_as_they_were_written(tmp_path):
    run = RunDirectory(tmp_path, SETTINGS)
    for step in (1, 2):
        run.finish(record(step))
    assert RunDirectory(tmp_path, SETTINGS).records() == (record(1), record(2))


def test_a_run_goes_on_after_the_last_step_without_a_gap(tmp_path):
    run = RunDirectory(tmp_path, SETTINGS)
    for step in (1, 3):
        run.finish(record(step))
    (tmp_path / ".step-0002.json").write_bytes(b"{ half of it")
    assert [found.step for found in run.records()] == [1]


def test_a_directory_of_other_settings_is_refused(tmp_path):
    RunDirectory(tmp_path, SETTINGS)
    with pytest.raises(InvalidConfig, match="name another one"):
        RunDirectory(tmp_path, replace(SETTINGS, seed=1))


def test_the_divergence_of_a_step_weighs_every_token_the_same():
    assert record(1).divergence == (3 * 0.5 + 0.1) / 4
    assert record(1).mean_reward == 0.625


def test_equal_runs_do_not_differ():
    runs = {"dense": [record(1), record(2)], "relay": [record(1), record(2, refit_s=9.0, modes=("dense",))]}
    assert differences(runs) == server_differences(runs) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rewards": (1.0, 0.26)}, "rewards differ"),
        ({"trainer_digest": "x"}, "trained weights differ"),
        ({"server_digests": {"left": "x", "right": "x"}}, "served weights differ"),
        (
            {"samples": (record(2).samples[0], replace(record(2).samples[1], tokens=(9,)))},
            "sample 1 differs from token 0",
        ),
        (
            {"samples": (replace(record(2).samples[0], logprobs=(-0.1, -1 / 3, -2.6e-7)), record(2).samples[1])},
            "sample 0 has the same tokens and other log probabilities",
        ),
        (
            {"samples": (replace(record(2).samples[0], tokens=(3, 4, 5, 6)), record(2).samples[1])},
            "sample 0 differs from token its end",
        ),
        (
            {"samples": (replace(record(2).samples[0], instance="right"), record(2).samples[1])},
            "sample 0 was computed by left and right",
        ),
    ],
)
def test_every_difference_is_found_and_named_with_its_step(change, told):
    runs = {"dense": [record(1), record(2)], "relay": [record(1), record(2, **change)]}
    (found,) = [line for line in differences(runs) if told in line]
    assert found.startswith("dense and relay at step 2: ")


def test_servers_of_one_run_that_hold_different_bits_are_found():
    other = record(1, server_digests={"left": "s1", "right": "other"})
    assert server_differences({"relay": [other]}) == ["relay at step 1: ['left', 'right'] hold different weights"]


def test_tables_hold_one_row_for_each_step_and_for_each_sample(tmp_path):
    runs = {"dense": [record(1), record(2, killed="left", lags=(1, 0))]}
    write_curves(runs, tmp_path / "curves.csv")
    write_samples(runs, tmp_path / "samples.csv")
    with (tmp_path / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(CURVES)
    assert [row["step"] for row in rows] == ["1", "2"]
    assert (rows[1]["killed"], rows[1]["mean_lag"], rows[1]["servers"]) == ("left", "0.500", "2")
    assert (rows[0]["mean_reward"], rows[0]["kl_per_token"]) == ("0.625000", "4.000e-01")
    with (tmp_path / "samples.csv").open(newline="") as file:
        samples = list(csv.DictReader(file))
    assert [(row["step"], row["sample"], row["lag"], row["tokens"]) for row in samples] == [
        *(("1", "0", "0", "3"), ("1", "1", "0", "1"), ("2", "0", "1", "3"), ("2", "1", "0", "1"))
    ]


def test_methods_are_named_once_each():
    assert [method.name for method in methods_named("dense, relay")] == ["dense", "relay"]
    for names in ("", "dense,dense", "nccl"):
        with pytest.raises(InvalidConfig, match="give some of"):
            methods_named(names)
