"""When a system under chaos is stuck: by time in which every process answered, so that a busy machine is no fault.

After the last fault a system must settle within ANSWERED_S seconds. Only looks at which every process answered at once
count, each for LOOK_S at most: a machine that gives the processes no time stops this clock. A process that hangs would
stop it for ever; so SILENT_S seconds of any kind end the wait too, and then the message says who was silent.

Paper: Section 6.3   Spec: TransitionEnds, AllServe
"""

from __future__ import annotations

from collections.abc import Collection

ANSWERED_S = 60.0
LOOK_S = 0.5
SILENT_S = 300.0


class Patience:
    """The wait since the last fault. `now` is `time.monotonic` everywhere."""

    def __init__(self, now: float) -> None:
        self._begin = self._looked = now
        self._answered_s = 0.0

    def begin_anew(self, now: float) -> None:
        """Something was struck, died or came back."""
        self._begin = self._looked = now
        self._answered_s = 0.0

    def look(self, now: float, silent: Collection[str]) -> str:
        """Count the time since the last look; a text says that the wait is over, and why. `silent`: who was."""
        passed, self._looked = now - self._looked, now
        if not silent:
            self._answered_s += min(passed, LOOK_S)
        if self._answered_s >= ANSWERED_S:
            return f"every process answered for {ANSWERED_S:g} s without a fault"
        if now - self._begin >= SILENT_S:
            return f"{SILENT_S:g} s without a fault, silent: {', '.join(sorted(silent)) or 'nobody now'}"
        return ""
