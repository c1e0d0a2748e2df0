"""After refits a real engine answers as a freshly started one does: tokens, log probabilities and checksums."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.servers import environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


def run(directory, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.in_process", str(directory), *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((directory / "report.json").read_text())


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("qwen3-moe", "2"), id="experts on two ranks"),
        pytest.param(("qwen3", "1"), id="dense on one rank", marks=pytest.mark.slow),
        pytest.param(("qwen3-moe", "2", "--expert-parallel"), id="experts shared out", marks=pytest.mark.slow),
    ],
)
def test_a_refitted_engine_answers_as_a_fresh_one(tmp_path, arguments):
    report = run(tmp_path, *arguments)
    assert report["versions"] == [0, 1, 2]
    assert report["checksums"] == report["fresh_checksums"]
    assert len(report["checksums"]) >= 10 * int(arguments[1])
    assert report["answers"][2] == report["fresh"]
    # Each step changed what is answered, so an engine that stayed behind would show.
    assert report["answers"][0] != report["answers"][1] != report["answers"][2]
