"""Programs of others that serve on loopback for tests and trials: started, waited for, ended.

A server writes its output to a log, has a session of its own, and ends with its parent.
Not handled: what each program is told and how it says that it is up (etcd_server, seaweedfs).

Paper: Section 7
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nemo_dcr.errors import EndpointLost

LOOPBACK_HOST = "127.0.0.1"
STOP_S = 5.0
"""After SIGTERM, before SIGKILL."""
_PR_SET_PDEATHSIG = 1


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK_HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def start_server(
    command: Sequence[str], log: Path, *, directory: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a directory with its output in `log`; `env` in place of this process's variables."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def await_server(
    name: str, process: subprocess.Popen[bytes], log: Path, answers: Callable[[], bool], timeout_s: float
) -> None:
    """Wait until a server answers.

    Raises: EndpointLost with the last lines of its log when it ended, or did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EndpointLost(name, f"ended with {process.returncode}: {_last_lines(log)}")
        if answers():
            return
        time.sleep(0.05)
    raise EndpointLost(name, f"did not answer within {timeout_s:g} s: {_last_lines(log)}")


def end_server(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL. Idempotent."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    if process.poll() is None:
        process.kill()
    process.wait()


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-5:])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
