"""Chronicles: every node tells its part once, files outlive kills and full disks, and a transition is one line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import AttemptId, Incarnation, InstanceId, Version
from nemo_dcr.runtime.chronicle import (
    AttemptBegan,
    AttemptOver,
    CandidateGivenUp,
    Chronicle,
    CommitResolved,
    GateMoved,
    LifeBegan,
    Measured,
    TookOver,
    TransitionOver,
    VersionDurable,
    read_life,
    tell_all,
)
from nemo_dcr.runtime.timings import StageClock
from nemo_dcr.testing.local_cluster import LocalCluster
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Slice

STORY = (TookOver, AttemptBegan, AttemptOver, CommitResolved, VersionDurable, TransitionOver, CandidateGivenUp)


@pytest.fixture
def cluster() -> LocalCluster:
    """Two instances and an owner, serving version 0."""
    tensors = (TensorMeta("a", (8, 3), "BF16"), TensorMeta("b", (5,), "F32"))
    made = LocalCluster(LocalSource(tensors, seed=1), {"a": Slice(0), "b": Slice(0)}, {"e0": 1, "e1": 1})
    made.run(lambda: made.serving_all)
    return made


def test_a_transition_is_told_from_its_first_attempt_to_its_end(cluster: LocalCluster) -> None:
    cluster.chronicle.clear()
    candidate = cluster.transition()
    told = [entry for entry in cluster.chronicle if isinstance(entry, STORY)]
    assert [type(entry) for entry in told] == [
        AttemptBegan,
        AttemptOver,
        CommitResolved,
        VersionDurable,
        TransitionOver,
    ]
    began, over, resolved, durable, ended = told
    assert (began.mode, began.base, began.candidate, began.receivers, began.owners) == (
        *("xor", 0, candidate),
        *(("e0/0", "e1/0"), 1),
    )
    assert (over.attempt, over.reason) == (began.attempt, "")
    assert resolved.outcome == "committed"
    assert (durable.version, durable.attempt, durable.receivers) == (1, began.attempt, ("e0/0", "e1/0"))
    assert (ended.version, ended.candidate) == (1, candidate)
    moves = [entry for entry in cluster.chronicle if isinstance(entry, GateMoved)]
    assert [(move.is_open, move.version) for move in moves] == [(False, None)] * 2 + [(True, Version(1))] * 2
    measured = [entry for entry in cluster.chronicle if isinstance(entry, Measured) and entry.attempt == began.attempt]
    assert {entry.timings.node for entry in measured} == {"owner-0", "e0/0", "e1/0"}
    owners = [entry.timings for entry in measured if entry.timings.node == "owner-0"]
    assert [{span.stage for span in timings.spans} for timings in owners] == [
        {"construct", "encode", "publish"},
        {"baseline"},
    ]
    assert owners[-1].counts["payload_bytes"] > 0
    assert "baseline_updated" in owners[-1].marks


def test_a_failed_attempt_is_told_with_its_reason_and_so_is_the_line_of_the_log(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.chronicle.clear()
    cluster.at("ApplyItem", lambda: cluster.crash_instance(InstanceId("e1")), node="e1")
    with caplog.at_level(logging.INFO, logger="nemo_dcr"):
        cluster.train()
        cluster.run(lambda: any(isinstance(entry, TransitionOver) for entry in cluster.chronicle))
    overs = [entry for entry in cluster.chronicle if isinstance(entry, AttemptOver)]
    assert [bool(entry.reason) for entry in overs][:2] == [True, False]
    assert "e1/0" in overs[0].reason
    lines = [record for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 1
    assert lines[0].nemo_dcr_version == 1
    assert lines[0].nemo_dcr_attempts == 2
    assert lines[0].nemo_dcr_failures == [overs[0].reason]
    assert lines[0].nemo_dcr_seconds > 0
    assert "on 1 receivers, 2 attempts seen here" in lines[0].message
    assert lines[0].message.endswith(f"failed: {overs[0].reason}")


def test_a_coordinator_that_took_over_tells_its_epoch_and_a_commit_that_lost(cluster: LocalCluster) -> None:
    cluster.chronicle.clear()
    cluster.at("SendCommit", cluster.take_over)
    cluster.train()
    cluster.run(lambda: cluster.record is not None and cluster.record.version == 1 and cluster.serving_all)
    assert [entry.epoch for entry in cluster.chronicle if isinstance(entry, TookOver)] == [2]
    assert next(entry.outcome for entry in cluster.chronicle if isinstance(entry, CommitResolved)) != "committed"


def test_intervals_are_told_once_and_sums_every_time() -> None:
    clock, attempt = StageClock("owner-0"), AttemptId(1)
    with clock.stage(attempt, "encode", "0"):
        pass
    first = clock.news(attempt)
    with clock.stage(attempt, "publish", "0"):
        pass
    second = clock.news(attempt)
    assert [[span.stage for span in news.spans] for news in (first, second)] == [["encode"], ["publish"]]
    assert set(second.seconds) == {"encode", "publish"}
    assert clock.news(attempt).spans == ()


def test_a_file_gives_back_what_was_told_without_a_torn_line(tmp_path: Path) -> None:
    chronicle = Chronicle(tmp_path, "e0/0", Incarnation(7))
    gate = GateMoved(at=1.5, attempt=AttemptId(2), is_open=True, tag="clean(3)", version=Version(3))
    both: list[object] = []
    tell_all(chronicle.tell, both.append)(gate)
    chronicle.close()
    chronicle.tell(gate)  # a file that ended says nothing any more
    path = tmp_path / "e0-0-7.ndjson"
    path.write_bytes(path.read_bytes() + b'{"what":"Gate')
    began, told = read_life(path)
    assert isinstance(began, LifeBegan)
    assert (began.node, began.incarnation) == ("e0/0", 7)
    assert [told, *both] == [gate, gate]


def test_a_damaged_line_is_named_and_an_unknown_entry_too(tmp_path: Path) -> None:
    path = tmp_path / "e0-0-7.ndjson"
    for line in (b"no JSON\n", b'{"what":"Nonsense","at":1.0}\n', b'{"what":"TookOver","at":1.0}\n'):
        path.write_bytes(line)
        with pytest.raises(OperatorNeeded, match="line 1 is damaged"):
            list(read_life(path))


def test_a_full_disk_ends_the_chronicle_and_not_its_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "owner-0-1.ndjson").symlink_to("/dev/full")
    chronicle = Chronicle(tmp_path, "owner-0", Incarnation(1))
    chronicle.tell(TookOver(at=1.0, epoch=1))
    assert [each.message.count("no further entries of the chronicle") for each in caplog.records] == [1]
