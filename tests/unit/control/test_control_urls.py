from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nemo_dcr.control import open_control
from nemo_dcr.control.etcd import EtcdControl
from nemo_dcr.control.etcd_client import EtcdConfig
from nemo_dcr.control.s3_objects import S3RecordConfig
from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.testing.control_calls import bootstrap


def test_an_etcd_url_names_members_prefix_and_certificates(tmp_path: Path) -> None:
    url = "etcd://a:2379,[::1]:2380/team/refits?ca=/pki/ca.pem&cert=/pki/c.pem&key=/pki/k.pem&timeout_s=2.5"
    control = open_control(url)
    assert isinstance(control, EtcdControl)
    assert control._client.config == EtcdConfig(
        members=("a:2379", "[::1]:2380"),
        prefix="team/refits",
        ca="/pki/ca.pem",
        cert="/pki/c.pem",
        key="/pki/k.pem",
        timeout_s=2.5,
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("etcd://host/refits", "no HOST:PORT"),
        ("etcd://host:0/refits", "no HOST:PORT"),
        ("etcd://host:70000/refits", "no HOST:PORT"),
        ("etcd://a:1,/refits", "no HOST:PORT"),
        ("etcd://host:2379", "name a prefix"),
        ("etcd://host:2379/", "name a prefix"),
        ("etcd://host:2379/a//b", "no prefix"),
        ("etcd://host:2379/a b", "no prefix"),
        ("etcd://me:secret@host:2379/refits", "holds no secret"),
        ("etcd://host:2379/refits?cert=c&key=k", "give ca alone"),
        ("etcd://host:2379/refits?ca=a&cert=c", "give ca alone"),
        ("etcd://host:2379/refits?timeout_s=0", "must be positive"),
        ("etcd://host:2379/refits?timeout_s=soon", "is no number"),
        ("etcd://host:2379/refits?timeout_s=", "given twice or empty"),
        ("etcd://host:2379/refits?timeout_s=1&timeout_s=2", "given twice or empty"),
        (
            "etcd://host:2379/refits?endpoint=http://a:1",
            "unknown option 'endpoint'; known are ca, cert, key, timeout_s",
        ),
        ("etcd://host:2379/refits#part", "must be sqlite"),
        ("etcd://[::1/refits", "is no URL"),
        ("s3://bucket", "name a prefix"),
        ("s3://Bucket/refits", "no bucket name"),
        ("s3://bucket/../refits", "no prefix"),
        ("s3://bucket/refits?endpoint=host:9000", "must be http://HOST:PORT"),
        ("s3://bucket/refits?timeout_s=-1", "must be positive"),
        ("s3://bucket/refits?parallel=4", "unknown option 'parallel'; known are endpoint, region, timeout_s"),
        ("http://host/refits", "must be sqlite:///PATH, etcd://HOST:PORT/PREFIX or s3://BUCKET/PREFIX"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_wrong(url: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        open_control(url)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "package"), [("etcd://host:2379/refits", "etcd3gw"), ("s3://bucket/refits", "boto3")]
)
def test_a_missing_client_library_is_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(OperatorNeeded, match=r"pip install 'nemo-dcr\["):
        open_control(scheme)


def test_looking_makes_no_record(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'record.db'}"
    with pytest.raises(InvalidConfig, match="there is no commit record"):
        open_control(url, reads_only=True)
    assert list(tmp_path.iterdir()) == []
    _, record = bootstrap(open_control(url))
    assert open_control(url, reads_only=True).peek().record == record


def test_the_options_of_an_s3_url_are_fields_of_its_configuration() -> None:
    known = S3RecordConfig(bucket="abc", prefix="a/b", endpoint="http://h:1", region="eu-x-1", timeout_s=3.0)
    assert known.where == "s3://abc/a/b at http://h:1"
