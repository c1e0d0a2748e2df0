"""Child processes of a demo run: started with a log file each, ended by pid, never orphaned.

Each child gets its own process group and dies with its parent. What a child prints goes to its log; when a child ends
by itself the error quotes the last lines of that log.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_dcr.errors import EndpointLost

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(1)


def end_on_terminate(stopping: threading.Event) -> None:
    """Let SIGTERM set `stopping` instead of ending this process at once."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a child process inherits: this process's variables, one compute thread, and `more`.

    Compiled modules are kept even where this process does not write them: every child imports the same ones.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(more or {})}


class Child:
    """One child process that runs a module of this package."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        more_environment: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """Start `python -m module arguments...`, with standard output and error in `log`.

        `within` is a command that becomes the one after it, such as `nsenter` into the namespace of a host.
        """
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*within, sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(more_environment),
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def require_alive(self) -> None:
        """Raises EndpointLost with the end of the log when the process ended."""
        if not self.alive():
            tail = self.log.read_text(errors="replace").strip().splitlines()[-5:]
            raise EndpointLost(self.name, f"ended with {self._process.returncode}; {self.log}: " + " | ".join(tail))

    def kill(self) -> None:
        """SIGKILL to it and to every process that it started, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, timeout_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after `timeout_s` seconds."""
        if self.alive():
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
