"""`nemo-dcr metrics`: what a scrape says is what the coordinator told, and page and dashboard name nothing else."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from nemo_dcr.cli.main import app
from nemo_dcr.cli.metrics import METRICS, samples
from nemo_dcr.cli.status import RunStatus
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import AttemptId, CandidateId, Epoch, Incarnation, InstanceId, Member, OwnerId, Version, receiver_id
from nemo_dcr.protocol import endpoint, owner
from nemo_dcr.protocol.endpoint_report import report
from nemo_dcr.protocol.tags import Tag, TagKind, TrackerKind, TrackerTag
from nemo_dcr.record import Record
from nemo_dcr.runtime.addresses import Address, publish_address
from nemo_dcr.runtime.coordinator_node import ACTIVE, COORDINATOR_STATUS, CoordinatorView, Role
from nemo_dcr.runtime.rpc import Server
from nemo_dcr.trace import LamportClock

DOCS = Path(__file__).resolve().parents[3] / "docs"
NAME = re.compile(r"nemo_dcr_[a-z_]+")
LIFE = Incarnation(5)
RECEIVERS = [Member(receiver_id(InstanceId("e"), rank), LIFE) for rank in range(2)]


def receiver(member: Member, tag: Tag, **changed: object) -> object:
    return replace(report(endpoint.start(member, ranks=2)[0]), tag=tag, **changed)


def told() -> CoordinatorView:
    clean = Tag(TagKind.CLEAN, Version(3))
    source, _ = owner.start(OwnerId(0), LIFE, tracker=TrackerTag(TrackerKind.AT, Version(2)))
    lost, _ = owner.start(OwnerId(1), LIFE, tracker=TrackerTag())
    return CoordinatorView(
        name="coordinator-a",
        incarnation=LIFE,
        role=Role.ACTIVE,
        idle_s=0.25,
        epoch=Epoch(2),
        phase="running",
        attempt=AttemptId(9),
        mode="overwrite",
        attempt_phase="applying",
        record=Record(
            Version(3), CandidateId("c3"), b"\x01", AttemptId(7), tuple(RECEIVERS), Version(2), Epoch(1), 1e9
        ),
        held="owners [1] do not answer",
        last_failure="",
        aborted=CandidateId(""),
        receivers=(
            receiver(RECEIVERS[0], clean, gate_open=True, requests=4, payloads=5),
            receiver(RECEIVERS[1], Tag(), failure="it broke"),
        ),
        owners=(replace(owner.report(source), payloads=6), owner.report(lost)),
        silent={"owner 1": "no reply"},
        left_out={},
    )


EXPECTED = {
    ("nemo_dcr_up", ""): 1,
    ("nemo_dcr_standby_coordinators", ""): 0,
    ("nemo_dcr_committed_version", ""): 3,
    ("nemo_dcr_commit_timestamp_seconds", ""): 1e9,
    ("nemo_dcr_required_receivers", ""): 2,
    ("nemo_dcr_epoch", ""): 2,
    ("nemo_dcr_attempt", ""): 9,
    ("nemo_dcr_coordinator_idle_seconds", ""): 0.25,
    ("nemo_dcr_waiting", ""): 1,
    ("nemo_dcr_silent_endpoints", ""): 1,
    ("nemo_dcr_left_out_receivers", ""): 0,
    ("nemo_dcr_receiver_version", "e/0"): 3,
    ("nemo_dcr_receiver_gate_open", "e/0"): 1,
    ("nemo_dcr_receiver_gate_open", "e/1"): 0,
    ("nemo_dcr_receiver_requests", "e/0"): 4,
    ("nemo_dcr_receiver_requests", "e/1"): 0,
    ("nemo_dcr_receiver_payloads", "e/0"): 5,
    ("nemo_dcr_receiver_payloads", "e/1"): 0,
    ("nemo_dcr_receiver_failed", "e/0"): 0,
    ("nemo_dcr_receiver_failed", "e/1"): 1,
    ("nemo_dcr_owner_baseline_version", "0"): 2,
    ("nemo_dcr_owner_payloads", "0"): 6,
    ("nemo_dcr_owner_payloads", "1"): 0,
    ("nemo_dcr_owner_failed", "0"): 0,
    ("nemo_dcr_owner_failed", "1"): 0,
}


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[Path]:
    server = Server("coordinator-a", LamportClock())
    server.answer(COORDINATOR_STATUS, lambda call: told())
    server.start()
    for name in ("coordinator-a", ACTIVE):
        publish_address(tmp_path, Address(name, server.address, LIFE, 1))
    yield tmp_path
    server.close()


def scraped(url: str) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.slow
def test_a_scrape_says_what_the_coordinator_told_and_says_so_when_it_is_gone(addresses: Path) -> None:
    program = Path(sys.executable).parent / "nemo-dcr"
    command = [program, "metrics", str(addresses), "--listen", "127.0.0.1:0", "--timeout-s", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("nemo-dcr metrics: http://127.0.0.1:")
            url = line.split()[-1]
            assert scraped(url) == EXPECTED
            for file in addresses.glob("*.json"):
                file.unlink()
            assert scraped(url) == {("nemo_dcr_up", ""): 0, ("nemo_dcr_standby_coordinators", ""): 0}
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_every_metric_is_told_by_some_status_and_has_the_label_that_it_says() -> None:
    given = list(samples(RunStatus(told(), (), {})))
    assert {(name, label): value for name, label, value in given} == EXPECTED
    assert {name for name, _, _ in given} == set(METRICS)
    assert all(bool(label) == bool(METRICS[name][0]) for name, label, _ in given)


def test_a_run_without_a_record_or_a_coordinator_tells_no_version() -> None:
    bare = {name for name, _, _ in samples(RunStatus(replace(told(), record=None, receivers=(), owners=()), (), {}))}
    assert "nemo_dcr_committed_version" not in bare
    assert "nemo_dcr_attempt" in bare
    assert list(samples(RunStatus(None, (told(),), {}))) == [
        ("nemo_dcr_up", "", 0),
        ("nemo_dcr_standby_coordinators", "", 1),
    ]


def test_page_and_dashboard_name_the_metrics_that_there_are() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(nemo_dcr_\w+)` \| (\w*) \| (.+) \|$", page, re.MULTILINE)
    assert {name: (label, meaning) for name, label, meaning in rows} == METRICS
    assert set(NAME.findall(page)) == set(METRICS)
    board = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert {name for query in queries for name in NAME.findall(query)} == set(METRICS)
    legends = [(target["expr"], target["legendFormat"]) for panel in board["panels"] for target in panel["targets"]]
    for query, legend in legends:
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            assert METRICS[NAME.findall(query)[-1]][0] == label, query
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)


@pytest.mark.parametrize("listen", ["9464", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000", ":1"])
def test_what_is_no_address_is_refused(tmp_path: Path, listen: str) -> None:
    done = CliRunner().invoke(app, ["metrics", str(tmp_path), "--listen", listen])
    assert isinstance(done.exception, InvalidConfig)
    assert "must be HOST:PORT" in str(done.exception)


def test_a_port_that_is_taken_and_a_directory_that_is_absent_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = CliRunner().invoke(app, ["metrics", str(tmp_path), "--listen", listen])
    assert isinstance(done.exception, InvalidConfig)
    assert f"{listen} cannot be listened on" in str(done.exception)
    done = CliRunner().invoke(app, ["metrics", str(tmp_path / "absent")])
    assert "absent does not exist" in str(done.exception)
