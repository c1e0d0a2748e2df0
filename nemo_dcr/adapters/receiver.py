"""One rank of an engine with a loader of its own, in one call: receiver, control socket, and if wanted a thread.

The counterpart of `Owner` for engines that are torch modules: anything with `load_weights`. What touches weights runs
on the thread that the engine lends by `work`; an engine without a loop of its own has a thread for it. While the gate
is open requests are admitted, and each is served by one committed version.
Not handled: vLLM (adapters.vllm), whose workers have a loop of their own.

Paper: Section 6.1; Section 7   Spec: ReceiverProgress, GateSafe
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nemo_dcr.adapters.prometheus import open_metrics
from nemo_dcr.config import CodecConfig, QueueConfig, RefitConfig
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import InstanceId, Member, receiver_id
from nemo_dcr.receiver.residents import NativeModel
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address
from nemo_dcr.runtime.chronicle import DIRECTORY as CHRONICLE
from nemo_dcr.runtime.chronicle import Chronicle, Told, tell_all
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT
from nemo_dcr.runtime.serve import ReceiverService
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import read_security
from nemo_dcr.transport.urls import open_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

LEND_S = 0.05
"""How long a thread waits for work at once."""


class Receiver:
    """One engine rank; close it or use it as a context manager."""

    def __init__(
        self,
        model: NativeModel,
        *,
        directory: Path | str,
        instance: str = "engine",
        rank: int = 0,
        ranks: int = 1,
        transport: str = "",
        run: str = "run",
        thread: bool = True,
        loaded_digest: bytes = b"",
        refit: RefitConfig | None = None,
        codec: CodecConfig | None = None,
        queue: QueueConfig | None = None,
        listen: str = LOOPBACK,
        keys: Path | str | None = None,
        metrics: str = "",
    ) -> None:
        """Begin to answer.

        Args:
            model: a torch module with a `load_weights` of its own.
            directory: of the run, the one that the owners have.
            instance: name of the engine, without a slash.
            rank: of this process among those of the engine.
            ranks: of the engine.
            transport: URL of the payloads; default: `store` in `directory`.
            run: name of the run.
            thread: apply on a thread of its own; False when the engine calls `work` itself.
            loaded_digest: content digest of the checkpoint that was loaded (`nemo_dcr.checkpoint.digests`), if known:
                with the owners' own checkpoint the first version is not sent.
            refit: post-apply checks.
            codec: what payloads may be.
            queue: bounds between the stages of a receiver.
            listen: where it answers control calls; beyond loopback it needs `keys`.
            keys: key directory of this rank.
            metrics: `PORT` or `HOST:PORT` at which rank 0 answers Prometheus, rank r at the r-th port after it; empty
                for none (docs/metrics.md).

        Raises: InvalidConfig; TransportFailed when the payload store cannot be opened.
        """
        place, name = Path(directory), receiver_id(InstanceId(instance), rank)
        for folder in ("addresses", "traces", "store"):
            (place / folder).mkdir(parents=True, exist_ok=True)
        security = PLAINTEXT if keys is None else read_security(Path(keys))
        clock, incarnation = LamportClock(), new_incarnation(place / "addresses", name)
        with ExitStack() as opened:
            payloads = open_transport(transport or (place / "store").resolve().as_uri(), run=run)
            opened.callback(payloads.close)
            trace = place / "traces" / f"{instance}-{rank}-{incarnation}.ndjson"
            tracer = FileTracer(trace, name, incarnation, clock)
            opened.callback(tracer.close)
            chronicle = Chronicle(place / CHRONICLE, name, incarnation)
            opened.callback(chronicle.close)
            endpoint = open_metrics(metrics, rank) if metrics else None
            told: Told = chronicle.tell
            if endpoint is not None:
                opened.callback(endpoint.close)
                told = tell_all(chronicle.tell, endpoint.metrics.teller(name))
            self.node = ReceiverNode(
                member=Member(name, incarnation),
                ranks=ranks,
                model=model,
                transport=payloads,
                tracer=tracer,
                refit=refit,
                codec=codec,
                queue=queue,
                loaded_digest=loaded_digest,
                told=told,
            )
            if endpoint is not None:
                endpoint.metrics.watch(name, lambda: self.node.queue_depths)
            self.metrics_port = None if endpoint is None else endpoint.port
            """Where this rank answers Prometheus; None when it does not."""
            self._service = ReceiverService(self.node, clock, listen, security)
            opened.callback(self._service.close)
            self._service.start()
            self._thread = threading.Thread(target=self._lend, name=f"apply-{name}", daemon=True)
            if thread:
                self._thread.start()
                opened.callback(self._thread.join)
            opened.callback(self._service.stopping.set)
            key = security.keys.public if security.keys is not None else ""
            publish_address(place / "addresses", Address(name, self._service.address, incarnation, os.getpid(), key))
            self._opened = opened.pop_all()

    def work(self, timeout_s: float = LEND_S) -> bool:
        """Lend this thread for one step, of at most `timeout_s` seconds of waiting; True when there was work."""
        return self._service.work(timeout_s)

    @contextmanager
    def serving(self, request: str) -> Iterator[None]:
        """One request, under one committed version from its beginning to its end.

        Raises: OperatorNeeded when the gate is closed; ask again later.
        """
        if not self.node.admit(request):
            raise OperatorNeeded(f"request {request!r} was not admitted: the gate is closed", "ask again later")
        try:
            yield
        finally:
            self.node.finish(request)

    def close(self) -> None:
        """Stop answering. Idempotent. Raises: the fault that ended it before, if one did."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lend(self) -> None:
        try:
            while not self._service.stopping.is_set():
                self._service.work(LEND_S)
        except BaseException as fault:
            self._service.fail(fault)
