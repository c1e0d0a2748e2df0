"""A real engine in a configuration that nobody proved ends at start-up, and says why.

The other configurations are refused by the same call, see `tests/failures/test_group_e_in_vllm.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import tiny
from tests.engines.servers import environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "v0", tiny.qwen3())


def start(checkpoint, options, log):
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.start", str(checkpoint), json.dumps(options)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(600)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param({"enable_lora": True}, "LoRA adapters", id="adapters"),
        pytest.param({"enable_sleep_mode": True}, "Sleep mode is not supported", id="sleep, by vLLM itself"),
    ],
)
def test_an_engine_that_nobody_proved_ends_at_start_up_with_the_reason(options, reason, checkpoint, tmp_path):
    assert start(checkpoint, options, tmp_path / "log") != 0
    told = (tmp_path / "log").read_text(errors="replace")
    assert reason in told, told[-3000:]
