"""The endpoint that Prometheus reads: the metrics of this process, over HTTP, when somebody asked for it.

`open_metrics` is given `PORT` or `HOST:PORT`, by default on the loopback address: the endpoint has no authentication,
and tells names of nodes and how a run is going. Port 0 takes a free one. The package prometheus_client is needed and
imported here alone, so that a process without an endpoint neither needs nor loads it.
Not handled: what is counted (see runtime.metrics).

Paper: Section 8 (quantities of the evaluation)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.runtime.metrics import BUCKETS_S, Histogram, MetricKind, RunMetrics

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

LOOPBACK_HOST = "127.0.0.1"


class MetricsEndpoint:
    """Answers `GET /metrics` on a thread of its own until `close`."""

    def __init__(self, host: str, port: int) -> None:
        """Bind and begin. Raises: InvalidConfig when the address cannot be bound."""
        from prometheus_client import CollectorRegistry, start_http_server

        self.metrics = RunMetrics()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self.metrics))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as problem:
            raise InvalidConfig("metrics", f"{host}:{port} cannot be bound ({problem}); name another port") from None
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """End the endpoint. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_metrics(listen: str, rank: int = 0) -> MetricsEndpoint:
    """The endpoint at `listen`, `PORT` or `HOST:PORT`; rank r of several processes takes the r-th port after it.

    Raises: InvalidConfig for an address that is none or cannot be bound; OperatorNeeded without prometheus_client.
    """
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or (listen.count(":") and not host):
        raise InvalidConfig("metrics", f"{listen!r} is neither PORT nor HOST:PORT")
    number = int(port) + (rank if int(port) else 0)
    if number > 65535:
        raise InvalidConfig("metrics", f"{listen!r} gives rank {rank} port {number}; begin below")
    if importlib.util.find_spec("prometheus_client") is None:
        raise OperatorNeeded("metrics need the package prometheus_client", "pip install 'nemo-dcr[metrics]'")
    return MetricsEndpoint(host.strip("[]") or LOOPBACK_HOST, number)


class _Collector:
    """Metrics in the form of prometheus_client."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric, value in self._metrics.samples():
            if isinstance(value, Histogram):
                reached, buckets = 0, []
                for bound, count in zip((*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"), value.counts, strict=True):
                    reached += count
                    buckets.append((bound, float(reached)))
                yield HistogramMetricFamily(metric.name, metric.about, buckets=buckets, sum_value=value.total)
                continue
            kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
            family = kind(metric.name.removesuffix("_total"), metric.about, labels=metric.labels)
            for labels, number in sorted(value.items()):
                family.add_metric(labels, number)
            yield family
