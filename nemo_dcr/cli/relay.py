"""The commands of the relay tree: `relay` runs one rollout node, `keys new` makes a key pair.

`relay` prints one line once it listens and one JSON line with its counters when SIGTERM or SIGINT ends it.
"""

from __future__ import annotations

import resource
import signal
import threading
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from nemo_dcr.config import MIB
from nemo_dcr.errors import InvalidConfig, TransportFailed
from nemo_dcr.transport.relay.keys import Security, new_keys, read_security
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.tree import RelayTree, read_tree

commands = typer.Typer()
key_commands = typer.Typer(no_args_is_help=True, help="Key pairs of relay nodes and of those who talk to them.")


@key_commands.command()
def new(
    directory: Annotated[Path, typer.Argument(help="Where the files go; made if it is absent.")] = Path("keys"),
) -> None:
    """Write a key pair, refuse to overwrite one, and print the public key."""
    typer.echo(new_keys(directory).public)


@commands.command()
def relay(
    node: Annotated[str, typer.Option(help="Name of this node, as trees name it.")],
    listen: Annotated[
        str, typer.Option(help="Address to listen on, such as tcp://10.0.0.7:7000. Default: the one in --tree.")
    ] = "",
    tree: Annotated[
        Path | None, typer.Option(help="JSON file with every node that a tree may name. Needed beyond loopback.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Key directory (nemo-dcr keys new); admits allowed.keys and the tree's nodes.")
    ] = None,
    run: Annotated[str, typer.Option(help="Name of the run; connections of another run are refused.")] = "",
    plaintext: Annotated[bool, typer.Option("--plaintext", help="Allow plaintext beyond loopback.")] = False,
    memory_mib: Annotated[int, typer.Option(min=1, help="Payloads kept in memory.")] = 4096,
    spill_mib: Annotated[int, typer.Option(min=1, help="Payloads kept in spill files past that.")] = 65536,
    spill_dir: Annotated[
        Path | None, typer.Option(help="Where spill files go; default: the temporary directory.")
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="MiB under way for one payload: bandwidth times delay.")] = 16,
    heartbeat_timeout_ms: Annotated[
        int, typer.Option(min=500, help="Silence after which a peer is lost; longer than 1 MiB takes on its link.")
    ] = 2000,
) -> None:
    """Run one node of a relay tree until SIGTERM."""
    known = read_tree(tree) if tree is not None else None
    address = listen or _listed_address(known, node)
    security = _security(keys, known, plaintext=plaintext)
    if known is None and (plaintext or keys is not None):
        raise InvalidConfig(
            "--tree", "name the nodes that a tree may hold; others could make this node connect anywhere"
        )
    if spill_dir is not None and not spill_dir.is_dir():
        raise InvalidConfig("--spill-dir", f"{spill_dir} is not a directory; make it first")
    stopping = threading.Event()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each spilled payload is an open file
    config = RelayConfig(
        memory_bytes=memory_mib * MIB,
        spill_bytes=spill_mib * MIB,
        window_frames=window,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    started = RelayNode(
        node,
        address,
        run=run,
        known=known,
        security=security,
        config=config,
        spill_directory=spill_dir,
        on_fault=lambda fault: stopping.set(),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        how = f"CURVE key {started.place.key}" if started.place.key else "plaintext"
        typer.echo(f"nemo-dcr relay: node {node} listens on {started.address} ({how})")
        stopping.wait()
        if started.ended.is_set():
            raise TransportFailed("relay", f"node {node} ended by a fault of its own; see the lines above, report it")
        typer.echo(msgspec.json.encode(started.counters()).decode())
    finally:
        started.close()


def _listed_address(known: RelayTree | None, node: str) -> str:
    if known is None:
        raise InvalidConfig("--listen", "give an address to listen on, or a --tree that lists this node")
    return known.node(node).address


def _security(keys: Path | None, known: RelayTree | None, *, plaintext: bool) -> Security:
    if keys is None:
        return Security(plaintext=plaintext)
    if plaintext:
        raise InvalidConfig("--plaintext", "contradicts --keys; leave one of them out")
    return read_security(keys, also=[each.key for each in known.nodes if each.key] if known is not None else [])


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.registered_commands += commands.registered_commands
    app.add_typer(key_commands, name="keys")


if __name__ == "__main__":
    commands()
