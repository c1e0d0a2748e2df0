"""Streams over relay nodes: counted once, passed on while they arrive, bounded, resumed after a break, stopped."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nemo_dcr.errors import AttemptFailed, AttemptStopped, PayloadConflict, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.testing.transport_suite import body_of, digest_of, publish
from nemo_dcr.transport.base import Publisher
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.tree import balanced_tree
from tests.unit.transport.relay_helpers import (
    MIB,
    ONE,
    OWNER,
    PATIENCE_S,
    CuttableLink,
    RawPeer,
    bodies,
    fetched_at_once,
    key,
    nodes_of,
    transport_over,
    tree_over,
    wait_for,
)

SMALL = RelayConfig(memory_bytes=4 * MIB, spill_bytes=4 * MIB, window_frames=2)


def test_each_payload_enters_and_leaves_every_node_once() -> None:
    sizes = [0, 1, MIB, 3 * MIB + 5]
    with nodes_of(4) as nodes, transport_over(tree_over(nodes)) as transport:
        for owner in (0, 5):
            publisher = transport.publisher(ONE, OwnerId(owner))
            for number, nbytes in enumerate(sizes):
                publish(publisher, key(number, owner=owner), body_of(key(number), nbytes))
            publisher.close_set()
            publisher.stop()
        for node, children in zip(nodes, (2, 1, 0, 0), strict=True):
            for owner in (0, 5):
                traffic = node.counters().owners[owner]
                assert (traffic.received, traffic.sent) == (sum(sizes), children * sum(sizes))
                assert (traffic.received_again, traffic.sent_again) == (0, 0)
        assert [transport.sent(OwnerId(owner)).sent for owner in (0, 5)] == [sum(sizes)] * 2
        assert transport.counters(nodes[3].place).owners[5].received == sum(sizes)


def test_frames_are_passed_on_while_the_payload_arrives() -> None:
    with nodes_of(3) as nodes:
        tree, peer = tree_over(nodes, fan_out=1), RawPeer(nodes[0])
        try:
            peer.send(wire.Open(1, 0, tree, 0))
            peer.send(wire.Put(1, 0, 0, 7, 3 * MIB, b"d", b"c"))
            grant = peer.receive()
            assert isinstance(grant, wire.Grant)
            assert (grant.upload, grant.offset) == (7, 0)
            peer.send(wire.Data(1, 0, 0, 7, 0), bytes(MIB))
            wait_for(lambda: 0 in nodes[2].counters().owners, "the first frame reaches the leaf")
            wait_for(lambda: nodes[2].counters().owners[0].received == MIB, "the first frame is at the leaf")
            assert nodes[0].counters().owners[0].received == MIB
        finally:
            peer.close()


def test_a_slow_receiver_holds_its_owner_back_and_loses_nothing() -> None:
    """The node never holds more than its budgets; once the receiver fetches, everything arrives."""
    with nodes_of(2, SMALL) as nodes:
        tree = balanced_tree([replace(node.place, receivers=1) for node in nodes])
        with transport_over(tree, config=SMALL) as owner, ThreadPoolExecutor(1) as pool:
            publisher = owner.publisher(ONE, OWNER)
            acked: list[int] = []

            def send() -> None:
                for number in range(40):
                    publish(publisher, key(number), body_of(key(number), MIB))
                    acked.append(number)
                publisher.close_set()

            sending = pool.submit(send)
            wait_for(lambda: nodes[0].counters().waiting == 1, "the node is full")
            assert len(acked) == 8
            with (
                transport_over(tree, nodes[0].place) as first,
                transport_over(tree, nodes[1].place) as second,
                ThreadPoolExecutor(2) as readers,
            ):
                reading = [readers.submit(fetched_at_once, each.subscribe(ONE, [OWNER])) for each in (first, second)]
                for each in reading:
                    assert each.result(PATIENCE_S) == {key(n): body_of(key(n), MIB) for n in range(40)}
            sending.result(PATIENCE_S)
        for node in nodes:
            counters = node.counters()
            assert counters.memory_peak_bytes <= SMALL.memory_bytes
            assert counters.spilled_peak_bytes <= SMALL.spill_bytes
            assert (counters.memory_bytes, counters.spilled_bytes, counters.waiting) == (0, 0, 0)


def test_stop_ends_a_publish_that_waits_for_room() -> None:
    with nodes_of(1, SMALL) as nodes:
        tree = balanced_tree([replace(nodes[0].place, receivers=1)])
        with transport_over(tree) as transport, ThreadPoolExecutor(1) as pool:
            publisher = transport.publisher(ONE, OWNER)
            for number in range(2):
                publish(publisher, key(number), body_of(key(number), 4 * MIB))
            waiting = pool.submit(publish, publisher, key(2), body_of(key(2), 4 * MIB))
            wait_for(lambda: nodes[0].counters().waiting == 1, "the node is full")
            began = time.monotonic()
            publisher.stop()
            with pytest.raises(AttemptStopped):
                waiting.result(PATIENCE_S)
            assert time.monotonic() - began < 2
            wait_for(lambda: nodes[0].counters().waiting == 0, "the stopped payload is dropped")


def test_a_node_that_keeps_everything_says_when_it_is_full() -> None:
    with nodes_of(2, SMALL) as nodes, transport_over(tree_over(nodes)) as transport:
        publisher = transport.publisher(ONE, OWNER)
        for number in range(2):
            publish(publisher, key(number), body_of(key(number), 4 * MIB))
        with pytest.raises(TransportFailed, match="raise its memory"):
            publish(publisher, key(2), body_of(key(2), MIB))


def test_a_newer_attempt_takes_the_room_of_an_older_one() -> None:
    with nodes_of(1, SMALL) as nodes, transport_over(tree_over(nodes), nodes[0].place) as transport:
        older, newer = (transport.publisher(AttemptId(attempt), OWNER) for attempt in (1, 2))
        for number in range(2):
            publish(older, key(number), body_of(key(number), 4 * MIB))
        publish(newer, key(0, attempt=2), body_of(key(0), 4 * MIB))
        with pytest.raises(AttemptStopped):
            publish(older, key(2), b"late")
        newer.close_set()
        assert bodies(transport.subscribe(AttemptId(2), [OWNER]), attempt=2) == {
            key(0, attempt=2): body_of(key(0), 4 * MIB)
        }


def test_a_broken_connection_is_resumed_and_its_repeats_are_counted_apart() -> None:
    """The link is cut in the middle of a payload: every byte arrives once, and what was under way is sent again."""
    nbytes = 24 * MIB
    with nodes_of(1) as nodes:
        link = CuttableLink(nodes[0].address)
        tree = balanced_tree([replace(nodes[0].place, address=link.address)])
        try:
            with transport_over(tree, nodes[0].place) as transport, ThreadPoolExecutor(1) as pool:
                publisher = transport.publisher(ONE, OWNER)
                publish(publisher, key(0))
                before = link.passed
                sending = pool.submit(publish, publisher, key(1), body_of(key(1), nbytes))
                wait_for(lambda: link.passed > before + 4 * MIB, "the payload is under way")
                link.cut()
                assert sending.result(PATIENCE_S).nbytes == nbytes
                publisher.close_set()
                found = bodies(transport.subscribe(ONE, [OWNER]))
                assert found == {key(0): body_of(key(0)), key(1): body_of(key(1), nbytes)}
                received, sent = nodes[0].counters().owners[0], transport.sent(OWNER)
                assert received.received == sent.sent == nbytes + len(body_of(key(0)))
                assert 0 < sent.sent_again <= 16 * MIB
        finally:
            link.close()


def test_publishing_again_after_a_break_sends_no_byte_twice_that_is_there() -> None:
    with nodes_of(2) as nodes:
        with transport_over(tree_over(nodes)) as first:
            publish(first.publisher(ONE, OWNER), key(0), body_of(key(0), 2 * MIB))
        with transport_over(tree_over(nodes)) as again:
            publisher = again.publisher(ONE, OWNER)
            publish(publisher, key(0), body_of(key(0), 2 * MIB))
            assert again.sent(OWNER).sent == 0
            with pytest.raises(PayloadConflict):
                publish(publisher, key(0), body_of(key(1), 2 * MIB))
        assert nodes[1].counters().owners[0].received == 2 * MIB


def test_an_attempt_runs_over_one_tree_and_the_next_may_run_over_another() -> None:
    with nodes_of(3) as nodes:
        narrow, wide = tree_over(nodes, fan_out=1), tree_over(nodes, fan_out=2)
        with transport_over(narrow) as first, transport_over(wide, nodes[2].place) as second:
            publish(first.publisher(ONE, OWNER), key(0))
            with pytest.raises(TransportFailed, match="another tree"):
                publish(second.publisher(ONE, OwnerId(1)), key(0, owner=1))
            publisher = second.publisher(AttemptId(2), OWNER)
            publish(publisher, key(0, attempt=2))
            publisher.close_set()
            assert len(bodies(second.subscribe(AttemptId(2), [OWNER]), attempt=2)) == 1


def test_clean_up_frees_bytes_spill_files_connections_and_state_at_every_node() -> None:
    with nodes_of(3, SMALL) as nodes, transport_over(tree_over(nodes), nodes[2].place) as transport:
        for attempt in range(1, 12):
            publisher = transport.publisher(AttemptId(attempt), OWNER)
            for number in range(3):
                publish(publisher, key(number, attempt), body_of(key(number), 2 * MIB))
            publisher.close_set()
            publisher.stop()
            assert nodes[2].counters().spilled_bytes == 2 * MIB
            transport.cleanup(AttemptId(attempt))
            for node in nodes:
                counters = node.counters()
                assert (counters.memory_bytes, counters.spilled_bytes, counters.attempts) == (0, 0, 0)
        wait_for(lambda: nodes[2].counters().peers == 0, "the parent closed its idle connection")


def test_a_failed_attempt_tells_everyone_and_keeps_no_bytes() -> None:
    """The middle node of a chain goes away: its parent names it, owner and receivers learn it, and bytes are freed."""
    quick = RelayConfig(patience_s=0.3)
    with nodes_of(3, quick) as nodes:
        tree = tree_over(nodes, fan_out=1)
        with transport_over(tree, nodes[0].place, config=quick) as transport:
            subscription = transport.subscribe(ONE, [OWNER])
            publisher = transport.publisher(ONE, OWNER)
            publish(publisher, key(0), body_of(key(0), 2 * MIB))
            assert subscription.poll(PATIENCE_S).key == key(0)
            nodes[1].close()
            with pytest.raises(AttemptFailed, match="relay node n1 is lost"):
                subscription.poll(PATIENCE_S)
            with pytest.raises(AttemptFailed, match="relay node n1 is lost"):
                publish(publisher, key(1))
            with pytest.raises(AttemptFailed, match="relay node n1 is lost"):
                publisher.close_set()
            assert nodes[0].counters().memory_bytes == 0


def test_a_subscription_that_has_everything_is_not_disturbed_by_a_later_loss() -> None:
    quick = RelayConfig(patience_s=0.3)
    with nodes_of(2, quick) as nodes, transport_over(tree_over(nodes), nodes[0].place, config=quick) as transport:
        publisher = transport.publisher(ONE, OWNER)
        publish(publisher, key(0))
        publisher.close_set()
        subscription = transport.subscribe(ONE, [OWNER])
        assert bodies(subscription) == {key(0): body_of(key(0))}
        nodes[1].close()
        wait_for(lambda: nodes[0].counters().owners[0].delivered and _has_failed(nodes[0]), "the loss is noticed")
        assert subscription.poll(0.2) is None


def _has_failed(node: object) -> bool:
    return any(attempt.failure is not None for attempt in node._table)


def _publish_for_ever(publisher: Publisher, buffer: bytearray, digest: bytes) -> None:
    for number in itertools.count():
        publisher.publish(key(number), buffer, digest)


def test_a_buffer_may_be_overwritten_while_a_stopped_publish_returns() -> None:
    """Nothing reads the caller's bytes after `publish` has raised."""
    with nodes_of(1, RelayConfig(window_frames=1)) as nodes, transport_over(tree_over(nodes)) as transport:
        publisher = transport.publisher(ONE, OWNER)
        buffer = bytearray(64 * MIB)
        digest = digest_of(buffer)
        stopper = threading.Timer(0.05, publisher.stop)
        stopper.start()
        with pytest.raises(AttemptStopped):
            _publish_for_ever(publisher, buffer, digest)
        buffer.clear()  # fails while a view of it is held
        stopper.join()
