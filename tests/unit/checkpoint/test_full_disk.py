"""A real file system that fills up under a command, at every step: the base stays whole, or a second run finishes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_dcr.checkpoint.diff import diff
from tests.unit.checkpoint.checkpoints import flipped, tensor, write_checkpoint

ROOT = Path(__file__).parents[3]
OLD = {f"w{number}": tensor("BF16", (50, 400), number) for number in range(4)} | {"gone": tensor("U8", (5,))}
NEW = {name: flipped(OLD[name], 0, 399) for name in ("w0", "w2", "w3")} | {"w1": OLD["w1"], "new": tensor("F32", (9,))}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("full")
    old = write_checkpoint(tmp / "old", OLD, shards=2, files={"config.json": b"1", "sub/gone.txt": b"x"})
    new = write_checkpoint(tmp / "new", NEW, shards=3, files={"config.json": b"2", "more/added.txt": b"y"})
    diff(old, new, tmp / "delta")
    return tmp


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bytes", "files"])
@pytest.mark.parametrize(
    ("mode", "states"),
    [
        ("in-place", {"full, old", "full, journal", "done, new"}),
        ("out", {"full, nothing", "done, all"}),
        ("diff", {"full, nothing", "done, all"}),
    ],
)
def test_disk_that_fills_up_at_any_step_leaves_all_or_nothing_and_a_second_run_finishes(
    mode, states, what, places, record_property
):
    arguments = [mode, what, *(str(places / name) for name in ("old", "new", "delta"))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.filling", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
    report = json.loads(done.stdout)
    record_property("means", report["means"])
    assert report["steps"] >= 10
    assert set(report["states"]) <= states
    assert {state for state in states if state.startswith("full")} - set(report["states"]) <= {"full, journal"}
