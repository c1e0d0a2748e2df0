"""Real `vllm serve` processes on loopback ports, ended as whole process groups."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S = 900.0
GATE = "nemo_dcr.adapters.vllm.middleware.RequestGate"
FLAGS = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--middleware", GATE),
    *("--weight-transfer-config", json.dumps({"backend": "nemo_dcr"}), "--host", "127.0.0.1"),
)


def environment(*, control_routes: bool = True) -> dict[str, str]:
    """For a server on a machine with few cores; compiled modules are kept, because every process imports them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "VLLM_SERVER_DEV_MODE": "1" if control_routes else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """One server; use it as a context manager."""

    def __init__(self, checkpoint: Path, log: Path, *flags: str, control_routes: bool = True) -> None:
        self.log = log
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        # `vllm serve` runs the same; its own command looks for a package that is named vllm, which vllm-cpu is not.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += ["--port", str(port), "--served-model-name", "m"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *FLAGS, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The one worker runs inside the engine core, which is a process less to start.
                env={**environment(control_routes=control_routes), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> Server:
        """Until it answers. Raises: AssertionError with the end of its log when it ends first."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server does not answer:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """SIGKILL to every process of the server."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def complete(self, prompt: list[int], tokens: int = 8, **options: Any) -> tuple[int, str | None, dict[str, Any]]:
        """Status, version header, and body of a greedy completion."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, **options}
        body |= {"return_token_ids": True, "ignore_eos": True, "detokenize": False}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return response.status, response.headers.get("x-nemo-dcr-version"), json.loads(response.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.headers.get("x-nemo-dcr-version"), json.loads(refused.read() or b"{}")
