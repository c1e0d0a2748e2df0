"""Figures of one refit over the emulated WAN: bounds, crossings, and the demands that fail when they should."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from nemo_dcr.cli.checkpoint_copy import PART_BYTES, parts_of
from nemo_dcr.cli.places import RELAY, STORE
from nemo_dcr.cli.wan import report
from nemo_dcr.cli.wan_row import Crossed, WanRow, construction_bound_s, crossed_between, table, transport_bound_s
from nemo_dcr.runtime.timeline import RefitTimeline
from nemo_dcr.runtime.timings import Span, Timings
from nemo_dcr.testing.delay_line import Crossing

CONTROL_PORT, PORT, ELSEWHERE = 7400, 7500, 8333
GOOD = WanRow(
    transport=RELAY,
    case="3% injected",
    number=4,
    warm_up=False,
    rate_mbit=20.0,
    rtt_ms=40.0,
    nodes=4,
    change_rate=0.03,
    payloads=40,
    least_payloads=18,
    v_payload=1_000_000,
    crossed=Crossed(payload=1_010_000, beside=5_000, interface=1_100_000, control=9_000, other=0),
    latency_s=5.0,
    check_s=0.1,
    construction_s=2.0,
    transport_s=4.0,
    finalization_s=0.4,
    reference_s=100.0,
)


def timings(node: str, *spans: tuple[str, float, float], **marks: float) -> Timings:
    return Timings(node, dict(marks), {}, {}, spans=tuple(Span(*span) for span in spans))


def test_a_good_refit_meets_every_demand_and_has_a_remainder_and_a_speedup() -> None:
    assert GOOD.unmet() == []
    assert round(GOOD.remainder_s, 6) == 0.6
    assert GOOD.speedup == 20.0
    assert report([GOOD], [])["ok"] is True
    assert table([GOOD]).count("\n") == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"crossed": replace(GOOD.crossed, payload=1_020_001)}, "exceed 1.02"),
        ({"crossed": replace(GOOD.crossed, payload=999_999)}, "did not all cross"),
        ({"crossed": replace(GOOD.crossed, other=40)}, "nobody may use"),
        ({"construction_s": 5.1}, "below the construction bound"),
        ({"latency_s": 3.9}, "below the transport bound"),
        ({"latency_s": 5.3}, "exceeds 1.3 x"),
    ],
)
def test_each_demand_fails_by_itself(change: dict, told: str) -> None:
    unmet = replace(GOOD, **change).unmet()
    assert len(unmet) == 1
    assert told in unmet[0]


def test_the_latency_factor_is_demanded_from_three_seconds_of_transport_on() -> None:
    short = replace(GOOD, transport_s=2.9, construction_s=1.0, latency_s=4.5)
    assert short.unmet() == []
    assert replace(short, transport_s=3.0).unmet() != []


def test_object_storage_may_cross_once_up_and_once_down_to_every_node() -> None:
    stored = replace(GOOD, transport=STORE, payloads=15, crossed=replace(GOOD.crossed, payload=5_050_000))
    assert stored.unmet() == []
    assert replace(stored, crossed=replace(GOOD.crossed, payload=5_100_001)).unmet() != []
    assert replace(stored, crossed=replace(GOOD.crossed, payload=4_999_999)).unmet() != []


def test_headers_of_small_stored_objects_count_as_any_other_bytes() -> None:
    small = replace(GOOD, transport=STORE, payloads=50, v_payload=1_000_000, least_payloads=25)
    assert replace(small, crossed=replace(GOOD.crossed, payload=5_100_000)).unmet() == []
    (why,) = replace(small, crossed=replace(GOOD.crossed, payload=5_246_000)).unmet()
    assert "exceed" in why


def test_crossings_are_differences_by_port_and_direction() -> None:
    before = [
        Crossing("training", "rollout", PORT, 1, 100, 100, 150),
        Crossing("training", "rollout", CONTROL_PORT, 1, 5, 5, 9),
    ]
    after = [
        Crossing("training", "rollout", PORT, 9, 1_100, 1_100, 1_650),
        Crossing("rollout", "training", PORT, 9, 30, 30, 530),
        Crossing("training", "rollout", CONTROL_PORT, 2, 25, 25, 79),
        Crossing("rollout", "training", CONTROL_PORT, 2, 7, 7, 47),
        Crossing("training", "store", ELSEWHERE, 1, 10, 3, 50),
        Crossing("store", "rollout", ELSEWHERE, 1, 5, 5, 45),
        Crossing("rollout", "store", 0, 1, 0, 0, 60),
    ]
    found = crossed_between(before, after, transport=RELAY, control_port=CONTROL_PORT, port=PORT)
    everything = 1_500 + 530 + 70 + 47 + 50 + 45 + 60
    assert found == Crossed(payload=1_000, beside=30, interface=everything, control=27, other=60)
    stored = crossed_between(before, after, transport=STORE, control_port=CONTROL_PORT, port=ELSEWHERE)
    assert (stored.payload, stored.beside) == (8, 7)


def test_bounds_cover_overlaps_once_and_only_inside_the_window() -> None:
    owner = timings(
        "owner-0",
        ("construct", 9.0, 11.0),  # begins before t0 = 10
        ("encode", 10.5, 12.0),
        ("publish", 11.0, 13.0),
        ("publish", 12.0, 14.0),
        construct_began=10.0,
        baseline_updated=16.0,
    )
    node = timings("r1/0", ("fetch", 11.0, 15.5), ("fetch", 15.0, 20.0), apply_ended=15.0)
    refit = RefitTimeline("x", (owner,), (node,))
    assert construction_bound_s(refit) == 2.0
    assert transport_bound_s(refit, RELAY) == 3.0
    assert transport_bound_s(refit, STORE) == 5.0
    assert refit.finalization_s == 1.0


def test_parts_of_the_reference_cover_the_range_once() -> None:
    parts = parts_of(5, 5 + 2 * PART_BYTES + 7)
    assert parts[0] == (5, 5 + PART_BYTES)
    assert parts[-1][1] == 5 + 2 * PART_BYTES + 7
    assert all(left[1] == right[0] for left, right in pairwise(parts))
