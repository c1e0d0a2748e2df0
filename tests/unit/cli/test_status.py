"""`nemo-dcr status`: what a coordinator tells, as a table and as JSON, and what is said when nobody coordinates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_dcr.cli import main
from nemo_dcr.errors import EndpointLost
from nemo_dcr.ids import AttemptId, CandidateId, Epoch, Incarnation, Version
from nemo_dcr.record import Record
from nemo_dcr.runtime.addresses import Address, publish_address
from nemo_dcr.runtime.coordinator_node import ACTIVE, COORDINATOR_STATUS, CoordinatorView, Role
from nemo_dcr.runtime.rpc import Server
from nemo_dcr.trace import LamportClock

LIFE = Incarnation(5)
RECORD = Record(Version(3), CandidateId("c3"), b"\x01", AttemptId(7), (), Version(2), Epoch(1))
VIEW = CoordinatorView(
    name="coordinator-a",
    incarnation=LIFE,
    role=Role.ACTIVE,
    idle_s=0.1,
    epoch=Epoch(2),
    phase="running",
    attempt=AttemptId(9),
    mode="overwrite",
    attempt_phase="applying",
    record=RECORD,
    held="owners [1] do not answer",
    last_failure="receiver e0/0 is lost",
    aborted=CandidateId(""),
    receivers=(),
    owners=(),
    silent={"owner 1": "no reply within 1 s"},
    left_out={"e1/0": "no prewarm: the connection broke"},
)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    server = Server("coordinator-a", LamportClock())
    server.answer(COORDINATOR_STATUS, lambda call: VIEW)
    server.start()
    for name in ("coordinator-a", ACTIVE):
        publish_address(tmp_path, Address(name, server.address, LIFE, 1))
    yield tmp_path
    server.close()


def test_the_table_shows_version_attempt_phase_and_who_is_silent(directory: Path) -> None:
    lines = CliRunner().invoke(main.app, ["status", str(directory)]).stdout.splitlines()
    for line in (
        "version 3 (candidate c3)",
        "coordinator coordinator-a, epoch 2: running, last round 0.1 s ago",
        "attempt 9 (overwrite): applying",
        "waits: owners [1] do not answer",
        "last failed attempt: receiver e0/0 is lost",
        "silent: owner 1: no reply within 1 s",
        "left out: receiver e1/0: no prewarm: the connection broke",
    ):
        assert line in lines


def test_json_holds_the_whole_view(directory: Path) -> None:
    told = json.loads(CliRunner().invoke(main.app, ["status", str(directory), "--json"]).stdout)
    assert (told["active"]["record"]["version"], told["active"]["attempt"]) == (3, 9)
    assert (told["standbys"], told["unanswered"]) == ([], {})


def test_nobody_who_coordinates_is_an_error_that_says_what_to_run(tmp_path: Path) -> None:
    found = CliRunner().invoke(main.app, ["status", str(tmp_path), "--timeout-s", "0.2"])
    assert isinstance(found.exception, EndpointLost)
    assert "start one: nemo-dcr coordinator" in str(found.exception)
