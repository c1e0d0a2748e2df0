"""Relay nodes as processes, as a deployment runs them, ended by their ids."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from nemo_dcr.transport.relay.tree import TreeNode

START_S = 60.0


class RelayProcess:
    """One `nemo-dcr relay` on a free loopback port."""

    def __init__(self, name: str, *options: str) -> None:
        command = [sys.executable, "-m", "nemo_dcr.cli.relay", "--node", name, "--listen", "tcp://127.0.0.1:*"]
        self.name = name
        self.process = subprocess.Popen(
            [*command, *options], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
        )
        self.place = TreeNode(name, "tcp://")

    def wait(self) -> RelayProcess:
        """Wait until it listens; several may start at once before that."""
        ready = self.process.stdout.readline()
        assert f"node {self.name} listens on " in ready, ready
        self.place = TreeNode(self.name, ready.split(" listens on ")[1].split()[0])
        return self

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """SIGTERM; the exit code and what it printed last."""
        self.send(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=START_S)
        return self.process.returncode, output

    def close(self) -> None:
        """End it whatever its state."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
