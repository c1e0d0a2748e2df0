"""Where a demo's payloads lie: the default, a server that is named and tried, or a clear refusal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nemo_dcr.cli.job import DemoJob
from nemo_dcr.cli.payload_store import FILES, open_payload_store
from nemo_dcr.errors import InvalidConfig, OperatorNeeded, TransportFailed
from nemo_dcr.transport.object_store import FileObjectStore
from nemo_dcr.transport.urls import open_transport
from tests.object_servers import BUCKET, ObjectServer


def job(run: Path, transport: str = "") -> DemoJob:
    return DemoJob(
        run=str(run),
        model="m",
        owners=1,
        instances={},
        chunk_target_bytes=1,
        bucket_target_bytes=1,
        name="r",
        transport=transport,
    )


def test_payloads_lie_in_the_run_directory_by_default(tmp_path: Path) -> None:
    with open_payload_store("file", None, tmp_path) as store:
        assert store == FILES
        demo = job(tmp_path / "run", store.url)
    assert isinstance(open_transport(demo.transport_url, run=demo.name), FileObjectStore)
    assert demo.store.is_dir()


def test_a_server_that_is_named_is_tried_before_anything_starts(
    moto: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.credentials.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.credentials.secret_key)
    url = f"s3://{BUCKET}/demo?endpoint={moto.endpoint}"
    with open_payload_store("s3", url, tmp_path) as store:
        assert job(tmp_path, store.url).transport_url == url
        assert store.credentials is None
        assert not store.secrets
    with (
        pytest.raises(TransportFailed, match="bucket does not exist"),
        open_payload_store("s3", url.replace(BUCKET, "no-such-bucket"), tmp_path),
    ):
        pass


@pytest.mark.parametrize(("kind", "url"), [("file", "s3://bucket"), ("s3", "file:///directory"), ("s3", "s3://b")])
def test_a_url_that_does_not_fit_is_a_usage_error(kind: str, url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig), open_payload_store(kind, url, tmp_path):
        pass


def test_a_server_that_is_not_installed_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(OperatorNeeded, match="pip install"), open_payload_store("s3", None, tmp_path):
        pass


@pytest.mark.slow
def test_a_server_that_is_started_here_keeps_its_secrets_out_of_the_job_and_ends(tmp_path: Path) -> None:
    with open_payload_store("s3", None, tmp_path / "server") as store:
        assert store.credentials is not None
        assert set(store.secrets.values()) == {store.credentials.access_key, store.credentials.secret_key}
        demo = job(tmp_path / "run", store.url)
        assert store.credentials.secret_key not in demo.save().read_text() + repr(store)
        assert (tmp_path / "server" / "identities.json").stat().st_mode & 0o077 == 0
        transport = open_transport(store.url, run="r", credentials=store.credentials)
        assert transport.publisher(1, 0).close_set().payloads == ()
    with pytest.raises(TransportFailed, match="cannot be reached"):
        open_transport(f"{store.url}&attempts=1", run="r", credentials=store.credentials).publisher(1, 0)
