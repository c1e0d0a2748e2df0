"""The commit record of a chaos system: a SQLite file, or an etcd server of the system's own that dies and comes back.

The server is one process of the system: killed, stopped, cut off and split like any other one, and started again on its
data and address. Whoever looks from outside gives up soon and looks again, so that the deployment goes on meanwhile.

Paper: Section 6.3; Appendix B (control plane)
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from nemo_dcr.control import SqliteControl, open_control
from nemo_dcr.record import WatchedControlPlane
from nemo_dcr.testing.chaos_source import SystemPlan
from nemo_dcr.testing.etcd_server import CLIENT_PORT, PEER_PORT, await_etcd, etcd_command
from nemo_dcr.testing.forked import PidSignals
from nemo_dcr.testing.server_process import LOOPBACK_HOST, end_server, free_ports, start_server

RECORD = "record"
"""Name of the server among the processes of a system."""
PREFIX = "chaos"
CALL_S = 2.0
"""How long a coordinator tries one call; its commits have a deadline of a second."""
LOOK_S, CHECK_S = 0.5, 60.0
"""The same for looks during a transition, and for the checks after it, when a server is up and may be slow."""
BUSY_S = 5.0
"""How long a writer of a SQLite file waits for another one, who may be stopped."""


def open_record(plan: SystemPlan, *, timeout_s: float = CALL_S) -> WatchedControlPlane:
    """The commit record of a system; `timeout_s` limits one call to a server."""
    if not plan.etcd:
        return SqliteControl(plan.directory / "record.sqlite", busy_timeout_s=BUSY_S)
    return open_control(f"etcd://{plan.etcd}/{PREFIX}?timeout_s={timeout_s}")


def close_record(control: WatchedControlPlane) -> None:
    """Release what it holds."""
    if isinstance(control, SqliteControl):
        control.close()


def etcd_address(host: str | None) -> str:
    """HOST:PORT for a server: in a namespace of its own, or on free ports of loopback when `host` is None."""
    return f"{LOOPBACK_HOST}:{free_ports(1)[0]}" if host is None else f"{host}:{CLIENT_PORT}"


class EtcdProcess(PidSignals):
    """One life of the server; as `Forked`."""

    def __init__(self, directory: Path, address: str, namespace: str | None) -> None:
        """Start it on what its earlier lives left in `directory`; raises OperatorNeeded when etcd is not installed."""
        directory.mkdir(parents=True, exist_ok=True)
        peer = free_ports(1)[0] if namespace is None else PEER_PORT
        place: Sequence[str] = () if namespace is None else ("ip", "netns", "exec", namespace)
        command = [*place, *etcd_command(directory, address, f"{LOOPBACK_HOST}:{peer}")]
        self._log = directory / "etcd.log"
        self._address = address
        self._process = start_server(command, self._log, directory=directory)
        super().__init__(self._process.pid)

    @property
    def exitcode(self) -> int | None:
        """As `Forked.exitcode`."""
        return self._process.poll()

    def join(self, timeout_s: float | None = None) -> int | None:
        """As `Forked.join`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def await_answer(self) -> None:
        """Wait until it serves. Raises: EndpointLost."""
        await_etcd(self._process, self._log, self._address)

    def end(self) -> None:
        """Let it end in order."""
        end_server(self._process)
