"""The S3 object store over a server at fault: a real proxy stands in front of a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nemo_dcr.errors import AttemptStopped, PayloadConflict, PayloadCorrupt, PayloadMissing, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.http_faults import Fault, FaultyProxy, Request
from nemo_dcr.testing.transport_suite import Consumer, body_of, digest_of, publish
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement
from nemo_dcr.transport.s3 import S3ObjectStore
from tests.object_servers import BUCKET, ObjectServer, name_of

pytestmark = pytest.mark.slow

ONE, TWO = AttemptId(1), AttemptId(2)
OWNER = OwnerId(0)
MIB = 1 << 20
PATIENCE_S = 60.0


@pytest.fixture
def faulty(moto: ObjectServer) -> Iterator[tuple[FaultyProxy, ObjectServer]]:
    with moto.faulty() as found:
        yield found


def key_of(number: int, attempt: AttemptId = ONE) -> PayloadKey:
    return PayloadKey(attempt, OWNER, number)


def sent(store: S3ObjectStore, count: int, nbytes: int = 200) -> list[Announcement]:
    publisher = store.publisher(ONE, OWNER)
    found = [publish(publisher, key_of(number), body_of(key_of(number), nbytes)) for number in range(count)]
    publisher.close_set()
    return found


def received(store: S3ObjectStore, attempt: AttemptId = ONE) -> dict[PayloadKey, bytes]:
    subscription = store.subscribe(attempt, [OWNER])
    found = Consumer(attempt, [OWNER]).run(subscription).bodies(subscription)
    subscription.stop()
    return found


def on_payload(method: str, number: int = 0) -> object:
    return lambda request: request.method == method and objects.payload_name(number) in request.path


def is_put(request: Request) -> bool:
    return request.method == "PUT" and "/payload-" in request.path


def is_whole_get(request: Request) -> bool:
    return request.method == "GET" and "/payload-" in request.path and not request.range


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (503, "ServiceUnavailable"), (500, "InternalError")])
def test_a_busy_server_is_asked_again(faulty: tuple[FaultyProxy, ObjectServer], status: int, code: str) -> None:
    proxy, server = faulty
    with server.store() as store:
        for method in ("PUT", "GET"):
            proxy.plant(Fault(on_payload(method), status=status, code=code))
        proxy.plant(Fault(lambda request: "list-type" in request.path, status=status, code=code))
        sent(store, 1)
        assert received(store) == {key_of(0): body_of(key_of(0))}
    assert [fault.times for fault in proxy.faults] == [0, 0, 0]


def test_a_server_that_stays_busy_fails_the_attempt_and_says_so(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    with server.store(attempts=2) as store:
        publisher = store.publisher(ONE, OWNER)
        proxy.plant(Fault(is_put, times=1000, status=503, code="SlowDown"))
        with pytest.raises(TransportFailed, match=r"fewer requests.*SlowDown"):
            publish(publisher, key_of(0))
    assert len([request for request in proxy.requests if is_put(request)]) == 2


def test_an_object_that_shows_late_is_fetched(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    with server.store(missing_after_s=PATIENCE_S) as store:
        sent(store, 1)
        proxy.plant(Fault(is_whole_get, times=2, status=404, code="NoSuchKey"))
        assert received(store) == {key_of(0): body_of(key_of(0))}


def test_a_download_that_breaks_off_goes_on_where_it_stopped(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    with server.store() as store:
        sent(store, 1, 3 * MIB)
        proxy.plant(Fault(is_whole_get, keep_bytes=2 * MIB))
        proxy.plant(
            Fault(
                lambda request: request.range.startswith("bytes=") and request.range.endswith("-"),
                times=1,
                keep_bytes=1000,
            )
        )
        assert received(store) == {key_of(0): body_of(key_of(0), 3 * MIB)}
    ranges = [request.range for request in proxy.requests if request.range.endswith("-")]
    begins = [int(text.removeprefix("bytes=").removesuffix("-")) for text in ranges]
    assert len(begins) == 2
    assert 0 < begins[0] <= 2 * MIB < 3 * MIB
    assert begins[0] < begins[1]


def test_an_object_that_changes_in_a_broken_download_is_never_mixed(
    faulty: tuple[FaultyProxy, ObjectServer], moto: ObjectServer
) -> None:
    proxy, server = faulty
    config = server.config(missing_after_s=PATIENCE_S)
    with server.store(config) as store:
        payload = sent(store, 1, 2 * MIB)[0]
        other = objects.frame(payload) + body_of(key_of(7), 2 * MIB)
        client = moto.client()

        def replaces(request: Request) -> bool:
            if request.range and not replaced:
                replaced.append(request)
                client.put_object(Bucket=BUCKET, Key=name_of(config, key_of(0)), Body=other)
            return False

        replaced: list[Request] = []
        proxy.plant(Fault(is_whole_get, keep_bytes=MIB))
        proxy.plant(Fault(replaces))
        found = store.subscribe(ONE, [OWNER]).fetch(payload)
        client.close()
    assert len(replaced) == 1
    assert found == body_of(key_of(7), 2 * MIB)


def test_a_download_that_always_breaks_off_fails_and_says_where(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    with server.store(attempts=3) as store:
        payload = sent(store, 1, MIB)[0]
        whole_or_rest = Fault(
            lambda request: request.method == "GET" and "/payload-" in request.path, 1000, keep_bytes=500
        )
        proxy.plant(whole_or_rest)
        with pytest.raises(TransportFailed, match=f"broke off 3 times, at byte .* of {MIB + objects.FRAME_BYTES}"):
            store.subscribe(ONE, [OWNER]).fetch(payload)


def test_a_stale_object_under_a_key_is_neither_announced_nor_read(moto: ObjectServer) -> None:
    config, client = moto.config(), moto.client()
    with moto.store(config) as store:
        sent(store, 1)
        old = client.get_object(Bucket=BUCKET, Key=name_of(config, key_of(0)))["Body"].read()
        client.put_object(Bucket=BUCKET, Key=name_of(config, key_of(0, TWO)), Body=old)
        client.put_object(Bucket=BUCKET, Key=name_of(config, key_of(1, TWO)), Body=b"")
        subscription = store.subscribe(TWO, [OWNER])
        assert not Consumer(TWO, [OWNER]).drain(subscription).order
        body = body_of(key_of(0))
        with pytest.raises(PayloadMissing, match="truncated or foreign"):
            subscription.fetch(Announcement(key_of(0, TWO), digest_of(body), len(body)))
    client.close()


@pytest.mark.parametrize("keep", [0, 50, objects.FRAME_BYTES, objects.FRAME_BYTES + 199])
def test_a_truncated_object_is_missing(moto: ObjectServer, keep: int) -> None:
    config, client = moto.config(), moto.client()
    with moto.store(config) as store:
        payload = sent(store, 1)[0]
        whole = client.get_object(Bucket=BUCKET, Key=name_of(config, key_of(0)))["Body"].read()
        client.put_object(Bucket=BUCKET, Key=name_of(config, key_of(0)), Body=whole[:keep])
        with pytest.raises(PayloadMissing, match="truncated or foreign"):
            store.subscribe(ONE, [OWNER]).fetch(payload)
    client.close()


def test_a_payload_with_another_digest_than_announced_is_missing(moto: ObjectServer) -> None:
    with moto.store() as store:
        payload = sent(store, 1)[0]
        with pytest.raises(PayloadMissing, match="another size or digest"):
            store.subscribe(ONE, [OWNER]).fetch(replace(payload, digest=bytes(16)))


@pytest.mark.parametrize("attempts", [1, 3])
def test_an_upload_whose_answer_is_lost_counts_once_it_is_seen_to_exist(
    faulty: tuple[FaultyProxy, ObjectServer], attempts: int
) -> None:
    proxy, server = faulty
    with server.store(attempts=attempts) as store:
        publisher = store.publisher(ONE, OWNER)
        proxy.plant(Fault(is_put, lose_answer=True))
        assert publish(publisher, key_of(0)).nbytes == 200
        assert len(publisher.close_set().payloads) == 1
        assert received(store) == {key_of(0): body_of(key_of(0))}


def test_a_lost_answer_does_not_hide_a_conflict(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    with server.store(attempts=1) as store:
        publish(store.publisher(ONE, OWNER), key_of(0), b"first")
        proxy.plant(Fault(is_put, lose_answer=True))
        with pytest.raises(PayloadConflict):
            publish(store.publisher(ONE, OWNER), key_of(0), b"other")


def test_an_upload_that_never_arrives_fails_the_attempt(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    with server.store(attempts=1) as store:
        publisher = store.publisher(ONE, OWNER)
        proxy.plant(Fault(is_put, status=502))
        with pytest.raises(TransportFailed, match="the server failed"):
            publish(publisher, key_of(0))
        publisher.close_set()
        assert received(store) == {}


def without_conditions(proxy: FaultyProxy) -> None:
    proxy.plant(Fault(lambda request: request.method in ("PUT", "POST"), times=1 << 30, drop_header="If-None-Match"))


def test_a_server_that_ignores_conditions_is_told_by_a_trial(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    without_conditions(proxy)
    with server.store() as store:
        publisher = store.publisher(ONE, OWNER)
        publish(publisher, key_of(0))
        publish(publisher, key_of(0))
        with pytest.raises(PayloadConflict, match="other bytes"):
            publish(publisher, key_of(0), b"other")
        publisher.close_set()
        assert received(store) == {key_of(0): body_of(key_of(0))}


def test_bytes_that_another_writer_replaced_are_found_before_the_set_is_closed(
    faulty: tuple[FaultyProxy, ObjectServer],
) -> None:
    proxy, server = faulty
    without_conditions(proxy)
    config, client = server.config(), server.client()
    with server.store(config) as store:
        publisher = store.publisher(ONE, OWNER)
        payload = publish(publisher, key_of(0))
        publish(publisher, key_of(1))
        same = client.get_object(Bucket=BUCKET, Key=name_of(config, key_of(1)))["Body"].read()
        client.put_object(Bucket=BUCKET, Key=name_of(config, key_of(1)), Body=same)
        other = objects.frame(replace(payload, digest=digest_of(b"other"), nbytes=5)) + b"other"
        client.put_object(Bucket=BUCKET, Key=name_of(config, key_of(0)), Body=other)
        with pytest.raises(PayloadConflict, match="replaced by other bytes"):
            publisher.close_set()
        client.delete_object(Bucket=BUCKET, Key=name_of(config, key_of(0)))
        with pytest.raises(TransportFailed, match="is gone"):
            publisher.close_set()
    client.close()


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (400, "ExpiredToken", "credentials have expired; renew the session token"),
        (403, "InvalidAccessKeyId", "does not know the access key"),
        (403, "SignatureDoesNotMatch", "secret key does not fit"),
        (403, "AccessDenied", "grant this operation"),
        (403, "RequestTimeTooSkewed", "clock"),
        (404, "NoSuchBucket", "bucket does not exist"),
        (400, "SomethingNew", "the server says 'planted'"),
    ],
)
def test_a_refusal_says_what_to_do(faulty: tuple[FaultyProxy, ObjectServer], status: int, code: str, says: str) -> None:
    proxy, server = faulty
    with server.store() as store:
        publisher = store.publisher(ONE, OWNER)
        publish(publisher, key_of(0))
        subscription = store.subscribe(ONE, [OWNER])
        proxy.plant(Fault(lambda request: True, times=1000, status=status, code=code))
        for step in (
            lambda: publish(publisher, key_of(1)),
            publisher.close_set,
            lambda: subscription.poll(PATIENCE_S),
            lambda: subscription.fetch(Announcement(key_of(0), bytes(16), 10)),
            lambda: store.cleanup(ONE),
            lambda: store.publisher(TWO, OWNER),
        ):
            with pytest.raises(TransportFailed, match=f"{says}.*{code}"):
                step()
    assert server.credentials.secret_key not in str(server)


def test_a_wrong_bucket_a_wrong_secret_and_an_absent_server_are_named(seaweedfs: ObjectServer) -> None:
    with seaweedfs.store(bucket="no-such-bucket") as store, pytest.raises(TransportFailed, match="NoSuchBucket"):
        sent(store, 1)
    stranger = replace(seaweedfs, credentials=replace(seaweedfs.credentials, secret_key="0" * 32))
    with stranger.store() as store, pytest.raises(TransportFailed, match="secret key does not fit"):
        sent(store, 1)
    stranger = replace(seaweedfs, credentials=replace(seaweedfs.credentials, access_key="nobody"))
    with stranger.store() as store, pytest.raises(TransportFailed, match="does not know the access key"):
        sent(store, 1)
    with (
        seaweedfs.store(endpoint="http://127.0.0.1:9", attempts=1) as store,
        pytest.raises(TransportFailed, match="cannot be reached"),
    ):
        sent(store, 1)


def test_each_payload_is_one_upload_and_for_a_late_reader_one_download(
    faulty: tuple[FaultyProxy, ObjectServer],
) -> None:
    proxy, server = faulty
    with server.store() as store:
        sent(store, 12)
        received(store)
    assert len([request for request in proxy.requests if is_put(request)]) == 12
    assert len([request for request in proxy.requests if request.method == "GET" and "/payload-" in request.path]) == 12
    assert len([request for request in proxy.requests if "list-type" in request.path]) == 2


def test_reading_ahead_begins_with_the_first_fetch_and_stays_within_its_bytes(
    faulty: tuple[FaultyProxy, ObjectServer],
) -> None:
    proxy, server = faulty
    with server.store(read_ahead_bytes=2 * MIB + 100) as store:
        payloads = sent(store, 8, MIB)
        subscription = store.subscribe(ONE, [OWNER])
        consumer = Consumer(ONE, [OWNER]).run(subscription)
        assert not list(filter(is_whole_get, proxy.requests))
        assert subscription.fetch(payloads[0]) == body_of(key_of(0), MIB)
        deadline = time.monotonic() + PATIENCE_S
        while len(list(filter(is_whole_get, proxy.requests))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(list(filter(is_whole_get, proxy.requests))) == 3
        assert len(consumer.bodies(subscription)) == 8
        assert len(list(filter(is_whole_get, proxy.requests))) == 9  # the first one was asked for twice
        subscription.stop()


def test_new_payloads_are_looked_for_while_one_is_downloaded(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    release = threading.Event()
    with server.store() as store, ThreadPoolExecutor(1) as pool:
        publisher = store.publisher(ONE, OWNER)
        first = publish(publisher, key_of(0), body_of(key_of(0)))
        subscription = store.subscribe(ONE, [OWNER])
        assert subscription.poll(PATIENCE_S) == first
        proxy.plant(Fault(is_whole_get, hold=release))
        fetching = pool.submit(subscription.fetch, first)
        second = publish(publisher, key_of(1), body_of(key_of(1)))
        deadline = time.monotonic() + PATIENCE_S

        def reads_of_the_second() -> list[Request]:
            objects_read = [each for each in proxy.requests if each.method == "GET" and "list-type" not in each.path]
            return [each for each in objects_read if objects.payload_name(1) in each.path]

        while not reads_of_the_second():
            assert time.monotonic() < deadline, "nobody looked"
            time.sleep(0.01)
        assert not fetching.done()
        release.set()
        assert fetching.result(PATIENCE_S) == body_of(key_of(0))
        assert subscription.poll(PATIENCE_S) == second
        assert subscription.fetch(second) == body_of(key_of(1))
        told = subscription.take_downloads()
        assert {key for key, _, _ in told} == {key_of(0), key_of(1)}
        assert all(begin < end for _, begin, end in told)
        assert subscription.take_downloads() == []
        assert [each.range for each in reads_of_the_second()] == [""], "a small object is read once, and whole"
        subscription.stop()


def test_a_look_goes_on_while_what_it_found_is_read_and_the_manifest_takes_that_read_over(
    faulty: tuple[FaultyProxy, ObjectServer],
) -> None:
    """Listings and objects share the link: one object that takes long holds back neither listings nor other objects."""
    proxy, server = faulty
    release = threading.Event()
    with server.store() as store, ThreadPoolExecutor(1) as pool:
        publisher = store.publisher(ONE, OWNER)
        subscription = store.subscribe(ONE, [OWNER])
        held = Fault(lambda request: is_whole_get(request) and objects.payload_name(1) in request.path, hold=release)
        try:
            announced = [publish(publisher, key_of(0), body_of(key_of(0)))]
            assert subscription.poll(PATIENCE_S) == announced[0]
            assert subscription.fetch(announced[0]) == body_of(key_of(0))
            proxy.plant(held)
            announced.append(publish(publisher, key_of(1), body_of(key_of(1))))
            polling = pool.submit(subscription.poll, PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while held.times:
                assert time.monotonic() < deadline, "nobody reads the second one"
                time.sleep(0.01)
            announced.append(publish(publisher, key_of(2), body_of(key_of(2))))
            assert polling.result(PATIENCE_S) == announced[2]
            manifest = publisher.close_set()
            assert [subscription.poll(PATIENCE_S), subscription.poll(PATIENCE_S)] == [announced[1], manifest]
            fetching = pool.submit(subscription.fetch, announced[1])
            assert subscription.fetch(announced[2]) == body_of(key_of(2))
            assert not fetching.done()
        finally:
            release.set()
        assert fetching.result(PATIENCE_S) == body_of(key_of(1))
        subscription.stop()
    for number in range(1, 3):
        assert sum(is_whole_get(each) and objects.payload_name(number) in each.path for each in proxy.requests) == 1


def test_an_object_that_is_gone_when_it_is_read_is_found_again(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    with server.store() as store:
        publisher = store.publisher(ONE, OWNER)
        subscription = store.subscribe(ONE, [OWNER])
        proxy.plant(
            Fault(lambda request: request.method == "GET" and "/payload-" in request.path, status=404, code="NoSuchKey")
        )
        first = publish(publisher, key_of(0), body_of(key_of(0)))
        assert subscription.poll(PATIENCE_S) == first
        assert subscription.fetch(first) == body_of(key_of(0))
        subscription.stop()


def test_a_payload_that_is_announced_too_large_is_refused_before_a_request(
    faulty: tuple[FaultyProxy, ObjectServer],
) -> None:
    proxy, server = faulty
    with server.store(max_payload_bytes=MIB) as store:
        with pytest.raises(TransportFailed, match=f"has {MIB + 1} bytes, receivers take {MIB}"):
            publish(store.publisher(ONE, OWNER), key_of(0), bytes(MIB + 1))
        before = len(proxy.requests)
        with pytest.raises(PayloadCorrupt, match="more than the limit"):
            store.subscribe(ONE, [OWNER]).fetch(Announcement(key_of(0), bytes(16), 1 << 50))
        assert len(proxy.requests) == before


def test_a_large_payload_goes_up_in_parts_and_stays_one_object(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    size = 11 * MIB
    with server.store(part_bytes=5 * MIB, parallel=2) as store:
        proxy.plant(Fault(lambda request: "partNumber=2" in request.path, status=503, code="SlowDown"))
        publisher = store.publisher(ONE, OWNER)
        publish(publisher, key_of(0), body_of(key_of(0), size))
        publish(publisher, key_of(0), body_of(key_of(0), size))
        with pytest.raises(PayloadConflict):
            publish(publisher, key_of(0), body_of(key_of(1), size))
        publisher.close_set()
        assert received(store) == {key_of(0): body_of(key_of(0), size)}
    numbers = {
        request.path.partition("partNumber=")[2][:1] for request in proxy.requests if "partNumber" in request.path
    }
    assert numbers == {"1", "2", "3"}


def test_parts_that_a_dead_owner_left_are_given_up_by_the_cleanup(moto: ObjectServer) -> None:
    config, client = moto.config(), moto.client()
    with moto.store(config) as store:
        for attempt in (ONE, TWO):
            client.create_multipart_upload(Bucket=BUCKET, Key=name_of(config, key_of(0, attempt)))
        store.cleanup(ONE)
        left = client.list_multipart_uploads(Bucket=BUCKET, Prefix=config.root).get("Uploads", [])
        assert [upload["Key"] for upload in left] == [name_of(config, key_of(0, TWO))]
    client.close()


def keys_in(server: ObjectServer, prefix: str) -> set[str]:
    client = server.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    found = {each["Key"] for page in pages for each in page.get("Contents", ())}
    client.close()
    return found


def test_cleanup_goes_on_after_a_crash_and_touches_no_other_run(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    config, other = server.config(page_keys=2, attempts=1), server.config()
    longer = replace(config, run=f"{config.run}-longer")
    for each in (config, other, longer):
        with server.store(each) as store:
            sent(store, 5)
    with server.store(config) as store:
        proxy.plant(Fault(lambda request: request.method == "POST", status=503, code="SlowDown"))
        with pytest.raises(TransportFailed):
            store.cleanup(ONE)
        assert len(keys_in(server, f"{config.root}attempt-")) == 6
        for _ in range(2):
            store.cleanup(ONE)
        assert not keys_in(server, f"{config.root}attempt-")
    for each in (other, longer):
        assert len(keys_in(server, f"{each.root}attempt-")) == 6


def test_a_cleanup_deletes_more_keys_than_a_server_lists_or_deletes_at_once(seaweedfs: ObjectServer) -> None:
    config, client = seaweedfs.config(), seaweedfs.client()
    names = [name_of(config, key_of(number)) for number in range(1001)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: client.put_object(Bucket=BUCKET, Key=name, Body=b""), names))
    client.close()
    with seaweedfs.store(config) as store:
        with pytest.raises(PayloadConflict, match="1000 more"):
            store.publisher(ONE, OWNER).close_set()
        store.cleanup(ONE)
    assert not keys_in(seaweedfs, f"{config.root}attempt-")


def test_an_upload_that_lands_after_the_cleanup_is_taken_back(moto: ObjectServer) -> None:
    config = moto.config()
    with moto.store(config) as store, moto.store(config) as peer:
        publisher = store.publisher(ONE, OWNER)
        publish(publisher, key_of(0))
        peer.cleanup(ONE)
        with pytest.raises(AttemptStopped, match="cleaned up"):
            publish(publisher, key_of(1))
        with pytest.raises(AttemptStopped, match="cleaned up"):
            publisher.close_set()
        assert not keys_in(moto, f"{config.root}attempt-")
        peer.cleanup(AttemptId(0))
        with pytest.raises(AttemptStopped, match="cleaned up"):
            publish(store.publisher(ONE, OWNER), key_of(0))


def test_a_cleanup_between_the_check_and_the_manifest_leaves_nothing(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    config = server.config()
    with server.store(config) as store, server.store(config) as peer:
        publisher = store.publisher(ONE, OWNER)
        publish(publisher, key_of(0))
        with ThreadPoolExecutor(1) as pool:
            held = threading.Event()
            proxy.plant(Fault(lambda request: request.method == "PUT" and "/set-manifest" in request.path, hold=held))
            closing = pool.submit(publisher.close_set)
            deadline = time.monotonic() + PATIENCE_S
            while not any("/set-manifest" in request.path and request.method == "PUT" for request in proxy.requests):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            peer.cleanup(ONE)
            held.set()
            with pytest.raises(AttemptStopped, match="cleaned up"):
                closing.result(PATIENCE_S)
        assert not keys_in(server, f"{config.root}attempt-")


def test_stop_ends_a_publish_a_poll_and_a_fetch_that_wait_for_the_server(
    faulty: tuple[FaultyProxy, ObjectServer],
) -> None:
    proxy, server = faulty
    held = threading.Event()
    with server.store() as store, ThreadPoolExecutor(3) as pool:
        publisher = store.publisher(ONE, OWNER)
        payload = publish(publisher, key_of(0))
        subscription = store.subscribe(ONE, [OWNER])
        before = len(proxy.requests)
        proxy.plant(Fault(lambda request: True, times=1000, hold=held))
        waiting = [
            pool.submit(publish, publisher, key_of(1)),
            pool.submit(subscription.fetch, payload),
            pool.submit(subscription.poll, PATIENCE_S),
        ]
        deadline = time.monotonic() + PATIENCE_S
        while len(proxy.requests) < before + 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        publisher.stop()
        subscription.stop()
        with pytest.raises(AttemptStopped):
            waiting[0].result(PATIENCE_S)
        with pytest.raises(PayloadMissing, match="stopped"):
            waiting[1].result(PATIENCE_S)
        assert waiting[2].result(PATIENCE_S) is None
        assert time.monotonic() - began < 5
        held.set()


def test_a_stop_while_the_manifest_is_stored_leaves_a_closed_set(faulty: tuple[FaultyProxy, ObjectServer]) -> None:
    proxy, server = faulty
    held = threading.Event()
    with server.store() as store, ThreadPoolExecutor(1) as pool:
        publisher = store.publisher(ONE, OWNER)
        publish(publisher, key_of(0))
        proxy.plant(Fault(lambda request: request.method == "PUT" and "/set-manifest" in request.path, hold=held))
        closing = pool.submit(publisher.close_set)
        deadline = time.monotonic() + PATIENCE_S
        while not any("/set-manifest" in each.path and each.method == "PUT" for each in proxy.requests):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        publisher.stop()
        held.set()
        assert len(closing.result(PATIENCE_S).payloads) == 1
        with pytest.raises(AttemptStopped):
            publisher.close_set()
        assert received(store) == {key_of(0): body_of(key_of(0))}


def test_a_fetch_of_an_absent_object_ends_with_the_subscription(moto: ObjectServer) -> None:
    with moto.store(missing_after_s=PATIENCE_S) as store, ThreadPoolExecutor(1) as pool:
        subscription = store.subscribe(ONE, [OWNER])
        fetching = pool.submit(subscription.fetch, Announcement(key_of(0), bytes(16), 10))
        subscription.stop()
        with pytest.raises(PayloadMissing, match="stopped"):
            fetching.result(PATIENCE_S)


@pytest.mark.parametrize("damage", ["truncated", "foreign", "altered"])
def test_a_damaged_manifest_fails_the_attempt(moto: ObjectServer, damage: str) -> None:
    config, client = moto.config(), moto.client()
    with moto.store(config) as store:
        sent(store, 2)
        name = name_of(config, key_of(0)).replace(objects.payload_name(0), "set-manifest")
        whole = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        bad = {"truncated": whole[:-1], "foreign": b"foreign", "altered": whole[:-1] + bytes([whole[-1] ^ 1])}
        client.put_object(Bucket=BUCKET, Key=name, Body=bad[damage])
        with pytest.raises(PayloadCorrupt):
            store.subscribe(ONE, [OWNER]).poll(PATIENCE_S)
        with pytest.raises(PayloadCorrupt):
            store.publisher(ONE, OWNER)
    client.close()
