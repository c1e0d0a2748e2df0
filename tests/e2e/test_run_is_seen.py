"""A run of a trainer and an engine as an operator sees it: its page, its log line, and what both endpoints tell."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from nemo_dcr.adapters.receiver import Receiver
from nemo_dcr.cli.main import app
from nemo_dcr.ids import Version
from nemo_dcr.report.run_story import read_run
from tests.e2e.module_refits import WAIT_S, Engine, until
from tests.e2e.test_owner_from_module import owner_of, policy
from tests.unit.adapters.test_pytorch_module import TABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def scrape(port: int | None) -> dict[str, float]:
    """Values by name, with label values after it in order of their names."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        " ".join((sample.name, *(value for _, value in sorted(sample.labels.items())))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The lines of ended transitions."""
    return [
        record for record in caplog.records if record.levelno == logging.INFO and hasattr(record, "nemo_dcr_version")
    ]


def test_two_refits_are_seen_on_the_page_in_the_log_and_at_both_endpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, engine = policy(), Engine(TABLE, 1)
    receiver = Receiver(engine.models[0], directory=tmp_path, metrics="0")
    with caplog.at_level(logging.INFO, logger="nemo_dcr"), receiver, owner_of(model, tmp_path, metrics="0") as owner:
        for version in (1, 2):
            model.norm.bias.data[version] += 1
            assert owner.refit(timeout_s=WAIT_S) == Version(version)
        # The trainer may step before the gates are open.
        until(lambda: scrape(receiver.metrics_port).get("nemo_dcr_served_version engine/0") == 2)
        until(lambda: len(told(caplog)) == 2)
        trained, served = scrape(owner.metrics_port), scrape(receiver.metrics_port)
    assert trained["nemo_dcr_committed_version"] == 2
    assert trained["nemo_dcr_required_receivers"] == 1
    assert trained["nemo_dcr_attempts_total xor acknowledged"] == 2
    assert trained["nemo_dcr_changed_elements_total owner-0"] == 2
    assert trained["nemo_dcr_payload_bytes_total published owner-0"] > 0
    assert trained["nemo_dcr_stage_seconds_total owner-0 publish"] > 0
    assert served["nemo_dcr_served_version engine/0"] == 2
    assert served["nemo_dcr_gate_open engine/0"] == 1
    assert served["nemo_dcr_gate_closed_seconds_total engine/0"] > 0
    assert served["nemo_dcr_queue_depth engine/0 staged"] == 0
    assert not [name for name in served if "owner-0" in name or "committed" in name]
    assert [(line.nemo_dcr_version, line.nemo_dcr_attempts, line.nemo_dcr_failures) for line in told(caplog)] == [
        (1, 1, []),
        (2, 1, []),
    ]
    story = read_run(tmp_path, last=9)
    assert [each.name for each in story.transitions] == ["version 1", "version 2"]
    sent = sum(attempt.count("payload_bytes") for each in story.transitions for attempt in each.attempts)
    restores = sum(attempt.count("payload_bytes") for attempt in story.recoveries)
    assert sent + restores == trained["nemo_dcr_payload_bytes_total published owner-0"]
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    assert "2 transitions" in done.stdout
