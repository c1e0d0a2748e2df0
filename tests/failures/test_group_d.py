"""Group D of the failure catalogue, object storage: a store that is busy, late, old, cut short or silent."""

from __future__ import annotations

import pytest

from nemo_dcr.errors import PayloadMissing
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.http_faults import Fault, Request
from nemo_dcr.testing.transport_suite import Consumer, body_of, digest_of, publish
from nemo_dcr.transport.base import Announcement, Manifest
from nemo_dcr.transport.s3 import S3ObjectStore
from tests.object_servers import BUCKET, moto_server, name_of

ONE, TWO = AttemptId(1), AttemptId(2)
OWNER = OwnerId(0)
KEY = PayloadKey(ONE, OWNER, 0)
NBYTES = 1 << 20


def is_download(request: Request) -> bool:
    return request.method == "GET" and "/payload-" in request.path and not request.range


def is_upload(request: Request) -> bool:
    return request.method == "PUT" and "/payload-" in request.path


FAULTS = {
    "503 to every kind of request": lambda: [
        Fault(is_upload, status=503, code="SlowDown"),
        Fault(is_download, status=503, code="SlowDown"),
        Fault(lambda request: "list-type" in request.path, status=503, code="ServiceUnavailable"),
    ],
    "404 twice after the upload": lambda: [Fault(is_download, times=2, status=404, code="NoSuchKey")],
    "a body that breaks off": lambda: [Fault(is_download, keep_bytes=NBYTES // 2)],
    "an upload without an answer": lambda: [Fault(is_upload, lose_answer=True)],
}


def sent(store: S3ObjectStore, attempt: AttemptId, count: int, nbytes: int = 200) -> list[Announcement]:
    publisher, keys = store.publisher(attempt, OWNER), [PayloadKey(attempt, OWNER, number) for number in range(count)]
    found = [publish(publisher, key, body_of(key, nbytes)) for key in keys]
    publisher.close_set()
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_d5_a_fault_of_the_store_costs_time_only(fault: str) -> None:
    attempts = 1 if fault == "an upload without an answer" else 5
    with moto_server() as moto, moto.faulty() as (proxy, server):
        for planted in FAULTS[fault]():
            proxy.plant(planted)
        with server.store(attempts=attempts, missing_after_s=30.0) as store:
            sent(store, ONE, 1, NBYTES)
            subscription = store.subscribe(ONE, [OWNER])
            consumer = Consumer(ONE, [OWNER]).run(subscription)
            assert consumer.bodies(subscription) == {KEY: body_of(KEY, NBYTES)}
            subscription.stop()
        assert not any(planted.times for planted in proxy.faults)


def test_d5_a_stale_object_under_a_key_is_not_taken() -> None:
    with moto_server() as server:
        config, client = server.config(), server.client()
        with server.store(config) as store:
            sent(store, ONE, 1)
            old = client.get_object(Bucket=BUCKET, Key=name_of(config, KEY))["Body"].read()
            newer = PayloadKey(TWO, OWNER, 0)
            client.put_object(Bucket=BUCKET, Key=name_of(config, newer), Body=old)
            subscription = store.subscribe(TWO, [OWNER])
            assert not Consumer(TWO, [OWNER]).drain(subscription).order
            with pytest.raises(PayloadMissing, match="truncated or foreign"):
                subscription.fetch(Announcement(newer, digest_of(body_of(KEY)), 200))
        client.close()


def test_d5_a_late_upload_of_an_older_attempt_meets_no_key_of_the_newer() -> None:
    with moto_server() as server, server.store() as store:
        older = store.publisher(ONE, OWNER)
        sent(store, TWO, 2)
        publish(older, KEY)
        older.close_set()
        subscription = store.subscribe(TWO, [OWNER])
        consumer = Consumer(TWO, [OWNER]).run(subscription)
        keys = [PayloadKey(TWO, OWNER, number) for number in range(2)]
        assert consumer.bodies(subscription) == {key: body_of(key) for key in keys}


def test_d5_a_cleanup_reads_every_page_of_a_listing() -> None:
    with moto_server() as server:
        config, client = server.config(page_keys=3), server.client()
        with server.store(config) as store:
            sent(store, ONE, 10)
            store.cleanup(ONE)
        assert not client.list_objects_v2(Bucket=BUCKET, Prefix=f"{config.root}attempt-").get("Contents")
        client.close()


def test_d5_a_manifest_comes_after_all_that_it_lists() -> None:
    with moto_server() as server, server.store() as store:
        sent(store, ONE, 4)
        subscription = store.subscribe(ONE, [OWNER])
        announced = []
        while isinstance(entry := subscription.poll(30.0), Announcement):
            announced.append(entry.key.payload)
        assert isinstance(entry, Manifest)
        assert announced == [0, 1, 2, 3]
