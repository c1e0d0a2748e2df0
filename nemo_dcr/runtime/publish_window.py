"""The payloads of one stream that are under way at once: published side by side, told in declared order.

A payload counts as published once its transport acknowledged it, which takes at least a round trip after its last byte.
With one payload at a time the link stands still meanwhile, for as long as a small payload itself takes. So up to
`payloads_in_flight` of them are handed to the transport, each on a thread of its own, and at most `in_flight_bytes`
bytes; a larger payload goes alone. They go out in order; whoever is told that they are published is told in that order
too, whichever was acknowledged first. The first failure is raised on the taker's thread and ends the others.
Not handled: what a receiver does with payloads that overtake each other; it takes the lowest number that is there.

Paper: Section 7 (pipelined delivery); Appendix C (transport interval)   Spec: EmitPayload
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from nemo_dcr.config import QueueConfig
from nemo_dcr.runtime.payload_stream import FormedPayload
from nemo_dcr.transport.base import Publisher

Tell = Callable[[int, bytes], None]
"""Told number and digest of a payload."""


class PublishWindow:
    """Use it inside a `with` block, from one thread; leaving the block waits until nothing is under way any more."""

    def __init__(
        self,
        publisher: Publisher,
        queue: QueueConfig,
        *,
        name: str,
        going: Callable[[FormedPayload], None],
        publish: Callable[[FormedPayload], None],
        published: Tell,
    ) -> None:
        """Nothing runs yet.

        Args:
            publisher: stopped when the block is left by an error, so that nothing stays under way.
            name: what its threads are called.
            going: called on the taker's thread before a payload goes out, in order.
            publish: returns when a payload is acknowledged; called on several threads.
            published: told of every acknowledged payload, in order, one at a time, on any thread.
        """
        self._publisher = publisher
        self._queue = queue
        self._going = going
        self._publish = publish
        self._tell = published
        self._threads = ThreadPoolExecutor(queue.payloads_in_flight, thread_name_prefix=name)
        self._changed = threading.Condition()
        self._payloads = 0
        self._bytes = 0
        self._acknowledged: dict[int, bytes] = {}
        """Digests by number of those that wait for an earlier one."""
        self._told = 0
        """Payloads that were told: the number of the next."""
        self._problem: BaseException | None = None

    def __enter__(self) -> PublishWindow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is under way when the block failed, and wait for every thread."""
        if kind is not None:
            self._publisher.stop()
        self._threads.shutdown(wait=True)
        self._problem = None

    def send(self, payload: FormedPayload) -> None:
        """Let one payload go out, the next in number; waits for room. Raises: what an earlier one failed with."""
        nbytes = len(payload.encoded.data)
        with self._changed:
            self._changed.wait_for(lambda: self._problem is not None or self._has_room(nbytes))
            self._check()
            self._payloads += 1
            self._bytes += nbytes
        self._going(payload)
        self._threads.submit(self._run, payload)

    def finish(self) -> None:
        """Wait until everything is published and told. Raises: what a payload failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem is not None or not self._payloads)
            self._check()

    def _has_room(self, nbytes: int) -> bool:
        fits = self._bytes + nbytes <= self._queue.in_flight_bytes or not self._payloads
        return fits and self._payloads < self._queue.payloads_in_flight

    def _check(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # a traceback that holds its own error keeps every payload of the stream alive

    def _run(self, payload: FormedPayload) -> None:
        number, nbytes = payload.number, len(payload.encoded.data)
        problem: BaseException | None = None
        try:
            self._publish(payload)
        except BaseException as caught:
            problem = caught
        with self._changed:
            if problem is None:
                self._acknowledged[number] = payload.encoded.digest
                try:
                    while self._told in self._acknowledged:
                        self._tell(self._told, self._acknowledged.pop(self._told))
                        self._told += 1
                except BaseException as caught:
                    problem = caught
            self._payloads -= 1
            self._bytes -= nbytes
            self._problem = self._problem or problem
            self._changed.notify_all()
        del problem, payload
