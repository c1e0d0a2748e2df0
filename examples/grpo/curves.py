"""The curves of all methods as one table, every sample as another, and the comparison that the run is for.

Synchronous runs under one kill plan must agree token by token, reward by reward and bit by bit; a difference is named
with its step and its first place. Log probabilities are compared as the numbers that servers told, to the last digit.
Not handled: smoothing; runs with different settings (records refuses them).

Paper: Section 8.3, Figure 9 (mean reward and KL of three methods); Figure 2 (change rate)
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.grpo.records import StepRecord

Runs = Mapping[str, Sequence[StepRecord]]
"""Records by method."""
CURVES = (
    *("method", "step", "mean_reward", "kl_per_token", "change_rate", "refit_s", "transition_s", "attempts"),
    *("servers", "killed", "restarted", "resumed", "mean_lag", "trainer_digest"),
)
SAMPLES = ("method", "step", "sample", "instance", "version", "lag", "tokens", "reward", "kl_per_token")


def write_curves(runs: Runs, path: Path) -> None:
    """One row for each step of each method."""
    rows = [
        (
            *(method, record.step, f"{record.mean_reward:.6f}", f"{record.divergence:.3e}"),
            *(f"{record.change_rate:.6f}", f"{record.refit_s:.3f}", f"{record.transition_s:.3f}"),
            *("+".join(record.modes), len({sample.instance for sample in record.samples})),
            *(record.killed, record.restarted, int(record.resumed)),
            *(f"{sum(record.lags) / len(record.lags):.3f}", record.trainer_digest[:16]),
        )
        for method, records in runs.items()
        for record in records
    ]
    _write(path, CURVES, rows)


def write_samples(runs: Runs, path: Path) -> None:
    """One row for each sample: its reward and divergence, and how many versions it was behind."""
    rows = [
        (
            *(method, record.step, number, sample.instance, sample.version, lag),
            *(len(sample.tokens), f"{reward:.6f}", f"{divergence:.3e}"),
        )
        for method, records in runs.items()
        for record in records
        for number, (sample, lag, reward, divergence) in enumerate(
            zip(record.samples, record.lags, record.rewards, record.divergences, strict=True)
        )
    ]
    _write(path, SAMPLES, rows)


def _write(path: Path, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(head)
        table.writerows(rows)


def differences(runs: Runs) -> list[str]:
    """What differs between the first method and each other one, over the steps that both have; empty when nothing."""
    names = list(runs)
    found: list[str] = []
    for other in names[1:]:
        for left, right in zip(runs[names[0]], runs[other], strict=False):
            at = f"{names[0]} and {other} at step {left.step}"
            found += [f"{at}: {what}" for what in _step_differences(left, right)]
    return found


def server_differences(runs: Runs) -> list[str]:
    """Steps after which two live servers of one run hold different bits."""
    return [
        f"{method} at step {record.step}: {sorted(record.server_digests)} hold different weights"
        for method, records in runs.items()
        for record in records
        if len(set(record.server_digests.values())) != 1
    ]


def _step_differences(left: StepRecord, right: StepRecord) -> list[str]:
    found = []
    for number, (one, two) in enumerate(zip(left.samples, right.samples, strict=True)):
        if one.instance != two.instance:
            found.append(f"sample {number} was computed by {one.instance} and {two.instance}")
        if (one.prompt, one.tokens) != (two.prompt, two.tokens):
            place = next((i for i, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=False)) if a != b), "its end")
            found.append(f"sample {number} differs from token {place} on")
        elif one.logprobs != two.logprobs:
            found.append(f"sample {number} has the same tokens and other log probabilities")
    if left.rewards != right.rewards:
        found.append("rewards differ")
    if left.trainer_digest != right.trainer_digest:
        found.append("trained weights differ")
    if set(left.server_digests.values()) != set(right.server_digests.values()):
        found.append("served weights differ")
    return found
