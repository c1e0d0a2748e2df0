"""The plugin's own control socket in the API server: the driver's four calls without vLLM's open control routes.

The middleware `RequestGate` starts it when the server was given
`--additional-config '{"nemo_dcr": {"control": "DIRECTORY"}}'`; its address is published there as `front-INSTANCE`. vLLM
then runs without VLLM_SERVER_DEV_MODE, so nobody can pause it, or start an update, through the port that serves
requests. `SocketEngine` is the driver's side.
Beyond loopback both sides need keys, as for every control socket (runtime.control_keys).
Not handled: what an admitted driver may ask for; it may ask for everything here.

Paper: Section 7 (gate); Appendix B (control calls)   Spec: CloseGate, OpenGate
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq

from nemo_dcr.adapters.vllm.client import EngineClient, Gate
from nemo_dcr.adapters.vllm.engine_api import CALL_S, PAUSE_S
from nemo_dcr.adapters.vllm.rank import Loan
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.errors import EngineTrouble
from nemo_dcr.ids import Version
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.methods import Done
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT, Method, NoReply, Peer, Respond, Server, call
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import Security


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One of the driver's calls: `attach`, `pause`, `lend` or `resume`."""

    operation: str
    version: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    """Settings of an attach, or the loan."""


ENGINE_CALL = Method("EngineCall", EngineCall, Done)


class FrontControl:
    """Carries out the driver's calls on the server's own event loop."""

    def __init__(
        self,
        engine: Any,
        gate: Gate,
        directory: Path,
        instance: str,
        *,
        listen: str = LOOPBACK,
        security: Security = PLAINTEXT,
    ) -> None:
        """`engine` is vLLM's engine client. Call it on the server's event loop.

        Raises: InvalidConfig when `security` does not allow `listen`, or it is taken.
        """
        self._client = EngineClient(engine, gate, "front")
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()
        self._server = Server(f"front-{instance}", LamportClock(), listen, security=security)
        self._server.register(ENGINE_CALL, self._take)
        self._server.start()
        name = f"front-{instance}"
        key = security.keys.public if security.keys is not None else ""
        incarnation = new_incarnation(directory, name)
        publish_address(directory, Address(name, self._server.address, incarnation, os.getpid(), key))

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def _take(self, asked: EngineCall, respond: Respond) -> None:
        self._loop.call_soon_threadsafe(self._begin, asked, respond)

    def _begin(self, asked: EngineCall, respond: Respond) -> None:
        task = self._loop.create_task(self._carry_out(asked, respond))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _carry_out(self, asked: EngineCall, respond: Respond) -> None:
        operations: dict[str, Callable[[], Awaitable[None]]] = {
            "attach": lambda: self._client.attach(asked.info),
            "pause": self._client.pause,
            "lend": lambda: self._client.lend(asked.info),
            "resume": lambda: self._client.resume(str(asked.version)),
        }
        try:
            await operations[asked.operation]()
        except Exception as problem:  # vLLM's own calls raise anything; the driver has to be told, or it waits
            respond(Done(f"{type(problem).__name__}: {problem}"))
        else:
            respond(Done())


class SocketEngine:
    """An engine behind the plugin's control socket; used by one thread."""

    def __init__(self, address: Address, security: Security = PLAINTEXT) -> None:
        """Connect to a front. Raises: InvalidConfig when `security` does not allow the address."""
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._peer = Peer(
                address.name, address.address, LamportClock(), self._context, key=address.key, security=security
            )
        except BaseException:
            self._context.term()
            raise

    def attach(self, settings: Settings) -> None:
        """As `EngineApi.attach`. Raises: EngineTrouble."""
        self._call(EngineCall("attach", info=settings.init_info()), PAUSE_S)

    def pause(self) -> None:
        """As `EngineApi.pause`. Raises: EngineTrouble."""
        self._call(EngineCall("pause"), PAUSE_S)

    def lend(self, loan: Loan) -> None:
        """As `EngineApi.lend`. Raises: EngineTrouble."""
        self._call(EngineCall("lend", info=asdict(loan)), loan.at_most_s + CALL_S)

    def resume(self, version: Version) -> None:
        """As `EngineApi.resume`. Raises: EngineTrouble."""
        self._call(EngineCall("resume", version=version), CALL_S)

    def close(self) -> None:
        """Release the socket."""
        self._peer.close()
        self._context.term()

    def _call(self, asked: EngineCall, timeout_s: float) -> None:
        answer = call(self._peer, ENGINE_CALL, asked, timeout_s)
        problem = answer.reason if isinstance(answer, NoReply) else answer[0].problem
        if problem:
            raise EngineTrouble(self._peer.name, asked.operation, problem)
