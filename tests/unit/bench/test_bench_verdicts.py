"""The benchmark run: what a demand means, what the report says, and that a missed demand fails the run."""

from __future__ import annotations

import json
from math import log2
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import __main__ as run
from bench import construction, encode, entropy, report, weights
from bench.clock import best_together
from bench.rows import Row, Rows, Settings
from nemo_dcr.codec.payload import verify_payload
from nemo_dcr.codec.records import Encoding
from nemo_dcr.config import CodecConfig
from nemo_dcr.kernels import hot

SMALL = Settings(tensors=2, shape=(24, 32), rates=(0.05,), repeats=1, seconds=0.0)
HELD = Row("quick", 2.0, "x", 2.0, True, "First")
MISSED = Row("small", 1.1, "x", 1.0, False, "First")
TOLD = Row("copy", 9.0, "GB/s", None, True, "Second")


@pytest.mark.parametrize(
    ("value", "demand", "at_least", "held"),
    [
        (2.0, 2.0, True, True),
        (1.99, 2.0, True, False),
        (2.0, 2.0, False, True),
        (2.01, 2.0, False, False),
        (0.0, None, True, True),
        (float("nan"), 2.0, True, False),
    ],
)
def test_a_row_is_held_on_its_own_side_of_the_demand(
    value: float, demand: float | None, at_least: bool, held: bool
) -> None:
    assert Row("", value, "x", demand, at_least, "").held is held


def test_the_report_has_each_row_under_its_group_with_its_verdict(tmp_path: Path) -> None:
    report.write(tmp_path, [HELD, MISSED, TOLD])
    page = (tmp_path / "report.md").read_text()
    assert page.index("## First") < page.index("| quick | 2 x | >= 2 | held |") < page.index("## Second")
    assert "| small | 1.1 x | <= 1 | missed |" in page
    assert "| copy | 9 GB/s |  |  |" in page
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["name"], row["held"]) for row in rows] == [("quick", True), ("small", False), ("copy", True)]


@pytest.mark.parametrize(("rows", "code"), [([HELD, TOLD], 0), ([HELD, MISSED], 1)])
def test_a_missed_demand_fails_the_run_and_is_reported(
    rows: list[Row], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(settings: Settings) -> Rows:
        yield from rows

    monkeypatch.setattr(run, "MODULES", {"encode": measured})
    threads = torch.get_num_threads()
    try:
        assert run.main(["--out", str(tmp_path)]) == code
    finally:
        hot.cool()
        torch.set_num_threads(threads)
    assert (tmp_path / "report.md").exists()


def test_the_entropy_bound_is_that_of_known_distributions() -> None:
    assert entropy.location_bytes([(8, 16)]) == 2.0
    assert entropy.location_bytes([(0, 16), (16, 16)]) == 0.0
    assert round(entropy.location_bytes([(1, 4)]), 9) == round((log2(4) + 3 * log2(4 / 3)) / 8, 9)
    assert entropy.value_bytes(np.array([7, 7, 7], "<u2")) == 0.0
    assert entropy.value_bytes(np.array([1, 2, 3, 4] * 4, "<u2")) == 4.0


def test_experts_change_in_about_the_given_share_of_their_elements() -> None:
    pairs = weights.experts(Settings(tensors=2, shape=(300, 400)), 0.03)
    changed = sum(int((pair.new != pair.old).sum()) for pair in pairs)
    assert 0.028 < changed / 240_000 < 0.032


def test_what_is_emitted_is_what_a_payload_carries() -> None:
    pairs = weights.experts(SMALL, 0.05)
    changed = [np.flatnonzero(pair.new != pair.old) for pair in pairs]
    items = verify_payload(encode.payload(pairs, Encoding.XOR).data, limits=CodecConfig()).decode()
    assert [item.flat_indices().tolist() for item in items] == [at.tolist() for at in changed]
    gaps = sum(len(at) - 1 for at in changed)
    assert encode.emitter(pairs)() == gaps + 2 * sum(map(len, changed))


def test_methods_take_turns() -> None:
    calls: list[str] = []
    best_together({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, SMALL)
    assert calls == ["a", "b", "a", "b"]


def test_construction_and_commit_are_measured_on_an_owner() -> None:
    pairs = weights.experts(SMALL, 0.05)
    rows = {row.name: row for row in construction.measured(pairs, SMALL)}
    changed = sum(int((pair.new != pair.old).sum()) for pair in pairs)
    assert round(rows["changed elements"].value, 9) == round(100 * changed / sum(len(pair.old) for pair in pairs), 9)
    assert rows["compare, encode, zstd, digest"].value > 0
    assert rows["commit over index_copy_ of the changes"].value > 0
