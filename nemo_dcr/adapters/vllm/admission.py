"""Which requests may run, and under which committed version: the gate of an engine that serves on an event loop.

Requests are admitted while it is open and counted until they end. It closes first, and the version changes only when no
request is left; so the version at admission is the version of every token of the request.
Not handled: who asks (see middleware for HTTP, async_in_process for calls); pausing the engine itself (see client).

Paper: Section 7 (gate)   Spec: AdmitRequest, FinishRequest, CloseGate, OpenGate
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CLOSE_WAITS_S = 3600.0
"""How long a close waits for running requests before it tells that they still run."""


class Admission:
    """One gate; every call is made on the event loop that serves."""

    def __init__(self) -> None:
        self.version: str | None = None
        """The committed version that is served; None while the gate is closed."""
        self.opened_once = False
        """False while the engine holds its start checkpoint, which nobody committed."""
        self.running = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[str]:
        """One request: waits until the gate is open, and gives the version that the request runs under."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version is not None)
            version = str(self.version)
            self.running += 1
        try:
            yield version
        finally:
            async with self._changed:
                self.running -= 1
                self._changed.notify_all()

    async def close(self) -> int:
        """Admit nothing more; returns how many requests still run after the wait for them."""
        async with self._changed:
            self.version = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self.running == 0), CLOSE_WAITS_S)
            return self.running

    async def open(self, version: str) -> None:
        """Admit requests, under this version."""
        async with self._changed:
            self.version, self.opened_once = version, True
            self._changed.notify_all()
