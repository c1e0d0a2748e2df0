"""Group D, transport: the entries that concern a relay tree."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import zmq

from nemo_dcr.errors import AttemptFailed, EndpointLost, TransportFailed
from nemo_dcr.ids import AttemptId
from nemo_dcr.testing.transport_suite import Consumer, body_of, digest_of, publish
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.keys import KeyPair, Security
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.tree import balanced_tree
from tests.unit.transport.relay_helpers import (
    MIB,
    ONE,
    OWNER,
    RawPeer,
    bodies,
    key,
    nodes_of,
    transport_over,
    tree_over,
)

QUICK = RelayConfig(patience_s=0.3, connect_s=1.0, handshake_ms=500, window_frames=1)


# -- D1: a buffer that is reused before it was sent


def test_d1_a_buffer_may_be_reused_as_soon_as_publish_returns() -> None:
    with nodes_of(2, QUICK) as nodes, transport_over(tree_over(nodes), nodes[1].place, config=QUICK) as transport:
        publisher = transport.publisher(ONE, OWNER)
        buffer = bytearray(6 * MIB)
        wanted = {}
        for number in range(3):
            buffer[:] = body_of(key(number), len(buffer))
            wanted[key(number)] = bytes(buffer)
            publisher.publish(key(number), memoryview(buffer), digest_of(buffer))
            buffer[:] = bytes(len(buffer))
        publisher.close_set()
        assert bodies(transport.subscribe(ONE, [OWNER])) == wanted


# -- D3: slow joiners and queues that drop


def test_d3_a_receiver_that_joins_late_or_reads_nothing_for_a_while_misses_nothing() -> None:
    with nodes_of(2, QUICK) as nodes, transport_over(tree_over(nodes), nodes[1].place, config=QUICK) as transport:
        early = transport.subscribe(ONE, [OWNER])
        publisher = transport.publisher(ONE, OWNER)
        for number in range(100):
            publish(publisher, key(number), body_of(key(number), 20_000))
        manifest = publisher.close_set()
        assert len(manifest.payloads) == 100
        for subscription in (early, transport.subscribe(ONE, [OWNER])):
            consumer, deadline = Consumer(ONE, [OWNER]), time.monotonic() + 10.0
            while not consumer.complete and time.monotonic() < deadline:
                if (entry := subscription.poll(0.5)) is not None:
                    consumer.take(entry)
                elif not consumer.seen:
                    break
            assert consumer.manifests == {OWNER: manifest}
            assert consumer.bodies(subscription) == {key(n): body_of(key(n), 20_000) for n in range(100)}


# -- D4: a child that dies after its parent acknowledged


def test_d4_a_leaf_that_dies_after_the_acknowledgement_fails_the_set_and_a_retry_goes_round_it() -> None:
    with nodes_of(3, QUICK) as nodes:
        tree = tree_over(nodes, fan_out=1)
        shapes = {1: tree, 2: tree.without(["n2"])}
        shape = shapes.__getitem__
        with transport_over(shape, nodes[1].place, config=QUICK) as transport, ThreadPoolExecutor(1) as pool:
            publisher = transport.publisher(ONE, OWNER)
            publish(publisher, key(0))
            nodes[2].close()
            closing = pool.submit(publisher.close_set)
            try:
                assert wait([closing], 10.0).done, "neither closed nor failed"
                with pytest.raises(EndpointLost, match="relay node n2 is lost"):
                    closing.result()
            finally:
                publisher.stop()
            retry = transport.publisher(AttemptId(2), OWNER)
            publish(retry, key(0, 2))
            retry.close_set()
            assert bodies(transport.subscribe(AttemptId(2), [OWNER]), attempt=2) == {key(0, 2): body_of(key(0, 2))}


def test_d4_a_finished_attempt_leaves_nothing_behind() -> None:
    with nodes_of(2) as nodes, transport_over(tree_over(nodes), nodes[1].place) as transport:
        for attempt in range(1, 101):
            publisher = transport.publisher(AttemptId(attempt), OWNER)
            publish(publisher, key(0, attempt), body_of(key(0), 70_000))
            publisher.close_set()
            publisher.stop()
            subscription = transport.subscribe(AttemptId(attempt), [OWNER])
            assert len(bodies(subscription, attempt=attempt)) == 1
            subscription.stop()
            transport.cleanup(AttemptId(attempt))
            assert [(n.counters().attempts, n.counters().memory_bytes) for n in nodes] == [(0, 0)] * 2
        client = transport._client
        hop, line = next(iter(client._hops.values())), next(iter(client._lines.values()))
        assert (len(client._hops), len(client._lines), hop.idle, line._sessions, line._fetches) == (1, 1, True, {}, {})


# -- D7: fixed ports and paths


def test_d7_two_runs_on_one_host_do_not_meet_and_a_port_is_free_after_a_crash() -> None:
    with nodes_of(1, QUICK, run="first") as first, nodes_of(1, QUICK, run="second") as second:
        assert first[0].address != second[0].address
        with transport_over(tree_over(second), run="first", config=QUICK) as transport:
            publisher = transport.publisher(ONE, OWNER)
            with pytest.raises(EndpointLost, match="belongs to run 'second'"):
                publish(publisher, key(0))
        with transport_over(tree_over(second), run="second", config=QUICK) as transport:
            publish(transport.publisher(ONE, OWNER), key(0))
        first[0].close()
        again = RelayNode("n0", first[0].address, run="first")
        again.close()


# -- D9: tensors larger than a bucket


def test_d9_payloads_larger_than_the_memory_budget_fit_exactly_or_are_empty() -> None:
    config = RelayConfig(memory_bytes=2 * MIB, spill_bytes=32 * MIB, window_frames=1)
    sizes = [6 * MIB, 6 * MIB + 1, 2 * MIB, MIB, MIB - 1, 0]
    with nodes_of(2, config) as nodes, transport_over(tree_over(nodes), nodes[1].place) as transport:
        publisher = transport.publisher(ONE, OWNER)
        for number, nbytes in enumerate(sizes):
            publish(publisher, key(number), body_of(key(number), nbytes))
        publisher.close_set()
        found = bodies(transport.subscribe(ONE, [OWNER]))
        assert found == {key(number): body_of(key(number), nbytes) for number, nbytes in enumerate(sizes)}
        counters = nodes[1].counters()
        assert (counters.memory_peak_bytes, counters.spilled_bytes) == (2 * MIB, sum(sizes) - 2 * MIB)


# -- D10: endpoints that anyone may write to


def test_d10_a_wrong_or_missing_key_is_refused_at_every_call() -> None:
    server, admitted, stranger = (KeyPair(*(text.decode() for text in zmq.curve_keypair())) for _ in range(3))
    security = Security(keys=server, allowed=frozenset([admitted.public]))
    node = RelayNode("n0", security=security, config=QUICK)
    try:
        tree = tree_over([node])
        with transport_over(tree, node.place, security=Security(keys=admitted), config=QUICK) as transport:
            publish(transport.publisher(ONE, OWNER), key(0))
        bare = balanced_tree([type(node.place)("n0", node.address)])
        for shape, own in ((tree, Security(keys=stranger)), (bare, Security())):
            with transport_over(shape, shape.root_node, security=own, config=QUICK) as transport:
                for call in (
                    lambda: publish(transport.publisher(ONE, OWNER), key(1)),
                    lambda: transport.publisher(ONE, OWNER).close_set(),
                    lambda: transport.subscribe(ONE, [OWNER]).poll(10.0),
                    lambda: transport.cleanup(ONE),
                    lambda place=shape.root_node: transport.counters(place),
                ):
                    with pytest.raises(AttemptFailed):
                        call()
        assert node.counters().attempts == 1
    finally:
        node.close()


def test_d10_sizes_are_checked_as_declared_and_a_pickle_is_no_message() -> None:
    with nodes_of(1) as nodes:
        raw = RawPeer(nodes[0])
        try:
            raw.socket.send(b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.")
            answer = raw.receive()
            assert isinstance(answer, wire.Rejected)
            assert isinstance(wire.error_of(answer.fault), TransportFailed)
            raw.send(wire.Open(1, 0, tree_over(nodes), 0))
            raw.send(wire.Put(1, 0, 0, 5, 10 << 40, bytes(16), bytes(16)), b"x" * 1024)
            assert isinstance(raw.receive(), wire.Refused)
            raw.send(wire.Put(1, 0, 0, 6, 10 << 40, bytes(16), bytes(16)))
            answer = raw.receive()
            assert isinstance(answer, wire.Refused)
            assert "is larger than" in answer.fault.detail
            assert nodes[0].counters().memory_peak_bytes == 0
        finally:
            raw.close()
