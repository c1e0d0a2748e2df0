"""The request gate of an HTTP server, and the version that each response was computed with.

`vllm serve ... --middleware nemo_dcr.adapters.vllm.middleware.RequestGate`. Requests to `/v1/*` are let in while the
gate is open, and counted until the last byte of their response. They are held while a transition has it closed, and
refused with 503 before it was first opened: the server then holds its start checkpoint, which nobody committed. The
gate closes first and the version changes only when no request is left, so the version at admission is the version of
every token of the response; it is the header `x-nemo-dcr-version`.
Three routes drive it: `POST /nemo_dcr/gate/close`, `POST /nemo_dcr/gate/open?version=N`, `GET /nemo_dcr/gate`. They
exist under the same condition as vLLM's own control routes (VLLM_SERVER_DEV_MODE=1) and are as unauthenticated.
Not handled: several API server processes, each of which would have a gate of its own.

Paper: Section 7 (gate)   Spec: AdmitRequest, FinishRequest, CloseGate, OpenGate
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GATED = "/v1/"
ROUTE = "/nemo_dcr/gate"
VERSION_HEADER = b"x-nemo-dcr-version"
CLOSE_WAITS_S = 3600.0
"""How long a close waits for running requests before it answers that they still run."""


class RequestGate:
    """A pure ASGI middleware; one for each server process."""

    def __init__(self, app: App, *, controlled: bool | None = None) -> None:
        """`controlled`: answer the three routes; by default as vLLM does for its own."""
        self._app = app
        self._controlled = _as_vllm() if controlled is None else controlled
        self._version: str | None = None
        """The committed version that is served; None while the gate is closed."""
        self._opened_once = False
        self._running = 0
        self._changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        path = str(scope.get("path", ""))
        if scope["type"] == "lifespan":
            with _control_socket(self, scope):
                await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif path.startswith(ROUTE) and self._controlled:
            await self._control(scope, path, send)
        elif path.startswith(GATED) and path != "/v1/models":
            await self._admit(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._changed:
            if not self._opened_once:
                refused = {"error": "this server holds no committed version yet; try again later"}
                await _answer(send, 503, refused, [(b"retry-after", b"1")])
                return
            await self._changed.wait_for(lambda: self._version is not None)
            version = str(self._version).encode()
            self._running += 1

        async def attributed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (VERSION_HEADER, version)]
            await send(message)

        try:
            await self._app(scope, receive, attributed)
        finally:
            async with self._changed:
                self._running -= 1
                self._changed.notify_all()

    async def close(self) -> int:
        """Admit nothing more; returns how many requests still run after the wait for them."""
        async with self._changed:
            self._version = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._running == 0), CLOSE_WAITS_S)
            return self._running

    async def open(self, version: str) -> None:
        """Admit requests, under this version."""
        async with self._changed:
            self._version, self._opened_once = version, True
            self._changed.notify_all()

    async def _control(self, scope: Scope, path: str, send: Send) -> None:
        asked = (scope["method"], path.removeprefix(ROUTE))
        if asked == ("POST", "/close"):
            await self.close()
        elif asked == ("POST", "/open"):
            version = parse_qs(scope.get("query_string", b"").decode()).get("version", [""])[0]
            if not version:
                await _answer(send, 400, {"error": "name the version: /open?version=N"})
                return
            await self.open(version)
        elif asked != ("GET", ""):
            await _answer(send, 404, {"error": f"{asked[0]} {path} does not exist"})
            return
        state = {"open": self._version is not None, "version": self._version, "running": self._running}
        await _answer(send, 200, state)


@contextmanager
def _control_socket(gate: RequestGate, scope: Scope) -> Iterator[None]:
    """While the server lives: the plugin's own control socket, where its configuration names a directory for it."""
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    config = getattr(getattr(engine, "vllm_config", None), "additional_config", None)
    wanted = config.get("nemo_dcr", {}) if isinstance(config, dict) else {}
    if "control" not in wanted:
        yield
        return
    from nemo_dcr.adapters.vllm.control import FrontControl

    front = FrontControl(engine, gate, Path(wanted["control"]), str(wanted.get("instance", "engine")))
    try:
        yield
    finally:
        front.close()


def _as_vllm() -> bool:
    from vllm import envs  # here, so that the gate also stands in front of other servers

    return bool(envs.VLLM_SERVER_DEV_MODE)


async def _answer(send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    content = json.dumps(body).encode()
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fields, *(headers or [])]})
    await send({"type": "http.response.body", "body": content})
