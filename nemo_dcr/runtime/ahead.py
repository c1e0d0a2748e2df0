"""One stage of a pipeline: an iterator that runs on a thread of its own, a bounded number of results ahead.

Results come in the order in which they were made, and after them the error that ended the source, if one did. A full
queue holds the thread, so a slow taker slows everything in front of it and nothing is dropped. `stop` wakes both sides,
drops what waits and makes the taker's next call raise; `join` returns once the source is closed, on the thread that ran
it. At most `slots` results wait, and one more is in the making.
Not handled: what a source does between two results; it has to look itself whether it was stopped.

Paper: Section 7 (construction overlaps transport); Appendix C (bounded queues)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from nemo_dcr.errors import AttemptStopped
from nemo_dcr.ids import AttemptId

T = TypeVar("T")

Waited = Callable[[float], None]
"""Told the seconds of each wait."""


class Ahead(Generic[T]):
    """Runs `source` ahead of the one that iterates over this. Begin with `start`, end with `stop` and `join`."""

    def __init__(
        self,
        name: str,
        source: Generator[T, None, None],
        *,
        attempt: AttemptId,
        slots: int,
        on_full: Waited = lambda seconds: None,
        on_empty: Waited = lambda seconds: None,
    ) -> None:
        """`on_full` is told how long the thread waited for room, `on_empty` how long the taker waited for a result."""
        self._source = source
        self._attempt = attempt
        self._slots = slots
        self._on_full = on_full
        self._on_empty = on_empty
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._problem: BaseException | None = None
        self._ended = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def waiting(self) -> int:
        """Results that wait for the taker."""
        return len(self._ready)

    def start(self) -> None:
        """Begin to run ahead."""
        self._thread.start()

    def stop(self) -> None:
        """Drop what waits, and let both sides give up; returns at once."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the source has ended and was closed; call `stop` first, unless it is exhausted."""
        if self._thread.ident is not None:
            self._thread.join()

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        """The next result. Raises: AttemptStopped after `stop`; whatever ended the source, after its results."""
        with self._changed:
            if not (self._ready or self._ended or self._stopped):
                begin = time.monotonic()
                self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
                self._on_empty(time.monotonic() - begin)
            if self._stopped:
                raise AttemptStopped(self._attempt, "its stages were stopped")
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._problem is None:
                raise StopIteration
            problem, self._problem = self._problem, None
        try:
            raise problem
        finally:
            del problem  # a traceback that holds its own error keeps everything of the stage alive

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            while self._put(next(self._source)):
                pass
            self._source.close()
        except StopIteration:
            pass
        except BaseException as caught:
            problem = caught
        with self._changed:
            self._problem, self._ended = problem, True
            self._changed.notify_all()
        del problem

    def _put(self, made: T) -> bool:
        """Hand one result on; waits for room. False when stopped."""
        with self._changed:
            if len(self._ready) >= self._slots and not self._stopped:
                begin = time.monotonic()
                self._changed.wait_for(lambda: len(self._ready) < self._slots or self._stopped)
                self._on_full(time.monotonic() - begin)
            if not self._stopped:
                self._ready.append(made)
                self._changed.notify_all()
            return not self._stopped
