"""The main job through the console script, on a small synthetic model: real processes, a real kill, a real restart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_dcr.cli.report import DemoReport
from nemo_dcr.report.page import page
from nemo_dcr.report.run_story import read_run
from nemo_dcr.runtime.trace_file import read_trace
from nemo_dcr.testing.synthetic import synthetic_checkpoint
from nemo_dcr.trace import Action

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = [str(Path(sys.executable).parent / "nemo-dcr"), "demo", "--engine", "reference"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_checkpoint(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=8,
        hidden_size=48,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
    )


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, str]:
    directory = tmp_path_factory.mktemp("demo") / "run"
    report = directory.parent / "report.json"
    done = subprocess.run(
        [
            *(*COMMAND, "--model", str(model), "--run-dir", str(directory), "--json", str(report), "--quiet"),
            *("--timeline", str(directory.parent / "timeline.json")),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "run", json.loads(report.read_text()), done.stdout


def test_four_transitions_end_without_a_mismatched_bit(run: tuple[Path, dict, str]) -> None:
    _, report, table = run
    assert report["ok"] is True
    assert [row["version"] for row in report["transitions"]] == [1, 2, 3, 4]
    assert all(row["mismatched_bits"] == 0 for row in report["transitions"])
    assert all(0 < row["changed_elements"] < row["total_elements"] for row in report["transitions"])
    assert all(row["payload_bytes"] < row["checkpoint_bytes"] for row in report["transitions"])
    assert all(row["payloads"] >= 30 for row in report["transitions"])
    assert "mismatched bits" in table
    assert {"refit", "construct", "encode", "publish", "apply", "check"} <= set(report["transitions"][0]["seconds"])


def test_stats_shows_what_the_report_counted_also_after_a_retry(run: tuple[Path, dict, str]) -> None:
    directory, report, _ = run
    done = subprocess.run([COMMAND[0], "stats", str(directory), "--json"], capture_output=True, text=True, check=True)
    stats = json.loads(done.stdout)
    rows = report["transitions"]
    assert [(each["version"], each["changed_elements"], each["source_elements"]) for each in stats["versions"]] == [
        (row["version"], row["changed_elements"], row["total_elements"]) for row in rows
    ]
    kinds = [sum(kind["changed"] for kind in each["kinds"].values()) for each in stats["versions"]]
    assert kinds == [row["changed_destinations"] for row in rows]
    assert sum(stats["elements"].values()) == rows[0]["canonical_elements"]
    assert len(stats["elements"]) == 11
    assert all(each["missing_owners"] == [] for each in stats["versions"])


def test_one_transition_runs_with_the_asynchronous_gate(run: tuple[Path, dict, str]) -> None:
    assert [row["gate"] for row in run[1]["transitions"]].count("async") == 1


def test_the_kill_fails_the_xor_attempt_and_an_overwrite_retry_commits(run: tuple[Path, dict, str]) -> None:
    rows = run[1]["transitions"]
    assert [[attempt["mode"] for attempt in row["attempts"]] for row in rows] == [
        ["xor"], ["xor"], ["xor", "overwrite"], ["xor"],
    ]  # fmt: skip
    failed, retried = rows[2]["attempts"]
    assert (failed["outcome"], retried["outcome"]) == ("failed", "committed")
    assert "solo/0 is lost" in failed["reason"]
    assert (rows[2]["xor_items"], rows[2]["overwrite_items"] > 0) == (0, True)
    assert rows[0]["overwrite_items"] == 0


def test_survivors_held_mixed_storage_and_the_victim_was_between_first_and_last_item(
    run: tuple[Path, dict, str],
) -> None:
    directory, report, _ = run
    kill = report["transitions"][2]["kill"]
    assert all(count > 0 for count in kill["applied_items"].values())
    assert all(old > 0 and new > 0 for old, new in kill["mixed_bits"].values())
    assert len(kill["mixed_bits"]) == 3
    first_life = min((directory / "traces").glob("solo-0-*.ndjson"))
    events = [event for event in read_trace(first_life) if event.attempt == kill["attempt"]]
    assert sum(event.action == Action.APPLY_ITEM for event in events) >= kill["applied_items"]["solo/0"]
    assert not any(event.action == Action.FLUSH for event in events)


def test_the_killed_instance_is_restored_densely_and_required_again(run: tuple[Path, dict, str]) -> None:
    directory, report, _ = run
    rows = report["transitions"]
    assert rows[2]["restored"] == ["solo/0"]
    assert [row["receivers"] for row in rows] == [4, 4, 3, 4]
    second_life = max((directory / "traces").glob("solo-0-*.ndjson"))
    events = read_trace(second_life)
    restored = next(event for event in events if event.action == Action.FINISH_RESTORE)
    applied = [e for e in events if e.action == Action.APPLY_ITEM and e.attempt == restored.attempt]
    assert len(applied) > 0


def test_no_request_runs_while_storage_is_being_written(run: tuple[Path, dict, str]) -> None:
    directory, _, _ = run
    served = 0
    for path in (directory / "traces").glob("solo-0-*.ndjson"):
        running: set[object] = set()
        writing = False
        for event in read_trace(path):
            match event.action:
                case Action.ADMIT_REQUEST:
                    assert not writing
                    running.add(event.args["request"])
                    served += 1
                case Action.FINISH_REQUEST:
                    running.discard(event.args["request"])
                case Action.APPLY_ITEM:
                    assert not running
                    writing = True
                case Action.OPEN_GATE:
                    writing = False
    assert served > 0


def test_every_process_left_a_gapless_trace_and_the_control_plane_too(run: tuple[Path, dict, str]) -> None:
    directory, report, _ = run
    names = {re.sub(r"(-\d{15,})?\.ndjson$", "", path.name) for path in (directory / "traces").glob("*.ndjson")}
    assert {"owner-0", "owner-1", "solo-0", "tp3-0", "tp3-2", "coordinator", "control"} <= names
    control = read_trace(directory / "traces" / "control.ndjson")
    assert sum(event.action == Action.COMMIT for event in control) == len(report["transitions"])
    assert sum(event.action == Action.BOOTSTRAP for event in control) == 1


def test_the_timeline_shows_every_stage_of_every_refit_on_every_node(run: tuple[Path, dict, str]) -> None:
    directory, report, _ = run
    events = json.loads((directory.parents[1] / "timeline.json").read_text())["traceEvents"]
    nodes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(nodes) == {"refits", "owner-0", "owner-1", "solo/0", "tp3/0", "tp3/1", "tp3/2"}
    windows = [event for event in events if event["ph"] == "X" and event["name"].startswith("refit of version")]
    assert len(windows) == len(report["transitions"]) == 4
    for owner in (nodes["owner-0"], nodes["owner-1"]):
        publishes = [event for event in events if event["pid"] == owner and event["name"] == "publish"]
        assert len(publishes) >= 4 * 15
    assert {event["name"] for event in events if event["pid"] == nodes["tp3/1"] and event["ph"] == "X"} == {
        *("fetch", "verify", "decode", "apply"),
    }
    assert all(
        row["waits"].keys() <= {"construct", "encode", "publish", "fetch", "decode"} for row in report["transitions"]
    )


def test_the_report_file_is_the_documented_schema(run: tuple[Path, dict, str]) -> None:
    import msgspec

    report = msgspec.convert(run[1], DemoReport)
    assert len(report.transitions) == 4


@pytest.mark.servers
def test_the_demo_runs_over_object_storage_that_it_starts(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--model", str(model), "--run-dir", str(tmp_path / "d"), "--transport", "s3", "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = json.loads((tmp_path / "d" / "run" / "job.json").read_text())
    assert job["transport"].startswith("s3://nemo-dcr?endpoint=http://127.0.0.1:")
    assert not list((tmp_path / "d" / "run" / "store").rglob("payload-*"))
    events = [event for path in (tmp_path / "d" / "run" / "traces").glob("*.ndjson") for event in read_trace(path)]
    assert sum(event.action == Action.COMMIT for event in events) == 1
    assert sum(event.action == Action.EMIT_PAYLOAD for event in events) >= 30


@pytest.mark.servers
def test_over_a_relay_tree_a_kill_a_retry_and_a_dense_restore_end_without_a_mismatched_bit(
    model: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(model), "--run-dir", str(tmp_path / "d"), "--transport", "relay", "--steps", "3"]
    done = subprocess.run(
        [*COMMAND, *arguments, "--quiet", "--json", str(tmp_path / "report.json")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["mismatched_bits"] for row in report["transitions"]] == [0, 0, 0]
    assert [len(row["attempts"]) for row in report["transitions"]] == [1, 1, 2]
    assert report["transitions"][2]["restored"] == ["solo/0"]
    job = json.loads((tmp_path / "d" / "run" / "job.json").read_text())
    assert set(job["relay_nodes"].values()) == {"node-0", "node-1"}
    assert not list((tmp_path / "d" / "run" / "store").rglob("payload-*"))
    sent = [row["payload_bytes"] for row in report["transitions"]]
    for node in ("node-0", "node-1"):
        told = (tmp_path / "d" / "transport" / f"{node}.log").read_text().splitlines()[-1]
        taken = sum(each["received"] for each in json.loads(told)["owners"].values())
        assert taken > sum(sent), f"{node} took less than the committed attempts sent"


def test_bad_usage_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--model", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(tmp_path) in done.stderr


def test_an_interrupted_demo_leaves_no_process_behind(model: Path, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--model", str(model), "--run-dir", str(tmp_path / "run"), "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    addresses = tmp_path / "run" / "run" / "addresses"
    deadline = time.monotonic() + 120
    while len(list(addresses.glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [json.loads(path.read_text())["pid"] for path in addresses.glob("*.json")]
    assert pids
    demo.send_signal(signal.SIGKILL)
    demo.wait(30)
    for pid in pids:
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_the_page_of_the_run_shows_the_kill_the_retry_and_every_version(
    run: tuple[Path, dict, str],
) -> None:
    directory, report, _ = run
    story = read_run(directory.parent, last=9)
    kill = next(row["kill"] for row in report["transitions"] if row["kill"])
    told = [
        (each.name, [(a.began.attempt, a.began.mode, a.failed) for a in each.attempts]) for each in story.transitions
    ]
    rows = [
        (f"version {row['version']}", [(a["id"], a["mode"], a["reason"]) for a in row["attempts"]])
        for row in report["transitions"]
    ]
    assert told == rows
    for each, row in zip(story.transitions, report["transitions"], strict=True):
        assert each.committed is not None
        figures = {key: row[key] for key in ("payload_bytes", "payloads", "xor_items", "overwrite_items")}
        assert {key: each.committed.count(key) for key in figures} == figures
        assert set(each.committed.nodes) == {"owner-0", "owner-1", *each.committed.began.receivers}
    assert {name for name, moves in story.gates.items() if moves[-1].version == 4} == set(story.gates)
    assert [attempt.began.mode for attempt in story.recoveries] == ["restore", "restore"]
    words = page(story, "demo").decode()
    assert f"attempt {kill['attempt']} (xor) of version 3" in words
    assert kill["instance"] in words
