"""A real engine in a configuration that nobody proved ends at start-up, and says why.

Where vLLM itself refuses a configuration on a CPU, its own reason is what is looked for. The rules themselves are
tested without an engine in `tests/unit/adapters/test_support.py` and `tests/failures/test_group_e_in_vllm.py`.
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
from tests.engines.servers import Server, environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
DRAFT = "a draft model or MTP head"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories by name; all but the first have a configuration only, and serve with dummy weights."""
    directory = tmp_path_factory.mktemp("models")
    dense = tiny.write_checkpoint(directory / "dense", tiny.qwen3())
    return {
        "dense": dense,
        "fp8 blocks": tiny.write_config(directory / "blocks", tiny.qwen3(quantization_config=tiny.FP8_BLOCKS)),
        "mtp": tiny.write_config(directory / "mtp", tiny.mimo()),
    }


def start(checkpoint, options, log):
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.start", str(checkpoint), json.dumps(options)],
            cwd=ROOT,
            # Engine core and single worker stay in one process: two imports of vLLM less.
            env={**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
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


N_GRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
DUMMY = {"load_format": "dummy"}


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        pytest.param("dense", {"enable_lora": True}, "LoRA adapters", id="adapters"),
        pytest.param("dense", {"enable_sleep_mode": True}, "Sleep mode is not supported", id="sleep, by vLLM itself"),
        pytest.param("dense", {"speculative_config": N_GRAMS}, DRAFT, id="draft by n-grams"),
        pytest.param(
            "mtp", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, **DUMMY}, DRAFT, id="MTP head"
        ),
        pytest.param("dense", {"quantization": "fp8"}, "quantization 'fp8'", id="quantized on loading"),
        pytest.param("fp8 blocks", DUMMY, "quantization 'fp8'", id="FP8 block scales"),
        pytest.param("dense", {"pipeline_parallel_size": 2}, "pipeline parallelism", id="pipeline"),
        pytest.param(
            "dense", {"data_parallel_size": 2}, r"LLM(data_parallel_size=2) is not supported", id="replicas, by vLLM"
        ),
    ],
)
def test_an_engine_that_nobody_proved_ends_at_start_up_with_the_reason(model, options, reason, checkpoints, tmp_path):
    assert start(checkpoints[model], options, tmp_path / "log") != 0
    told = (tmp_path / "log").read_text(errors="replace")
    assert reason in told, told[-3000:]


def test_a_server_of_several_replicas_ends_at_start_up_with_the_reason(checkpoints, tmp_path):
    server = Server(checkpoints["dense"], tmp_path / "log", "--data-parallel-size", "2")
    with server, pytest.raises(AssertionError, match="the server ended"):
        server.wait()
    told = server.log.read_text(errors="replace")
    assert "data parallelism inside one engine" in told, told[-3000:]
