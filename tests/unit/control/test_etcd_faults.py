"""The etcd control plane when requests are delayed, answers are lost, and its keys are touched by others."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_dcr.control.etcd import EtcdControl
from nemo_dcr.control.etcd_client import EtcdClient, EtcdConfig, Operation, Stored
from nemo_dcr.control.head import encode
from nemo_dcr.errors import ControlPlaneUnavailable, OperatorNeeded
from nemo_dcr.record import Committed, Refusal
from nemo_dcr.testing import etcd_server
from nemo_dcr.testing.control_calls import (
    bootstrap,
    check_chain,
    check_journal,
    commit,
    granted,
    prepare,
    refusal,
    successor,
)
from nemo_dcr.testing.etcd_server import EtcdServer
from nemo_dcr.testing.http_faults import Fault, FaultyProxy, Request

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()
TXN = "/v3/kv/txn"


@pytest.fixture
def config(etcd: EtcdServer) -> EtcdConfig:
    return EtcdConfig(members=(etcd.address,), prefix=f"faults/{next(NUMBERS)}")


@pytest.fixture
def proxy(etcd: EtcdServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(f"http://{etcd.address}") as proxy:
        yield proxy


def through(proxy: FaultyProxy, config: EtcdConfig, *more: str, timeout_s: float = 10.0) -> EtcdControl:
    """The same record, reached through the proxy."""
    members = (proxy.endpoint.removeprefix("http://"), *more)
    return EtcdControl(EtcdConfig(members=members, prefix=config.prefix, timeout_s=timeout_s))


def all_answered(proxy: FaultyProxy) -> None:
    """Wait until the server has acted on all that was sent, held requests included."""
    until = time.monotonic() + 30
    while len(proxy.answered) < len(proxy.requests):
        assert time.monotonic() < until
        time.sleep(0.01)


def nth(number: int) -> Callable[[Request], bool]:
    """Strike from the transaction with this number on; the first one of a step reads, the second writes."""
    seen = itertools.count()
    return lambda request: request.path == TXN and next(seen) >= number


def fill(client: EtcdClient, writes: Iterator[Operation]) -> None:
    """Write until something stops it."""
    for write in writes:
        client.transaction([], [write], [])


def test_a_commit_whose_answer_was_lost_is_known_to_have_landed(proxy: FaultyProxy, config: EtcdConfig) -> None:
    control = through(proxy, config)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    fault = proxy.plant(Fault(nth(1), lose_answer=True))
    reply = commit(control, epoch, record, attempt)
    assert fault.times == 0
    assert isinstance(reply, Committed)
    assert check_chain(control) == (record, successor(record, epoch, attempt))
    check_journal(control)


def test_a_prepare_whose_answer_was_lost_allocates_one_attempt(proxy: FaultyProxy, config: EtcdConfig) -> None:
    control = through(proxy, config)
    epoch, record = bootstrap(control)
    fault = proxy.plant(Fault(nth(1), lose_answer=True))
    assert granted(prepare(control, epoch, record)) == record.attempt + 1
    assert fault.times == 0
    assert control.read().last_attempt == record.attempt + 1


def test_a_member_without_an_answer_is_left_for_the_next(
    proxy: FaultyProxy, config: EtcdConfig, etcd: EtcdServer
) -> None:
    control = through(proxy, config, etcd.address)
    proxy.plant(Fault(lambda request: True, times=10**6, status=503))
    epoch, record = bootstrap(control)
    granted(prepare(control, epoch, record))
    assert len(proxy.requests) == 1


def test_a_commit_without_any_answer_is_settled_by_one_read(proxy: FaultyProxy, config: EtcdConfig) -> None:
    control, other = through(proxy, config, timeout_s=0.5), EtcdControl(config)
    epoch, record = bootstrap(other)
    attempt = granted(prepare(other, epoch, record))
    proxy.plant(Fault(nth(1), times=10**6, lose_answer=True))
    with pytest.raises(ControlPlaneUnavailable, match="commit"):
        commit(control, epoch, record, attempt)
    assert other.read().record == successor(record, epoch, attempt)


def test_a_commit_that_is_under_way_never_lands_after_a_read(proxy: FaultyProxy, config: EtcdConfig) -> None:
    control, other = through(proxy, config, timeout_s=0.5), EtcdControl(config)
    epoch, record = bootstrap(other)
    attempt = granted(prepare(other, epoch, record))
    release = threading.Event()
    proxy.plant(Fault(nth(1), times=10**6, hold=release))
    with pytest.raises(ControlPlaneUnavailable, match="commit"):
        commit(control, epoch, record, attempt)
    assert other.read().record == record
    release.set()
    all_answered(proxy)
    assert check_chain(other) == (record,)


def test_etcd_refuses_a_commit_that_was_under_way_past_its_deadline(proxy: FaultyProxy, config: EtcdConfig) -> None:
    control, other = through(proxy, config, timeout_s=0.5), EtcdControl(config)
    epoch, record = bootstrap(other)
    attempt = granted(prepare(other, epoch, record))
    release = threading.Event()
    proxy.plant(Fault(nth(1), times=10**6, hold=release))
    with pytest.raises(ControlPlaneUnavailable, match="commit"):
        commit(control, epoch, record, attempt, deadline=time.time() + 1.0)
    client = EtcdClient(config)
    waited = time.monotonic() + 30
    while any(client.all_below("deadlines")):
        assert time.monotonic() < waited
        time.sleep(0.1)
    release.set()
    all_answered(proxy)
    assert other.peek().record == record  # a look moves nothing: the lease alone kept the commit out


def test_a_commit_is_sent_again_only_before_its_deadline(proxy: FaultyProxy, config: EtcdConfig) -> None:
    control, other = through(proxy, config, timeout_s=60.0), EtcdControl(config)
    epoch, record = bootstrap(other)
    attempt = granted(prepare(other, epoch, record))
    proxy.plant(Fault(lambda request: request.path == "/v3/kv/put", times=10**6, status=503))
    begin = time.monotonic()
    # Told at the last try, or refused at the next: which one depends on where the deadline falls.
    with contextlib.suppress(ControlPlaneUnavailable):
        assert refusal(commit(control, epoch, record, attempt, deadline=time.time() + 1.0)) is Refusal.DEADLINE
    assert time.monotonic() - begin < 30
    assert check_chain(other) == (record,)


def test_a_record_whose_first_step_is_written_while_it_is_read_is_not_taken_for_damaged(
    config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = EtcdControl(config), EtcdControl(config)
    get, records = EtcdClient.get, []

    def get_slowly(client: EtcdClient, *names: str) -> dict[str, Stored]:
        found = get(client, *names)
        if "head" in names and not records:
            records.append(None)
            records.append(bootstrap(writer)[1])
        return found

    monkeypatch.setattr(EtcdClient, "get", get_slowly)
    assert reader.peek().record == records[1]


def test_a_record_that_was_removed_while_in_use_needs_an_operator(config: EtcdConfig) -> None:
    control, client = EtcdControl(config), EtcdClient(config)
    bootstrap(control)
    client.transaction([], [client.delete("head")], [])
    for user in (control, EtcdControl(config)):
        with pytest.raises(OperatorNeeded, match="has no head"):
            user.acquire_epoch()
    client.transaction([], [client.delete(each.name) for each in client.all_below("journal")], [])
    EtcdControl(config).acquire_epoch()
    with pytest.raises(OperatorNeeded, match="removed or replaced"):
        control.peek()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", encode({"format": 1})])
def test_a_damaged_head_needs_an_operator(config: EtcdConfig, content: bytes) -> None:
    client = EtcdClient(config)
    client.transaction([], [client.put("head", content)], [])
    with pytest.raises(OperatorNeeded, match="no part of a commit record"):
        EtcdControl(config).read()


def test_a_later_format_needs_an_operator(config: EtcdConfig) -> None:
    control, client = EtcdControl(config), EtcdClient(config)
    bootstrap(control)
    head = client.get("head")["head"].value
    client.transaction([], [client.put("head", head.replace(b'"format":1', b'"format":2'))], [])
    with pytest.raises(OperatorNeeded, match="format 2"):
        control.read()


def test_a_change_by_another_hand_between_read_and_write_is_noticed(config: EtcdConfig) -> None:
    control, client = EtcdControl(config), EtcdClient(config)
    epoch, record = bootstrap(control)
    granted(prepare(control, epoch, record))
    load = control._load

    def touched_after_reading(candidate):  # type: ignore[no-untyped-def]
        seen = load(candidate)
        control._load = load  # type: ignore[method-assign]
        client.transaction([], [client.put("candidates/c1", b'{"attempts":7,"dead":true}')], [])
        return seen

    control._load = touched_after_reading  # type: ignore[method-assign]
    reply = prepare(control, epoch, record)
    assert "aborted" in str(reply)


def test_history_and_journal_are_read_in_pages(config: EtcdConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_dcr.control.etcd_client._PAGE_KEYS", 2)
    control = EtcdControl(config)
    epoch, record = bootstrap(control)
    for _ in range(5):
        granted(prepare(control, epoch, record))
    check_journal(control)
    assert len(control.journal()) == 8


def test_a_forked_child_opens_connections_of_its_own(config: EtcdConfig) -> None:
    control = EtcdControl(config)
    _, record = bootstrap(control)
    child = os.fork()
    if child == 0:
        # The child must not return into pytest; its exit status is its verdict.
        status = 1
        try:
            control.acquire_epoch()
            status = 0 if control.read().record == record else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert control.read().epoch == 2


def test_no_server_is_an_unknown_outcome(config: EtcdConfig) -> None:
    control = EtcdControl(EtcdConfig(members=("127.0.0.1:9",), prefix=config.prefix, timeout_s=0.2))
    with pytest.raises(ControlPlaneUnavailable, match=r"127\.0\.0\.1:9 gives no answer"):
        control.acquire_epoch()


@pytest.mark.servers
def test_a_full_database_needs_an_operator_and_can_still_be_read(tmp_path: Path) -> None:
    with EtcdServer(tmp_path, quota_bytes=4 << 20) as server:
        config = EtcdConfig(members=(server.address,), prefix="refits")
        control, client = EtcdControl(config), EtcdClient(config)
        _, record = bootstrap(control)
        filling = (client.put(f"else/{number}", bytes(1 << 20)) for number in itertools.count())
        with pytest.raises(OperatorNeeded, match=r"database space exceeded.*defragment"):
            fill(client, filling)
        with pytest.raises(OperatorNeeded, match=r"database space exceeded.*defragment"):
            control.acquire_epoch()
        assert control.peek().record == record
        assert control.history() == (record,)


@pytest.mark.parametrize("size", [1_600_000, 2 << 20])
def test_a_request_that_is_too_large_needs_an_operator(config: EtcdConfig, size: int) -> None:
    client = EtcdClient(config)
    with pytest.raises(OperatorNeeded, match=r"too large|larger than max"):
        client.transaction([], [client.put("large", bytes(size))], [])


def test_a_missing_server_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(etcd_server.shutil, "which", lambda name: None)
    with pytest.raises(OperatorNeeded, match="apt-get install etcd-server"):
        EtcdServer(tmp_path)
