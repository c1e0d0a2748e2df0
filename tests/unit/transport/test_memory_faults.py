from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.errors import AttemptStopped, InvalidConfig, PayloadCorrupt, PayloadMissing, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.transport_suite import Consumer, body_of, publish
from nemo_dcr.transport.base import Announcement, Manifest, Subscription
from nemo_dcr.transport.faults import FaultPlan
from nemo_dcr.transport.memory import MemoryTransport

OWNERS = [OwnerId(0), OwnerId(1)]


def sent(transport: MemoryTransport, attempt: int = 1, count: int = 12) -> None:
    for owner in OWNERS:
        publisher = transport.publisher(AttemptId(attempt), owner)
        for number in range(count):
            publish(publisher, PayloadKey(AttemptId(attempt), owner, number))
        publisher.close_set()


def deliveries(subscription: Subscription, idle_polls: int = 40) -> list[Announcement | Manifest | None]:
    """Everything delivered until `idle_polls` polls waited in vain; None marks such a poll."""
    found: list[Announcement | Manifest | None] = []
    while found.count(None) < idle_polls:
        found.append(subscription.poll(0))
    return found


def test_one_seed_gives_one_schedule() -> None:
    def schedule(seed: int) -> list[Announcement | Manifest | None]:
        transport = MemoryTransport(FaultPlan(seed=seed, lose=0.3, repeat=0.3, reorder=0.5, late=0.3, stale=0.3))
        sent(transport, 1)
        sent(transport, 2)
        return deliveries(transport.subscribe(AttemptId(2), OWNERS))

    assert schedule(5) == schedule(5)
    assert schedule(5) != schedule(6)


def test_two_subscriptions_have_fates_of_their_own() -> None:
    transport = MemoryTransport(FaultPlan(seed=1, reorder=0.5, late=0.3))
    sent(transport)
    assert deliveries(transport.subscribe(AttemptId(1), OWNERS)) != deliveries(
        transport.subscribe(AttemptId(1), OWNERS)
    )


@pytest.mark.parametrize("fault", ["lose", "repeat", "reorder", "late", "stale"])
def test_each_fault_of_time_shows_and_loses_nothing(fault: str) -> None:
    clean = MemoryTransport()
    faulty = MemoryTransport(FaultPlan(seed=3, **{fault: 0.5}))
    for transport in (clean, faulty):
        sent(transport, 1)
        sent(transport, 2)
    plain = deliveries(clean.subscribe(AttemptId(2), OWNERS))
    subscription = faulty.subscribe(AttemptId(2), OWNERS)
    seen = deliveries(subscription)
    assert seen != plain
    consumer = Consumer(AttemptId(2), OWNERS)
    for entry in seen:
        if entry is not None:
            consumer.take(entry)
    assert consumer.complete
    assert bool(consumer.stale) == (fault == "stale")
    assert len(consumer.bodies(subscription)) == 24


@given(
    seed=st.integers(0, 2**32),
    faults=st.fixed_dictionaries(
        {name: st.sampled_from([0.0, 0.2, 0.7]) for name in ("lose", "repeat", "reorder", "late", "stale")}
    ),
)
def test_an_honest_receiver_accepts_exactly_what_was_sent(seed: int, faults: dict[str, float]) -> None:
    transport = MemoryTransport(FaultPlan(seed=seed, **faults))
    sent(transport, 1, count=3)
    sent(transport, 2, count=4)
    subscription = transport.subscribe(AttemptId(2), OWNERS)
    consumer = Consumer(AttemptId(2), OWNERS)
    for _ in range(2000):
        if consumer.complete:
            break
        if (entry := subscription.poll(0)) is not None:
            consumer.take(entry)
    keys = [PayloadKey(AttemptId(2), owner, number) for owner in OWNERS for number in range(4)]
    assert consumer.bodies(subscription) == {key: body_of(key) for key in keys}


@given(seed=st.integers(0, 2**32), fault=st.sampled_from(["lose_for_good", "forget", "alter"]))
def test_a_harmful_fault_is_never_taken_for_the_set(seed: int, fault: str) -> None:
    transport = MemoryTransport(FaultPlan(seed=seed, **{fault: 0.3}))
    sent(transport, 1, count=4)
    subscription = transport.subscribe(AttemptId(1), OWNERS)
    consumer = Consumer(AttemptId(1), OWNERS)
    for entry in deliveries(subscription, 3):
        if entry is not None:
            consumer.take(entry)
    if consumer.complete:
        try:
            bodies = consumer.bodies(subscription)
        except (PayloadCorrupt, PayloadMissing):
            return
        keys = [PayloadKey(AttemptId(1), owner, number) for owner in OWNERS for number in range(4)]
        assert bodies == {key: body_of(key) for key in keys}


def test_what_is_lost_for_good_never_arrives() -> None:
    transport = MemoryTransport(FaultPlan(seed=1, lose_for_good=1.0))
    sent(transport)
    assert set(deliveries(transport.subscribe(AttemptId(1), OWNERS))) == {None}


def test_a_forgotten_payload_is_missing() -> None:
    transport = MemoryTransport(FaultPlan(seed=1, forget=1.0))
    sent(transport)
    subscription = transport.subscribe(AttemptId(1), OWNERS)
    consumer = Consumer(AttemptId(1), OWNERS).run(subscription)
    with pytest.raises(PayloadMissing):
        consumer.bodies(subscription)


def test_an_altered_payload_differs_in_one_bit() -> None:
    transport = MemoryTransport(FaultPlan(seed=1, alter=1.0))
    sent(transport, count=1)
    subscription = transport.subscribe(AttemptId(1), OWNERS)
    for key, payload in Consumer(AttemptId(1), OWNERS).run(subscription).seen.items():
        right, wrong = int.from_bytes(body_of(key)), int.from_bytes(subscription.fetch(payload))
        assert (right ^ wrong).bit_count() == 1


def test_harmful_faults_end_with_the_attempt_that_the_plan_names() -> None:
    transport = MemoryTransport(FaultPlan(seed=1, lose_for_good=1.0, alter=1.0, harm_through=AttemptId(1)))
    sent(transport, 1)
    sent(transport, 2)
    assert set(deliveries(transport.subscribe(AttemptId(1), OWNERS))) == {None}
    subscription = transport.subscribe(AttemptId(2), OWNERS)
    assert len(Consumer(AttemptId(2), OWNERS).run(subscription).bodies(subscription)) == 24


def test_a_publisher_waits_for_a_consumer_that_is_a_window_behind() -> None:
    transport = MemoryTransport(window=2)
    subscription = transport.subscribe(AttemptId(1), [OwnerId(0)])
    sender = threading.Thread(target=sent, args=(transport, 1, 5), daemon=True)
    sender.start()
    sender.join(0.2)
    assert sender.is_alive()
    assert subscription.waiting(OwnerId(0)) == 2
    consumer = Consumer(AttemptId(1), [OwnerId(0)]).run(subscription)
    sender.join(30)
    assert not sender.is_alive()
    assert len(consumer.seen) == 5


@pytest.mark.parametrize("end", ["stop", "cleanup", "unsubscribe"])
def test_a_blocked_publish_ends_with_its_attempt_or_its_consumer(end: str) -> None:
    transport = MemoryTransport(window=1)
    subscription = transport.subscribe(AttemptId(1), [OwnerId(0)])
    publisher = transport.publisher(AttemptId(1), OwnerId(0))
    publish(publisher, PayloadKey(AttemptId(1), OwnerId(0), 0))
    raised: list[type[Exception]] = []

    def block() -> None:
        try:
            publish(publisher, PayloadKey(AttemptId(1), OwnerId(0), 1))
        except AttemptStopped as error:
            raised.append(type(error))

    sender = threading.Thread(target=block, daemon=True)
    sender.start()
    sender.join(0.1)
    assert sender.is_alive()
    {"stop": publisher.stop, "cleanup": lambda: transport.cleanup(AttemptId(1)), "unsubscribe": subscription.stop}[
        end
    ]()
    sender.join(30)
    assert not sender.is_alive()
    assert raised == ([] if end == "unsubscribe" else [AttemptStopped])


def test_cleanup_frees_the_capacity() -> None:
    transport = MemoryTransport(capacity_bytes=1000)
    for attempt in (1, 2):
        publisher = transport.publisher(AttemptId(attempt), OwnerId(0))
        publish(publisher, PayloadKey(AttemptId(attempt), OwnerId(0), 0), bytes(900))
        with pytest.raises(TransportFailed, match="capacity_bytes"):
            publish(publisher, PayloadKey(AttemptId(attempt), OwnerId(0), 1), bytes(101))
        transport.cleanup(AttemptId(attempt))


@pytest.mark.parametrize(
    "values", [{"lose": 1.0}, {"repeat": -0.1}, {"alter": 1.1}, {"late": float("nan")}, {"reorder_by": 0}]
)
def test_a_plan_with_an_impossible_value_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        FaultPlan(**values)
    with pytest.raises(InvalidConfig):
        MemoryTransport(window=0)
