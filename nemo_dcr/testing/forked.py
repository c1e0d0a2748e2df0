"""A process forked from a server that imported everything, which any thread may watch while others start theirs.

The standard library reads the end of such a process from a pipe, once, without a lock; and whoever starts a process
reads the ends of all other ones on the way, those of other threads too. Of two readers at once one gets the exit code
and the other one an empty pipe, which it takes for code 255, and the last to write wins. So every start and every look
at an end goes through one lock here, and no other code may touch the process object.
Not handled: a server of forks that died, which is code 255 for all its children.

Paper: Section 6.3
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

_ENDS = threading.Lock()


class PidSignals(ABC):
    """A process that is signalled and looked at by its number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    @abstractmethod
    def exitcode(self) -> int | None:
        """How it ended, as `Popen.returncode`; None while it runs or is stopped."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end for so long, without a limit when None; how it ended."""

    @property
    def is_stopped(self) -> bool:
        """A SIGSTOP took effect."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forked(PidSignals):
    """One forked process. It ends with this one."""

    def __init__(self, context: ForkServerContext, role: Callable[..., None], *arguments: object) -> None:
        """Start it; the arguments are pickled."""
        self._process = context.Process(target=role, args=arguments, daemon=True)
        with _ENDS:
            self._process.start()
        pid = self._process.pid
        assert pid is not None  # it was started
        super().__init__(pid)

    @property
    def exitcode(self) -> int | None:
        """As `PidSignals.exitcode`."""
        with _ENDS:
            return self._process.exitcode

    def join(self, timeout_s: float | None = None) -> int | None:
        """As `PidSignals.join`."""
        connection.wait([self._process.sentinel], timeout_s)
        return self.exitcode
