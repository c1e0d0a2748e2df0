"""A coordinator in a thread of a trainer process, for runs that start none of their own.

It is the process of `nemo-dcr coordinator` without the process: it finds owners and receivers by their address files
and ends with its host. Nothing of it is durable, so another one may take over at any time; this one ends then.
Not handled: engines that are driven over an API of their own (see adapters.vllm).

Paper: Section 6.3
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from nemo_dcr.config import RefitConfig
from nemo_dcr.control import open_control
from nemo_dcr.ids import OwnerId
from nemo_dcr.protocol.transition_state import CoordinatorConfig
from nemo_dcr.runtime.addresses import new_incarnation
from nemo_dcr.runtime.chronicle import DIRECTORY as CHRONICLE
from nemo_dcr.runtime.chronicle import Chronicle, Told, tell_all, tell_nobody
from nemo_dcr.runtime.coordinator_node import CoordinatorNode
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.base import Transport
from nemo_dcr.transport.relay.keys import Security

NAME = "coordinator-trainer"


class CoordinatorThread:
    """Coordinates until `close`."""

    def __init__(
        self,
        directory: Path,
        record: str,
        transport: Transport,
        *,
        owners: int,
        instances: int,
        refit: RefitConfig,
        listen: str = LOOPBACK,
        security: Security = PLAINTEXT,
        told: Told = tell_nobody,
    ) -> None:
        """Bind `listen` and begin.

        Args:
            directory: of the run, with `addresses`, `traces` and `chronicle`.
            record: URL of the commit record.
            transport: for the cleanup of old payloads; the caller closes it.
            owners: trainer ranks.
            instances: the first version waits for so many engine instances.
            refit: the protocol's times and choices.
            listen: where it answers `nemo-dcr status`.
            security: its key pair.
            told: gets what its chronicle gets.

        Raises: InvalidConfig for a URL or address that cannot be used; OperatorNeeded; ControlPlaneUnavailable.
        """
        clock, incarnation = LamportClock(), new_incarnation(directory / "addresses", NAME)
        self._control = open_control(record, now=time.time)
        self._tracer = FileTracer(directory / "traces" / f"{NAME}-{incarnation}.ndjson", NAME, incarnation, clock)
        self._chronicle = Chronicle(directory / CHRONICLE, NAME, incarnation)
        self.problem: BaseException | None = None
        """What ended it, Conflict when another coordinator took over; None while it runs."""
        try:
            self._node = CoordinatorNode(
                name=NAME,
                incarnation=incarnation,
                config=CoordinatorConfig(
                    refit=refit, owners=tuple(OwnerId(rank) for rank in range(owners)), bootstrap_instances=instances
                ),
                directory=directory / "addresses",
                control=self._control,
                transport=transport,
                tracer=self._tracer,
                clock=clock,
                listen=listen,
                security=security,
                told=tell_all(self._chronicle.tell, told),
            )
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; an open transition is taken up by the next coordinator."""
        self._node.stopping.set()
        self._thread.join()
        self._let_go()

    def _run(self) -> None:
        try:
            self._node.run()
        except BaseException as problem:  # told to the trainer, which waits for a transition that would never end
            self.problem = problem

    def _let_go(self) -> None:
        self._tracer.close()
        self._chronicle.close()
        close = getattr(self._control, "close", None)
        if close is not None:
            close()
