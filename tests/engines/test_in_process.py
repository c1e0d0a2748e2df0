"""After refits a real engine answers as a freshly started one does: tokens, log probabilities and checksums."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.servers import environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


def run(directory, *arguments):
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.in_process", str(directory), *arguments],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(1700)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, (directory / "log").read_text(errors="replace")[-6000:]
    return json.loads((directory / "report.json").read_text())


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("qwen3-moe", "2"), id="experts on two ranks"),
        pytest.param(("qwen3-moe", "2", "--expert-parallel"), id="experts shared out", marks=pytest.mark.slow),
        pytest.param(("nemotron-h", "2"), id="mamba hybrid on two ranks", marks=pytest.mark.slow),
        pytest.param(("qwen3", "2"), id="dense on two ranks", marks=pytest.mark.slow),
        pytest.param(("qwen3", "1"), id="dense on one rank", marks=pytest.mark.slow),
        pytest.param(("qwen3", "1", "--async"), id="dense on an event loop", marks=pytest.mark.slow),
    ],
)
def test_a_refitted_engine_answers_as_a_fresh_one(tmp_path, arguments):
    report = run(tmp_path, *arguments)
    assert report["versions"] == [0, 1, 2]
    assert report["checksums"] == report["fresh_checksums"]
    assert len(report["checksums"]) >= 10 * int(arguments[1])
    assert report["answers"][2] == report["fresh"]
    # Some ranks had an update session open before the last refit, others had none.
    assert report.get("open") == ([False, True] if arguments[1] == "2" else None)
    # Each step changed what is answered, so an engine that stayed behind would show.
    assert report["answers"][0] != report["answers"][1] != report["answers"][2]
    # Requests that were admitted around a refit were computed by the version that they were told.
    assert {version for version, _, _ in report["streamed"]} >= ({0, 1} if "--async" in arguments else set())
    assert all(tokens == report["answers"][version][number][0] for version, number, tokens in report["streamed"])
