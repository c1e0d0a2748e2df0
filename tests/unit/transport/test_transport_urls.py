"""A transport URL opens what it says, or is refused with the form that it must have."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest

from nemo_dcr.errors import InvalidConfig, OperatorNeeded, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.transport_suite import Consumer, publish
from nemo_dcr.transport.object_store import FileObjectStore
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import TreeNode, balanced_tree, write_tree
from nemo_dcr.transport.s3 import S3ObjectStore
from nemo_dcr.transport.s3_client import MIB, S3Config, S3Credentials, open_client
from nemo_dcr.transport.urls import open_transport
from tests.object_servers import BUCKET, ObjectServer


def test_a_file_url_opens_the_directory_of_the_run(tmp_path: Path) -> None:
    root = tmp_path / "a directory"
    publisher = open_transport(root.as_uri(), run="r").publisher(AttemptId(1), OwnerId(0))
    publish(publisher, PayloadKey(AttemptId(1), OwnerId(0), 0))
    publisher.close_set()
    assert isinstance(FileObjectStore(root, run="r"), FileObjectStore)
    with pytest.raises(InvalidConfig, match="belongs to run 'r'"):
        open_transport(root.as_uri(), run="other")


def test_an_s3_url_opens_a_bucket_and_two_runs_in_it_never_meet(moto: ObjectServer) -> None:
    url = f"s3://{BUCKET}/shared/prefix?endpoint={moto.endpoint}&region=eu-west-1&parallel=2&missing_after_s=0.1"
    first, second = (open_transport(url, run=run, credentials=moto.credentials) for run in ("first", "second"))
    key = PayloadKey(AttemptId(1), OwnerId(0), 0)
    for store, body in ((first, b"first"), (second, b"second")):
        publisher = store.publisher(key.attempt, key.owner)
        publish(publisher, key, body)
        publisher.close_set()
    second.cleanup(AttemptId(1))
    subscription = first.subscribe(key.attempt, [key.owner])
    assert Consumer(key.attempt, [key.owner]).run(subscription).bodies(subscription) == {key: b"first"}
    for store in (first, second):
        assert isinstance(store, S3ObjectStore)
        store.close()


def test_a_relay_url_opens_the_tree_of_a_file_and_receivers_read_at_the_node_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "the tree.json"
    key = PayloadKey(AttemptId(1), OwnerId(0), 0)
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in ("root", "leaf"):
            node = stack.enter_context(contextlib.closing(RelayNode(name, "tcp://127.0.0.1:*", run="r")))
            nodes.append(TreeNode(name, node.address))
        write_tree(file, balanced_tree(nodes))
        url = file.as_uri().replace("file:", "relay:")
        owner, receiver = open_transport(url, run="r"), open_transport(f"{url}?node=leaf&patience_s=0.5", run="r")
        for transport in (owner, receiver):
            assert isinstance(transport, RelayTransport)
            stack.callback(transport.close)
        publisher = owner.publisher(key.attempt, key.owner)
        publish(publisher, key, b"payload")
        publisher.close_set()
        subscription = receiver.subscribe(key.attempt, [key.owner])
        assert Consumer(key.attempt, [key.owner]).run(subscription).bodies(subscription) == {key: b"payload"}
        with pytest.raises(InvalidConfig, match=r"relay\.local"):
            owner.subscribe(key.attempt, [key.owner])
        with pytest.raises(InvalidConfig, match="no node 'stem'"):
            open_transport(f"{url}?node=stem", run="r")
        with pytest.raises(InvalidConfig, match=r"known are .*heartbeat_ms"):
            open_transport(f"{url}?nod=leaf", run="r")
        with pytest.raises(InvalidConfig, match="is no number"):
            open_transport(f"{url}?window_frames=1.5", run="r")
        with pytest.raises(InvalidConfig, match=r"secret\.key"):
            open_transport(f"{url}?keys={tmp_path}", run="r")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/directory",
        "directory",
        "http://host/bucket",
        "file://",
        "file:///",
        "file://host/directory",
        "file:///directory?region=x",
        "s3://",
        "s3://ab",
        "s3://Bucket",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a b",
        "s3://key:secret@bucket/prefix",
        "s3://bucket:9000/prefix",
        "s3://bucket/prefix#part",
        "s3://bucket?endpoint=host:9000",
        "s3://bucket?endpoint=http://user:secret@host",
        "s3://bucket?region=",
        "s3://bucket?region=a&region=b",
        "s3://bucket?regoin=a",
        "s3://bucket?parallel=many",
        "s3://bucket?parallel=0",
        "s3://bucket?part_bytes=1",
        "s3://bucket?page_keys=1001",
        "s3://bucket?read_ahead_bytes=-1",
        "s3://bucket?missing_after_s=-1",
        "s3://bucket?share_bytes=0",
        "s3://bucket?share=relative",
        "s3://[bucket",
        "relay://",
        "relay:///",
        "relay://host/tree.json",
        "relay:///no-such-directory/tree.json",
    ],
)
def test_any_other_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig):
        open_transport(url, run="r")


@pytest.mark.parametrize("run", ["", "..", "a/b", "-a", "x" * 65])
def test_a_run_needs_a_name_that_is_one_part_of_a_key(run: str) -> None:
    with pytest.raises(InvalidConfig, match=r"s3\.run"):
        open_transport("s3://bucket", run=run)


def test_a_secret_in_a_url_is_not_repeated_and_credentials_do_not_show() -> None:
    with pytest.raises(InvalidConfig) as refused:
        open_transport("s3://key:hidden@bucket", run="r")
    assert "hidden" not in str(refused.value)
    assert "hidden" not in repr(S3Credentials(access_key="key", secret_key="hid" + "den", session_token="hid" + "den"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OperatorNeeded, match=r"pip install 'nemo-dcr\[s3\]'"):
        open_transport("s3://bucket", run="r")


def test_absent_regions_profiles_and_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(TransportFailed, match="no region is known"):
        open_transport("s3://bucket", run="r")
    store = open_transport("s3://bucket?endpoint=http://127.0.0.1:9", run="r")
    with pytest.raises(TransportFailed, match="no usable credentials"):
        store.publisher(AttemptId(1), OwnerId(0))
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(TransportFailed, match="absent"):
        open_transport("s3://bucket?region=eu-west-1", run="r")


def test_amazon_is_addressed_by_host_and_other_servers_by_path() -> None:
    held = S3Credentials(access_key="key", secret_key="x" * 8)
    amazon = open_client(S3Config(bucket="bucket", run="r", region="eu-west-1"), held)
    other = open_client(S3Config(bucket="bucket", run="r", endpoint="http://127.0.0.1:9"), held)
    assert amazon.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "k"}).startswith(
        "https://bucket.s3."
    )
    assert other.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "k"}).startswith(
        "http://127.0.0.1:9/bucket/k"
    )
    assert S3Config(bucket="bucket", run="r").part_bytes == 64 * MIB
