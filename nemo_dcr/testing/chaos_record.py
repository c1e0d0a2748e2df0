"""The commit record of a chaos system: a SQLite file, or an etcd or S3 server of its own that dies and comes back.

The server is one process of the system: killed, stopped, cut off and split like any other one, and started again on its
data and address. Whoever looks from outside gives up soon and looks again, so that the deployment goes on meanwhile.

Paper: Section 6.3; Appendix B (control plane)
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from nemo_dcr.control import SqliteControl, open_control
from nemo_dcr.record import WatchedControlPlane
from nemo_dcr.testing.chaos_source import RecordPlace, SystemPlan
from nemo_dcr.testing.etcd_server import CLIENT_PORT, PEER_PORT, await_etcd, etcd_command
from nemo_dcr.testing.forked import PidSignals
from nemo_dcr.testing.seaweedfs import BUCKET, await_seaweedfs, new_credentials, seaweedfs_command
from nemo_dcr.testing.server_process import LOOPBACK_HOST, end_server, free_ports, start_server
from nemo_dcr.transport.s3_client import S3Credentials

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
    """The commit record of a system; `timeout_s` limits one call to a server, which need not be up now."""
    match plan.record:
        case RecordPlace.SQLITE:
            return SqliteControl(plan.directory / "record.sqlite", busy_timeout_s=BUSY_S)
        case RecordPlace.ETCD:
            return open_control(f"etcd://{plan.record_at}/{PREFIX}?timeout_s={timeout_s}")
        case RecordPlace.S3:
            return _open_s3(plan, timeout_s)


def _open_s3(plan: SystemPlan, timeout_s: float) -> WatchedControlPlane:
    import boto3

    from nemo_dcr.control.s3 import S3Control
    from nemo_dcr.control.s3_objects import S3RecordConfig

    keys = _keys(plan)
    session = boto3.session.Session(keys.access_key, keys.secret_key)
    endpoint = f"http://{plan.record_at}"
    config = S3RecordConfig(bucket=BUCKET, prefix=PREFIX, endpoint=endpoint, timeout_s=timeout_s)
    # Whether the server keeps to conditions is asked by the first step, and not here.
    return S3Control(config, session, reads_only=True)


def _keys(plan: SystemPlan) -> S3Credentials:
    if plan.record_keys is None:
        raise ValueError("the plan has no credentials for its S3 server")
    return plan.record_keys


def close_record(control: WatchedControlPlane) -> None:
    """Release what it holds."""
    if isinstance(control, SqliteControl):
        control.close()


def record_server(place: RecordPlace, host: str | None) -> tuple[str, S3Credentials | None]:
    """HOST:PORT and credentials for a server: in a namespace of its own, or on loopback when `host` is None."""
    if not place.is_server:
        return "", None
    at = f"{LOOPBACK_HOST}:{free_ports(1)[0]}" if host is None else f"{host}:{CLIENT_PORT}"
    return at, new_credentials() if place is RecordPlace.S3 else None


class RecordProcess(PidSignals):
    """One life of the server; as `Forked`."""

    def __init__(self, plan: SystemPlan) -> None:
        """Start it on what its earlier lives left; raises OperatorNeeded when its program is not installed."""
        directory = plan.directory / RECORD
        directory.mkdir(parents=True, exist_ok=True)
        namespace = plan.hosts.get(RECORD)
        within = () if namespace is None else ("ip", "netns", "exec", namespace)
        command = _etcd(plan, directory) if plan.record is RecordPlace.ETCD else _seaweedfs(plan, directory)
        self._plan = plan
        self._log = directory / "server.log"
        self._process = start_server([*within, *command], self._log, directory=directory)
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
        if self._plan.record is RecordPlace.ETCD:
            await_etcd(self._process, self._log, self._plan.record_at)
        else:
            await_seaweedfs(self._process, self._log, f"http://{self._plan.record_at}", _keys(self._plan))

    def end(self) -> None:
        """Let it end in order."""
        end_server(self._process)


def _etcd(plan: SystemPlan, directory: Path) -> list[str]:
    peer = PEER_PORT if RECORD in plan.hosts else free_ports(1)[0]
    return etcd_command(directory, plan.record_at, f"{LOOPBACK_HOST}:{peer}")


def _seaweedfs(plan: SystemPlan, directory: Path) -> list[str]:
    host, _, port = plan.record_at.rpartition(":")
    return seaweedfs_command(directory, host, int(port), _keys(plan))
