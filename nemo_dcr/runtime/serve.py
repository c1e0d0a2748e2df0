"""Puts nodes behind sockets: one server thread, a thread for each stage of the node, and the engine's own thread.

A service answers every control call of the protocol and the runtime's own calls for prewarm, timings and dumps. An
owner's service publishes on a thread that lasts; what constructs and encodes ahead of it ends with each stream. A
receiver's service has one thread for intake and one for decoding. What touches an engine's weights runs on the thread
that the engine lends by calling `work`.
Not handled: starting processes and telling others the address (the caller does).

Paper: Section 6.1 (prewarm call); Appendix B (endpoints)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import NemoDcrError
from nemo_dcr.receiver.residents import resident_dump
from nemo_dcr.runtime.methods import (
    DUMP,
    ENGINE,
    OWNER_METHODS,
    PREWARM,
    RECEIVER_METHODS,
    SERVING,
    STOP,
    TABLE,
    TIMINGS,
    TROUBLE,
    BoxRow,
    Done,
    EngineView,
    Nothing,
    Prewarm,
    Prewarmed,
    Serving,
    Storage,
    Table,
    TensorRow,
    Trouble,
)
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT, Bulk, Respond, Server
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import Security

POLL_S = 0.1
SERVING_REQUEST = "serving"
"""The request that an engine with a scheduler of its own runs while it may compute tokens."""


def rows(metas: Iterable[TensorMeta]) -> tuple[TensorRow, ...]:
    """Tensors as they travel in calls."""
    return tuple(TensorRow(meta.name, meta.shape, meta.dtype) for meta in metas)


def metas(table: Iterable[TensorRow]) -> tuple[TensorMeta, ...]:
    """Tensors as they came in a call."""
    return tuple(TensorMeta(row.name, row.shape, row.dtype) for row in table)


class _Service:
    """A server, and a background thread for each of some steps that repeats it until `close`.

    A fault of this package ends the service: `stopping` is set and `close` raises it, so that the process ends and
    peers name it, instead of waiting for a thread that is gone.
    """

    def __init__(
        self, name: str, clock: LamportClock, listen: str, security: Security, **steps: Callable[[float], object]
    ) -> None:
        self.stopping = threading.Event()
        self._fault: BaseException | None = None
        self.server = Server(name, clock, listen, security=security, on_fault=self._end)
        self._threads = [
            threading.Thread(target=self._loop, args=(step,), name=f"{stage}-{name}", daemon=True)
            for stage, step in steps.items()
        ]
        self.server.answer(STOP, self._stop)

    @property
    def address(self) -> str:
        """Where this service answers."""
        return self.server.address

    def start(self) -> None:
        """Begin to answer and to step."""
        self.server.start()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop all threads and release the sockets.

        Raises: whatever ended one of the threads.
        """
        self.stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10.0)
        self.server.close()
        if self._fault is not None:
            raise self._fault

    def _stop(self, call: Nothing) -> Done:
        self.stopping.set()
        return Done()

    def _loop(self, step: Callable[[float], object]) -> None:
        try:
            while not self.stopping.is_set():
                step(POLL_S)
        except BaseException as fault:
            self._end(fault)

    def fail(self, fault: BaseException) -> None:
        """A fault on a thread that others lend: end the service, so that peers see a lost endpoint."""
        self._end(fault)

    def _end(self, fault: BaseException) -> None:
        self._fault = fault
        self.stopping.set()


class ReceiverService(_Service):
    """A receiver node behind a socket; the engine calls `work` on its own thread until `stopping` is set."""

    def __init__(
        self, node: ReceiverNode, clock: LamportClock, listen: str = LOOPBACK, security: Security = PLAINTEXT
    ) -> None:
        """Bind `listen`. Raises: InvalidConfig when `security` does not allow it, or it is taken."""
        super().__init__(node.member.receiver, clock, listen, security, intake=node.intake, decode=node.decode)
        node.run_apart()
        self._node = node
        self._prewarmed: tuple[tuple[TensorRow, ...], Prewarmed] | None = None
        for method in RECEIVER_METHODS.values():
            self.server.register(method, node.call)
        self.server.register(PREWARM, self._prewarm)
        self.server.register(DUMP, self._dump)
        self.server.answer(TIMINGS, node.timings.of)
        self.server.answer(ENGINE, lambda call: EngineView(node.report, node.wants_engine))
        self.server.answer(SERVING, self._serving)
        self.server.answer(TROUBLE, self._trouble)

    def work(self, timeout_s: float = POLL_S) -> bool:
        """Lend this thread for one step; True when there was work."""
        return self._node.work(timeout_s)

    def _serving(self, call: Serving) -> Done:
        """One request stands for everything that an engine with a scheduler of its own computes meanwhile."""
        if not call.begins:
            self._node.finish(SERVING_REQUEST)
        elif SERVING_REQUEST not in self._node.requests and not self._node.admit(SERVING_REQUEST):
            return Done("the gate is closed")
        return Done()

    def _trouble(self, call: Trouble) -> Done:
        self._node.trouble(call.attempt, call.detail)
        return Done()

    def _prewarm(self, call: Prewarm, respond: Respond) -> None:
        def run() -> None:
            known = self._prewarmed
            if known is not None and known[0] == call.tensors and not call.again:
                return respond(known[1])
            self._prewarmed = None
            try:
                classes, reasons = self._node.prewarm(metas(call.tensors))
            except NemoDcrError as problem:
                return respond(Prewarmed({}, {}, f"{type(problem).__name__}: {problem}"))
            found = Prewarmed({name: path.value for name, path in classes.items()}, reasons)
            self._prewarmed = (call.tensors, found)
            return respond(found)

        self._node.on_engine(run)

    def _dump(self, call: Nothing, respond: Respond) -> None:
        def run() -> None:
            dump = list(resident_dump(self._node.model))
            table = tuple(TensorRow(row.name, row.shape, row.dtype) for row in dump)
            respond(Storage(table), Bulk(tuple(row.words.tobytes() for row in dump)))

        self._node.on_engine(run)


class OwnerService(_Service):
    """An owner node behind a socket; streams and copies run on the service's own thread."""

    def __init__(
        self, node: OwnerNode, clock: LamportClock, listen: str = LOOPBACK, security: Security = PLAINTEXT
    ) -> None:
        """Bind `listen`. Raises: InvalidConfig when `security` does not allow it, or it is taken."""
        super().__init__(f"owner-{node.delta.owner}", clock, listen, security, work=node.work)
        node.run_apart()
        self._node = node
        for method in OWNER_METHODS.values():
            self.server.register(method, node.call)
        self.server.answer(TABLE, self._table)
        self.server.register(DUMP, self._dump)
        self.server.answer(TIMINGS, node.timings.of)

    def _table(self, call: Nothing) -> Table:
        delta = self._node.delta
        return Table(rows(delta.tensor_table()), delta.source_elements, delta.baseline_bytes)

    def _dump(self, call: Nothing, respond: Respond) -> None:
        trackers = list(self._node.delta.tracker_words())
        respond(
            Storage(
                rows(tensor for tensor, _, _ in trackers),
                tuple(BoxRow(box.view, box.start, box.extent, box.axes) for _, box, _ in trackers),
            ),
            Bulk(tuple(words.tobytes() for _, _, words in trackers)),
        )
