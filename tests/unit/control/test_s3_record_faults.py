"""The S3 control plane: servers that ignore conditions, late requests, lost answers, and what others do to objects."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_dcr.control import s3
from nemo_dcr.control.s3 import S3Control
from nemo_dcr.control.s3_objects import S3Objects, S3RecordConfig
from nemo_dcr.errors import ControlPlaneUnavailable, OperatorNeeded
from nemo_dcr.record import Committed
from nemo_dcr.testing.control_calls import bootstrap, check_chain, check_journal, commit, granted, prepare, successor
from nemo_dcr.testing.http_faults import Fault, FaultyProxy, Request
from nemo_dcr.transport.s3_client import S3Credentials
from tests.object_servers import BUCKET, ObjectServer, session_of

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()
ALWAYS = 10**6


@pytest.fixture
def config(seaweedfs: ObjectServer) -> S3RecordConfig:
    return S3RecordConfig(bucket=BUCKET, prefix=f"faults/{next(NUMBERS)}", endpoint=seaweedfs.endpoint)


@pytest.fixture
def control(seaweedfs: ObjectServer, config: S3RecordConfig) -> S3Control:
    return S3Control(config, session_of(seaweedfs.credentials))


@pytest.fixture
def proxy(seaweedfs: ObjectServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def client(seaweedfs: ObjectServer) -> Iterator[Any]:
    client = seaweedfs.client()
    yield client
    client.close()


def through(proxy: FaultyProxy, config: S3RecordConfig, server: ObjectServer, timeout_s: float = 10.0) -> S3Control:
    """The same record, reached through the proxy."""
    fields = {"bucket": config.bucket, "prefix": config.prefix, "endpoint": proxy.endpoint, "timeout_s": timeout_s}
    return S3Control(S3RecordConfig(**fields), session_of(server.credentials))  # type: ignore[arg-type]


def all_answered(proxy: FaultyProxy) -> None:
    """Wait until the server has acted on all that was sent, held requests included."""
    until = time.monotonic() + 30
    while len(proxy.answered) < len(proxy.requests):
        assert time.monotonic() < until
        time.sleep(0.01)


def put_of(name: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and request.path.endswith(name)


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_a_condition_is_refused_at_the_start(moto: ObjectServer, header: str) -> None:
    with moto.faulty() as (proxy, server):
        fields = {"bucket": BUCKET, "prefix": f"ignores/{header}", "endpoint": server.endpoint}
        config = S3RecordConfig(**fields)
        S3Control(config, session_of(moto.credentials))
        proxy.plant(Fault(lambda request: True, times=ALWAYS, drop_header=header))
        with pytest.raises(OperatorNeeded, match=f"does not keep to the condition {header}"):
            S3Control(config, session_of(moto.credentials))
        looking = S3Control(config, session_of(moto.credentials), reads_only=True)
        with pytest.raises(OperatorNeeded, match=f"does not keep to the condition {header}"):
            looking.acquire_epoch()
        assert looking.peek().epoch == 0


def test_a_server_that_does_not_know_conditions_is_refused(proxy: FaultyProxy, config, seaweedfs) -> None:  # type: ignore[no-untyped-def]
    proxy.plant(Fault(put_of("probe"), times=ALWAYS, status=501, code="NotImplemented"))
    with pytest.raises(OperatorNeeded, match="does not keep to the condition"):
        through(proxy, config, seaweedfs)


def test_a_commit_whose_answer_was_lost_is_known_by_its_nonce(
    proxy: FaultyProxy, config: S3RecordConfig, seaweedfs: ObjectServer
) -> None:
    control = through(proxy, config, seaweedfs)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    fault = proxy.plant(Fault(put_of("head"), lose_answer=True))
    reply = commit(control, epoch, record, attempt)
    assert fault.times == 0
    assert isinstance(reply, Committed)
    assert check_chain(control) == (record, successor(record, epoch, attempt))
    check_journal(control)


def test_a_lost_answer_is_known_also_after_the_event_went_to_the_log(
    proxy: FaultyProxy,
    config: S3RecordConfig,
    control: S3Control,
    seaweedfs: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "TAIL_EVENTS", 1)
    slow = through(proxy, config, seaweedfs)
    epoch, record = bootstrap(slow)
    attempt = granted(prepare(slow, epoch, record))
    swap = slow._swap

    def overtaken(*args: Any) -> bool:
        try:
            return swap(*args)
        finally:
            slow._swap = swap  # type: ignore[method-assign]
            for _ in range(3):
                control.acquire_epoch()

    slow._swap = overtaken  # type: ignore[method-assign]
    proxy.plant(Fault(put_of("head"), lose_answer=True))
    assert isinstance(commit(slow, epoch, record, attempt), Committed)
    assert check_chain(control) == (record, successor(record, epoch, attempt))


def test_a_prepare_whose_answer_was_lost_allocates_one_attempt(
    proxy: FaultyProxy, config: S3RecordConfig, seaweedfs: ObjectServer
) -> None:
    control = through(proxy, config, seaweedfs)
    epoch, record = bootstrap(control)
    fault = proxy.plant(Fault(put_of("head"), lose_answer=True))
    assert granted(prepare(control, epoch, record)) == record.attempt + 1
    assert fault.times == 0
    assert control.read().last_attempt == record.attempt + 1


def test_a_commit_without_any_answer_is_settled_by_one_read(
    proxy: FaultyProxy, config: S3RecordConfig, control: S3Control, seaweedfs: ObjectServer
) -> None:
    slow = through(proxy, config, seaweedfs, timeout_s=0.5)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    proxy.plant(Fault(put_of("head"), times=ALWAYS, lose_answer=True))
    with pytest.raises(ControlPlaneUnavailable, match="commit"):
        commit(slow, epoch, record, attempt)
    assert control.read().record == successor(record, epoch, attempt)


@pytest.mark.parametrize("fence", ["read", "prepare", "acquire_epoch"])
def test_an_upload_that_is_under_way_never_lands_after_another_step(
    proxy: FaultyProxy, config: S3RecordConfig, control: S3Control, seaweedfs: ObjectServer, fence: str
) -> None:
    slow = through(proxy, config, seaweedfs, timeout_s=0.5)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    release = threading.Event()
    proxy.plant(Fault(put_of("head"), times=ALWAYS, hold=release))
    with pytest.raises(ControlPlaneUnavailable, match="commit"):
        commit(slow, epoch, record, attempt)
    if fence == "prepare":
        granted(prepare(control, epoch, record))
    else:
        getattr(control, fence)()
    release.set()
    all_answered(proxy)
    assert check_chain(control) == (record,)


def test_a_commit_is_sent_again_only_before_its_deadline(
    proxy: FaultyProxy, config: S3RecordConfig, control: S3Control, seaweedfs: ObjectServer
) -> None:
    slow = through(proxy, config, seaweedfs, timeout_s=60.0)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    proxy.plant(Fault(put_of("head"), times=ALWAYS, status=503, code="SlowDown"))
    begin = time.monotonic()
    with pytest.raises(ControlPlaneUnavailable, match="commit"):
        commit(slow, epoch, record, attempt, deadline=time.time() + 1.0)
    assert time.monotonic() - begin < 30


def test_a_copy_of_the_tail_that_was_left_half_made_is_finished(
    control: S3Control, config: S3RecordConfig, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch, record = bootstrap(control)
    granted(prepare(control, epoch, record))
    granted(prepare(control, epoch, record))
    monkeypatch.setattr(s3, "TAIL_EVENTS", 5)
    create, made = control._objects.create, list[str]()

    def dies(name: str, content: bytes) -> bool:
        if made:
            raise KeyboardInterrupt
        made.append(name)
        return create(name, content)

    monkeypatch.setattr(control._objects, "create", dies)
    with pytest.raises(KeyboardInterrupt):
        control.acquire_epoch()
    assert made
    again = S3Control(config, session_of(seaweedfs.credentials))
    assert again.peek(successor(record, epoch, record.attempt).candidate).candidate_attempts == 2
    granted(prepare(again, again.acquire_epoch().epoch, record))
    assert again.read(successor(record, epoch, record.attempt).candidate).candidate_attempts == 3
    check_chain(again)
    check_journal(again)


def test_a_record_that_was_removed_while_in_use_needs_an_operator(
    control: S3Control, config: S3RecordConfig, client: Any
) -> None:
    bootstrap(control)
    client.delete_object(Bucket=BUCKET, Key=f"{config.prefix}/head")
    with pytest.raises(OperatorNeeded, match="removed or replaced"):
        control.acquire_epoch()


def test_a_record_that_is_begun_and_fills_a_tail_while_it_is_read_is_not_taken_for_damaged(
    control: S3Control, config: S3RecordConfig, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "TAIL_EVENTS", 2)
    reader = S3Control(config, session_of(seaweedfs.credentials))
    get, records = S3Objects.get, []

    def get_slowly(objects: S3Objects, name: str) -> tuple[bytes, str] | None:
        found = get(objects, name)
        if name == "head" and not records:
            records.append(None)
            epoch, record = bootstrap(control)
            granted(prepare(control, epoch, record))
            granted(prepare(control, epoch, record))
            records.append(record)
        return found

    monkeypatch.setattr(S3Objects, "get", get_slowly)
    assert reader.peek().record == records[1]


def test_a_head_that_is_gone_is_not_made_anew_in_front_of_its_log(
    control: S3Control,
    config: S3RecordConfig,
    seaweedfs: ObjectServer,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "TAIL_EVENTS", 2)
    bootstrap(control)
    client.delete_object(Bucket=BUCKET, Key=f"{config.prefix}/head")
    with pytest.raises(OperatorNeeded, match="has no head"):
        S3Control(config, session_of(seaweedfs.credentials)).acquire_epoch()


def test_an_old_head_that_was_put_back_is_noticed_at_the_log(
    control: S3Control,
    config: S3RecordConfig,
    seaweedfs: ObjectServer,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = {"Bucket": BUCKET, "Key": f"{config.prefix}/head"}
    epoch, record = bootstrap(control)
    old = client.get_object(**head)["Body"].read()
    monkeypatch.setattr(s3, "TAIL_EVENTS", 4)
    granted(prepare(control, epoch, record))
    control.acquire_epoch()
    client.put_object(**head, Body=old)
    control.acquire_epoch()
    with pytest.raises(OperatorNeeded, match="holds other events"):
        control.acquire_epoch()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
def test_a_damaged_head_needs_an_operator(
    control: S3Control, config: S3RecordConfig, client: Any, content: bytes
) -> None:
    client.put_object(Bucket=BUCKET, Key=f"{config.prefix}/head", Body=content)
    with pytest.raises(OperatorNeeded, match="no part of a commit record"):
        control.read()


def test_an_object_that_is_too_large_is_not_read(
    control: S3Control, config: S3RecordConfig, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_dcr.control.s3_objects.MAX_OBJECT_BYTES", 100)
    client.put_object(Bucket=BUCKET, Key=f"{config.prefix}/head", Body=bytes(101))
    with pytest.raises(OperatorNeeded, match="too large"):
        control.read()


def test_wrong_credentials_and_a_missing_bucket_need_an_operator(seaweedfs: ObjectServer, moto: ObjectServer) -> None:
    wrong = session_of(S3Credentials(access_key="nobody", secret_key=seaweedfs.credentials.secret_key))
    with pytest.raises(OperatorNeeded, match="AWS_PROFILE"):
        S3Control(S3RecordConfig(bucket=BUCKET, prefix="a", endpoint=seaweedfs.endpoint), wrong)
    with pytest.raises(OperatorNeeded, match="create the bucket"):
        S3Control(
            S3RecordConfig(bucket="no-such-bucket", prefix="a", endpoint=moto.endpoint), session_of(moto.credentials)
        )


def test_a_forked_child_opens_connections_of_its_own(control: S3Control) -> None:
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
