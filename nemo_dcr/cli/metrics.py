"""The command `metrics`: how a run stands, for Prometheus, as its active coordinator tells it.

A process of its own: each scrape asks the coordinator what `nemo-dcr status` asks, so nothing in the run counts or
waits for it. Where no coordinator answers, `nemo_dcr_up` is 0 and only standbys are counted. The endpoint speaks plain
HTTP.
Not handled: seconds of the stages and bytes of payloads, which no coordinator knows (see the timeline of a refit).

Paper: none
"""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_dcr.cli.status import RunStatus, ask_status
from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.protocol.tags import TagKind, TrackerKind
from nemo_dcr.runtime.coordinator_node import CoordinatorView
from nemo_dcr.runtime.rpc import PLAINTEXT
from nemo_dcr.transport.relay.keys import Security, read_security

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

commands = typer.Typer()

RUN, RECEIVER, OWNER = "", "receiver", "owner"
METRICS = {
    "nemo_dcr_up": (RUN, "1 while an active coordinator answers."),
    "nemo_dcr_standby_coordinators": (RUN, "Standbys that answer."),
    "nemo_dcr_committed_version": (RUN, "The version of the commit record."),
    "nemo_dcr_commit_timestamp_seconds": (RUN, "When it was committed, by the clock of who committed it."),
    "nemo_dcr_required_receivers": (RUN, "Receivers that the commit record names."),
    "nemo_dcr_epoch": (RUN, "The coordinator's epoch; it grows with each takeover."),
    "nemo_dcr_attempt": (RUN, "The latest attempt; it grows faster than the version where attempts fail."),
    "nemo_dcr_coordinator_idle_seconds": (RUN, "Since the coordinator's loop last went round."),
    "nemo_dcr_waiting": (RUN, "1 while the coordinator waits for something from outside."),
    "nemo_dcr_silent_endpoints": (RUN, "Endpoints that did not answer the last call."),
    "nemo_dcr_left_out_receivers": (RUN, "Receivers that can take no part."),
    "nemo_dcr_receiver_version": (RECEIVER, "The version that its storage holds or started from; absent: none."),
    "nemo_dcr_receiver_gate_open": (RECEIVER, "1 while it admits requests."),
    "nemo_dcr_receiver_requests": (RECEIVER, "Requests that were admitted and are not finished."),
    "nemo_dcr_receiver_payloads": (RECEIVER, "Payloads of its attempt that it accepted."),
    "nemo_dcr_receiver_failed": (RECEIVER, "1 where its attempt failed there."),
    "nemo_dcr_owner_baseline_version": (OWNER, "The version that its baseline holds; absent while it holds none."),
    "nemo_dcr_owner_payloads": (OWNER, "Payloads of its attempt that it published."),
    "nemo_dcr_owner_failed": (OWNER, "1 where its attempt failed there."),
}
"""Label and meaning of every metric; all are gauges."""


def samples(status: RunStatus) -> Iterator[tuple[str, str, float]]:
    """Metric, value of its label (empty for the run's own) and value, of all that a status tells."""
    view = status.active
    yield "nemo_dcr_up", "", view is not None
    yield "nemo_dcr_standby_coordinators", "", len(status.standbys)
    if view is not None:
        yield from _run_samples(view)
        yield from _endpoint_samples(view)


def _run_samples(view: CoordinatorView) -> Iterator[tuple[str, str, float]]:
    if view.record is not None:
        yield "nemo_dcr_committed_version", "", view.record.version
        yield "nemo_dcr_commit_timestamp_seconds", "", view.record.time
        yield "nemo_dcr_required_receivers", "", len(view.record.required)
    yield "nemo_dcr_epoch", "", view.epoch
    yield "nemo_dcr_attempt", "", view.attempt
    yield "nemo_dcr_coordinator_idle_seconds", "", view.idle_s
    yield "nemo_dcr_waiting", "", bool(view.held)
    yield "nemo_dcr_silent_endpoints", "", len(view.silent)
    yield "nemo_dcr_left_out_receivers", "", len(view.left_out)


def _endpoint_samples(view: CoordinatorView) -> Iterator[tuple[str, str, float]]:
    for receiver in view.receivers:
        if receiver.tag.kind is not TagKind.NONE:
            yield "nemo_dcr_receiver_version", receiver.receiver, receiver.tag.version
        yield "nemo_dcr_receiver_gate_open", receiver.receiver, receiver.gate_open
        yield "nemo_dcr_receiver_requests", receiver.receiver, receiver.requests
        yield "nemo_dcr_receiver_payloads", receiver.receiver, receiver.payloads
        yield "nemo_dcr_receiver_failed", receiver.receiver, bool(receiver.failure)
    for owner in view.owners:
        if owner.tracker.kind is TrackerKind.AT:
            yield "nemo_dcr_owner_baseline_version", str(owner.owner), owner.tracker.version
        yield "nemo_dcr_owner_payloads", str(owner.owner), owner.payloads
        yield "nemo_dcr_owner_failed", str(owner.owner), bool(owner.failure)


class RunCollector:
    """Asks the run at each scrape; what `prometheus_client` calls a collector."""

    def __init__(self, addresses: Path, timeout_s: float, security: Security = PLAINTEXT) -> None:
        """`timeout_s` bounds one scrape in seconds."""
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._security = security

    def describe(self) -> list[GaugeMetricFamily]:
        """Every metric without a value, so that registering it asks nobody."""
        return list(_families().values())

    def collect(self) -> list[GaugeMetricFamily]:
        """Every metric with what the run tells now."""
        families = _families()
        for name, label, value in samples(ask_status(self._addresses, self._timeout_s, self._security)):
            families[name].add_metric([label] if METRICS[name][0] else [], float(value))
        return list(families.values())


def _families() -> dict[str, GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily

    return {
        name: GaugeMetricFamily(name, meaning, labels=[label] if label else [])
        for name, (label, meaning) in METRICS.items()
    }


@commands.command()
def metrics(
    directory: Annotated[Path, typer.Argument(help="Where the processes of the run publish their addresses.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT of the endpoint; plain HTTP.")] = "127.0.0.1:9464",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long one scrape waits for the coordinator.")] = 2.0,
    keys: Annotated[Path | None, typer.Option(help="Key directory that the coordinator admits.")] = None,
) -> None:
    """Answer Prometheus until SIGTERM: how the run stands, by receiver and owner."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise OperatorNeeded("metrics need prometheus_client", "pip install 'nemo-dcr[metrics]'")
    from prometheus_client import CollectorRegistry, start_http_server

    if not directory.is_dir():
        raise InvalidConfig("DIRECTORY", f"{directory} does not exist; name the run's directory of addresses")
    host, _, port = listen.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidConfig("--listen", f"must be HOST:PORT, such as 127.0.0.1:9464, got {listen!r}")
    registry, ended = CollectorRegistry(), threading.Event()
    registry.register(RunCollector(directory, timeout_s, read_security(keys) if keys is not None else PLAINTEXT))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as problem:
        raise InvalidConfig("--listen", f"{listen} cannot be listened on: {problem}; name another port") from problem
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    typer.echo(f"nemo-dcr metrics: http://{host}:{server.server_port}/metrics")
    ended.wait()
    server.shutdown()
    server.server_close()
    thread.join()


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
