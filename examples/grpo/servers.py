"""vLLM servers that outlive one method, and the fleet of one method on them.

Starting a server costs more than a step. So a server that ends a method alive serves the next one: it is attached to
that method's run, which pauses it, drops its caches, and loads the start checkpoint again through a digest. A server
that was killed is gone, and a new process takes its place.
Not handled: servers that other programs started.

Paper: Section 7 (engines)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from examples.grpo.rollouts import RolloutServer
from nemo_dcr.adapters.vllm.engine_api import HttpEngine
from nemo_dcr.cli.fleet import CALL_S
from nemo_dcr.cli.job import DemoJob
from nemo_dcr.cli.processes import Child
from nemo_dcr.cli.vllm_fleet import VllmFleet, start_server
from nemo_dcr.ids import InstanceId
from nemo_dcr.trace import LamportClock

FLAGS = ("--max-num-seqs", "16", "--generation-config", "vllm", "--disable-uvicorn-access-log")
TRAINER = "examples.grpo.trainer_rank"


class Servers:
    """Running servers by instance; ends them when it is closed."""

    def __init__(self, model: Path, logs: Path, secrets: Mapping[str, str]) -> None:
        self._model, self._logs, self._secrets = str(model), logs, secrets
        self._running: dict[str, tuple[Child, str]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def obtain(self, instance: str) -> tuple[Child, str]:
        """The running server of this name, started if there is none; it may not answer yet."""
        held = self._running.get(instance)
        if held is None or not held[0].alive():
            log = self._logs / f"{instance}.log"
            self._running[instance] = start_server(instance, self._model, log, self._secrets, FLAGS)
        return self._running[instance]

    def close(self) -> None:
        """End all of them at once: their runs are over, and nobody waits for the end of a trace."""
        for child, _ in self._running.values():
            child.kill()
        self._running.clear()


class GrpoFleet(VllmFleet):
    """Trainer ranks of one method, and the servers that it borrows."""

    def __init__(self, job: DemoJob, clock: LamportClock, servers: Servers, secrets: Mapping[str, str]) -> None:
        super().__init__(job, clock, secrets, trainer=TRAINER)
        self._servers = servers

    @property
    def live(self) -> tuple[InstanceId, ...]:
        """Instances that are attached and alive, in the order of the job."""
        return tuple(InstanceId(i) for i in self.job.instances if i in self._urls and self._children[i].alive())

    def rollout_servers(self) -> list[RolloutServer]:
        """The live ones, for requests."""
        return [RolloutServer(instance, self._urls[instance]) for instance in self.live]

    def wait_until_served(self) -> None:
        """Return once every live server computes under its open gate. Raises: EndpointLost."""
        self._engines.wait_until_in_step(CALL_S)

    def checksums(self) -> dict[str, dict[str, str]]:
        """vLLM's own checksum of every parameter of each live server."""
        return {instance: HttpEngine(self._urls[instance]).checksums() for instance in self.live}

    def forget(self, instance: InstanceId) -> None:
        """A killed instance leaves the endpoints: nobody waits for it any more."""
        self._engines.remove_engine(instance)
        del self._urls[instance]

    def start_early(self, instance: InstanceId) -> None:
        """Start the process of an instance that comes back later, beside what runs now."""
        self._servers.obtain(instance)

    def close(self) -> None:
        """End the trainer ranks and release the sockets; live servers go back."""
        for instance in self.job.instances:
            self._urls.pop(instance, None)
            self._children.pop(instance, None)
        super().close()

    def _spawn_instance(self, instance: InstanceId) -> None:
        self._children[instance], self._urls[instance] = self._servers.obtain(instance)
