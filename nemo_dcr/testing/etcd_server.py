"""An etcd server of one member on loopback, for tests and trials: it can be killed and started again on its data.

The program is Debian's `etcd-server`. Both ports are free ones, only loopback listens, and a server ends with its
parent. Not handled: clusters of several members; TLS.

Paper: Section 6.3
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from nemo_dcr.errors import EndpointLost, OperatorNeeded

START_S = 60.0
"""Limit for the server to answer; a second on an idle machine."""
STOP_S = 5.0
"""After SIGTERM, before SIGKILL."""
_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


def etcd_binary() -> Path:
    """The server's program. Raises: OperatorNeeded when it is not installed."""
    found = shutil.which("etcd")
    if found is None:
        raise OperatorNeeded("the etcd server is not installed", "on Debian: apt-get install etcd-server")
    return Path(found)


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
        self._port, self._peer_port = _free_ports()
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
        return f"{_HOST}:{self._port}"

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
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        clients, peers = f"http://{self.address}", f"http://{_HOST}:{self._peer_port}"
        command = [
            str(etcd_binary()),
            "--name=one",
            f"--data-dir={self._directory / 'data'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=one={peers}",
            f"--quota-backend-bytes={self._quota_bytes}",
        ]
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self._directory,
                env={},  # etcd takes options from variables too
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        try:
            self._wait_until_it_answers(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise EndpointLost("etcd", f"ended with {process.returncode}: {self._last_lines()}")
            if _is_healthy(self._port):
                return
            time.sleep(0.05)
        raise EndpointLost("etcd", f"did not answer within {START_S:g} s: {self._last_lines()}")

    def _last_lines(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-5:])


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status == 200 and b"true" in answer.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind((_HOST, 0))
        second.bind((_HOST, 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
