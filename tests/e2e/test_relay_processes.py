"""Relay nodes as processes: killed, stopped, restarted, and a retry over another tree."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nemo_dcr.errors import AttemptFailed, EndpointLost
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.testing.transport_suite import Consumer, body_of, publish
from nemo_dcr.transport.base import Publisher
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import RelayTree, balanced_tree
from tests.e2e.relay_processes import RelayProcess
from tests.unit.transport.relay_helpers import MIB, OWNER, bodies, key

pytestmark = pytest.mark.slow
NAMED_WITHIN_S = 8.0
"""Heartbeats 2 to 2.5 s, patience 1 s, and a machine that is busy."""


@pytest.fixture
def processes() -> Iterator[list[RelayProcess]]:
    """A root and two levels: n0 -> n1 -> n3, n0 -> n2."""
    with ExitStack() as stack:
        started = [RelayProcess(f"n{number}") for number in range(4)]
        for process in started:
            stack.callback(process.close)
        yield [process.wait() for process in started]


def tree_of(processes: list[RelayProcess]) -> RelayTree:
    return balanced_tree([process.place for process in processes], fan_out=2)


def publish_for_ever(publisher: Publisher) -> None:
    for number in itertools.count():
        publish(publisher, key(number))


class Stream(threading.Thread):
    """An owner that publishes payloads of 4 MiB without a pause until something raises."""

    def __init__(self, transport: RelayTransport, attempt: int) -> None:
        super().__init__(daemon=True)
        self.publisher = transport.publisher(AttemptId(attempt), OWNER)
        self.attempt = attempt
        self.acked = 0
        self.flowing = threading.Event()
        self.error: AttemptFailed | None = None
        self.ended = 0.0

    def run(self) -> None:
        try:
            while True:
                publish(self.publisher, key(self.acked, self.attempt), body_of(key(0), 4 * MIB))
                self.acked += 1
                if self.acked == 3:
                    self.flowing.set()
        except AttemptFailed as problem:
            self.error, self.ended = problem, time.monotonic()


@pytest.mark.parametrize(("victim", "sent"), [(0, signal.SIGKILL), (1, signal.SIGSTOP), (3, signal.SIGKILL)])
def test_a_node_that_dies_or_stops_under_a_stream_is_named_and_a_retry_goes_round_it(
    processes: list[RelayProcess], victim: int, sent: int
) -> None:
    """Owner and receivers learn which node is lost within seconds; the next attempt runs over a tree without it."""
    tree = tree_of(processes)
    left = [process for process in processes if process is not processes[victim]]
    shapes = {1: tree, 2: tree.without([f"n{victim}"])}
    with ExitStack() as stack:
        transport = RelayTransport(lambda attempt: shapes[attempt], local=processes[2].place)
        stack.callback(transport.close)
        subscription = transport.subscribe(AttemptId(1), [OWNER])
        stream = Stream(transport, 1)
        stream.start()
        assert stream.flowing.wait(60.0)
        began = time.monotonic()
        processes[victim].send(sent)
        stream.join(NAMED_WITHIN_S * 2)
        assert isinstance(stream.error, EndpointLost)
        assert stream.error.endpoint == f"relay node n{victim}"
        assert stream.ended - began < NAMED_WITHIN_S
        stream.publisher.stop()
        if victim != 0:  # who loses the root learns it from the owner's failure, through the coordinator
            with pytest.raises(AttemptFailed, match=f"relay node n{victim} is lost"):
                Consumer(AttemptId(1), [OWNER]).run(subscription)
        subscription.stop()
        publisher = transport.publisher(AttemptId(2), OWNER)
        for number in range(3):
            publish(publisher, key(number, 2), body_of(key(number), 2 * MIB))
        publisher.close_set()
        for process in left:
            reader = RelayTransport(shapes[2], local=process.place)
            stack.callback(reader.close)
            found = bodies(reader.subscribe(AttemptId(2), [OWNER]), attempt=2)
            assert found == {key(number, 2): body_of(key(number), 2 * MIB) for number in range(3)}
            assert reader.counters(process.place).owners[0].received_again == 0
        transport.cleanup(AttemptId(2))
        for process in left:
            counters = transport.counters(process.place)
            assert (counters.memory_bytes, counters.spilled_bytes, counters.attempts) == (0, 0, 0)


def test_a_node_that_was_restarted_is_not_taken_for_its_earlier_life(processes: list[RelayProcess]) -> None:
    """The leaf comes back under its name at its old port: the attempt still fails, for what it held is gone."""
    tree = tree_of(processes)
    transport = RelayTransport(tree)
    leaf = processes[3]
    again: list[RelayProcess] = []
    try:
        publisher = transport.publisher(AttemptId(1), OWNER)
        publish(publisher, key(0))
        leaf.close()
        again.append(RelayProcess("n3", "--listen", leaf.place.address))
        assert again[0].wait().place == leaf.place
        with pytest.raises(AttemptFailed, match="relay node n3 is lost"):
            publish_for_ever(publisher)
        retry = transport.publisher(AttemptId(2), OWNER)
        publish(retry, key(0, 2))
        assert len(retry.close_set().payloads) == 1
    finally:
        transport.close()
        for process in again:
            process.close()


def test_a_node_ends_on_sigterm_and_prints_its_counters(processes: list[RelayProcess]) -> None:
    transport = RelayTransport(tree_of(processes))
    publisher = transport.publisher(AttemptId(1), OwnerId(4))
    publish(publisher, key(0, owner=4), bytes(MIB))
    publisher.close_set()
    transport.close()
    code, output = processes[3].end()
    assert code == 0
    assert json.loads(output)["owners"]["4"]["received"] == MIB
