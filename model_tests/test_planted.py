"""Each planted fault is found by the state machine within the examples that CI runs.

One process hunts them one after the other, since the tables of loaders take longer to draw than most hunts.

Proofs: xor_reconstructs, inactive_unchanged, dedup_once
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from model_tests.planted import PLANTED

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = 220
"""As many as the machine runs in CI."""
IN_CI = ("codec", "mask", "late fence", "commit", "restore")
"""Found in seconds; deduplication takes longer than all of these."""
DEEP = tuple(sorted(PLANTED.keys() - set(IN_CI)))


@cache
def hunted(*names: str) -> dict[str, dict[str, Any]]:
    """What the hunts in another process say, by fault."""
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "ci", "PYTHONPATH": os.pathsep.join((str(ROOT), "spec"))}
    command = [sys.executable, "-m", "model_tests.planted", str(EXAMPLES), *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(names), done.stderr
    return {each["fault"]: each for each in found}


def require_found(name: str, found: dict[str, Any]) -> None:
    assert found["planted"] > 0, f"{PLANTED[name].what}: it never made a difference"
    assert found["by"], f"{PLANTED[name].what}: not found in {found['examples']} examples"


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_CI)
def test_a_planted_fault_is_found(name, tally):
    require_found(name, hunted(*IN_CI)[name])
    tally.add("mutants")


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DEEP)
def test_every_other_planted_fault_is_found_too(name, tally):
    require_found(name, hunted(*DEEP)[name])
    tally.add("mutants")


def test_there_is_a_planted_fault_for_each_part_that_keeps_bits_right():
    assert set(PLANTED) == {"codec", "mask", "deduplication", "late fence", "commit", "restore"}
    assert len({planted.seed for planted in PLANTED.values()}) == len(PLANTED)
