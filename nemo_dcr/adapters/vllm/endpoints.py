"""Endpoints whose receivers live in engines with a main loop and a scheduler of their own.

Protocol calls go to each rank's control socket, as for any receiver. Beside them one thread for each engine instance
looks at its ranks and does what only the engine's own API can: it pauses before a rank may be quiet, lends the main
loops while ranks have work for them, and resumes once every rank's gate is open. The ranks hold one request, `serving`,
from before the engine resumes until after it paused; so no rank writes while a token may be computed, whichever of
the two processes dies in between. A driver keeps nothing that a new one could not see.
Not handled: the protocol (coordinator); starting engines.

Paper: Section 7 (gate); Appendix B   Spec: AdmitRequest, FinishRequest   Decisions: D5, D20
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from nemo_dcr.adapters.vllm.engine_api import EngineApi
from nemo_dcr.adapters.vllm.rank import Loan
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.errors import EndpointLost, EngineTrouble
from nemo_dcr.ids import ReceiverId, instance_of, receiver_id
from nemo_dcr.runtime.addresses import Address, wait_for_address
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import ENGINE, SERVING, TROUBLE, EngineView, Nothing, Serving, Trouble
from nemo_dcr.runtime.rpc import PLAINTEXT, Bulk, Method
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import Security

logger = logging.getLogger(__name__)

POLL_S = 0.05
CALL_S = 10.0
LOAN = Loan(idle_s=0.1, at_most_s=30.0)


class EngineEndpoints(SocketEndpoints):
    """Socket endpoints with a driver for each engine instance."""

    def __init__(self, clock: LamportClock, security: Security = PLAINTEXT) -> None:
        """`security` is the coordinator's: its key pair, where ranks answer beyond loopback."""
        super().__init__(clock, security)
        self._shared_clock, self._shared_security = clock, security
        self._drivers: dict[str, EngineDriver] = {}

    def add_engine(self, engine: EngineApi, settings: Settings, ranks: int, timeout_s: float = 60.0) -> list[Address]:
        """Attach an engine instance in the place of an earlier life of it; returns the addresses of its ranks.

        Raises: EngineTrouble when it refuses; EndpointLost when a rank opened no receiver (its log says why).
        """
        self.remove_engine(settings.instance)
        engine.attach(settings)
        receivers = [receiver_id(settings.name, rank) for rank in range(ranks)]
        found = [wait_for_address(settings.addresses, receiver, timeout_s) for receiver in receivers]
        for receiver, address in zip(receivers, found, strict=True):
            self.add_receiver(receiver, address)
        driver = EngineDriver(
            engine, dict(zip(receivers, found, strict=True)), self._shared_clock, self._shared_security
        )
        self._drivers[settings.instance] = driver
        driver.start()
        return found

    def remove_engine(self, instance: str) -> None:
        """Forget an engine instance and its ranks. Idempotent."""
        driver = self._drivers.pop(instance, None)
        if driver is not None:
            driver.close()
        for receiver in list(self.receivers()):
            if instance_of(receiver) == instance:
                self.remove_receiver(receiver)

    def wait_until_in_step(self, timeout_s: float) -> None:
        """Return once every engine whose gates are open was resumed, which happens a moment later.

        Raises: EndpointLost for the first that was not in time.
        """
        deadline = time.monotonic() + timeout_s
        for instance, driver in self._drivers.items():
            if not driver.wait_until_in_step(deadline - time.monotonic()):
                raise EndpointLost(instance, f"it was not resumed within {timeout_s:g} s")

    def close(self) -> None:
        """End the drivers and release all sockets."""
        for driver in self._drivers.values():
            driver.close()
        self._drivers.clear()
        super().close()


class EngineDriver:
    """Keeps one engine instance in step with the gates of its ranks, on a thread of its own."""

    def __init__(
        self,
        engine: EngineApi,
        ranks: dict[ReceiverId, Address],
        clock: LamportClock,
        security: Security = PLAINTEXT,
    ) -> None:
        """`engine` is attached and paused, or was resumed by a driver before this one."""
        self.ranks = dict(ranks)
        self._engine = engine
        self._ranks = SocketEndpoints(clock, security)
        for receiver, address in ranks.items():
            self._ranks.add_receiver(receiver, address)
        self._resumed = False
        """This driver resumed the engine after the last pause; false when unknown."""
        self._looks = 0
        self._behind = False
        """At the last look gates were open, and the engine was not resumed yet."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"engine-{next(iter(ranks))}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait_until_in_step(self, timeout_s: float) -> bool:
        """True once the engine computes if its gates are open, by a look after this call, or once the driver ended."""
        deadline, first = time.monotonic() + timeout_s, self._looks
        while self._thread.is_alive() and (self._looks < first + 2 or self._behind):
            if time.monotonic() > deadline:
                return False
            self._stopping.wait(POLL_S / 5)
        return True

    def close(self) -> None:
        """End the thread after its present step; a step that waits for running requests is left behind."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        if not self._thread.is_alive():
            self._ranks.close()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                acted = self.step()
            except EndpointLost as lost:
                logger.warning("the driver ends: %s", lost)  # the coordinator sees the same on its own sockets
                return
            if not acted:
                self._stopping.wait(POLL_S)

    def step(self) -> bool:
        """Look at the ranks once and do at most one thing; True when something was done.

        Raises: EndpointLost when a rank is gone.
        """
        views: Sequence[EngineView] = [view for view, _ in self._ask(ENGINE, Nothing())]
        opened = all(view.report.gate_open for view in views)
        serving = [view.report.requests > 0 for view in views]
        self._behind = opened and not (all(serving) and self._resumed)
        self._looks += 1
        try:
            if any(serving) and not opened:
                self._resumed = False
                self._engine.pause()
                self._ask(SERVING, Serving(begins=False))
            elif self._behind:
                if any(done.problem for done, _ in self._ask(SERVING, Serving(begins=True))):
                    return True  # a gate closed meanwhile: the next step pauses
                self._engine.resume(views[0].report.tag.version)
                self._resumed = True
            elif any(view.wanted for view in views):
                self._engine.lend(LOAN)
            else:
                return False
        except EngineTrouble as trouble:
            logger.warning("%s", trouble)
            for view in views:
                self._ask(TROUBLE, Trouble(view.report.attempt, str(trouble)), [view.report.receiver])
            return False
        return True

    def _ask(self, method: Method, argument: Any, only: list[ReceiverId] | None = None) -> list[tuple[Any, Bulk]]:
        return list(self._ranks.call_receivers(method, argument, CALL_S, only=only).values())
