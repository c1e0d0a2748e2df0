"""An etcd server of one member on loopback, for tests and trials: it can be killed and started again on its data.

The program is Debian's `etcd-server`. Both ports are free ones, only loopback listens, and a server ends with its
parent. Chaos starts the same program on an address of its own. Not handled: clusters of several members; TLS.

Paper: Section 6.3
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
from pathlib import Path

from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.testing.server_process import LOOPBACK_HOST, await_server, end_server, free_ports, start_server

CLIENT_PORT, PEER_PORT = 2379, 2380
"""etcd's own ports, free in a namespace of its own."""
START_S = 60.0
"""Limit for the server to answer; a second on an idle machine."""


def etcd_binary() -> Path:
    """The server's program. Raises: OperatorNeeded when it is not installed."""
    found = shutil.which("etcd")
    if found is None:
        raise OperatorNeeded("the etcd server is not installed", "on Debian: apt-get install etcd-server")
    return Path(found)


def etcd_command(directory: Path, address: str, peer: str, *, quota_bytes: int = 0) -> list[str]:
    """The command line of one member with its data below `directory`; HOST:PORT for clients and for itself.

    Raises: OperatorNeeded when etcd is not installed.
    """
    clients, peers = f"http://{address}", f"http://{peer}"
    return [
        str(etcd_binary()),
        "--name=one",
        f"--data-dir={directory / 'data'}",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=one={peers}",
        f"--quota-backend-bytes={quota_bytes}",
    ]


def await_etcd(process: subprocess.Popen[bytes], log: Path, address: str) -> None:
    """Wait until a server that was started answers at HOST:PORT. Raises: EndpointLost."""
    await_server("etcd", process, log, lambda: _is_healthy(address), START_S)


class EtcdServer:
    """One running server; close it. Use it as a context manager."""

    def __init__(self, directory: Path, *, quota_bytes: int = 0) -> None:
        """Start a server that keeps its data and its log in `directory`, and wait until it answers.

        With `quota_bytes` its database takes no more than that; 0 is etcd's own limit.

        Raises: OperatorNeeded when etcd is not installed; EndpointLost when the server does not answer.
        """
        self.log = directory / "etcd.log"
        self._directory = directory
        self._quota_bytes = quota_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._port, self._peer_port = free_ports(2)
        self._process = self._start()

    def __enter__(self) -> EtcdServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def address(self) -> str:
        """HOST:PORT for clients; stays the same over a restart."""
        return f"{LOOPBACK_HOST}:{self._port}"

    def kill(self) -> None:
        """SIGKILL: nothing is flushed that was not before."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start again on the same data and ports, and wait until it answers. Raises: EndpointLost."""
        self.close()
        self._process = self._start()

    def close(self) -> None:
        """SIGTERM, then SIGKILL."""
        end_server(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        peer = f"{LOOPBACK_HOST}:{self._peer_port}"
        command = etcd_command(self._directory, self.address, peer, quota_bytes=self._quota_bytes)
        # etcd takes options from variables too.
        process = start_server(command, self.log, directory=self._directory, env={})
        try:
            await_etcd(process, self.log, self.address)
        except BaseException:
            end_server(process)
            raise
        return process


def _is_healthy(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status == 200 and b"true" in answer.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
