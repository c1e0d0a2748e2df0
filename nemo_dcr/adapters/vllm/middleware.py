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

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from nemo_dcr.adapters.vllm.admission import Admission

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GATED = "/v1/"
ROUTE = "/nemo_dcr/gate"
VERSION_HEADER = b"x-nemo-dcr-version"


class RequestGate:
    """A pure ASGI middleware; one for each server process."""

    def __init__(self, app: App, *, controlled: bool | None = None) -> None:
        """`controlled`: answer the three routes; by default as vLLM does for its own."""
        self._app = app
        self._controlled = _as_vllm() if controlled is None else controlled
        self._admission = Admission()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        path = str(scope.get("path", ""))
        if scope["type"] == "lifespan":
            with _control_socket(self._admission, scope):
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
        if not self._admission.opened_once:
            refused = {"error": "this server holds no committed version yet; try again later"}
            await _answer(send, 503, refused, [(b"retry-after", b"1")])
            return
        async with self._admission.admitted() as version:

            async def attributed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", []), (VERSION_HEADER, version.encode())]
                await send(message)

            await self._app(scope, receive, attributed)

    async def _control(self, scope: Scope, path: str, send: Send) -> None:
        asked = (scope["method"], path.removeprefix(ROUTE))
        if asked == ("POST", "/close"):
            await self._admission.close()
        elif asked == ("POST", "/open"):
            version = parse_qs(scope.get("query_string", b"").decode()).get("version", [""])[0]
            if not version:
                await _answer(send, 400, {"error": "name the version: /open?version=N"})
                return
            await self._admission.open(version)
        elif asked != ("GET", ""):
            await _answer(send, 404, {"error": f"{asked[0]} {path} does not exist"})
            return
        admission = self._admission
        state = {"open": admission.version is not None, "version": admission.version, "running": admission.running}
        await _answer(send, 200, state)


@contextmanager
def _control_socket(gate: Admission, scope: Scope) -> Iterator[None]:
    """While the server lives: the plugin's own control socket, where its configuration names a directory for it."""
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    config = getattr(getattr(engine, "vllm_config", None), "additional_config", None)
    wanted = config.get("nemo_dcr", {}) if isinstance(config, dict) else {}
    if "control" not in wanted:
        yield
        return
    from nemo_dcr.adapters.vllm.control import FrontControl
    from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT
    from nemo_dcr.transport.relay.keys import read_security

    front = FrontControl(
        engine,
        gate,
        Path(wanted["control"]),
        str(wanted.get("instance", "engine")),
        listen=str(wanted.get("listen", LOOPBACK)),
        security=read_security(Path(wanted["keys"])) if "keys" in wanted else PLAINTEXT,
    )
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
