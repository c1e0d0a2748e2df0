"""The plan of a refit: latency, bounds, bytes, memory, and when sending every weight is the better choice.

Latency is the course of the pipeline plus finalization and what startup, drain and hand-overs were measured to add.
The dense alternative is the paper's reference: each training node uploads its part of the checkpoint, then each rollout
node downloads all of it, with nothing but the transfer counted.
Not handled: fabrics over which trainer and servers share a collective; give their rate as `gbps` to compare.

Paper: Section 5 (baseline memory); Section 8.1 (reference); Section 8.6; Section 8.7; Appendix C
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from nemo_dcr.config import QueueConfig
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.planner.calibration import Calibration
from nemo_dcr.planner.coding import WIDTH, Coding, payload_bytes
from nemo_dcr.planner.models import ModelSize
from nemo_dcr.planner.pipeline import Course, Load, run

BITS = 8
GIGA = 10**9
BASELINE_FACTOR = 1.03
"""Baselines over the checkpoint: residual tensors are kept as sources and as canonical tensors (1.03 to 1.04)."""
MOST_GBPS = 10_000.0
"""No link is faster, when the crossover is looked for."""


class Delivery(StrEnum):
    """How payloads travel."""

    relay = "relay"
    s3 = "s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a refit runs on. Raises: InvalidConfig."""

    model: ModelSize
    change: float
    """Changed over all elements, above 0 and at most 1."""
    delivery: Delivery = Delivery.relay
    training_nodes: int = 8
    owners: int = 32
    """Owner processes on all training nodes."""
    rollout_nodes: int = 8
    gbps: float = 5.0
    """Cross-cluster flow of one node, in 10^9 bits a second."""
    bucket_bytes: float = 512 * 1024 * 1024
    coding: Coding = Coding.planes

    def __post_init__(self) -> None:
        if not 0 < self.change <= 1:
            raise InvalidConfig("--change", f"must be above 0 and at most 100%, got {self.change:g}")
        for name in ("training_nodes", "owners", "rollout_nodes", "gbps", "bucket_bytes"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"--{name.replace('_', '-')}", f"must be positive, got {getattr(self, name)}")
        if self.owners < self.training_nodes:
            detail = f"{self.owners} owners on {self.training_nodes} nodes: every node has at least one"
            raise InvalidConfig("--owners", detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Seconds and bytes of one refit."""

    deployment: Deployment
    latency_s: float
    construction_s: float
    """Lower bound."""
    transport_s: float
    """Lower bound."""
    finalization_s: float
    handoffs_s: float
    payloads: int
    v_payload: float
    v_cross: float
    owner_bytes: float
    """Host memory of one owner: its baseline, and payloads in its queues."""
    receiver_bytes: float
    """Host memory of one receiver: decoded payloads in every slot."""
    reference_s: float
    """The full checkpoint instead."""
    crossover_gbps: float | None
    """From this flow on the full checkpoint is there first; None when that does not happen, or was not looked for."""
    crossover_change: float | None
    """The same for the change rate."""

    @property
    def speedup(self) -> float:
        """Reference over latency."""
        return self.reference_s / self.latency_s


def make_plan(
    deployment: Deployment, calibration: Calibration, queue: QueueConfig | None = None, *, crossover: bool = True
) -> Plan:
    """Plan one refit; sizes of queues are the defaults of Appendix C unless given.

    `crossover`: also look where the full checkpoint is there first, which takes some dozens of courses.
    """
    course, latency = _latency(deployment, calibration)
    nbytes = payload_bytes(deployment.model.nbytes, deployment.change, deployment.coding)
    owned = deployment.model.nbytes / deployment.owners
    decoded = nbytes / course.payloads * _decoded_factor(deployment)
    queues = queue or QueueConfig()
    ahead = queues.buckets_ahead + queues.payloads_ahead
    slots = min(queues.payload_slots, course.payloads)
    crossings = 1 if deployment.delivery is Delivery.relay else 1 + deployment.rollout_nodes
    return Plan(
        deployment=deployment,
        latency_s=latency,
        construction_s=course.constructed_s,
        transport_s=course.transport_s,
        finalization_s=_finalization_s(owned, calibration),
        handoffs_s=calibration.handoffs_s(owned),
        payloads=course.payloads,
        v_payload=nbytes,
        v_cross=nbytes * crossings,
        owner_bytes=owned * BASELINE_FACTOR + decoded * ahead,
        receiver_bytes=decoded * slots,
        reference_s=reference_s(deployment, calibration),
        crossover_gbps=_crossing(
            lambda gbps: _margin(replace(deployment, gbps=gbps), calibration), deployment.gbps, MOST_GBPS
        )
        if crossover
        else None,
        crossover_change=_crossing(
            lambda change: _margin(replace(deployment, change=change), calibration), deployment.change, 1.0
        )
        if crossover
        else None,
    )


def reference_s(deployment: Deployment, calibration: Calibration) -> float:
    """Seconds of the transfer of a full checkpoint: up by all training nodes, then down by each rollout node."""
    rate = deployment.gbps * GIGA / BITS * calibration.reference_share
    return deployment.model.nbytes * (1 + 1 / deployment.training_nodes) / rate


def _latency(deployment: Deployment, calibration: Calibration) -> tuple[Course, float]:
    owned = deployment.model.nbytes / deployment.owners
    flow = deployment.gbps * GIGA / BITS
    store = deployment.delivery is Delivery.s3
    course = run(
        Load(
            owners=deployment.owners,
            training_nodes=deployment.training_nodes,
            owner_bytes=owned,
            bucket_bytes=deployment.bucket_bytes,
            payload_bytes=payload_bytes(deployment.model.nbytes, deployment.change, deployment.coding),
            construct_bytes_s=calibration.construct_bytes_s,
            construct_fixed_s=calibration.construct_fixed_s,
            uplink_bytes_s=flow * calibration.reference_share,
            downlink_bytes_s=flow * (calibration.store_share if store else calibration.relay_share),
            store=store,
            round_trip_s=calibration.round_trip_s,
            apply_bytes_s=calibration.apply_bytes_s,
        )
    )
    return course, course.applied_s + _finalization_s(owned, calibration) + calibration.handoffs_s(owned)


def _finalization_s(owned: float, calibration: Calibration) -> float:
    return calibration.finalize_s + owned / calibration.update_bytes_s


def _decoded_factor(deployment: Deployment) -> float:
    """Decoded over compressed payload: locations of about one byte, and a value."""
    changed = deployment.model.nbytes / WIDTH * deployment.change
    return (1 + WIDTH) * changed / payload_bytes(deployment.model.nbytes, deployment.change, deployment.coding)


def _margin(deployment: Deployment, calibration: Calibration) -> float:
    """Seconds by which the refit is ahead of the full checkpoint."""
    return reference_s(deployment, calibration) - _latency(deployment, calibration)[1]


def _crossing(margin: Callable[[float], float], begin: float, end: float) -> float | None:
    """The smallest argument, between `begin` and `end`, from which on the margin is negative; by bisection."""
    if margin(begin) <= 0:
        return begin
    if margin(end) > 0:
        return None
    low, high = math.log(begin), math.log(end)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if margin(math.exp(middle)) > 0 else (low, middle)
    return math.exp(high)
