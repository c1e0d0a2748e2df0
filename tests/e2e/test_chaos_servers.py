"""Chaos runs whose record lies in a server and whose payloads travel through relay nodes; both are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_dcr.testing.chaos_run import cases_of, run
from nemo_dcr.testing.chaos_source import RecordPlace
from nemo_dcr.testing.chaos_system import fork_server

pytestmark = [pytest.mark.slow, pytest.mark.servers]
SEED, NUMBER = 228, 4
"""A run that kills both."""


@pytest.mark.parametrize("record", [RecordPlace.ETCD, RecordPlace.S3])
def test_a_system_outlives_a_killed_record_server_and_a_killed_relay_node(tmp_path: Path, record: RecordPlace) -> None:
    drawn = [str(case) for case in cases_of(SEED, NUMBER, server=True, relays=True)]
    assert {"record: at any time, kill", "relay: at any time, kill"} <= set(drawn)
    result = run(SEED, NUMBER, tmp_path / "run", fork_server([record]), record=record, relays=True)
    assert result.breaches == []
    assert [str(outcome.case) for outcome in result.outcomes] == drawn
    struck = " ".join(text for outcome in result.outcomes for text in outcome.struck)
    assert "kill of record from outside" in struck
    assert "kill of relay-" in struck
    assert result.requests > 0
