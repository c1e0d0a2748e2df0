"""`nemo-dcr coordinator` and `nemo-dcr status` as an operator runs them: a takeover, a zombie, and what is shown."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import Result
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from nemo_dcr.cli import main
from nemo_dcr.config import GateMode
from nemo_dcr.errors import EndpointLost
from nemo_dcr.report.run_story import read_run
from nemo_dcr.runtime.chronicle import SteppedAside, TookOver
from nemo_dcr.testing.chaos_run import settled
from nemo_dcr.testing.chaos_source import SystemPlan
from nemo_dcr.testing.chaos_system import ChaosSystem, fork_server

LIMIT_S = 120.0


def command(plan: SystemPlan, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "nemo_dcr.cli.main", *arguments[:1], str(plan.addresses), *arguments[1:]]


def coordinator(plan: SystemPlan, name: str, *options: str) -> subprocess.Popen[str]:
    record, store = plan.directory / "record.sqlite", plan.payloads
    given = ["--control", f"sqlite:///{record}", "--transport", f"file://{store}", "--run", "here", "--owners", "2"]
    times = ["--heartbeat-s", "0.1", "--lost-after-s", "4", "--takeover-after-s", "3"]
    trace = ["--trace", str(plan.traces), "--chronicle", str(plan.directory / "chronicle"), "--metrics", "0"]
    started = command(plan, "coordinator", *given, *times, *trace, "--name", name, *options)
    return subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def scrape(process: subprocess.Popen[str]) -> dict[str, float]:
    """What a coordinator tells Prometheus at the port that it printed; labels are left out."""
    assert process.stdout is not None
    port = next(line for line in process.stdout if "metrics on port" in line).split()[-1]
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_standby_command_takes_over_and_the_zombie_ends_with_code_5(tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    plan = SystemPlan(
        directory=tmp_path / "system", seed=4, owners=2, instances={"e0": 1}, gate=GateMode.SYNC, run="here"
    )
    system = ChaosSystem(plan, fork_server(), random.Random(1), coordinators=())
    started = [coordinator(plan, "x"), coordinator(plan, "y", "--standby")]

    def serves() -> bool:
        system.tick()
        return settled(system, system.state()) is not None

    def taken_over() -> bool:
        system.tick()
        view = system.coordinator()
        return view is not None and view.name == "coordinator-y"

    def status(*options: str) -> Result:
        return CliRunner().invoke(main.app, ["status", str(plan.addresses), *options])

    try:
        until(serves, "version 0 is not served")
        until(lambda: (plan.addresses / "coordinator-y.json").exists(), "the standby does not answer")
        told = status("--json")
        assert told.exit_code == 0, told.output
        active = json.loads(told.stdout)["active"]
        assert (active["name"], active["record"]["version"]) == ("coordinator-x", 0)
        assert [row["receiver"] for row in active["receivers"]] == ["e0/0"]
        assert [row["owner"] for row in active["owners"]] == [0, 1]
        os.kill(started[0].pid, signal.SIGSTOP)
        until(taken_over, "nobody took over")
        assert scrape(started[1])["nemo_dcr_takeovers_total"] == 1
        table = status("--timeout-s", "1")
        assert "coordinator coordinator-y, epoch 2" in table.stdout
        assert "no answer: coordinator-x" in table.stdout
        os.kill(started[0].pid, signal.SIGCONT)
        _, complaint = started[0].communicate(timeout=LIMIT_S)
        assert started[0].returncode == main.EXIT_REPLACED
        assert "coordinator-x was replaced: epoch 1 was replaced by epoch 2" in complaint
        started[1].terminate()
        started[1].communicate(timeout=LIMIT_S)
        told = read_run(plan.directory, last=9).takeovers
        assert [type(entry) for node, entry in told if node == "coordinator-y"] == [TookOver]
        assert [type(entry) for node, entry in told if node == "coordinator-x"] == [TookOver, SteppedAside]
        assert started[1].returncode == 0
        gone = status("--timeout-s", "1")
        assert isinstance(gone.exception, EndpointLost)
        assert "start one: nemo-dcr coordinator" in str(gone.exception)
    finally:
        for each in started:
            each.kill()
            each.communicate()
        system.close()
