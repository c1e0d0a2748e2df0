"""`nemo-dcr record show`, `history` and `watch`, over SQLite and over servers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_dcr.cli.main import app
from nemo_dcr.control import open_control
from nemo_dcr.record import Committed, ControlPlane, Record
from nemo_dcr.testing.control_calls import MEMBERS, bootstrap, commit, granted, prepare
from nemo_dcr.testing.etcd_server import EtcdServer
from tests.object_servers import BUCKET, ObjectServer


def record_of_two_versions(url: str) -> tuple[ControlPlane, tuple[Record, ...]]:
    control = open_control(url)
    epoch, first = bootstrap(control)
    reply = commit(control, epoch, first, granted(prepare(control, epoch, first, "[b]step-1")), "[b]step-1")
    assert isinstance(reply, Committed)
    return control, (first, reply.record)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["record", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def as_json(record: Record) -> dict[str, object]:
    return {
        "version": record.version,
        "time": record.time,
        "candidate": record.candidate,
        "digest": record.digest.hex(),
        "baseline": record.baseline,
        "attempt": record.attempt,
        "epoch": record.epoch,
        "required": [{"receiver": each.receiver, "incarnation": each.incarnation} for each in MEMBERS],
    }


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'record.db'}"


def test_show_prints_all_that_the_record_binds(url: str) -> None:
    control, (_, record) = record_of_two_versions(url)
    record = control.history()[-1]
    shown = json.loads(printed("show", url, "--json"))
    assert shown == {"record": as_json(record), "epoch": 1, "last_attempt": 2}
    table = printed("show", url)
    for part in ("[b]step-1", "a/0", str(2**62 + 1), "b/0", "20"):
        assert part in table


def test_history_lists_every_version_in_order(url: str) -> None:
    control, _ = record_of_two_versions(url)
    records = control.history()
    assert json.loads(printed("history", url, "--json")) == [as_json(record) for record in records]
    assert json.loads(printed("history", url, "--json", "--last", "1")) == [as_json(records[-1])]
    lines = [line.split() for line in printed("history", url).splitlines() if line.strip()]
    assert [line[0] for line in lines if line[0].isdigit()] == ["0", "1"]


def test_a_record_without_a_version_is_shown_as_such(url: str) -> None:
    open_control(url).acquire_epoch()
    assert "none yet" in printed("show", url)
    assert json.loads(printed("show", url, "--json")) == {"record": None, "epoch": 1, "last_attempt": 0}
    assert json.loads(printed("history", url, "--json")) == []


def test_watch_prints_each_version_until_the_wanted_one(url: str) -> None:
    control, (_, record) = record_of_two_versions(url)
    outputs: list[str] = []
    watching = threading.Thread(
        target=lambda: outputs.append(printed("watch", url, "--json", "--until", "2", "--timeout", "60"))
    )
    watching.start()
    assert isinstance(commit(control, record.epoch, record, granted(prepare(control, record.epoch, record))), Committed)
    watching.join(60)
    assert [json.loads(line)["version"] for line in outputs[0].splitlines()][-1] == 2
    assert "version 2  candidate c1" in printed("watch", url, "--until", "2")


@pytest.mark.slow
def test_looking_goes_by_exit_codes(url: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "nemo_dcr.cli.main", "record", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert run("show", url) == (2, f"nemo-dcr: {_absent(url)}\n")
    record_of_two_versions(url)
    code, said = run("watch", url, "--until", "7", "--timeout", "0")
    assert (code, "version 7 was not committed within 0 s" in said) == (4, True)
    (tmp_path / "damaged.db").write_bytes(b"not a database, but long enough to be looked at" * 100)
    code, said = run("history", f"sqlite:///{tmp_path / 'damaged.db'}")
    assert (code, "damaged" in said) == (3, True)


@pytest.mark.slow
def test_records_behind_servers_are_shown_and_left_alone(
    etcd: EtcdServer, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.credentials.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.credentials.secret_key)
    for url in (f"etcd://{etcd.address}/shown", f"s3://{BUCKET}/shown?endpoint={seaweedfs.endpoint}"):
        result = CliRunner().invoke(app, ["record", "show", url])
        assert str(result.exception) == _absent(url)
        control, records = record_of_two_versions(url)
        clock = control.peek().clock
        assert json.loads(printed("show", url, "--json"))["record"]["attempt"] == records[-1].attempt
        assert [each["version"] for each in json.loads(printed("history", url, "--json"))] == [0, 1]
        assert "version 1" in printed("watch", url, "--until", "1")
        assert control.peek().clock == clock


def _absent(url: str) -> str:
    said = f"there is no commit record at {url}; correct the URL, or start a coordinator on it"
    return f"configuration control.url: {said}"
