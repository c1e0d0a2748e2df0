"""Threads that began while a loader ran and are still there when it is done.

Such a thread can write resident storage at any time, where nothing intercepts it. Threads that are about to end are
waited for, for at most a second. Python does not say who started a thread, so that a thread which some other part of
the process starts at the same time is counted too.
Not handled: threads that run no Python, such as those of native libraries.

Paper: Section 6.1 (dispatch hook)   Conditions: LC1
"""

from __future__ import annotations

import sys
import threading
import time

_GRACE_S = 1.0
_POLL_S = 0.005


class ThreadCensus:
    """The threads of this process at one moment."""

    def __init__(self) -> None:
        # Threads by object, because an ended thread's number is used again; the numbers find those without an object.
        self._threads = set(threading.enumerate())
        self._numbers = set(sys._current_frames())

    def outliving(self, grace_s: float = _GRACE_S) -> list[str]:
        """Names of the threads that began since then and still run after at most `grace_s` seconds."""
        deadline = time.monotonic() + grace_s
        while (found := self._new()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _new(self) -> list[str]:
        now = threading.enumerate()
        known = self._numbers | {thread.ident for thread in now}
        named = [thread.name for thread in now if thread not in self._threads]
        return sorted([*named, *(f"thread {number}" for number in sys._current_frames() if number not in known)])
