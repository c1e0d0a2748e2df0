"""The command `coordinator`: run one coordinator of a deployment, active or standby.

It finds owners and receivers by the address files of a directory, opens the commit record by its URL, and ends with
code 5 when another coordinator took over. SIGTERM ends it with 0; nothing of a coordinator is lost with it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_dcr.adapters.prometheus import open_metrics
from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.config_file import Configuration, load_config
from nemo_dcr.control import open_control
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import OwnerId
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.runtime.addresses import new_incarnation
from nemo_dcr.runtime.chronicle import Chronicle, tell_all
from nemo_dcr.runtime.coordinator_node import ACTIVE, CoordinatorNode
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.trace import LamportClock, NullTracer
from nemo_dcr.transport.relay.keys import read_security
from nemo_dcr.transport.urls import open_transport

commands = typer.Typer()


@commands.command()
def coordinator(
    directory: Annotated[Path, typer.Argument(help="Where the processes of the run publish their addresses.")],
    control: Annotated[str, typer.Option(help="URL of the commit record, such as sqlite:////DIRECTORY/record.sqlite.")],
    transport: Annotated[str, typer.Option(help="URL of the payloads, such as file:///DIRECTORY or s3://BUCKET.")],
    run: Annotated[str, typer.Option(help="Name of the run, the same in all its processes.")],
    owners: Annotated[int, typer.Option(min=1, help="Trainer ranks; no attempt runs without all of them.")],
    instances: Annotated[int, typer.Option(min=1, help="The first version waits for so many engine instances.")] = 1,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait, and take over when the active coordinator is gone.")
    ] = False,
    name: Annotated[
        str, typer.Option(help="It is called coordinator-NAME; default: the host's name and the process id.")
    ] = "",
    takeover_after_s: Annotated[float, typer.Option(min=0.1, help="A standby waits so long for a silent one.")] = 5.0,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings (see `nemo-dcr config`); the options below go before it.")
    ] = None,
    gate: Annotated[GateMode | None, typer.Option(help="When request gates close.", show_default="sync")] = None,
    attempt_deadline_s: Annotated[
        float | None, typer.Option(min=0.1, help="An attempt fails after so long.", show_default="600")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, help="A candidate is given up after so many.", show_default="5")
    ] = None,
    heartbeat_s: Annotated[
        float | None, typer.Option(min=0.01, help="How often endpoints are asked.", show_default="0.2")
    ] = None,
    lost_after_s: Annotated[
        float | None, typer.Option(min=0.1, help="An endpoint is lost after so long a silence.", show_default="2.5")
    ] = None,
    listen: Annotated[str, typer.Option(help="Where it answers `nemo-dcr status` and its standby.")] = LOOPBACK,
    keys: Annotated[
        Path | None, typer.Option(help="Key directory (nemo-dcr keys new); needed beyond loopback.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write its trace into this directory.")] = None,
    chronicle: Annotated[
        Path | None, typer.Option(help="Write what it did, with times, into this directory: RUN_DIR/chronicle.")
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Answer Prometheus at PORT or HOST:PORT; a port alone is on loopback. Default: nowhere.")
    ] = "",
) -> None:
    """Coordinate refits until SIGTERM, or until another coordinator took over."""
    if not directory.is_dir():
        raise InvalidConfig("DIRECTORY", f"{directory} does not exist; name the run's directory of addresses")
    name = f"{ACTIVE}-{name or f'{socket.gethostname()}-{os.getpid()}'}"
    if "/" in name:
        raise InvalidConfig("--name", f"{name!r} holds a slash, as the names of receivers do; take another, such as a")
    refit = merged(
        config,
        gate=gate,
        attempt_deadline_s=attempt_deadline_s,
        max_attempts=max_attempts,
        heartbeat_s=heartbeat_s,
        lost_after_s=lost_after_s,
    )
    payloads = open_transport(transport, run=run)
    clock, incarnation = LamportClock(), new_incarnation(directory, name)
    tracer = FileTracer(trace / f"{name}-{incarnation}.ndjson", name, incarnation, clock) if trace else None
    story = Chronicle(chronicle, name, incarnation) if chronicle else None
    endpoint = open_metrics(metrics) if metrics else None
    listeners = [*([story.tell] if story else []), *([endpoint.metrics.teller(name)] if endpoint else [])]
    node = CoordinatorNode(
        name=name,
        incarnation=incarnation,
        config=CoordinatorConfig(
            refit=refit,
            owners=tuple(OwnerId(rank) for rank in range(owners)),
            bootstrap_instances=instances,
        ),
        directory=directory,
        control=open_control(control, now=time.time),
        transport=payloads,
        tracer=tracer or NullTracer(),
        clock=clock,
        standby=standby,
        takeover_after_s=takeover_after_s,
        listen=listen,
        security=read_security(keys) if keys is not None else PLAINTEXT,
        told=tell_all(*listeners),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stopping.set())
    logging.getLogger("nemo_dcr").setLevel(logging.INFO)  # one line for each transition is what its log is for
    typer.echo(f"nemo-dcr coordinator: {name} answers on {node.server.address}, {'standby' if standby else 'active'}")
    if endpoint is not None:
        typer.echo(f"nemo-dcr coordinator: metrics on port {endpoint.port}")
    try:
        node.run()
    finally:
        if tracer is not None:
            tracer.close()
        if story is not None:
            story.close()
        if endpoint is not None:
            endpoint.close()
        payloads.close()


def merged(file: Path | None, **options: Any) -> RefitConfig:
    """What a file says, where no option does; None is an option that was not given. Raises: InvalidConfig."""
    config = Configuration() if file is None else load_config(file)
    given = {name: value for name, value in options.items() if value is not None}
    return replace(config, refit=replace(config.refit, **given)).refit


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
