"""The receiver node of one worker rank, beside an engine that keeps its main loop for itself.

Control calls are answered and compressed payloads are staged on threads of their own, while the engine serves. Only
what touches weights (prewarm, application, flush, dumps) needs the engine's thread; the engine lends it by calling
`lend` from its weight-update call. `lend` never raises: an error of an attempt travels by the protocol, and a fault of
this package ends the control socket, which peers see as a lost endpoint. A forward pass over storage that is not one
committed version is refused by `fence`.
Not handled: vLLM (see engine); when to lend (see the driver in endpoints).

Paper: Section 7 (staging beside serving); Appendix B   Spec: ReceiverProgress, GateSafe
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from nemo_dcr.adapters.prometheus import open_metrics
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.config import RefitConfig
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import Member, receiver_id
from nemo_dcr.protocol.tags import TagKind
from nemo_dcr.receiver.residents import NativeModel
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.chronicle import Chronicle, Told, tell_all
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.serve import ReceiverService
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.urls import open_transport

logger = logging.getLogger(__name__)

STEP_S = 0.02
"""How long the lent thread waits for work at once."""


@dataclass(frozen=True)
class Loan:
    """How long the engine lends its thread: until there was nothing to do for `idle_s`, at most `at_most_s`."""

    idle_s: float = 0.1
    at_most_s: float = 600.0


class RankReceiver:
    """A receiver node with its control socket, published in the run directory."""

    def __init__(
        self, settings: Settings, rank: int, ranks: int, model: NativeModel, *, loaded_digest: bytes = b""
    ) -> None:
        """Begin to answer. `loaded_digest` names the checkpoint in the storage, or is empty when nobody knows.

        Raises: TransportFailed when the payload store cannot be opened; InvalidConfig for keys that are missing, or
        that do not allow where it is to listen.
        """
        self.settings = settings
        security = settings.security
        self.forwards_refused = 0
        receiver = receiver_id(settings.name, rank)
        clock, incarnation = LamportClock(), new_incarnation(settings.addresses, receiver)
        settings.traces.mkdir(parents=True, exist_ok=True)
        trace = settings.traces / f"{receiver.replace('/', '-')}-{incarnation}.ndjson"
        self._endpoint = open_metrics(settings.metrics, rank) if settings.metrics else None
        self._transport = open_transport(settings.transport_url, run=settings.run)
        self._tracer = FileTracer(trace, receiver, incarnation, clock)
        self._chronicle = Chronicle(settings.chronicle, receiver, incarnation)
        told: Told = self._chronicle.tell
        if self._endpoint is not None:
            told = tell_all(told, self._endpoint.metrics.teller(receiver))
        self.node = ReceiverNode(
            member=Member(receiver, incarnation),
            ranks=ranks,
            model=model,
            transport=self._transport,
            tracer=self._tracer,
            refit=RefitConfig(post_apply_check=settings.post_apply_check),
            loaded_digest=loaded_digest,
            told=told,
        )
        try:
            self._service = ReceiverService(self.node, clock, settings.listen, security)
        except BaseException:
            self._let_go()
            raise
        if self._endpoint is not None:
            self._endpoint.metrics.watch(receiver, lambda: self.node.queue_depths)
        self._service.start()
        key = security.keys.public if security.keys is not None else ""
        publish_address(settings.addresses, Address(receiver, self._service.address, incarnation, os.getpid(), key))

    @property
    def alive(self) -> bool:
        """False once the control socket ended, for a fault or by a call."""
        return not self._service.stopping.is_set()

    def lend(self, loan: Loan) -> None:
        """Do what waits for the engine's thread, on this thread. Never raises."""
        deadline = time.monotonic() + loan.at_most_s
        idle_since = time.monotonic()
        try:
            while self.alive and time.monotonic() < deadline:
                if self._service.work(STEP_S):
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since >= loan.idle_s:
                    return
        except Exception as fault:
            logger.critical("%s: a step on the engine's thread failed", self.node.member.receiver, exc_info=True)
            self._service.fail(fault)
            self._service.server.close()

    def fence(self) -> None:
        """Called before every forward pass of the model.

        Raises: OperatorNeeded over storage that is not one committed version; the engine then has to end.
        """
        report = self.node.report
        if report.tag.kind is not TagKind.CLEAN:
            self.forwards_refused += 1
            raise OperatorNeeded(
                f"{report.receiver} was told to compute tokens with storage that is {report.tag}",
                "let only the coordinator resume this engine; restart it",
            )

    def close(self) -> None:
        """Stop answering. Idempotent."""
        try:
            self._service.close()
        except Exception:  # it hands on the fault that ended it, which was told to peers and is no news here
            logger.warning("%s: its service had failed before", self.node.member.receiver, exc_info=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self._tracer.close()
        self._chronicle.close()
        self._transport.close()
