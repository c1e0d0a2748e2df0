"""How payloads of a demo run travel: a directory, an S3 bucket of a server that is started or named, or a relay tree.

A server that is started here gets credentials of its own; they reach the other processes as environment variables and
are never written to the job. A server that is named is tried before anything else starts, with the credentials that
boto3 finds. A relay tree has two nodes on loopback addresses, in plaintext, one for each instance; owners stream to the
first, and everything that the second one's receivers get comes through it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_dcr.cli.processes import Child
from nemo_dcr.errors import EndpointLost, InvalidConfig, OperatorNeeded
from nemo_dcr.ids import AttemptId
from nemo_dcr.transport.relay.tree import TreeNode, balanced_tree, write_tree
from nemo_dcr.transport.urls import open_transport

if TYPE_CHECKING:
    from nemo_dcr.transport.s3_client import S3Credentials

FILE, S3, RELAY = "file", "s3", "relay"
RELAY_NODES = ("node-0", "node-1")
_STARTS_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PayloadStore:
    """What processes need to open the store."""

    url: str = ""
    """Empty for the store in the run directory."""
    credentials: S3Credentials | None = None
    """None asks boto3's standard chain."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The credentials as boto3 finds them in the environment."""
    name: str = ""
    """Of the run that relay nodes serve; empty where the run may choose."""
    tree: Path | None = None
    """JSON file of the relay tree; with it no store is used."""
    nodes: tuple[str, ...] = ()
    """Names of its nodes, at which receivers may read."""


FILES = PayloadStore()


@contextmanager
def open_payload_store(kind: str, url: str | None, directory: Path) -> Iterator[PayloadStore]:
    """The store of a run: `file`, `relay`, or `s3` at `url`, else on a SeaweedFS that keeps its files in `directory`.

    The relay tree has its logs and its file there too.
    Raises: InvalidConfig for a URL that is no S3 URL; OperatorNeeded when a package is missing; TransportFailed when
    the named server cannot be used; EndpointLost when SeaweedFS or a relay node does not start.
    """
    if kind != S3 and url is not None:
        raise InvalidConfig("--s3-url", "needs --transport s3")
    if kind == FILE:
        yield FILES
        return
    if kind == RELAY:
        with _relay_tree(directory) as store:
            yield store
        return
    if url is not None:
        if not url.startswith("s3://"):
            raise InvalidConfig("--s3-url", f"must be s3://BUCKET/PREFIX?endpoint=URL&region=NAME, got {url!r}")
        open_transport(url, run="nemo-dcr-check").cleanup(AttemptId(0))
        yield PayloadStore(url=url)
        return
    try:
        from nemo_dcr.testing.seaweedfs import SeaweedServer
    except ModuleNotFoundError as error:
        raise OperatorNeeded("object storage over S3 needs boto3", "pip install 'nemo-dcr[s3,seaweedfs]'") from error
    with SeaweedServer(directory) as server:
        held = server.credentials
        secrets = {"AWS_ACCESS_KEY_ID": held.access_key, "AWS_SECRET_ACCESS_KEY": held.secret_key}
        yield PayloadStore(url=server.url, credentials=held, secrets=secrets)


@contextmanager
def _relay_tree(directory: Path) -> Iterator[PayloadStore]:
    directory.mkdir(parents=True, exist_ok=True)
    name = secrets.token_hex(8)
    with ExitStack() as running:
        children = []
        for node in RELAY_NODES:
            log = directory / f"{node}.log"
            arguments = ["relay", "--node", node, "--listen", "tcp://127.0.0.1:*", "--run", name]
            children.append(Child(f"relay {node}", "nemo_dcr.cli.main", arguments, log))
            running.callback(children[-1].stop)
        tree = balanced_tree(
            [TreeNode(node, _address(child)) for node, child in zip(RELAY_NODES, children, strict=True)]
        )
        write_tree(directory / "tree.json", tree)
        yield PayloadStore(name=name, tree=directory / "tree.json", nodes=RELAY_NODES)


def _address(child: Child) -> str:
    """Where a relay node listens, as it says. Raises: EndpointLost when it ends, or says nothing in time."""
    deadline = time.monotonic() + _STARTS_S
    while time.monotonic() < deadline:
        child.require_alive()
        if told := re.search(r"listens on (tcp://\S+) ", child.log.read_text(encoding="utf-8")):
            return told[1]
        time.sleep(0.05)
    raise EndpointLost(child.name, f"is not ready after {_STARTS_S:g} s; see {child.log}")
