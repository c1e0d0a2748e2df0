"""The demo's fleet with real vLLM servers: the same trainer processes, and one `vllm serve` for each instance.

Every server is driven over its HTTP routes on loopback; ranks are reached over their control sockets, as the reference
engine's are.

Paper: Section 7 (engines)
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_dcr.adapters.vllm.endpoints import EngineEndpoints
from nemo_dcr.adapters.vllm.engine_api import HttpEngine
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.cli.fleet import CALL_S, Fleet
from nemo_dcr.cli.job import DemoJob
from nemo_dcr.cli.processes import Child
from nemo_dcr.cli.vllm_server import ENVIRONMENT, SHUTDOWN_S
from nemo_dcr.errors import EndpointLost
from nemo_dcr.ids import InstanceId, ReceiverId
from nemo_dcr.runtime.trace_file import declare_killed
from nemo_dcr.trace import LamportClock

START_S = 900.0
"""Limit for a server to load the model and answer; seconds on an idle machine, minutes on a busy one."""
STOP_S = SHUTDOWN_S + 10.0
"""For a server that was told to end."""
TOKENS = 12
"""Of a completion."""


def start_server(
    name: str, model: str, log: Path, secrets: Mapping[str, str], flags: Sequence[str] = ()
) -> tuple[Child, str]:
    """Start a server on a free loopback port; returns its process and its base address, before it answers.

    `flags` follow those of `vllm_server`, and the last one of a name counts.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = [port, model, *flags]
    child = Child(name, "nemo_dcr.cli.vllm_server", arguments, log, {**ENVIRONMENT, **secrets})
    return child, f"http://127.0.0.1:{port}"


class VllmFleet(Fleet):
    """Trainer processes and vLLM servers of one run."""

    def __init__(
        self, job: DemoJob, clock: LamportClock, secrets: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """`options`: further ones of `Fleet`."""
        self._engines = EngineEndpoints(clock)
        self._urls: dict[str, str] = {}
        super().__init__(job, clock, self._engines, secrets, **options)

    def kill(self, instance: InstanceId) -> None:
        """SIGKILL every process of one server."""
        self._children[instance].kill()
        for receiver in self.receivers([instance]):
            declare_killed(self.job.traces, receiver, self._addresses[receiver].incarnation)

    def complete(self, prompt: str) -> dict[str, str]:
        """The greedy completion of each instance."""
        self._engines.wait_until_in_step(CALL_S)
        return {instance: self._complete(url, prompt) for instance, url in self._urls.items()}

    def close(self) -> None:
        """End every child process and release the sockets."""
        self.endpoints.close()
        for instance in self._urls:
            self._children[instance].stop(STOP_S)
            self._children[instance].kill()  # what a server that was told to stop left behind
        super().close()

    def _complete(self, url: str, prompt: str) -> str:
        body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_S) as response:
            return str(json.loads(response.read())["choices"][0]["text"])

    def _spawn_instance(self, instance: InstanceId) -> None:
        log = self.job.directory / "logs" / f"{instance}.log"
        self._children[instance], self._urls[instance] = start_server(instance, self.job.model, log, self.secrets)

    def _join(self, instance: InstanceId) -> list[ReceiverId]:
        self._wait_until_healthy(instance)
        settings = Settings(
            instance=instance,
            directory=str(self.job.directory),
            store=self.job.url_at(self.receivers([instance])[0]),
            run=self.job.name,
            post_apply_check=self.job.post_apply_check,
        )
        receivers = self.receivers([instance])
        found = self._engines.add_engine(HttpEngine(self._urls[instance]), settings, len(receivers), START_S)
        self._addresses.update(zip(receivers, found, strict=True))
        return receivers

    def _wait_until_healthy(self, instance: InstanceId) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self._children[instance].require_alive()
            try:
                with urllib.request.urlopen(f"{self._urls[instance]}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise EndpointLost(instance, f"the server did not answer within {START_S:g} s")
