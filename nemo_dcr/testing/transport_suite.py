"""The conformance suite of transports: a class of tests that each transport's test class inherits.

Give a fixture `transport` and the method `alter`; override `peer` where another process would open the store anew, and
the two flags where the transport repeats, reorders or delivers stale announcements. `Consumer` is an honest receiver:
it drops other attempts and repeats by key, waits for every manifest and checks every digest. The names of the tests are
their claims.

Paper: Section 7; Appendix B (transports)   Spec: Channel
"""

# ruff: noqa: D102
from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_dcr.errors import AttemptStopped, PayloadConflict, PayloadCorrupt, PayloadMissing
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport.base import Announcement, Buffer, Manifest, Publisher, Subscription, Transport

POLL_S = 0.02
PATIENCE_S = 120.0


def digest_of(data: Buffer) -> bytes:
    """BLAKE2b-128, as the payload trailer has it."""
    return hashlib.blake2b(data, digest_size=16).digest()


def body_of(key: PayloadKey, nbytes: int = 200) -> bytes:
    """Bytes that differ between keys."""
    return hashlib.shake_128(str(key).encode()).digest(nbytes)


def publish(publisher: Publisher, key: PayloadKey, data: Buffer | None = None) -> Announcement:
    """Publish `data`, or the bytes of `body_of`, with its digest."""
    body = body_of(key) if data is None else data
    return publisher.publish(key, body, digest_of(body))


class Consumer:
    """An honest receiver of one attempt."""

    def __init__(self, attempt: AttemptId, owners: Iterable[OwnerId]) -> None:
        self.attempt = attempt
        self.owners = set(owners)
        self.seen: dict[PayloadKey, Announcement] = {}
        self.manifests: dict[OwnerId, Manifest] = {}
        self.order: list[Announcement | Manifest] = []
        self.stale: list[Announcement | Manifest] = []

    @property
    def complete(self) -> bool:
        """Every manifest is in, and every payload that one names was announced."""
        listed = {payload.key for manifest in self.manifests.values() for payload in manifest.payloads}
        return self.manifests.keys() == self.owners and listed <= self.seen.keys()

    def take(self, entry: Announcement | Manifest) -> None:
        """Accept one delivery."""
        self.order.append(entry)
        attempt = entry.key.attempt if isinstance(entry, Announcement) else entry.attempt
        if attempt != self.attempt:
            self.stale.append(entry)
        elif isinstance(entry, Manifest):
            assert self.manifests.setdefault(entry.owner, entry) == entry
        else:
            assert self.seen.setdefault(entry.key, entry) == entry

    def run(self, subscription: Subscription) -> Consumer:
        """Poll until the attempt is complete."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.complete:
            assert time.monotonic() < deadline, f"incomplete: {len(self.seen)} payloads, manifests {self.manifests}"
            if (entry := subscription.poll(POLL_S)) is not None:
                self.take(entry)
        return self

    def drain(self, subscription: Subscription) -> Consumer:
        """Poll until two polls in a row wait in vain."""
        idle = 0
        while idle < 2:
            entry = subscription.poll(POLL_S)
            idle = idle + 1 if entry is None else 0
            if entry is not None:
                self.take(entry)
        return self

    def bodies(self, subscription: Subscription) -> dict[PayloadKey, bytes]:
        """Fetch and verify every payload that a manifest names. Raises: PayloadCorrupt, PayloadMissing."""
        found = {}
        for manifest in self.manifests.values():
            for payload in manifest.payloads:
                data = subscription.fetch(payload)
                if digest_of(data) != payload.digest or len(data) != payload.nbytes:
                    raise PayloadCorrupt(str(payload.key), "its digest differs")
                found[payload.key] = bytes(data)
        return found


class TransportSuite(ABC):
    """Tests that every transport passes."""

    manifest_last = True
    """An owner's manifest is delivered after all its announcements."""
    own_attempt_only = True
    """Nothing of another attempt is delivered."""
    many = 1100
    """Payloads of a large set: more than a page of a listing or a queue holds."""

    def peer(self, transport: Transport) -> Transport:
        """The transport as another process of the run would open it."""
        return transport

    @abstractmethod
    def alter(self, transport: Transport, announcement: Announcement) -> None:
        """Change one stored bit of a payload."""

    def send(
        self, transport: Transport, attempt: int, owner: int, numbers: Sequence[int], *, close: bool = True
    ) -> Publisher:
        """Publish payloads with the bytes of `body_of` and close the set."""
        publisher = transport.publisher(AttemptId(attempt), OwnerId(owner))
        for number in numbers:
            publish(publisher, PayloadKey(AttemptId(attempt), OwnerId(owner), number))
        if close:
            publisher.close_set()
        return publisher

    def receive(self, transport: Transport, attempt: int, owners: Sequence[int]) -> dict[PayloadKey, bytes]:
        """Run a consumer to the end; returns the bodies by key."""
        named = [OwnerId(owner) for owner in owners]
        subscription = self.peer(transport).subscribe(AttemptId(attempt), named)
        return Consumer(AttemptId(attempt), named).run(subscription).bodies(subscription)

    def test_every_payload_arrives_with_its_bytes(self, transport: Transport) -> None:
        self.send(transport, 1, 0, range(5))
        self.send(transport, 1, 3, range(2))
        keys = [PayloadKey(AttemptId(1), OwnerId(o), n) for o, count in ((0, 5), (3, 2)) for n in range(count)]
        assert self.receive(transport, 1, [0, 3]) == {key: body_of(key) for key in keys}

    def test_an_early_subscriber_sees_everything(self, transport: Transport) -> None:
        subscription = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)])
        assert subscription.poll(0) is None
        self.send(transport, 1, 0, range(5))
        consumer = Consumer(AttemptId(1), [OwnerId(0)]).run(subscription)
        assert len(consumer.bodies(subscription)) == 5

    def test_payloads_are_announced_before_the_set_is_closed(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, range(3), close=False)
        subscription = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)])
        consumer = Consumer(AttemptId(1), [OwnerId(0)]).drain(subscription)
        assert {key.payload for key in consumer.seen} == {0, 1, 2}
        assert not consumer.manifests
        publisher.close_set()
        assert len(consumer.run(subscription).bodies(subscription)) == 3

    def test_each_subscriber_sees_everything(self, transport: Transport) -> None:
        self.send(transport, 1, 0, range(4))
        assert self.receive(transport, 1, [0]) == self.receive(transport, 1, [0])

    def test_a_subscription_sees_its_owners_only(self, transport: Transport) -> None:
        early = self.peer(transport).subscribe(AttemptId(1), [OwnerId(1)])
        self.send(transport, 1, 0, range(2))
        self.send(transport, 1, 1, range(3))
        assert {key.owner for key in self.receive(transport, 1, [1])} == {1}
        consumer = Consumer(AttemptId(1), [OwnerId(1)]).run(early).drain(early)
        assert {key.owner for key in consumer.seen} == set(consumer.manifests) == {1}

    def test_the_manifest_comes_last_and_lists_the_set_in_order(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, [4, 0, 3, 1, 2], close=False)
        closed = publisher.close_set()
        assert [payload.key.payload for payload in closed.payloads] == [0, 1, 2, 3, 4]
        subscription = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)])
        consumer = Consumer(AttemptId(1), [OwnerId(0)]).run(subscription)
        assert consumer.manifests == {OwnerId(0): closed}
        assert consumer.manifests[OwnerId(0)].digest == closed.digest
        if self.manifest_last:
            assert [isinstance(entry, Manifest) for entry in consumer.order] == [False] * 5 + [True]

    def test_an_empty_set_is_a_manifest_without_payloads(self, transport: Transport) -> None:
        self.send(transport, 1, 0, [])
        self.send(transport, 1, 1, [0])
        assert len(self.receive(transport, 1, [0, 1])) == 1

    def test_an_open_set_is_never_complete(self, transport: Transport) -> None:
        self.send(transport, 1, 0, range(2), close=False)
        self.send(transport, 1, 1, range(2))
        owners = [OwnerId(0), OwnerId(1)]
        consumer = Consumer(AttemptId(1), owners).drain(self.peer(transport).subscribe(AttemptId(1), owners))
        assert not consumer.complete

    def test_payloads_of_any_size_arrive(self, transport: Transport) -> None:
        publisher = transport.publisher(AttemptId(1), OwnerId(0))
        sizes = [0, 1, 4096, (20 << 20) + 1]
        for number, nbytes in enumerate(sizes):
            key = PayloadKey(AttemptId(1), OwnerId(0), number)
            assert publish(publisher, key, body_of(key, nbytes)).nbytes == nbytes
        publisher.close_set()
        received = self.receive(transport, 1, [0])
        assert [len(received[PayloadKey(AttemptId(1), OwnerId(0), n)]) for n in range(len(sizes))] == sizes

    def test_more_payloads_than_a_page_or_a_queue_holds_arrive(self, transport: Transport) -> None:
        self.send(transport, 1, 0, range(self.many))
        assert len(self.receive(transport, 1, [0])) == self.many

    def test_the_sender_may_overwrite_its_buffer_after_publish(self, transport: Transport) -> None:
        publisher = transport.publisher(AttemptId(1), OwnerId(0))
        buffer = bytearray(1000)
        keys = [PayloadKey(AttemptId(1), OwnerId(0), number) for number in range(3)]
        for key in keys:
            buffer[:] = body_of(key, 1000)
            publish(publisher, key, memoryview(buffer))
            buffer[:] = bytes(1000)
        publisher.close_set()
        assert self.receive(transport, 1, [0]) == {key: body_of(key, 1000) for key in keys}

    def test_a_slow_consumer_loses_nothing(self, transport: Transport) -> None:
        subscription, count = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)]), min(400, self.many)
        sender = threading.Thread(target=self.send, args=(transport, 1, 0, range(count)), daemon=True)
        sender.start()
        sender.join(0.2)
        consumer = Consumer(AttemptId(1), [OwnerId(0)]).run(subscription)
        sender.join(PATIENCE_S)
        assert not sender.is_alive()
        assert len(consumer.bodies(subscription)) == count

    def test_threads_may_publish_into_one_set(self, transport: Transport) -> None:
        publisher = transport.publisher(AttemptId(1), OwnerId(0))
        keys = [PayloadKey(AttemptId(1), OwnerId(0), number) for number in range(40)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda key: publish(publisher, key), keys))
        publisher.close_set()
        assert len(self.receive(transport, 1, [0])) == 40

    def test_the_same_bytes_under_the_same_key_are_one_payload(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, [0, 0, 1, 0], close=False)
        assert len(publisher.close_set().payloads) == 2
        publish(publisher, PayloadKey(AttemptId(1), OwnerId(0), 1))
        assert len(self.receive(transport, 1, [0])) == 2

    def test_other_bytes_under_the_same_key_are_a_conflict(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, [0], close=False)
        key = PayloadKey(AttemptId(1), OwnerId(0), 0)
        with pytest.raises(PayloadConflict):
            publish(publisher, key, b"other")
        same_size = body_of(key)[:-1] + bytes([body_of(key)[-1] ^ 1])
        with pytest.raises(PayloadConflict):
            publisher.publish(key, same_size, digest_of(body_of(key)))
        publisher.close_set()
        assert self.receive(transport, 1, [0]) == {key: body_of(key)}

    def test_a_restarted_owner_sends_the_same_set_again(self, transport: Transport) -> None:
        self.send(transport, 1, 0, range(3), close=False)
        closed = self.send(self.peer(transport), 1, 0, range(5)).close_set()
        assert self.send(self.peer(transport), 1, 0, range(5)).close_set() == closed
        assert len(self.receive(transport, 1, [0])) == 5

    def test_a_restarted_owner_cannot_close_a_set_that_it_did_not_send(self, transport: Transport) -> None:
        self.send(transport, 1, 0, range(3), close=False)
        restarted = self.send(self.peer(transport), 1, 0, range(2), close=False)
        with pytest.raises(PayloadConflict):
            restarted.close_set()

    def test_nothing_is_published_into_a_closed_set(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, range(2))
        for again in (publisher, self.peer(transport).publisher(AttemptId(1), OwnerId(0))):
            with pytest.raises(PayloadConflict):
                publish(again, PayloadKey(AttemptId(1), OwnerId(0), 2))
        assert len(self.receive(transport, 1, [0])) == 2

    def test_a_closed_set_keeps_its_manifest(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, range(2))
        assert publisher.close_set() == publisher.close_set()

    def test_a_stopped_publisher_publishes_nothing(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, range(2), close=False)
        publisher.stop()
        publisher.stop()
        with pytest.raises(AttemptStopped):
            publish(publisher, PayloadKey(AttemptId(1), OwnerId(0), 2))
        with pytest.raises(AttemptStopped):
            publisher.close_set()
        subscription = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)])
        consumer = Consumer(AttemptId(1), [OwnerId(0)]).drain(subscription)
        assert {key.payload for key in consumer.seen} == {0, 1}
        assert not consumer.manifests

    def test_stop_ends_a_poll_that_waits(self, transport: Transport) -> None:
        subscription = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)])
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            waiting = pool.submit(subscription.poll, PATIENCE_S)
            subscription.stop()
            assert waiting.result(PATIENCE_S) is None
            assert time.monotonic() - began < PATIENCE_S / 2
        self.send(transport, 1, 0, range(2))
        assert subscription.poll(0) is None

    def test_two_attempts_stay_apart(self, transport: Transport) -> None:
        older = self.send(transport, 1, 0, range(2), close=False)
        self.send(transport, 2, 0, range(3))
        publish(older, PayloadKey(AttemptId(1), OwnerId(0), 2))
        older.close_set()
        assert {key.attempt for key in self.receive(transport, 1, [0])} == {1}
        second = {PayloadKey(AttemptId(2), OwnerId(0), n) for n in range(3)}
        assert self.receive(transport, 2, [0]) == {key: body_of(key) for key in second}

    def test_a_late_write_of_an_older_attempt_is_never_taken_for_the_new_one(self, transport: Transport) -> None:
        older = self.send(transport, 1, 0, range(2), close=False)
        subscription = self.peer(transport).subscribe(AttemptId(2), [OwnerId(0)])
        newer = self.send(transport, 2, 0, [0], close=False)
        publish(older, PayloadKey(AttemptId(1), OwnerId(0), 5))
        older.close_set()
        publish(newer, PayloadKey(AttemptId(2), OwnerId(0), 1))
        newer.close_set()
        consumer = Consumer(AttemptId(2), [OwnerId(0)]).run(subscription).drain(subscription)
        assert {key.payload for key in consumer.seen} == {0, 1}
        assert consumer.bodies(subscription) == {key: body_of(key) for key in consumer.seen}
        assert {entry.key.attempt for entry in consumer.stale if isinstance(entry, Announcement)} <= {1}
        assert not (self.own_attempt_only and consumer.stale)

    def test_identifiers_of_64_bits_stay_exact(self, transport: Transport) -> None:
        attempts = [2**53, 2**53 + 1, 2**63 - 1]
        for attempt in attempts:
            self.send(transport, attempt, 99_999, [2**40])
        for attempt in attempts:
            key = PayloadKey(AttemptId(attempt), OwnerId(99_999), 2**40)
            assert self.receive(transport, attempt, [99_999]) == {key: body_of(key)}

    def test_an_altered_bit_shows_in_the_digest(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, range(2))
        self.alter(transport, publisher.close_set().payloads[1])
        subscription = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)])
        consumer = Consumer(AttemptId(1), [OwnerId(0)]).run(subscription)
        with pytest.raises(PayloadCorrupt):
            consumer.bodies(subscription)

    def test_a_payload_that_was_never_published_is_missing(self, transport: Transport) -> None:
        self.send(transport, 1, 0, [0])
        subscription = self.peer(transport).subscribe(AttemptId(1), [OwnerId(0)])
        with pytest.raises(PayloadMissing):
            subscription.fetch(Announcement(PayloadKey(AttemptId(1), OwnerId(0), 7), bytes(16), 10))

    def test_cleanup_removes_whole_attempts_and_no_others(self, transport: Transport) -> None:
        self.send(transport, 1, 0, range(2))
        self.send(transport, 2, 0, range(2))
        self.send(transport, 3, 0, range(2))
        reader = self.peer(transport).subscribe(AttemptId(2), [OwnerId(0)])
        payloads = Consumer(AttemptId(2), [OwnerId(0)]).run(reader).manifests[OwnerId(0)].payloads
        for _ in range(2):
            self.peer(transport).cleanup(AttemptId(2))
        with pytest.raises(PayloadMissing):
            reader.fetch(payloads[0])
        for attempt in (1, 2):
            subscription = self.peer(transport).subscribe(AttemptId(attempt), [OwnerId(0)])
            assert not Consumer(AttemptId(attempt), [OwnerId(0)]).drain(subscription).order
        assert len(self.receive(transport, 3, [0])) == 2

    def test_a_publisher_of_an_attempt_that_was_cleaned_up_is_told(self, transport: Transport) -> None:
        publisher = self.send(transport, 1, 0, range(2), close=False)
        self.peer(transport).cleanup(AttemptId(1))
        with pytest.raises(AttemptStopped):
            publish(publisher, PayloadKey(AttemptId(1), OwnerId(0), 2))
        with pytest.raises(AttemptStopped):
            publisher.close_set()

    def test_keys_of_another_set_and_digests_without_bytes_are_refused(self, transport: Transport) -> None:
        publisher = transport.publisher(AttemptId(1), OwnerId(0))
        for key in (PayloadKey(AttemptId(2), OwnerId(0), 0), PayloadKey(AttemptId(1), OwnerId(1), 0)):
            with pytest.raises(ValueError, match="does not belong"):
                publish(publisher, key)
        with pytest.raises(ValueError, match="digest"):
            publisher.publish(PayloadKey(AttemptId(1), OwnerId(0), 0), b"x", b"")

    def test_close_ends_every_thread_and_may_be_repeated(self, transport: Transport) -> None:
        before = set(threading.enumerate())
        self.send(transport, 1, 0, range(3))
        subscription = transport.subscribe(AttemptId(1), [OwnerId(0)])
        assert len(Consumer(AttemptId(1), [OwnerId(0)]).run(subscription).bodies(subscription)) == 3
        subscription.stop()
        for _ in range(2):
            transport.close()
        deadline = time.monotonic() + 10
        while left := set(threading.enumerate()) - before:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.01)
