"""What a run over the emulated WAN consists of: hosts with one process each, their keys, the relay tree, the store.

Trainer ranks stand on the training hosts, one engine and one relay node on each rollout host, the object store behind
the boundary. The driver, which is the coordinator, moves onto the first training host. Every process has a key pair of
its own; control servers admit the coordinator, relay nodes admit whoever takes part.

Paper: Section 7 (both transports); Section 8.1 (testbed)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_dcr.cli.job import DemoJob, target_bytes
from nemo_dcr.cli.places import file_name
from nemo_dcr.cli.processes import Child
from nemo_dcr.errors import EndpointLost
from nemo_dcr.ids import InstanceId, receiver_id
from nemo_dcr.testing.regions import Host, Regions
from nemo_dcr.testing.seaweedfs import SeaweedServer
from nemo_dcr.transport.relay.keys import ALLOWED_NAME, KeyPair, new_keys
from nemo_dcr.transport.relay.tree import TreeNode, balanced_tree, write_tree

CONTROL_PORT, RELAY_PORT, STORE_PORT = 7400, 7500, 8333
PORTS = (CONTROL_PORT, RELAY_PORT, STORE_PORT)
COORDINATOR = "coordinator"
GLOO_INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0"}
"""The trainers' process group stays on the LAN of its region."""
_START_S = 60.0


class WanSite:
    """The hosts of one run and what stands on them; close it before the regions."""

    def __init__(self, regions: Regions, directory: Path, model: Path) -> None:
        """Make keys, tree and job, start the store and the relay nodes.

        Raises: OperatorNeeded when SeaweedFS is not installed; EndpointLost when a process does not start.
        """
        self.regions = regions
        self.directory = directory
        self._hosts: dict[str, Host] = {}
        for rank, host in enumerate(regions.training):
            self._hosts[f"owner-{rank}"] = host
        for host in regions.rollout:
            self._hosts[receiver_id(InstanceId(host.name), 0)] = host
        self._relays: list[Child] = []
        store = regions.store
        self.store = SeaweedServer(
            directory / "seaweedfs", host=store.address, port=STORE_PORT, within=store.command([])
        )
        try:
            self.job = self._plan(model)
            self._start_relays()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What every process needs beside the job: credentials, and the LAN for the process group."""
        held = self.store.credentials
        return {**GLOO_INTERFACE, "AWS_ACCESS_KEY_ID": held.access_key, "AWS_SECRET_ACCESS_KEY": held.secret_key}

    def within(self, name: str) -> Sequence[str]:
        """The command that puts a process on its host."""
        return self._hosts[name].command([])

    def close(self) -> None:
        """End relay nodes and store."""
        for relay in self._relays:
            relay.stop()
        self.store.close()

    def _plan(self, model: Path) -> DemoJob:
        keys = self.directory / "keys"
        pairs = {name: new_keys(keys / file_name(name)) for name in (COORDINATOR, *self._hosts)}
        nodes = {host.name: new_keys(keys / f"relay-{host.name}") for host in self.regions.rollout}
        for name in self._hosts:
            _admit(keys / file_name(name), [pairs[COORDINATOR]])
        for host in self.regions.rollout:
            _admit(keys / f"relay-{host.name}", [*pairs.values(), *nodes.values()])
        rollout = [
            TreeNode(host.name, f"tcp://{host.address}:{RELAY_PORT}", nodes[host.name].public)
            for host in self.regions.rollout
        ]
        write_tree(self.directory / "tree.json", balanced_tree(rollout, fan_out=2))
        job = DemoJob(
            run=str(self.directory / "run"),
            model=str(model),
            name=secrets.token_hex(8),
            owners=len(self.regions.training),
            instances={host.name: 1 for host in self.regions.rollout},
            chunk_target_bytes=target_bytes(model),
            bucket_target_bytes=target_bytes(model),
            # Half a second before the first payload is seen would be a tenth of a refit here.
            # The hosts are one machine: receivers of different hosts must not share what they downloaded.
            # Four payloads of 150 KB keep a link of 40 ms busy; more of them would stand in its queue, before listings.
            transport=f"{self.store.url}&look_most_s=0.1&share=none&parallel=4",
            # Checks overlap with transport here, so no time that they took could be subtracted from the latency.
            post_apply_check=False,
            listen={name: f"tcp://{host.address}:{CONTROL_PORT}" for name, host in self._hosts.items()},
            keys=str(keys),
            tree=str(self.directory / "tree.json"),
            relay_nodes={receiver_id(InstanceId(host.name), 0): host.name for host in self.regions.rollout},
        )
        job.save()
        return job

    def _start_relays(self) -> None:
        for host in self.regions.rollout:
            arguments = ["relay", "--node", host.name, "--tree", self.job.tree, "--run", self.job.name]
            arguments += ["--keys", str(self.directory / "keys" / f"relay-{host.name}")]
            log = self.directory / f"relay-{host.name}.log"
            self._relays.append(
                Child(f"relay {host.name}", "nemo_dcr.cli.main", arguments, log, within=host.command([]))
            )
        for relay in self._relays:
            _await(relay, lambda relay=relay: b"listens on" in relay.log.read_bytes())  # type: ignore[misc]


def _admit(directory: Path, clients: Sequence[KeyPair]) -> None:
    (directory / ALLOWED_NAME).write_text("".join(f"{client.public}\n" for client in clients), encoding="utf-8")


def _await(child: Child, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        child.require_alive()
        if time.monotonic() > deadline:
            raise EndpointLost(child.name, f"is not ready after {_START_S:g} s; see {child.log}")
        time.sleep(0.05)
