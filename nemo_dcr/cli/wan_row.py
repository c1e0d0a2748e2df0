"""One refit over the emulated WAN in figures, and what is demanded of it.

Latency is t1 - t0 without post-apply checks. The construction lower bound is the time that an owner's compute intervals
cover, on the busiest owner. The transport lower bound is the same for the intervals from submission to acknowledgement
of payloads; with object storage the downloads of a rollout node are such intervals too, because the store and not the
owner sends to them. What remains of the latency above the larger bound and finalization went into startup, drain and
hand-overs. Payload-carrying bytes are the data bytes of TCP segments on the transport's port in the direction of the
payloads, each as often as it was sent: over the relay tree all of them, with the frames of its protocol; on the store's
port the stored objects, with the frame in each. HTTP heads of objects have a demand of their own, for each payload and
crossing, because their size does not depend on the object's. What else the store says, listings above all, is told
apart.

Paper: Section 7 (V_payload, V_cross); Section 8.7; Appendix C (timed window, lower bounds, finalization)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from nemo_dcr.cli.places import RELAY, STORE
from nemo_dcr.runtime.timeline import CONSTRUCTION, TRANSPORT, RefitTimeline, covered
from nemo_dcr.testing import regions
from nemo_dcr.testing.delay_line import OTHER_PORT, Crossing

OVERHEAD = 1.02
"""Payload-carrying bytes may exceed the payloads by 2%: headers and retransmission."""
HEAD_BYTES = 1024
"""HTTP heads of one payload and one crossing, on average: an upload, or the read of its frame and its download."""
LATENCY_FACTOR = 1.30
BOUND_S = 3.0
"""Transport lower bounds from which on the latency factor is demanded."""
_DIRECTIONS = {
    RELAY: ((regions.TRAINING, regions.ROLLOUT),),
    STORE: ((regions.TRAINING, regions.STORE), (regions.STORE, regions.ROLLOUT)),
}
_DOWNLOADS = {RELAY: (), STORE: ("download",)}
_SECONDS = ("latency_s", "check_s", "construction_s", "transport_s", "finalization_s")


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """What crossed the boundary during one refit, in bytes."""

    payload: int
    """Payload-carrying, retransmission included."""
    heads: int
    """HTTP heads of the messages that carry them, retransmission included."""
    beside: int
    """Data bytes on the transport's port that carry no payload: both directions, listings, acknowledgements."""
    interface: int
    """IPv4 packets of both directions and all ports."""
    control: int
    """Data bytes on the control port, both directions."""
    other: int
    """Bytes of every port that is neither control nor a transport's."""


@dataclass(frozen=True, kw_only=True)
class WanRow:
    """One refit."""

    transport: str
    case: str
    number: int
    """Version that it committed."""
    warm_up: bool
    rate_mbit: float
    rtt_ms: float
    nodes: int
    """Rollout nodes, N_node."""
    change_rate: float
    """N_chg / N_src."""
    payloads: int
    least_payloads: int
    """Of the owner with the fewest."""
    v_payload: int
    """Bytes of unique compressed payloads."""
    crossed: Crossed
    latency_s: float
    check_s: float
    construction_s: float
    transport_s: float
    finalization_s: float
    reference_s: float
    """Transport-only full-checkpoint reference at the same boundary; 0 when it was not measured."""

    @property
    def remainder_s(self) -> float:
        """Latency above the larger bound and finalization."""
        return self.latency_s - max(self.construction_s, self.transport_s) - self.finalization_s

    @property
    def allowed_crossings(self) -> int:
        """How often a payload crosses: once over the relay tree; up and down to every node over the store."""
        return 1 if self.transport == RELAY else 1 + self.nodes

    @property
    def speedup(self) -> float:
        """Reference over latency."""
        return self.reference_s / self.latency_s

    @property
    def link_use(self) -> float:
        """Share of the transport bound for which the payloads alone keep one link busy: the root's, or a node's."""
        return self.v_payload * 8 / (self.rate_mbit * 1e6) / max(self.transport_s, 1e-9)

    @property
    def meets_latency(self) -> bool:
        """Whether latency is within the factor of the transport lower bound, where that bound is long enough."""
        return self.transport_s < BOUND_S or self.latency_s <= LATENCY_FACTOR * self.transport_s

    def unmet(self) -> list[str]:
        """What is demanded of every refit and does not hold here; the latency factor is demanded of `typical` ones."""
        crossed, least = self.crossed, self.allowed_crossings * self.v_payload
        demands = {
            f"{crossed.payload} payload-carrying bytes are fewer than {least}: they did not all cross": crossed.payload
            >= least,
            f"{crossed.payload} payload-carrying bytes exceed {OVERHEAD} x {least}": crossed.payload
            <= OVERHEAD * least,
            f"{crossed.heads} bytes of HTTP heads exceed {HEAD_BYTES} for each payload and crossing": crossed.heads
            <= HEAD_BYTES * self.allowed_crossings * self.payloads,
            f"{crossed.other} bytes crossed on ports that nobody may use": crossed.other == 0,
            f"latency {self.latency_s:.3f} s is below the construction bound": self.latency_s >= self.construction_s,
            f"latency {self.latency_s:.3f} s is below the transport bound": self.latency_s >= self.transport_s,
        }
        name = f"{self.transport}, {self.case}, version {self.number}"
        return [f"{name}: {demand}" for demand, holds in demands.items() if not holds]


def crossed_between(
    before: Iterable[Crossing], after: Iterable[Crossing], *, transport: str, control_port: int, port: int
) -> Crossed:
    """What crossed between two readings of the counters; `port` is the transport's."""
    objects, heads, at_port, interface, control, other = 0, 0, 0, 0, 0, 0
    for sign, rows in ((-1, before), (1, after)):
        for row in rows:
            if row.port == port and (row.source, row.target) in _DIRECTIONS[transport]:
                objects += sign * row.object_bytes
                heads += sign * row.head_bytes
            at_port += sign * row.data_bytes * (row.port == port)
            control += sign * row.data_bytes * (row.port == control_port)
            other += sign * row.all_bytes * (row.port == OTHER_PORT)
            interface += sign * row.all_bytes
    beside = at_port - objects - heads
    return Crossed(payload=objects, heads=heads, beside=beside, interface=interface, control=control, other=other)


def typical(rows: Sequence[WanRow]) -> WanRow:
    """The mean of several timed refits of one case, figure by figure; the last one's number.

    Raises: ValueError without rows.
    """
    if not rows:
        raise ValueError("a mean needs at least one refit")

    def mean(figures: Iterable[float]) -> float:
        return sum(figures) / len(rows)

    crossed = {field.name: round(mean(getattr(row.crossed, field.name) for row in rows)) for field in fields(Crossed)}
    figures = {name: mean(getattr(row, name) for row in rows) for name in _SECONDS}
    counts = {name: round(mean(getattr(row, name) for row in rows)) for name in ("payloads", "v_payload")}
    rate = mean(row.change_rate for row in rows)
    return replace(rows[-1], crossed=Crossed(**crossed), change_rate=rate, **figures, **counts)  # type: ignore[arg-type]


def middle(rows: Sequence[WanRow]) -> WanRow:
    """The median of several refits of one case by latency over transport bound.

    Raises: IndexError without rows.
    """
    return sorted(rows, key=lambda row: row.latency_s / max(row.transport_s, 1e-9))[len(rows) // 2]


def latency_unmet(row: WanRow) -> list[str]:
    """What is demanded of the latency of a typical refit and does not hold."""
    if row.meets_latency:
        return []
    bound = f"{LATENCY_FACTOR} x transport bound {row.transport_s:.3f} s"
    return [f"{row.transport}, {row.case}: typical latency {row.latency_s:.3f} s exceeds {bound}"]


def transport_bound_s(refit: RefitTimeline, transport: str) -> float:
    """The transport lower bound in seconds, see the head of this module."""
    t0, t1 = refit.t0, refit.t1
    downloads = [
        covered(
            (max(span.begin, t0), min(span.end, t1))
            for span in node.spans
            if span.stage in _DOWNLOADS[transport] and span.end > t0 and span.begin < t1
        )
        for node in refit.receivers
    ]
    return max(refit.bound_s(TRANSPORT), *downloads, 0.0)


def construction_bound_s(refit: RefitTimeline) -> float:
    """The construction lower bound in seconds."""
    return refit.bound_s(CONSTRUCTION)


_HEADINGS = (
    "transport", "case", "v", "rate", "payloads", "V_payload", "crossed", "x V", "with heads", "interface", "latency s",
    "construct", "transport", "link use", "final", "rest", "reference", "speed-up",
)  # fmt: skip


def table(rows: Sequence[WanRow]) -> str:
    """The rows as an aligned text table."""
    cells = [
        (
            row.transport,
            row.case + (" (warm-up)" if row.warm_up else ""),
            str(row.number),
            f"{row.change_rate:.3%}",
            str(row.payloads),
            f"{row.v_payload:,}",
            f"{row.crossed.payload:,}",
            f"{row.crossed.payload / max(1, row.v_payload):.3f}",
            f"{(row.crossed.payload + row.crossed.heads) / max(1, row.v_payload):.3f}",
            f"{row.crossed.interface:,}",
            f"{row.latency_s:.3f}",
            f"{row.construction_s:.3f}",
            f"{row.transport_s:.3f}",
            f"{row.link_use:.2f}",
            f"{row.finalization_s:.3f}",
            f"{row.remainder_s:.3f}",
            f"{row.reference_s:.1f}",
            f"{row.speedup:.1f}",
        )
        for row in rows
    ]
    widths = [max(len(cell) for cell in column) for column in zip(_HEADINGS, *cells, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in (_HEADINGS, *cells)
    )
