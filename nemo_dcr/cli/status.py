"""The command `status`: how a run stands, as its coordinators tell it.

The active coordinator tells phase, attempt and what it last heard of every endpoint; standbys tell that they are there.
Without an active coordinator that answers the exit code is 4, and the lines say who was silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import zmq

from nemo_dcr.errors import EndpointLost, InvalidConfig
from nemo_dcr.protocol.messages import OwnerReport, ReceiverReport
from nemo_dcr.runtime.addresses import read_addresses
from nemo_dcr.runtime.coordinator_node import ACTIVE, COORDINATOR_STATUS, CoordinatorView, Role
from nemo_dcr.runtime.methods import Nothing
from nemo_dcr.runtime.rpc import PLAINTEXT, NoReply, Peer, exchange
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import Security, read_security

commands = typer.Typer()


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What the coordinators of a run told."""

    active: CoordinatorView | None
    standbys: tuple[CoordinatorView, ...]
    unanswered: dict[str, str]
    """Coordinators that published an address and do not answer, with the reason."""


def ask_status(directory: Path, timeout_s: float, security: Security = PLAINTEXT) -> RunStatus:
    """Ask every coordinator that published an address in `directory`; waits `timeout_s` seconds at most."""
    context: zmq.Context[Any] = zmq.Context()
    entries = [entry for entry in read_addresses(directory) if entry.name.startswith(ACTIVE)]
    lives = {(entry.address, entry.incarnation): entry for entry in entries}
    clock = LamportClock()
    peers = [
        Peer(entry.name, entry.address, clock, context, security=security, key=entry.key) for entry in lives.values()
    ]
    try:
        answers = exchange({peer.name: (peer, COORDINATOR_STATUS, Nothing()) for peer in peers}, timeout_s)
    finally:
        for peer in peers:
            peer.close()
        context.term()
    views: list[CoordinatorView] = [answer[0] for answer in answers.values() if not isinstance(answer, NoReply)]
    active = sorted((view for view in views if view.role is Role.ACTIVE), key=lambda view: view.epoch)
    return RunStatus(
        active[-1] if active else None,
        tuple(view for view in views if view.role is Role.STANDBY),
        {name: answer.reason for name, answer in answers.items() if isinstance(answer, NoReply)},
    )


def table(status: RunStatus) -> str:
    """The status as lines for a terminal."""
    lines: list[str] = []
    view = status.active
    if view is not None:
        lines += _coordinator_lines(view)
        lines += _rows(
            ("receiver", "incarnation", "attempt", "tag", "gate", "progress"), map(_receiver_row, view.receivers)
        )
        lines += _rows(
            ("owner", "incarnation", "attempt", "baseline", "candidate", "progress"), map(_owner_row, view.owners)
        )
        lines += [f"silent: {name}: {reason}" for name, reason in sorted(view.silent.items())]
        lines += [f"left out: receiver {name}: {reason}" for name, reason in sorted(view.left_out.items())]
    lines += [f"standby {each.name}" for each in status.standbys]
    lines += [f"no answer: {name}: {reason}" for name, reason in sorted(status.unanswered.items())]
    return "\n".join(lines)


def _coordinator_lines(view: CoordinatorView) -> list[str]:
    version = "none" if view.record is None else str(view.record.version)
    candidate = "" if view.record is None else f" (candidate {view.record.candidate or 'of the first checkpoint'})"
    lines = [
        f"version {version}{candidate}",
        f"coordinator {view.name}, epoch {view.epoch}: {view.phase}, last round {view.idle_s:.1f} s ago",
    ]
    if view.attempt:
        lines.append(f"attempt {view.attempt} ({view.mode}): {view.attempt_phase}")
    if view.held:
        lines.append(f"waits: {view.held}")
    if view.last_failure:
        lines.append(f"last failed attempt: {view.last_failure}")
    if view.aborted:
        lines.append(f"given up: candidate {view.aborted}")
    return lines


def _receiver_row(report: ReceiverReport) -> tuple[str, ...]:
    steps = (
        (bool(report.failure), f"failed: {report.failure}"),
        (report.asleep, "asleep"),
        (report.acked, "acknowledged"),
        (report.stopped, "stopped"),
        (report.staged, "staged"),
        (report.apply_open, "applying"),
        (report.quiet, "quiet"),
        (True, "serving"),
    )
    done = next(text for holds, text in steps if holds)
    gate = "open" if report.gate_open else "closed"
    progress = f"{done}, {report.payloads} payloads, {report.requests} requests"
    return report.receiver, str(report.incarnation), str(report.attempt), str(report.tag), gate, progress


def _owner_row(report: OwnerReport) -> tuple[str, ...]:
    progress = f"failed: {report.failure}" if report.failure else report.status.value
    progress += f", {report.payloads} payloads" + (", copying the baseline" if report.filling else "")
    return (
        f"owner {report.owner}",
        str(report.incarnation),
        str(report.attempt),
        str(report.tracker),
        report.candidate or "-",
        progress,
    )


def _rows(head: tuple[str, ...], rows: Any) -> list[str]:
    """Columns as wide as their widest cell."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


@commands.command()
def status(
    directory: Annotated[Path, typer.Argument(help="Where the processes of the run publish their addresses.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for answers.")] = 5.0,
    keys: Annotated[Path | None, typer.Option(help="Key directory that the coordinator admits.")] = None,
) -> None:
    """Show version, attempt, phase, and every owner and receiver of a run."""
    if not directory.is_dir():
        raise InvalidConfig("DIRECTORY", f"{directory} does not exist; name the run's directory of addresses")
    found = ask_status(directory, timeout_s, read_security(keys) if keys is not None else PLAINTEXT)
    typer.echo(msgspec.json.encode(msgspec.to_builtins(found, str_keys=True)).decode() if json else table(found))
    if found.active is None:
        raise EndpointLost("coordinator", f"none is active in {directory}; start one: nemo-dcr coordinator {directory}")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
