"""Counters and gauges of one process, fed from its chronicle: what they are called, and what each entry adds.

Every metric is in `METRICS`, with its unit in its name. Sums of an attempt are told several times; a counter grows by
what is new in them. Gauges of queues are read when somebody asks. A node is a label, an attempt or a candidate never:
labels stay few, however long a run is.
Not handled: the format and the endpoint that Prometheus reads (see adapters.prometheus); bytes that relays and shared
downloads move between hosts, which no node of the protocol sees.

Paper: Appendix C (stages, queues); Appendix D (change rate, payload bytes); Section 8
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from nemo_dcr.ids import AttemptId, CandidateId
from nemo_dcr.record import DELTA_MODES
from nemo_dcr.runtime.chronicle import (
    AttemptBegan,
    AttemptOver,
    CandidateGivenUp,
    CommitResolved,
    Entry,
    GateMoved,
    Measured,
    TookOver,
    TransitionOver,
    VersionDurable,
)
from nemo_dcr.runtime.failure_kinds import kind_of_failure
from nemo_dcr.runtime.timings import Timings
from nemo_dcr.runtime.timings import now as wall

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets of a duration, in seconds."""
_DELTA = frozenset(mode.value for mode in DELTA_MODES)
_KEPT = 16
"""Attempts whose sums are kept, to tell what is new in them."""


class MetricKind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """As Prometheus shows it; counters end in `_total`."""
    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()


_C, _G = MetricKind.COUNTER, MetricKind.GAUGE
METRICS = {
    metric.name: metric
    for metric in (
        Metric("nemo_dcr_transition_seconds", MetricKind.HISTOGRAM, "First attempt to end of a transition."),
        Metric("nemo_dcr_attempts_total", _C, "Attempts that ended.", ("mode", "outcome")),
        Metric("nemo_dcr_failed_attempts_total", _C, "Attempts that failed, by kind of reason.", ("reason",)),
        Metric("nemo_dcr_commit_conflicts_total", _C, "Commits that were asked for and not made."),
        Metric("nemo_dcr_given_up_candidates_total", _C, "Transitions that were aborted."),
        Metric("nemo_dcr_takeovers_total", _C, "Times that this coordinator took a new epoch."),
        Metric("nemo_dcr_committed_version", _G, "The version that this coordinator committed last."),
        Metric("nemo_dcr_required_receivers", _G, "Receivers of that version."),
        Metric("nemo_dcr_stage_seconds_total", _C, "Seconds of work; stages overlap.", ("node", "stage")),
        Metric("nemo_dcr_wait_seconds_total", _C, "Seconds that a stage stood still for a queue.", ("node", "stage")),
        Metric("nemo_dcr_payload_bytes_total", _C, "Compressed bytes, published or received.", ("node", "direction")),
        Metric("nemo_dcr_payloads_total", _C, "Payloads that an owner published.", ("node",)),
        Metric("nemo_dcr_items_total", _C, "Items that an owner sent, by encoding.", ("node", "encoding")),
        Metric("nemo_dcr_compared_elements_total", _C, "Source elements that an owner compared.", ("node",)),
        Metric("nemo_dcr_changed_elements_total", _C, "Those of them that had changed.", ("node",)),
        Metric("nemo_dcr_change_ratio", _G, "Changed over compared elements, in the last stream.", ("node",)),
        Metric("nemo_dcr_queue_depth", _G, "Payloads that wait in a queue now.", ("node", "queue")),
        Metric("nemo_dcr_gate_open", _G, "1 while requests are admitted.", ("node",)),
        Metric(
            "nemo_dcr_gate_closed_seconds_total", _C, "Seconds with a closed gate after the first opening.", ("node",)
        ),
        Metric("nemo_dcr_served_version", _G, "The version behind the open gate, or behind it last.", ("node",)),
    )
}
"""By name."""

Labels = tuple[str, ...]
Depths = Callable[[], Mapping[str, int]]


@dataclass(slots=True)
class Histogram:
    """Durations, counted by bucket."""

    counts: list[int]
    """One more than `BUCKETS_S`: the last has what is longer than all of them."""
    total: float = 0.0
    """Seconds in all."""


class RunMetrics:
    """The metrics of one process; give its `tell` the entries of all its nodes. Thread safe."""

    def __init__(self, now: Callable[[], float] = wall) -> None:
        """`now` gives seconds since the epoch."""
        self._now = now
        self._lock = threading.Lock()
        self._values: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        self._transitions = Histogram([0] * (len(BUCKETS_S) + 1))
        self._began: tuple[CandidateId, float] | None = None
        self._modes: dict[AttemptId, str] = {}
        self._sums: dict[tuple[AttemptId, str], Timings] = {}
        self._closed: dict[str, float] = {}
        """Nodes whose gate is closed, since when."""
        self._depths: dict[str, Depths] = {}

    def watch(self, node: str, depths: Depths) -> None:
        """Ask `depths` for the lengths of a node's queues whenever somebody reads the metrics."""
        with self._lock:
            self._depths[node] = depths

    def tell(self, entry: Entry, node: str = "") -> None:
        """Take note of an entry; `node` is whose gate moved."""
        with self._lock:
            match entry:
                case AttemptBegan():
                    self._begin(entry)
                case AttemptOver(attempt=attempt, reason=reason):
                    mode = self._modes.pop(attempt, "unknown")
                    self._add("nemo_dcr_attempts_total", 1, mode, "failed" if reason else "acknowledged")
                    if reason:
                        self._add("nemo_dcr_failed_attempts_total", 1, kind_of_failure(reason).value)
                case CommitResolved(outcome=outcome):
                    self._add("nemo_dcr_commit_conflicts_total", float(outcome != "committed"))
                case VersionDurable(version=version, receivers=receivers):
                    self._set("nemo_dcr_committed_version", version)
                    self._set("nemo_dcr_required_receivers", len(receivers))
                case TransitionOver(at=at, candidate=candidate):
                    if self._began is not None and self._began[0] == candidate:
                        self._observe(at - self._began[1])
                        self._began = None
                case CandidateGivenUp():
                    self._add("nemo_dcr_given_up_candidates_total", 1)
                case TookOver():
                    self._add("nemo_dcr_takeovers_total", 1)
                case GateMoved():
                    self._gate(node, entry)
                case Measured(attempt=attempt, timings=timings):
                    self._measure(attempt, timings)
                case _:
                    pass

    def teller(self, node: str) -> Callable[[Entry], None]:
        """`tell` for the entries of one node."""
        return lambda entry: self.tell(entry, node)

    def samples(self) -> Iterator[tuple[Metric, dict[Labels, float] | Histogram]]:
        """Every metric that has a value now."""
        with self._lock:
            watched = dict(self._depths)
        depths: dict[Labels, float] = {}
        for node, read in watched.items():
            depths |= {(node, queue): float(number) for queue, number in read().items()}
        with self._lock:
            values = {name: dict(found) for name, found in self._values.items()}
            closed = values.setdefault("nemo_dcr_gate_closed_seconds_total", {})
            for node, since in self._closed.items():
                closed[(node,)] = closed.get((node,), 0.0) + max(0.0, self._now() - since)
            histogram = Histogram(list(self._transitions.counts), self._transitions.total)
        values["nemo_dcr_queue_depth"] = depths
        for name, metric in METRICS.items():
            if metric.kind is MetricKind.HISTOGRAM:
                yield metric, histogram
            elif values.get(name):
                yield metric, values[name]

    def _add(self, name: str, amount: float, *labels: str) -> None:
        found = self._values[name]
        found[labels] = found.get(labels, 0.0) + amount

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name][labels] = value

    def _observe(self, seconds: float) -> None:
        bucket = next((number for number, bound in enumerate(BUCKETS_S) if seconds <= bound), len(BUCKETS_S))
        self._transitions.counts[bucket] += 1
        self._transitions.total += max(0.0, seconds)

    def _begin(self, entry: AttemptBegan) -> None:
        self._modes = {**self._modes, entry.attempt: entry.mode}
        for old in sorted(self._modes)[:-_KEPT]:
            del self._modes[old]
        if entry.mode in _DELTA and (self._began is None or self._began[0] != entry.candidate):
            self._began = entry.candidate, entry.at

    def _gate(self, node: str, moved: GateMoved) -> None:
        self._set("nemo_dcr_gate_open", float(moved.is_open), node)
        if moved.is_open:
            since = self._closed.pop(node, None)
            self._add("nemo_dcr_gate_closed_seconds_total", 0.0 if since is None else max(0.0, moved.at - since), node)
            self._set("nemo_dcr_served_version", float(moved.version or 0), node)
        else:
            self._closed.setdefault(node, moved.at)

    def _measure(self, attempt: AttemptId, timings: Timings) -> None:
        node, known = timings.node, self._sums.get((attempt, timings.node))
        self._sums[attempt, node] = timings
        for old in sorted({key[0] for key in self._sums})[:-_KEPT]:
            self._sums = {key: sums for key, sums in self._sums.items() if key[0] != old}
        for stage, seconds in _growth(timings.seconds, {} if known is None else known.seconds):
            self._add("nemo_dcr_stage_seconds_total", seconds, node, stage)
        for stage, seconds in _growth(timings.wait_seconds, {} if known is None else known.wait_seconds):
            self._add("nemo_dcr_wait_seconds_total", seconds, node, stage)
        counts = dict(_growth(timings.counts, {} if known is None else known.counts))
        direction = "received" if "/" in node else "published"
        for count, name, labels in (
            ("payload_bytes", "nemo_dcr_payload_bytes_total", (direction,)),
            ("payloads", "nemo_dcr_payloads_total", ()),
            ("xor_items", "nemo_dcr_items_total", ("xor",)),
            ("overwrite_items", "nemo_dcr_items_total", ("overwrite",)),
            ("source_elements", "nemo_dcr_compared_elements_total", ()),
            ("changed_elements", "nemo_dcr_changed_elements_total", ()),
        ):
            if count in counts:
                self._add(name, counts[count], node, *labels)
        if timings.counts.get("source_elements"):
            ratio = timings.counts.get("changed_elements", 0) / timings.counts["source_elements"]
            self._set("nemo_dcr_change_ratio", ratio, node)


def _growth(sums: Mapping[str, float], known: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """What each sum grew by; a stage that is told negative for a moment, as `apply` without its check, adds nothing."""
    return ((name, max(0.0, value - known.get(name, 0.0))) for name, value in sums.items())
