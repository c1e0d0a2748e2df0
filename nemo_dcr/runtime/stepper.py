"""Runs one pure machine: events in order, one at a time, effects performed under one lock.

An event that arrives while effects are performed, from the performer itself or through it, is taken after them, so
the machine never sees half a step. Whoever waits on the condition looks again after every event.
Not handled: what an effect means (the node that owns the machine).

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

State = TypeVar("State")
Event = TypeVar("Event")
Effect = TypeVar("Effect")


class Stepper(Generic[State, Event, Effect]):
    """The state of a machine and the queue of its events. Thread safe."""

    def __init__(
        self,
        start: tuple[State, tuple[Effect, ...]],
        step: Callable[[State, Event], tuple[State, tuple[Effect, ...]]],
        perform: Callable[[Effect], None],
        changed: threading.Condition,
    ) -> None:
        """`start` is the first state with its effects, which `begin` performs; `changed` has a reentrant lock."""
        self.state, self._first = start
        self._step = step
        self._perform = perform
        self._changed = changed
        self._events: deque[Event] = deque()
        self._stepping = False

    def begin(self) -> None:
        """Perform the effects of the start; call it once the performer is complete."""
        first, self._first = self._first, ()
        for effect in first:
            self._perform(effect)

    def feed(self, event: Event) -> None:
        """Take an event, and those that its effects cause."""
        with self._changed:
            self._events.append(event)
            if self._stepping:
                return
            self._stepping = True
            try:
                while self._events:
                    self.state, effects = self._step(self.state, self._events.popleft())
                    for effect in effects:
                        self._perform(effect)
            finally:
                self._stepping = False
                self._changed.notify_all()
