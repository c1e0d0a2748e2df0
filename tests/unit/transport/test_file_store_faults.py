from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_dcr.errors import (
    AttemptFailed,
    AttemptStopped,
    InvalidConfig,
    PayloadCorrupt,
    PayloadMissing,
    TransportFailed,
)
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.transport_suite import Consumer, body_of, digest_of, publish
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement
from nemo_dcr.transport.object_store import FileObjectStore, fresh_root

ONE = AttemptId(1)
OWNER = OwnerId(0)
PATIENCE_S = 60.0

WRITER = """
import sys
from nemo_dcr.ids import PayloadKey
from nemo_dcr.testing.transport_suite import body_of, publish
from nemo_dcr.transport.object_store import FileObjectStore

root, owner, count, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
publisher = FileObjectStore(root, run="r").publisher(1, owner)
for number in range(count):
    key = PayloadKey(1, owner, number)
    publish(publisher, key, body_of(key, nbytes))
    print(number, flush=True)
publisher.close_set()
"""


@pytest.fixture
def store(tmp_path: Path) -> FileObjectStore:
    return FileObjectStore(tmp_path / "store", run="r", missing_after_s=0.05)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store" / objects.attempt_name(ONE) / objects.owner_name(OWNER)


def key_of(number: int) -> PayloadKey:
    return PayloadKey(ONE, OWNER, number)


def sent(store: FileObjectStore, count: int) -> list[Announcement]:
    publisher = store.publisher(ONE, OWNER)
    found = [publish(publisher, key_of(number)) for number in range(count)]
    publisher.close_set()
    return found


def start_writer(root: Path, *arguments: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def temporary_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".tmp-*") if path.is_file()]


def test_publishing_leaves_no_temporary_file(store: FileObjectStore, tmp_path: Path) -> None:
    publisher = store.publisher(ONE, OWNER)
    publish(publisher, key_of(0))
    with pytest.raises(AttemptFailed):
        publish(publisher, key_of(0), b"other")
    publisher.close_set()
    assert not temporary_files(tmp_path)


def test_a_temporary_file_is_never_read(store: FileObjectStore, directory: Path) -> None:
    publisher = store.publisher(ONE, OWNER)
    complete = objects.frame(Announcement(key_of(0), bytes(16), 4)) + b"half"
    (directory / ".tmp-0123").write_bytes(complete)
    (directory / "payload-00000001.part").write_bytes(complete)
    publisher.close_set()
    consumer = Consumer(ONE, [OWNER]).run(store.subscribe(ONE, [OWNER]))
    assert not consumer.seen


@pytest.mark.parametrize("content", [b"", b"foreign", bytes(96), bytes(500)])
def test_a_foreign_file_under_a_payload_key_is_not_announced(
    store: FileObjectStore, directory: Path, content: bytes
) -> None:
    directory.mkdir(parents=True)
    (directory / objects.payload_name(0)).write_bytes(content)
    subscription = store.subscribe(ONE, [OWNER])
    assert not Consumer(ONE, [OWNER]).drain(subscription).seen
    with pytest.raises(PayloadMissing, match="truncated or foreign"):
        subscription.fetch(Announcement(key_of(0), bytes(16), len(content)))


@pytest.mark.parametrize("keep", [0, 50, objects.FRAME_BYTES, objects.FRAME_BYTES + 199])
def test_a_truncated_payload_is_missing(store: FileObjectStore, directory: Path, keep: int) -> None:
    payload = sent(store, 1)[0]
    os.truncate(directory / objects.payload_name(0), keep)
    with pytest.raises(PayloadMissing, match="truncated"):
        store.subscribe(ONE, [OWNER]).fetch(payload)


def test_the_object_of_another_payload_under_a_key_is_not_read(store: FileObjectStore, directory: Path) -> None:
    payloads = sent(store, 2)
    os.replace(directory / objects.payload_name(0), directory / objects.payload_name(1))
    with pytest.raises(PayloadMissing):
        store.subscribe(ONE, [OWNER]).fetch(payloads[1])


def test_a_payload_with_another_digest_than_announced_is_missing(store: FileObjectStore) -> None:
    payload = sent(store, 1)[0]
    with pytest.raises(PayloadMissing, match="another size or digest"):
        store.subscribe(ONE, [OWNER]).fetch(Announcement(payload.key, bytes(16), payload.nbytes))


def test_an_object_that_appears_late_is_fetched(tmp_path: Path) -> None:
    store = FileObjectStore(tmp_path / "store", missing_after_s=PATIENCE_S)
    payload = Announcement(key_of(0), digest_of(body_of(key_of(0))), 200)
    subscription = store.subscribe(ONE, [OWNER])
    timer = threading.Timer(0.1, sent, (store, 1))
    timer.start()
    assert subscription.fetch(payload) == body_of(key_of(0))
    timer.join()


def test_stop_ends_a_fetch_that_waits(tmp_path: Path) -> None:
    subscription = FileObjectStore(tmp_path / "store", missing_after_s=PATIENCE_S).subscribe(ONE, [OWNER])
    timer = threading.Timer(0.1, subscription.stop)
    timer.start()
    began = time.monotonic()
    with pytest.raises(PayloadMissing, match="stopped"):
        subscription.fetch(Announcement(key_of(0), bytes(16), 200))
    assert time.monotonic() - began < PATIENCE_S / 2
    timer.join()


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign"])
def test_a_damaged_manifest_is_an_error_and_never_an_empty_set(
    store: FileObjectStore, directory: Path, damage: str
) -> None:
    sent(store, 3)
    path = directory / objects.MANIFEST_NAME
    content = path.read_bytes()
    changed = {"truncate": content[:-1], "flip": content[:-1] + bytes([content[-1] ^ 1]), "foreign": b"[]"}[damage]
    path.write_bytes(changed)
    subscription = store.subscribe(ONE, [OWNER])
    with pytest.raises(PayloadCorrupt, match="1/0/manifest"):
        Consumer(ONE, [OWNER]).drain(subscription)
    with pytest.raises(PayloadCorrupt, match="1/0/manifest"):
        store.publisher(ONE, OWNER)


def test_a_payload_that_a_listing_missed_is_announced_with_the_manifest(
    store: FileObjectStore, directory: Path
) -> None:
    payloads = sent(store, 2)
    hidden = directory / objects.payload_name(1)
    content = hidden.read_bytes()
    hidden.unlink()
    subscription = store.subscribe(ONE, [OWNER])
    consumer = Consumer(ONE, [OWNER]).run(subscription)
    assert list(consumer.seen.values()) == payloads
    hidden.write_bytes(content)
    assert len(consumer.bodies(subscription)) == 2


def test_stop_ends_a_publish_between_two_blocks(store: FileObjectStore, tmp_path: Path) -> None:
    publisher = store.publisher(ONE, OWNER)
    data = bytes(64 << 20)
    raised: list[Exception] = []

    def write() -> None:
        try:
            for number in range(1000):
                publisher.publish(key_of(number), data, digest_of(b""))
        except AttemptStopped as error:
            raised.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    publisher.stop()
    visible = sorted(path.name for path in tmp_path.rglob("payload-*"))
    writer.join(PATIENCE_S)
    assert not writer.is_alive()
    assert len(raised) == 1
    assert sorted(path.name for path in tmp_path.rglob("payload-*")) == visible
    assert not temporary_files(tmp_path)


def test_a_stop_between_the_write_and_the_link_keeps_the_payload_invisible(
    store: FileObjectStore, directory: Path
) -> None:
    publisher = store.publisher(ONE, OWNER)
    with ThreadPoolExecutor(1) as pool:
        with publisher._lock:
            publishing = pool.submit(publish, publisher, key_of(0))
            deadline = time.monotonic() + PATIENCE_S
            while [file.stat().st_size for file in temporary_files(directory)] != [objects.FRAME_BYTES + 200]:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            publisher._stopped = True
        with pytest.raises(AttemptStopped):
            publishing.result(PATIENCE_S)
    assert list(directory.iterdir()) == []


def test_fsync_stores_the_same_objects(tmp_path: Path) -> None:
    for name, fsync in (("plain", False), ("synced", True)):
        sent(FileObjectStore(tmp_path / name, run="r", fsync=fsync), 2)
    plain, synced = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*-0*/*/*")}
        for name in ("plain", "synced")
    )
    assert len(plain) == 3
    assert plain == synced


def test_cleanup_spares_files_that_are_not_its_own(store: FileObjectStore, tmp_path: Path) -> None:
    sent(store, 1)
    root = tmp_path / "store"
    kept = [root / "attempt-1", root / "notes.txt", root / "attempt-000000000000000000001"]
    for path in kept:
        path.write_text("mine")
    store.cleanup(AttemptId(5))
    assert all(path.exists() for path in kept)
    assert not (root / objects.attempt_name(ONE)).exists()


def test_cleanup_finishes_what_an_interrupted_cleanup_left(store: FileObjectStore, tmp_path: Path) -> None:
    sent(store, 2)
    root = tmp_path / "store"
    os.rename(root / objects.attempt_name(ONE), root / ".deleted-0123")
    store.cleanup(AttemptId(0))
    assert [path.name for path in root.iterdir()] == ["nemo-dcr-store"]


def test_a_payload_that_is_read_stays_readable_during_cleanup(store: FileObjectStore, directory: Path) -> None:
    sent(store, 1)
    with open(directory / objects.payload_name(0), "rb") as file:
        store.cleanup(ONE)
        assert file.read()[objects.FRAME_BYTES :] == body_of(key_of(0))


def test_two_runs_on_one_host_get_roots_of_their_own(tmp_path: Path) -> None:
    roots = [fresh_root(tmp_path) for _ in range(2)]
    for root, body in zip(roots, (b"one", b"two"), strict=True):
        publisher = FileObjectStore(root).publisher(ONE, OWNER)
        publish(publisher, key_of(0), body)
        publisher.close_set()
    for root, body in zip(roots, (b"one", b"two"), strict=True):
        subscription = FileObjectStore(root).subscribe(ONE, [OWNER])
        assert Consumer(ONE, [OWNER]).run(subscription).bodies(subscription) == {key_of(0): body}


def test_a_second_run_in_the_same_root_is_refused(tmp_path: Path) -> None:
    FileObjectStore(tmp_path / "store", run="first")
    with pytest.raises(InvalidConfig, match="belongs to run 'first'"):
        FileObjectStore(tmp_path / "store", run="second")
    FileObjectStore(tmp_path / "store", run="first")
    FileObjectStore(tmp_path / "store")


def test_threads_that_open_a_new_root_at_once_agree_on_its_run(tmp_path: Path) -> None:
    refused: list[str] = []
    barrier = threading.Barrier(4)

    def claim(run: str) -> None:
        barrier.wait()
        try:
            FileObjectStore(tmp_path / "store", run=run)
        except InvalidConfig:
            refused.append(run)

    threads = [threading.Thread(target=claim, args=(f"run-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(refused) == 3


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(InvalidConfig, match=r"model\.safetensors"):
        FileObjectStore(tmp_path)
    (tmp_path / "nemo-dcr-store").write_text("something else")
    with pytest.raises(InvalidConfig, match="mark"):
        FileObjectStore(tmp_path)


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportFailed, match="cannot be written"):
        FileObjectStore(tmp_path / "file" / "store")
    with pytest.raises(TransportFailed, match="cannot be written"):
        fresh_root(tmp_path / "file" / "store")


def test_an_unreadable_store_is_a_typed_error(store: FileObjectStore, directory: Path) -> None:
    directory.parent.mkdir(parents=True)
    directory.write_text("a file where the owner's directory belongs")
    with pytest.raises(TransportFailed, match="cannot read"):
        store.subscribe(ONE, [OWNER]).poll(0)
    with pytest.raises(TransportFailed, match="cannot be written"):
        store.publisher(ONE, OWNER)


def test_a_write_that_the_system_refuses_is_a_typed_error(store: FileObjectStore, tmp_path: Path) -> None:
    publisher = store.publisher(ONE, OWNER)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(TransportFailed, match="cannot store payload 1/0/0"):
            publish(publisher, key_of(0), bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not temporary_files(tmp_path)
    assert publish(publisher, key_of(0)).nbytes == 200


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
def test_owners_in_other_processes_are_received(
    store: FileObjectStore, tmp_path: Path, writers: list[subprocess.Popen[str]]
) -> None:
    owners = [OwnerId(0), OwnerId(1)]
    subscription = store.subscribe(ONE, owners)
    writers += [start_writer(tmp_path / "store", owner, 30, 5000) for owner in owners]
    consumer = Consumer(ONE, owners).run(subscription)
    keys = [PayloadKey(ONE, owner, number) for owner in owners for number in range(30)]
    assert consumer.bodies(subscription) == {key: body_of(key, 5000) for key in keys}


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_payloads_only_and_its_successor_completes_the_set(
    store: FileObjectStore, tmp_path: Path, writers: list[subprocess.Popen[str]]
) -> None:
    nbytes = 24 << 20
    writers.append(start_writer(tmp_path / "store", OWNER, 50, nbytes))
    assert writers[0].stdout is not None
    assert writers[0].stdout.readline() == "0\n"
    deadline = time.monotonic() + PATIENCE_S
    while not temporary_files(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.001)
    writers[0].send_signal(signal.SIGKILL)
    writers[0].wait(PATIENCE_S)
    # The writer may have been killed between two payloads; a half-written one is laid down for that case.
    if not temporary_files(tmp_path):
        path = tmp_path / "store" / objects.attempt_name(ONE) / objects.owner_name(OWNER) / ".tmp-half"
        path.write_bytes(bytes(1000))
    subscription = store.subscribe(ONE, [OWNER])
    consumer = Consumer(ONE, [OWNER]).drain(subscription)
    assert 1 <= len(consumer.seen) < 50
    assert not consumer.manifests
    for key, payload in consumer.seen.items():
        assert subscription.fetch(payload) == body_of(key, nbytes)
    publisher = store.publisher(ONE, OWNER)
    for number in range(len(consumer.seen) + 1):
        publish(publisher, key_of(number), body_of(key_of(number), nbytes))
    publisher.close_set()
    assert len(consumer.run(subscription).seen) == len(publisher.close_set().payloads)
    store.cleanup(ONE)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["nemo-dcr-store"]
