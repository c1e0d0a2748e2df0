"""Receivers of one node download a payload once between them, and none of them depends on another."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_dcr.errors import PayloadMissing
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.transport_suite import Consumer, body_of, digest_of, publish
from nemo_dcr.transport.base import Announcement
from nemo_dcr.transport.node_share import NodeShare
from tests.object_servers import ObjectServer

ONE, TWO = AttemptId(1), AttemptId(2)
OWNER = OwnerId(0)
STORE = "a store"
PATIENCE_S = 60.0


def announced(number: int, attempt: AttemptId = ONE) -> tuple[Announcement, bytes]:
    key = PayloadKey(attempt, OWNER, number)
    body = body_of(key, 300)
    return Announcement(key, digest_of(body), len(body)), body


def opened(directory: Path, attempt: AttemptId = ONE, limit_bytes: int = 1 << 20) -> NodeShare:
    share = NodeShare(str(directory), STORE, limit_bytes=limit_bytes)
    share.begin(attempt)
    return share


def never() -> bytes:
    raise AssertionError("it was downloaded again")


def go_on() -> None:
    """Nobody gives up."""


def counted(bodies: list[bytes], body: bytes) -> Callable[[], bytes]:
    def download() -> bytes:
        bodies.append(body)
        return body

    return download


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("owner-*") if path.suffix != ".lock")


def test_what_one_receiver_downloaded_the_others_read(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    entry, body = announced(0)
    assert first.take(entry, lambda: body, go_on) == body
    assert second.take(entry, never, go_on) == body
    assert first.take(entry, never, go_on) == body


def test_receivers_that_want_a_payload_at_once_download_it_once(tmp_path: Path) -> None:
    shares = [opened(tmp_path) for _ in range(4)]
    downloads: list[bytes] = []
    entries = [announced(number) for number in range(20)]

    def all_of(share: NodeShare) -> list[bytes]:
        return [share.take(entry, counted(downloads, body), go_on) for entry, body in entries]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(all_of, shares)) == [[body for _, body in entries]] * 4
    assert sorted(downloads) == sorted(body for _, body in entries)


def test_a_download_that_fails_is_done_by_the_next(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    entry, body = announced(0)

    def broken() -> bytes:
        raise PayloadMissing(str(entry.key), "it is absent")

    with pytest.raises(PayloadMissing):
        first.take(entry, broken, go_on)
    assert second.take(entry, lambda: body, go_on) == body


HOLDER = """
import sys, time
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport.base import Announcement
from nemo_dcr.transport.node_share import NodeShare

share = NodeShare(sys.argv[1], "a store", limit_bytes=1 << 20)
share.begin(AttemptId(1))

def download():
    print("downloading", flush=True)
    time.sleep(3600)

share.take(Announcement(PayloadKey(AttemptId(1), OwnerId(0), 0), b"d" * 16, 5), download, lambda: None)
"""


@pytest.mark.slow
def test_the_download_of_a_receiver_that_is_killed_is_taken_over(tmp_path: Path) -> None:
    entry = Announcement(PayloadKey(ONE, OWNER, 0), b"d" * 16, 5)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "downloading\n"
            share, waits = opened(tmp_path), threading.Event()
            with ThreadPoolExecutor(1) as pool:
                taken = pool.submit(share.take, entry, lambda: b"bytes", waits.set)
                assert waits.wait(PATIENCE_S)
                assert not taken.done()
                holder.kill()
                assert taken.result(PATIENCE_S) == b"bytes"
        finally:
            holder.kill()


def test_a_receiver_that_is_stopped_waits_no_longer(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    entry, body = announced(0)
    leave, inside = threading.Event(), threading.Event()

    def slow() -> bytes:
        inside.set()
        assert leave.wait(PATIENCE_S)
        return body

    def stopped() -> None:
        raise PayloadMissing(str(entry.key), "the subscription was stopped")

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(first.take, entry, slow, go_on)
        assert inside.wait(PATIENCE_S)
        with pytest.raises(PayloadMissing, match="stopped"):
            second.take(entry, never, stopped)
        leave.set()
        assert taken.result(PATIENCE_S) == body


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"x" + content[1:], lambda _: b""])
def test_a_file_that_is_not_the_announced_object_is_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    share = opened(tmp_path)
    entry, body = announced(0)
    share.take(entry, lambda: body, go_on)
    [file] = [path for path in tmp_path.rglob("owner-*") if path.suffix != ".lock"]
    file.write_bytes(damage(file.read_bytes()))
    assert share.take(entry, lambda: body, go_on) == body
    assert share.take(entry, never, go_on) == body


def test_a_payload_that_was_announced_anew_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    share = opened(tmp_path)
    entry, body = announced(0)
    share.take(entry, lambda: body, go_on)
    other = Announcement(entry.key, digest_of(b"other"), 5)
    assert share.take(other, lambda: b"other", go_on) == b"other"


def test_files_go_with_a_later_attempt_and_with_the_last_receiver(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    for number in range(3):
        entry, body = announced(number)
        first.take(entry, lambda body=body: body, go_on)
    assert len(files_of(tmp_path)) == 3
    second.begin(TWO)
    assert files_of(tmp_path) == []
    late, body = announced(0)
    assert first.take(late, lambda: body, go_on) == body  # it still reads the earlier attempt
    entry, body = announced(7, TWO)
    second.take(entry, lambda: body, go_on)
    first.close()
    first.close()
    assert files_of(tmp_path) == ["owner-00000-payload-00000000", "owner-00000-payload-00000007"]
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_receiver_is_told_whether_there_is_anybody_to_share_with(tmp_path: Path) -> None:
    first = NodeShare(str(tmp_path), STORE, limit_bytes=1)
    assert not first.begin(ONE)
    second = NodeShare(str(tmp_path), STORE, limit_bytes=1)
    assert second.begin(ONE)
    assert first.begin(TWO)
    assert not NodeShare(str(tmp_path), "another store", limit_bytes=1).begin(TWO)
    second.close()
    assert not first.begin(TWO)
    assert NodeShare(str(tmp_path), STORE, limit_bytes=1).begin(TWO)


def test_a_full_share_takes_no_more_and_nobody_fails(tmp_path: Path) -> None:
    share = opened(tmp_path, limit_bytes=2 * (96 + 300))  # a frame is in front of each
    downloads: list[bytes] = []
    for number in range(4):
        entry, body = announced(number)
        for _ in range(2):
            assert share.take(entry, counted(downloads, body), go_on) == body
    assert len(files_of(tmp_path)) == 2
    assert len(downloads) == 2 + 2 * 2


def test_where_nothing_can_be_shared_each_downloads_and_is_told_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    with caplog.at_level(logging.WARNING):
        share = opened(file / "below")
    assert "not shared" in caplog.text
    entry, body = announced(0)
    downloads: list[bytes] = []
    for _ in range(2):
        assert share.take(entry, counted(downloads, body), go_on) == body
    assert len(downloads) == 2
    share.close()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_place_that_others_may_change_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    """Whoever owns the directory, or the place that a link points to, could replace what lies there."""
    place = tmp_path / "share"
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        first = opened(place)
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1000)  # somebody else's turn
    with caplog.at_level(logging.WARNING):
        share = opened(place)
    assert "another user" in caplog.text
    entry, body = announced(0)
    assert share.take(entry, lambda: body, go_on) == body
    assert files_of(tmp_path) == []
    if not is_link:
        first.close()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_two_receivers_of_one_node_ask_the_store_once_for_each_payload(
    moto: ObjectServer, tmp_path: Path, shared: bool
) -> None:
    with moto.faulty() as (proxy, server):
        config = server.config(share=str(tmp_path) if shared else None)
        with server.store(config) as owner, server.store(config) as one, server.store(config) as other:
            publisher = owner.publisher(ONE, OWNER)
            keys = [PayloadKey(ONE, OWNER, number) for number in range(12)]
            expected = {key: body_of(key, 5000) for key in keys}
            for key in keys:
                publish(publisher, key, expected[key])
            publisher.close_set()

            for store in (one, other):
                store.subscribe(ONE, []).stop()  # both have been there before

            def received(index: int) -> dict[PayloadKey, bytes]:
                subscription = (one, other)[index].subscribe(ONE, [OWNER])
                found = Consumer(ONE, [OWNER]).run(subscription).bodies(subscription)
                subscription.stop()
                return found

            with ThreadPoolExecutor(2) as pool:
                assert list(pool.map(received, range(2))) == [expected, expected]
        whole = [
            each for each in proxy.requests if each.method == "GET" and "/payload-" in each.path and not each.range
        ]
    assert len(whole) == len(keys) * (1 if shared else 2)
    assert list(tmp_path.iterdir()) == []
