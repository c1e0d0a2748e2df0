"""Figures of one refit over the emulated WAN: bounds, crossings, and the demands that fail when they should."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from nemo_dcr.cli.checkpoint_copy import PART_BYTES, parts_of
from nemo_dcr.cli.places import RELAY, STORE
from nemo_dcr.cli.wan import FULL, SHORT, Outcome, Plan, plan_of, report
from nemo_dcr.cli.wan_row import (
    Crossed,
    WanRow,
    construction_bound_s,
    crossed_between,
    latency_unmet,
    middle,
    table,
    transport_bound_s,
    typical,
)
from nemo_dcr.cli.wan_run import Restored
from nemo_dcr.errors import InvalidConfig
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
    crossed=Crossed(payload=1_010_000, heads=0, beside=5_000, interface=1_100_000, control=9_000, other=0),
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
    assert GOOD.link_use == 0.1  # 8 Mbit take 0.4 s
    assert latency_unmet(GOOD) == []
    assert report(Outcome(rows=[GOOD], means=[GOOD]))["ok"] is True
    assert report(Outcome(rows=[GOOD], unmet=["a demand"]))["ok"] is False
    assert table([GOOD]).count("\n") == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"crossed": replace(GOOD.crossed, payload=1_020_001)}, "exceed 1.02"),
        ({"crossed": replace(GOOD.crossed, payload=999_999)}, "did not all cross"),
        ({"crossed": replace(GOOD.crossed, other=40)}, "nobody may use"),
        ({"construction_s": 5.1}, "below the construction bound"),
        ({"latency_s": 3.9}, "below the transport bound"),
        ({"crossed": replace(GOOD.crossed, heads=1024 * 40 + 1)}, "HTTP heads"),
    ],
)
def test_each_demand_fails_by_itself(change: dict, told: str) -> None:
    unmet = replace(GOOD, **change).unmet()
    assert len(unmet) == 1
    assert told in unmet[0]


def test_the_latency_factor_is_demanded_from_three_seconds_of_transport_on() -> None:
    short = replace(GOOD, transport_s=2.9, construction_s=1.0, latency_s=4.5)
    assert latency_unmet(short) == []
    (told,) = latency_unmet(replace(short, transport_s=3.0))
    assert "exceeds 1.3 x transport bound 3.000 s" in told


def test_the_latency_factor_is_demanded_of_the_mean_and_of_the_median_but_not_of_each_refit() -> None:
    rows = [replace(GOOD, number=number, latency_s=latency) for number, latency in enumerate((4.25, 6.0, 4.75))]
    assert [row.meets_latency for row in rows] == [True, False, True]
    assert rows[1].unmet() == []
    assert typical(rows).latency_s == 5.0
    assert latency_unmet(typical(rows)) == []
    assert middle(rows) == rows[2]
    slow = [replace(row, latency_s=row.latency_s + 1.0) for row in rows]
    assert latency_unmet(middle(slow)) != []
    assert latency_unmet(typical(slow)) != []


def test_a_run_that_tells_the_latency_factor_fails_for_everything_else() -> None:
    slow = replace(GOOD, latency_s=6.0)
    demanding, telling = Outcome(), Outcome(tells_latency=True)
    for outcome in (demanding, telling):
        outcome.judge_latency(slow)
        assert outcome.means == [slow]
    assert (len(demanding.unmet), demanding.told) == (1, [])
    assert (telling.unmet, telling.told) == ([], demanding.unmet)
    assert report(telling)["told"] == demanding.unmet
    telling.unmet += replace(GOOD, latency_s=3.9).unmet()
    assert report(telling)["ok"] is False


def test_a_mean_takes_every_figure_of_every_refit() -> None:
    other = replace(GOOD, number=5, transport_s=2.0, v_payload=3_000_000, change_rate=0.05, payloads=44)
    mean = typical([GOOD, replace(other, crossed=replace(GOOD.crossed, payload=3_010_000, heads=2))])
    assert (mean.number, mean.transport_s, mean.v_payload, mean.payloads) == (5, 3.0, 2_000_000, 42)
    assert (mean.crossed.payload, mean.crossed.heads, mean.crossed.beside) == (2_010_000, 1, 5_000)
    with pytest.raises(ValueError, match="at least one"):
        typical([])


def test_a_restore_crosses_once_over_the_relay_tree_and_up_and_down_over_the_store() -> None:
    over = Restored(transport=RELAY, receiver="r4/0", v_payload=1_000, crossed=1_010, other=0, seconds=2.0)
    assert over.unmet() == []
    assert replace(over, crossed=1_021).unmet() != []
    assert replace(over, crossed=999).unmet() != []
    assert replace(over, other=1).unmet() != []
    assert replace(over, transport=STORE, crossed=2_040).unmet() == []
    assert replace(over, transport=STORE, crossed=2_041).unmet() != []


def test_options_choose_what_is_run_and_unknown_ones_are_refused() -> None:
    def plan(**more: Any) -> Plan:
        chosen = {"full": False, "transports": [], "cases": [], "restores": False, "reference_share": None, **more}
        return plan_of(**chosen)

    assert plan() == SHORT
    assert plan(full=True) == FULL
    some = plan(full=True, transports=["store"], cases=["3%", "step"], reference_share=8)
    assert (some.transports, [case.name for case in some.cases]) == (("store",), ["optimizer step", "3% injected"])
    assert (some.warm_ups, some.timed, some.reference_share) == (5, 10, 8)
    assert plan(cases=["none"], restores=True).cases == ()
    with pytest.raises(InvalidConfig, match=r"wan\.transport.*pigeon"):
        plan(transports=["pigeon"])
    with pytest.raises(InvalidConfig, match=r"wan\.case.*7%"):
        plan(cases=["7%"])


def test_object_storage_may_cross_once_up_and_once_down_to_every_node() -> None:
    stored = replace(GOOD, transport=STORE, payloads=15, crossed=replace(GOOD.crossed, payload=5_050_000))
    assert stored.unmet() == []
    assert replace(stored, crossed=replace(GOOD.crossed, payload=5_100_001)).unmet() != []
    assert replace(stored, crossed=replace(GOOD.crossed, payload=4_999_999)).unmet() != []


def test_heads_of_stored_objects_have_a_demand_of_their_own() -> None:
    small = replace(GOOD, transport=STORE, payloads=50, v_payload=1_000_000, least_payloads=25)
    crossed = replace(GOOD.crossed, payload=5_100_000, heads=1024 * 5 * 50)
    assert replace(small, crossed=crossed).unmet() == []
    (why,) = replace(small, crossed=replace(crossed, heads=crossed.heads + 1)).unmet()
    assert "HTTP heads exceed 1024" in why


def test_crossings_are_differences_by_port_and_direction() -> None:
    before = [
        Crossing("training", "rollout", PORT, 1, 100, 100, 0, 150),
        Crossing("training", "rollout", CONTROL_PORT, 1, 5, 5, 0, 9),
    ]
    after = [
        Crossing("training", "rollout", PORT, 9, 1_100, 1_100, 0, 1_650),
        Crossing("rollout", "training", PORT, 9, 30, 30, 0, 530),
        Crossing("training", "rollout", CONTROL_PORT, 2, 25, 25, 0, 79),
        Crossing("rollout", "training", CONTROL_PORT, 2, 7, 7, 0, 47),
        Crossing("training", "store", ELSEWHERE, 1, 10, 3, 2, 50),
        Crossing("store", "rollout", ELSEWHERE, 1, 5, 5, 0, 45),
        Crossing("rollout", "store", 0, 1, 0, 0, 0, 60),
    ]
    found = crossed_between(before, after, transport=RELAY, control_port=CONTROL_PORT, port=PORT)
    everything = 1_500 + 530 + 70 + 47 + 50 + 45 + 60
    assert found == Crossed(payload=1_000, heads=0, beside=30, interface=everything, control=27, other=60)
    stored = crossed_between(before, after, transport=STORE, control_port=CONTROL_PORT, port=ELSEWHERE)
    assert (stored.payload, stored.heads, stored.beside) == (8, 2, 5)


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
    node = timings("r1/0", ("download", 11.0, 15.5), ("download", 15.0, 20.0), apply_ended=15.0)
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
