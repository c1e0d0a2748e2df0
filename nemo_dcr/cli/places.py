"""Where one process of a job stands: its control address, its keys, and the transports that it opens.

On one machine every process listens on a free loopback port in plaintext and shares a payload store. Across hosts the
job names an address for each process, a folder with one key directory for each, and the relay tree; with a store and a
tree both are open, and the driver chooses one before each transition.
Not handled: bringing keys and trees to hosts; a deployment does that.

Paper: Section 7 (object storage, relay tree); Appendix B (channels are trusted or encrypted)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_dcr.cli.job import DemoJob
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.runtime.methods import Done
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT, Method
from nemo_dcr.transport.base import Publisher, Subscription, Transport
from nemo_dcr.transport.relay.keys import Security, read_security
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import read_tree
from nemo_dcr.transport.urls import open_transport

if TYPE_CHECKING:
    from nemo_dcr.transport.s3_client import S3Credentials

STORE, RELAY = "store", "relay"


@dataclass(frozen=True, slots=True)
class Choose:
    """Use this transport for attempts from now on."""

    transport: str


CHOOSE = Method("ChooseTransport", Choose, Done)


class ChosenTransport:
    """Several transports, of which one is used for new attempts; all are cleaned up."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        """The first one is chosen."""
        self._transports = dict(transports)
        self._chosen = next(iter(self._transports.values()))

    def choose(self, call: Choose) -> Done:
        """Use another one from now on; an attempt keeps what it was opened with."""
        if call.transport not in self._transports:
            return Done(f"this process has no transport {call.transport!r}")
        self._chosen = self._transports[call.transport]
        return Done()

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> Publisher:
        """As `Transport.publisher`."""
        return self._chosen.publisher(attempt, owner)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> Subscription:
        """As `Transport.subscribe`."""
        return self._chosen.subscribe(attempt, owners)

    def cleanup(self, through: AttemptId) -> None:
        """Clean up every transport."""
        for transport in self._transports.values():
            transport.cleanup(through)

    def close(self) -> None:
        """Close every transport."""
        for transport in self._transports.values():
            transport.close()


@dataclass(frozen=True, slots=True)
class Place:
    """One process."""

    listen: str
    """Where it answers control calls."""
    security: Security
    transport: ChosenTransport

    @property
    def key(self) -> str:
        """Its public key, for its published address; empty in plaintext."""
        return self.security.keys.public if self.security.keys is not None else ""


def security_of(job: DemoJob, name: str) -> Security:
    """The keys of a process. Raises: InvalidConfig when the job has keys and this process has none."""
    return read_security(Path(job.keys) / file_name(name)) if job.keys else PLAINTEXT


def place_of(job: DemoJob, name: str, credentials: S3Credentials | None = None) -> Place:
    """Where process `name` stands, with its transports open.

    Raises: InvalidConfig for a job that does not fit together; what `open_transport` raises.
    """
    security = security_of(job, name)
    transports: dict[str, Transport] = {}
    if job.transport or not job.tree:
        transports[STORE] = open_transport(job.transport_url, run=job.name, credentials=credentials)
    if job.tree:
        tree = read_tree(Path(job.tree))
        node = job.relay_nodes.get(name)
        if node is not None and node not in {each.name for each in tree.nodes}:
            raise InvalidConfig("job.relay_nodes", f"the tree has no node {node!r}, at which {name} receives")
        local = None if node is None else tree.node(node)
        transports[RELAY] = RelayTransport(tree, local=local, run=job.name, security=security)
    return Place(job.listen.get(name, LOOPBACK), security, ChosenTransport(transports))


def file_name(name: str) -> str:
    """A process name as a file name."""
    return name.replace("/", "-")
