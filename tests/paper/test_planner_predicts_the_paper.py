"""The planner, calibrated on the paper's 120B refits, predicts the others within a fifth, or it is said why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from nemo_dcr.planner.calibration import Calibration, read_calibration
from nemo_dcr.planner.coding import Coding
from nemo_dcr.planner.models import NAMED
from nemo_dcr.planner.plan import Delivery, Deployment, Plan, make_plan

WITHIN = 0.20
PAPER = read_calibration("paper")
RELAY, S3 = Delivery.relay, Delivery.s3
SIZES = ("30B", "120B", "550B", "1T")
RATES = (0.03, 0.05)


def planned(size: str, change: float, delivery: Delivery, rates: Calibration = PAPER) -> Plan:
    deployment = Deployment(model=NAMED[size], change=change, delivery=delivery, coding=Coding.paper)
    return make_plan(deployment, rates, crossover=False)


PLANS = {key: planned(*key) for key in itertools.product(SIZES, RATES, Delivery)}
RELAY_PLANS = [plan for key, plan in PLANS.items() if key[2] is RELAY]


def rest_s(plan: Plan) -> float:
    """What the latency has above the larger bound and finalization."""
    return plan.latency_s - max(plan.construction_s, plan.transport_s) - plan.finalization_s


def store_over_relay(size: str) -> float:
    return PLANS[size, 0.05, S3].latency_s / PLANS[size, 0.05, RELAY].latency_s


def of_checkpoint(change: float) -> float:
    return PLANS["120B", change, RELAY].v_payload / NAMED["120B"].nbytes


PREDICTED: dict[str, tuple[Callable[[], float], float]] = {
    "30B, the fastest refit, s": (lambda: PLANS["30B", 0.03, RELAY].latency_s, 8.3),
    "30B, the slowest refit, s": (lambda: PLANS["30B", 0.05, S3].latency_s, 14.5),
    "1T, the fastest refit, s": (lambda: PLANS["1T", 0.03, RELAY].latency_s, 150.0),
    "the largest speed-up": (lambda: max(plan.speedup for plan in PLANS.values()), 40.0),
    "the smallest speed-up": (lambda: min(plan.speedup for plan in PLANS.values()), 12.0),
    "120B, the largest speed-up": (lambda: PLANS["120B", 0.03, RELAY].speedup, 33.2),
    "120B, the smallest speed-up": (lambda: PLANS["120B", 0.05, S3].speedup, 15.1),
    "1T, store over relay at 5%": (lambda: store_over_relay("1T"), 1.36),
    "payloads at 3% over the checkpoint": (lambda: of_checkpoint(0.03), 0.024),
    "payloads at 5% over the checkpoint": (lambda: of_checkpoint(0.05), 0.038),
    "payloads at 3% over changed values": (lambda: of_checkpoint(0.03) / 0.03, 1 - 0.21),
    "payloads at 5% over changed values": (lambda: of_checkpoint(0.05) / 0.05, 1 - 0.24),
    "the smallest share of the transport bound": (
        lambda: min(plan.transport_s / plan.latency_s for plan in RELAY_PLANS),
        0.77,
    ),
    "the largest share of the transport bound": (
        lambda: max(plan.transport_s / plan.latency_s for plan in RELAY_PLANS),
        0.94,
    ),
    "the smallest share of the construction bound": (
        lambda: min(plan.construction_s / plan.latency_s for plan in RELAY_PLANS),
        0.18,
    ),
    "the largest share of the construction bound": (
        lambda: max(plan.construction_s / plan.latency_s for plan in RELAY_PLANS),
        0.45,
    ),
    "the shortest finalization, s": (lambda: min(plan.finalization_s for plan in RELAY_PLANS), 0.2),
    "the longest finalization, s": (lambda: max(plan.finalization_s for plan in RELAY_PLANS), 1.7),
    "the least above bound and finalization, s": (lambda: min(map(rest_s, RELAY_PLANS)), 1.8),
    "the most above bound and finalization, s": (lambda: max(map(rest_s, RELAY_PLANS)), 9.2),
    "120B, payloads": (lambda: PLANS["120B", 0.03, RELAY].payloads, 482),
}

# The text's own figures do not lie on one line: by its speed-ups the plain transfer of a checkpoint ran at 2.97 Gbit/s
# a node for 120B (22.6 s x 33.2) and at 3.84 Gbit/s for 1T (87.5 minutes), and the slowest 120B refit (49.7 s) moved
# its payloads through the store at 1.7 Gbit/s a node, the slowest at 1T (300 s) at 2.3. A calibration on 120B alone
# cannot know that the later runs had the faster network; ratios, which cancel it, are above.
UNMATCHED: dict[str, tuple[Callable[[], float], float]] = {
    "1T, the full checkpoint, minutes": (lambda: PLANS["1T", 0.03, RELAY].reference_s / 60, 87.5),
    "1T, the slowest refit, s": (lambda: PLANS["1T", 0.05, S3].latency_s, 300.0),
    "30B, store over relay at 5%": (lambda: store_over_relay("30B"), 1.13),
}


@pytest.mark.parametrize("claim", PREDICTED)
def test_a_figure_of_the_text_is_predicted_within_a_fifth(claim: str) -> None:
    predicted, text = PREDICTED[claim]
    assert abs(predicted() / text - 1) <= WITHIN, f"{predicted():.3f} against {text}"


@pytest.mark.parametrize("claim", UNMATCHED)
def test_a_figure_that_one_calibration_cannot_match_is_off_by_the_difference_of_the_networks(claim: str) -> None:
    predicted, text = UNMATCHED[claim]
    assert WITHIN < predicted() / text - 1 < 0.45, f"{predicted():.3f} against {text}: name it in PREDICTED"


def test_at_5_percent_the_relay_tree_beats_the_store_at_every_size() -> None:
    assert all(store_over_relay(size) > 1 for size in SIZES)


def near(found: float, wanted: float, share: float = 1e-9) -> bool:
    """Seconds and bytes of a prediction, not bits of a weight."""
    return abs(found - wanted) <= share * abs(wanted)


def fitted(field: str, key: tuple[str, float, Delivery], target: float, figure: Callable[[Plan], float]) -> float:
    """The rate with which a figure of one refit comes out, by bisection; the figure falls with the rate."""
    low, high = 0.05, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        slow = figure(planned(*key, replace(PAPER, **{field: middle}))) > target
        low, high = (middle, high) if slow else (low, middle)
    return low


def latency(plan: Plan) -> float:
    return plan.latency_s


def test_the_shares_of_the_links_follow_from_the_120b_refits_alone() -> None:
    assert near(fitted("relay_share", ("120B", 0.03, RELAY), 22.6, latency), PAPER.relay_share, 0.01)
    assert near(fitted("store_share", ("120B", 0.05, S3), 49.7, latency), PAPER.store_share, 0.01)
    reference = fitted("reference_share", ("120B", 0.03, RELAY), 22.6 * 33.2, lambda plan: plan.reference_s)
    assert near(reference, PAPER.reference_share, 0.01)
