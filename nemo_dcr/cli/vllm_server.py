"""One `vllm serve` process of the demo, which dies with the demo.

    python -m nemo_dcr.cli.vllm_server PORT MODEL

The process becomes vLLM's own command line; nothing of it is imported here. The server listens on loopback, with
vLLM's control routes open, as the HTTP driver needs them.
"""

from __future__ import annotations

import json
import os
import sys

from nemo_dcr.cli.processes import die_with_parent

KV_CACHE_BYTES = 128 << 20
FLAGS = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--served-model-name", "demo", "--host", "127.0.0.1"),
    *("--middleware", "nemo_dcr.adapters.vllm.middleware.RequestGate"),
    *("--weight-transfer-config", json.dumps({"backend": "nemo_dcr"})),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(port: str, model: str) -> None:
    """Become the server."""
    # `vllm serve` runs the same; its own command looks for a package that is named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port, *FLAGS]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1], sys.argv[2])
