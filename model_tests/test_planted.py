"""Each planted fault is found by the state machine, in a process of its own, within the examples that CI runs.

Proofs: xor_reconstructs, inactive_unchanged, dedup_once
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_tests.planted import PLANTED

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = 220
"""As many as the machine runs in CI."""
IN_CI = ("restore",)
"""Found in seconds; the others take the deep run."""


def hunted(name: str) -> dict[str, str | int]:
    """What the hunt in another process says."""
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "ci", "PYTHONPATH": os.pathsep.join((str(ROOT), "spec"))}
    command = [sys.executable, "-m", "model_tests.planted", name, str(EXAMPLES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, str | int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_CI)
def test_a_planted_fault_is_found(name, tally):
    found = hunted(name)
    assert found["by"], f"{PLANTED[name].what}: not found in {found['examples']} examples"
    tally.add("mutants")


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(PLANTED.keys() - set(IN_CI)))
def test_every_other_planted_fault_is_found_too(name, tally):
    found = hunted(name)
    assert found["by"], f"{PLANTED[name].what}: not found in {found['examples']} examples"
    tally.add("mutants")


def test_there_is_a_planted_fault_for_each_part_that_keeps_bits_right():
    assert set(PLANTED) == {"codec", "mask", "deduplication", "late fence", "commit", "restore"}
    assert len({planted.seed for planted in PLANTED.values()}) == len(PLANTED)
