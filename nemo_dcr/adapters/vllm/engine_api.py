"""What a driver asks of an engine, and the engine behind vLLM's HTTP server.

Four things: attach (pause, then open the receivers), pause (no request runs, no token is computed, every cache is
empty), lend (the workers' main loops), resume under a committed version. A cache that cannot be emptied, or says that
it cannot, is `EngineTrouble`, which fails the attempt before anything is written.
vLLM's control routes exist only with VLLM_SERVER_DEV_MODE=1 and ask for no key: bind such a server to a private
address. Where that is not enough, use the control socket of the plugin (see control).
Not handled: which endpoint needs what (see endpoints).

Paper: Section 7 (gate); Appendix B   Spec: CloseGate, OpenGate
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from nemo_dcr.adapters.vllm.rank import Loan
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.errors import EngineTrouble
from nemo_dcr.ids import Version

CALL_S = 60.0
PAUSE_S = 3700.0
"""Running requests end first; longer than the gate itself waits."""


def open_session(start: Callable[[], object], finish: Callable[[], object]) -> None:
    """Open vLLM's update session. One that a driver left open, perhaps on some ranks only, is closed first.

    Raises: EngineTrouble when it cannot be opened.
    """
    try:
        start()
    except EngineTrouble:
        with contextlib.suppress(EngineTrouble):  # on the ranks where it is not open there is nothing to finish
            finish()
        start()


class EngineApi(Protocol):
    """One engine instance. Every method may be repeated, and raises EngineTrouble when the engine did not do it."""

    def attach(self, settings: Settings) -> None:
        """Pause, and let every rank open its receiver; ranks that did publish their address."""
        ...

    def pause(self) -> None:
        """Return once nothing runs and nothing will, with prefix, encoder and multimodal caches empty."""
        ...

    def lend(self, loan: Loan) -> None:
        """Lend the main loop of every rank to its receiver."""
        ...

    def resume(self, version: Version) -> None:
        """Compute again, under this committed version."""
        ...


class HttpEngine:
    """An engine behind `vllm serve`. With the middleware `RequestGate` responses are attributed to versions."""

    def __init__(self, url: str) -> None:
        """`url` is the server's base address, such as http://127.0.0.1:8000."""
        self.url = url.rstrip("/")
        self._gate: bool | None = None

    def attach(self, settings: Settings) -> None:
        """As `EngineApi.attach`. Raises: EngineTrouble."""
        self.pause()
        self._post("init_weight_transfer_engine", {"init_info": settings.init_info()}, timeout_s=PAUSE_S)

    def pause(self) -> None:
        """As `EngineApi.pause`. Raises: EngineTrouble."""
        if self.has_gate:
            state = self._post("nemo_dcr/gate/close", timeout_s=PAUSE_S)
            if state.get("open") is not False or state.get("running") != 0:
                raise EngineTrouble(self.url, "close the gate", f"it answered {state}")
        self._post("pause?mode=wait", timeout_s=PAUSE_S)
        reset = self._post("reset_prefix_cache?reset_external=true")
        if reset.get("success") is not True:
            raise EngineTrouble(self.url, "reset the prefix cache", f"it answered {reset}")
        self._post("reset_mm_cache")
        self._post("reset_encoder_cache")

    def lend(self, loan: Loan) -> None:
        """As `EngineApi.lend`. Raises: EngineTrouble."""
        open_session(lambda: self._post("start_weight_update"), lambda: self._post("finish_weight_update"))
        self._post("update_weights", {"update_info": asdict(loan)}, timeout_s=loan.at_most_s + CALL_S)
        self._post("finish_weight_update")

    def resume(self, version: Version) -> None:
        """As `EngineApi.resume`. Raises: EngineTrouble."""
        self._post("update_weight_version", {"new_version": str(version)})
        self._post("resume")
        if self.has_gate:
            self._post(f"nemo_dcr/gate/open?version={version}")

    @property
    def has_gate(self) -> bool:
        """Whether the server runs `RequestGate`; asked once."""
        if self._gate is None:
            status, _ = self._request("GET", "nemo_dcr/gate", None, CALL_S)
            self._gate = status == 200
        return self._gate

    def weight_version(self) -> str:
        """The version that the engine was last resumed under, by its own account."""
        return str(self._call("GET", "weight_info").get("weight_version"))

    def checksums(self) -> dict[str, str]:
        """vLLM's own checksum of every parameter of every rank."""
        found: dict[str, str] = self._post("weight_checker", {"action": "checksum"}, timeout_s=PAUSE_S)["checksums"]
        return found

    def _post(self, path: str, body: Any = None, timeout_s: float = CALL_S) -> dict[str, Any]:
        return self._call("POST", path, body, timeout_s)

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float = CALL_S) -> dict[str, Any]:
        status, content = self._request(method, path, body, timeout_s)
        if status != 200:
            hint = "; start the server with VLLM_SERVER_DEV_MODE=1" if status == 404 else ""
            raise EngineTrouble(self.url, path, f"status {status}: {content[:300].decode(errors='replace')}{hint}")
        try:
            found = json.loads(content) if content else {}
        except ValueError:
            raise EngineTrouble(self.url, path, f"no JSON: {content[:100]!r}") from None
        return found if isinstance(found, dict) else {"answer": found}

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        data = None if method == "GET" else json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(
            f"{self.url}/{path}", data=data, method=method, headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return int(response.status), response.read()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read()
        except OSError as problem:
            raise EngineTrouble(self.url, path, f"no answer: {problem}") from None
