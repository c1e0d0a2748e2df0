"""Threads that began while a loader ran and are still there when it is done.

Such a thread can write resident storage at any time, where nothing intercepts it. Threads that are about to end are
waited for, for at most a second. Python does not say who started a thread, so that a thread which some other part of
the process starts at the same time is counted too.
Not handled: threads that run no Python, such as those of native libraries.

Paper: Section 6.1 (dispatch hook)   Conditions: LC1
"""

from __future__ import annotations

import gc
import sys
import threading
import time

_GRACE_S = 1.0
_POLL_S = 0.005
_ONE_CENSUS = threading.Lock()


class ThreadCensus:
    """The threads of this process at one moment."""

    def __init__(self) -> None:
        # Threads by object, because an ended thread's number is used again; the numbers find those without an object.
        self._threads = set(threading.enumerate())
        self._numbers = _numbers()

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
        return sorted([*named, *(f"thread {number}" for number in _numbers() if number not in known)])


def _numbers() -> set[int]:
    """Identifiers of all threads that run Python.

    Without the collector: up to Python 3.11.8 the interpreter holds its list of threads locked while it makes frame
    objects. A collection among them may run a destructor that lets go of the interpreter's lock; a thread that starts
    or ends then waits for the list and holds that lock, and the process stands still for ever (CPython issue 106883).
    """
    with _ONE_CENSUS:  # so that one census does not turn the collector on again under another
        collects = gc.isenabled()
        gc.disable()
        try:
            return set(sys._current_frames())
        finally:
            if collects:
                gc.enable()
