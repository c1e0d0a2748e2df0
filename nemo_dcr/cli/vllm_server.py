"""One vLLM server of the demo, with all its processes in one group that ends with the demo.

    python -m nemo_dcr.cli.vllm_server PORT MODEL [FLAGS OF VLLM...]

vLLM's engine core outlives a front end that is killed. So this process stays beside the server and looks whether the
demo still lives; if not, it kills its whole group. Nothing of vLLM is imported here. The server listens on loopback,
with vLLM's control routes open, as the HTTP driver needs them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

LOOK_S = 0.5
"""How soon the end of the demo is noticed."""
KV_CACHE_BYTES = 128 << 20
SHUTDOWN_S = 15
"""How long the engine may take to end; with vLLM's default of 0 it is killed before it has closed its trace."""
FLAGS = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--served-model-name", "demo", "--host", "127.0.0.1"),
    *("--shutdown-timeout", str(SHUTDOWN_S)),
    *("--middleware", "nemo_dcr.adapters.vllm.middleware.RequestGate"),
    *("--weight-transfer-config", json.dumps({"backend": "nemo_dcr"})),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The one worker runs inside the engine core: a process less to start; its binding of threads is not wanted here.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def run_in_group(command: Sequence[str]) -> int:
    """Run `command` and return its exit code; a SIGTERM is passed on. The parent's end is that of the whole group."""
    parent = os.getppid()
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while True:
        try:
            return child.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)


def main(port: str, model: str, *more: str) -> int:
    """Run the server until it ends; `more` flags follow `FLAGS`, and the last one of a name counts."""
    # `vllm serve` runs the same; its own command looks for a package that is named vllm, which vllm-cpu is not.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--port",
        port,
        *FLAGS,
        *more,
    ]
    return run_in_group(command)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
