"""Metrics: what a real cluster tells adds up, names are the documented ones, and the dashboard asks for no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.ids import AttemptId, CandidateId, Epoch, InstanceId, Version
from nemo_dcr.runtime.chronicle import (
    AttemptBegan,
    AttemptOver,
    CandidateGivenUp,
    CommitResolved,
    GateMoved,
    Measured,
    TookOver,
    TransitionOver,
)
from nemo_dcr.runtime.metrics import BUCKETS_S, METRICS, Histogram, MetricKind, RunMetrics
from nemo_dcr.runtime.timings import Timings
from nemo_dcr.testing.local_cluster import LocalCluster
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Slice

DOCS = Path(__file__).parents[3] / "docs"
UNITS = (
    "seconds",
    "bytes",
    "payloads",
    "items",
    "elements",
    "ratio",
    "attempts",
    "conflicts",
    "candidates",
    "takeovers",
)
UNITS = (*UNITS, "version", "receivers", "depth", "open")
NAME = re.compile(r"nemo_dcr_\w+")


def values(metrics: RunMetrics) -> dict[str, Any]:
    return {metric.name: found for metric, found in metrics.samples()}


def began(attempt: int, candidate: str, at: float, mode: str = "xor") -> AttemptBegan:
    return AttemptBegan(
        at=at,
        attempt=AttemptId(attempt),
        mode=mode,
        gate="sync",
        base=Version(0),
        candidate=CandidateId(candidate),
        receivers=("e0/0",),
        owners=1,
    )


def measured(attempt: int, node: str, seconds: dict[str, float], counts: dict[str, int]) -> Measured:
    timings = Timings(node, {}, seconds, counts, {}, {"encode": 0.5})
    return Measured(at=9.0, attempt=AttemptId(attempt), timings=timings)


def test_what_the_nodes_of_a_cluster_told_is_what_the_metrics_say() -> None:
    tensors = (TensorMeta("a", (8, 3), "BF16"), TensorMeta("b", (5,), "F32"))
    cluster = LocalCluster(LocalSource(tensors, seed=1), {"a": Slice(0), "b": Slice(0)}, {"e0": 1, "e1": 1})
    cluster.run(lambda: cluster.serving_all)
    cluster.transition()
    cluster.at("ApplyItem", lambda: cluster.crash_instance(InstanceId("e1")), node="e1")
    cluster.train()
    cluster.run(lambda: len([entry for entry in cluster.chronicle if isinstance(entry, TransitionOver)]) == 2)
    metrics = RunMetrics()
    for entry in cluster.chronicle:
        metrics.tell(entry)
    found = values(metrics)
    assert found["nemo_dcr_committed_version"] == {(): 2.0}
    assert found["nemo_dcr_required_receivers"] == {(): 1.0}
    attempts = found["nemo_dcr_attempts_total"]
    assert (attempts["xor", "acknowledged"], attempts["xor", "failed"], attempts["overwrite", "acknowledged"]) == (
        1,
        1,
        1,
    )
    assert found["nemo_dcr_failed_attempts_total"] == {("receiver_lost",): 1.0}
    assert found["nemo_dcr_transition_seconds"].counts != [0] * len(found["nemo_dcr_transition_seconds"].counts)
    assert sum(found["nemo_dcr_transition_seconds"].counts) == 2
    last: dict[tuple[int, str], Timings] = {}
    for entry in cluster.chronicle:
        if isinstance(entry, Measured):
            last[entry.attempt, entry.timings.node] = entry.timings
    for count, name in (
        ("payloads", "nemo_dcr_payloads_total"),
        ("source_elements", "nemo_dcr_compared_elements_total"),
    ):
        whole = sum(timings.counts.get(count, 0) for (_, node), timings in last.items() if node == "owner-0")
        assert found[name]["owner-0",] == whole > 0
    sent = sum(timings.counts.get("payload_bytes", 0) for (_, node), timings in last.items() if node == "e0/0")
    assert found["nemo_dcr_payload_bytes_total"]["e0/0", "received"] == sent > 0


def test_sums_that_are_told_again_add_only_what_is_new_in_them() -> None:
    metrics = RunMetrics()
    metrics.tell(measured(1, "owner-0", {"publish": 2.0}, {"payload_bytes": 10, "source_elements": 4}))
    metrics.tell(measured(1, "owner-0", {"publish": 2.5}, {"payload_bytes": 10, "source_elements": 4, "xor_items": 3}))
    metrics.tell(
        measured(2, "owner-0", {"publish": 1.0}, {"payload_bytes": 7, "source_elements": 4, "changed_elements": 1})
    )
    found = values(metrics)
    assert found["nemo_dcr_stage_seconds_total"] == {("owner-0", "publish"): 3.5}
    assert found["nemo_dcr_wait_seconds_total"] == {("owner-0", "encode"): 1.0}
    assert found["nemo_dcr_payload_bytes_total"] == {("owner-0", "published"): 17}
    assert found["nemo_dcr_items_total"] == {("owner-0", "xor"): 3}
    assert found["nemo_dcr_change_ratio"] == {("owner-0",): 0.25}


def test_a_closed_gate_counts_while_it_is_closed_and_stops_when_it_opens() -> None:
    clock = [100.0]
    metrics = RunMetrics(now=lambda: clock[0])
    tell = metrics.teller("e0/0")

    def gate(at: float, is_open: bool) -> None:
        version = Version(3) if is_open else None
        tell(GateMoved(at=at, attempt=AttemptId(1), is_open=is_open, tag="clean(3)", version=version))

    gate(100.0, True)
    gate(110.0, False)
    clock[0] = 112.5
    assert values(metrics)["nemo_dcr_gate_closed_seconds_total"] == {("e0/0",): 2.5}
    assert values(metrics)["nemo_dcr_gate_open"] == {("e0/0",): 0.0}
    gate(114.0, True)
    clock[0] = 200.0
    assert values(metrics)["nemo_dcr_gate_closed_seconds_total"] == {("e0/0",): 4.0}
    assert values(metrics)["nemo_dcr_served_version"] == {("e0/0",): 3.0}


def test_a_transition_is_timed_from_its_first_attempt_and_falls_into_its_bucket() -> None:
    metrics = RunMetrics()
    metrics.tell(began(1, "c1", 10.0))
    metrics.tell(began(2, "c1", 12.0, "overwrite"))
    metrics.tell(began(3, "c0", 12.5, "restore"))
    metrics.tell(TransitionOver(at=13.0, version=Version(1), candidate=CandidateId("c1")))
    metrics.tell(TransitionOver(at=99.0, version=Version(2), candidate=CandidateId("never told")))
    histogram = values(metrics)["nemo_dcr_transition_seconds"]
    assert histogram == Histogram([int(bound == 5.0) for bound in (*BUCKETS_S, 0.0)], 3.0)


def test_conflicts_takeovers_and_given_up_candidates_are_counted() -> None:
    metrics = RunMetrics()
    metrics.tell(CommitResolved(at=1.0, attempt=AttemptId(1), outcome="committed"))
    assert values(metrics)["nemo_dcr_commit_conflicts_total"] == {(): 0.0}
    metrics.tell(CommitResolved(at=1.0, attempt=AttemptId(2), outcome="stale epoch: 1"))
    metrics.tell(TookOver(at=1.0, epoch=Epoch(4)))
    metrics.tell(CandidateGivenUp(at=1.0, candidate=CandidateId("c"), reason="r"))
    metrics.tell(AttemptOver(at=1.0, attempt=AttemptId(9), reason="deadline passed"))
    found = values(metrics)
    assert found["nemo_dcr_commit_conflicts_total"] == {(): 1.0}
    assert found["nemo_dcr_takeovers_total"] == found["nemo_dcr_given_up_candidates_total"] == {(): 1.0}
    assert found["nemo_dcr_attempts_total"] == {("unknown", "failed"): 1.0}


def test_queues_are_asked_when_somebody_reads_and_a_long_run_keeps_little() -> None:
    metrics, depths = RunMetrics(), {"staged": 2, "decoded": 0}
    metrics.watch("e0/0", lambda: depths)
    assert values(metrics)["nemo_dcr_queue_depth"] == {("e0/0", "staged"): 2.0, ("e0/0", "decoded"): 0.0}
    for attempt in range(1, 200):
        metrics.tell(began(attempt, f"c{attempt}", float(attempt)))
        metrics.tell(measured(attempt, "owner-0", {"publish": 1.0}, {}))
    assert len(metrics._sums) <= 20
    assert len(metrics._modes) <= 20
    assert values(metrics)["nemo_dcr_stage_seconds_total"] == {("owner-0", "publish"): 199.0}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_name_says_its_unit_and_the_page_lists_it_with_its_labels(metric: Any) -> None:
    assert re.fullmatch(rf"nemo_dcr_([a-z]+_)*({'|'.join(UNITS)})(_total)?", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    rows = [
        line for line in (DOCS / "metrics.md").read_text(encoding="utf-8").splitlines() if f"`{metric.name}` |" in line
    ]
    assert len(rows) == 1
    assert re.findall(r"`(\w+)`", rows[0].split("|")[2]) == list(metric.labels)
    assert f"{metric.kind.value}: {metric.about}" in rows[0]


def test_the_page_lists_no_other_metric() -> None:
    assert set(NAME.findall((DOCS / "metrics.md").read_text(encoding="utf-8"))) == set(METRICS)


def test_the_dashboard_asks_for_every_metric_and_for_labels_that_it_has() -> None:
    board = json.loads((DOCS / "dashboards" / "refits.json").read_text(encoding="utf-8"))
    shown = set()
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            names = {re.sub("_(bucket|sum|count)$", "", name) for name in NAME.findall(target["expr"])}
            assert names
            assert names <= set(METRICS), target["expr"]
            shown |= names
            grouped = re.findall(r"by \(([\w, ]+)\)", target["expr"])
            labels = {label for group in grouped for label in group.split(", ")}
            labels |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert labels - {"le"} <= {label for name in names for label in METRICS[name].labels}
    assert shown == set(METRICS)
    identities = [panel["id"] for panel in board["panels"]]
    assert len(set(identities)) == len(identities)
