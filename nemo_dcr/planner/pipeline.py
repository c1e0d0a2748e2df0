"""A refit as a discrete-event model: owners build payloads, links carry them, receivers apply them.

Each owner builds its buckets one after the other and sends each payload as soon as it is built; at most `WINDOW` of its
payloads are on the way, and a payload counts as submitted when its turn comes. Owners of a node share its uplink. Over
the relay tree all payloads then go through the root's downlink; over object storage every rollout node downloads all of
them through its own. A receiver applies payloads in the order of arrival. A link serves payloads one at a time in order
of arrival, which gives the same ends as fair sharing does for equal payloads.
Not handled: retries, retransmission, links between rollout nodes (they forward while payloads arrive).

Paper: Section 7 (Figure 8); Section 8.7 (lower bounds, finalization)
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

WINDOW = 4
"""Payloads of one owner that are on the way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one refit has to do."""

    owners: int
    training_nodes: int
    owner_bytes: float
    """Checkpoint bytes of one owner."""
    bucket_bytes: float
    payload_bytes: float
    """Of all owners."""
    construct_bytes_s: float
    construct_fixed_s: float
    uplink_bytes_s: float
    """Of one training node."""
    downlink_bytes_s: float
    """Of the root, or of each rollout node."""
    store: bool
    """Payloads are uploaded whole before they are downloaded."""
    round_trip_s: float
    apply_bytes_s: float


@dataclass(frozen=True, slots=True)
class Course:
    """When things ended, in seconds from t0."""

    constructed_s: float
    """Compute of the busiest owner: the construction lower bound."""
    transport_s: float
    """What the intervals of the busiest sender cover: the transport lower bound."""
    applied_s: float
    payloads: int


def run(load: Load) -> Course:
    """The course of one refit."""
    count = max(1, math.ceil(load.owner_bytes / load.bucket_bytes))
    nbytes = load.payload_bytes / load.owners / count
    build_s = load.owner_bytes / count / load.construct_bytes_s
    uplinks = [0.0] * load.training_nodes
    downlink = applied = 0.0
    acknowledged: list[list[float]] = [[] for _ in range(load.owners)]
    intervals: list[list[tuple[float, float]]] = [[] for _ in range(load.owners)]
    up_s, down_s = nbytes / load.uplink_bytes_s, nbytes / load.downlink_bytes_s
    ready = [(load.construct_fixed_s + build_s, owner, 0) for owner in range(load.owners)]
    heapq.heapify(ready)
    busy_down = (math.inf, -math.inf, 0.0)
    while ready:
        submitted, owner, number = heapq.heappop(ready)
        node = owner * load.training_nodes // load.owners
        uplinks[node] = max(uplinks[node], submitted) + up_s
        if load.store:
            stored = uplinks[node] + load.round_trip_s
            downlink = max(downlink, stored + load.round_trip_s) + down_s
            arrived, told = downlink, stored
            busy_down = (min(busy_down[0], downlink - down_s), downlink, busy_down[2] + down_s)
        else:
            # The root forwards what arrives; the slower of both links decides when the last byte is there.
            downlink = max(max(downlink, uplinks[node] - up_s) + down_s, uplinks[node])
            arrived = downlink + load.round_trip_s / 2
            told = arrived + load.round_trip_s / 2
        applied = max(applied, arrived) + nbytes / load.apply_bytes_s
        acknowledged[owner].append(told)
        intervals[owner].append((submitted, told))
        if number + 1 < count:
            built = load.construct_fixed_s + (number + 2) * build_s
            turn = acknowledged[owner][number + 1 - WINDOW] if number + 1 >= WINDOW else 0.0
            heapq.heappush(ready, (max(built, turn, submitted), owner, number + 1))
    sender_s = max(_covered(each) for each in intervals)
    return Course(
        constructed_s=load.construct_fixed_s + count * build_s,
        transport_s=max(sender_s, busy_down[2]),
        applied_s=applied,
        payloads=count * load.owners,
    )


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Seconds that intervals cover, overlaps once."""
    total, end = 0.0, -math.inf
    for begin, until in sorted(intervals):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total
