"""What the daemon tells Prometheus: what is observed in passing, and the text of a scrape.

One registry of our own, so that two daemons in one process do not mix. What
can be read at any time (tier gauges, block counters) is taken from statistics
at each scrape, see metric_families.py. Serving the text is app/exposition.py's
business; docs/metrics.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

import prefixd_server
from prefixd_server.base.accounts import Stats
from prefixd_server.base.metric_families import FAMILIES, StatsCollector
from prefixd_server.base.types import Tier

RPC_BUCKETS_S = (
    *(0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0),
)
"""Fine up to the client's default deadline of 50 ms, so that p99.9 can be read off."""
CROSSING_BUCKETS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 10.0, 30.0),
)
"""From one block in memory to a disk that hangs."""
LOOP_LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
"""2 ms is the bound on one step of the loop."""


class Metrics:
    """The registry and what is observed in passing. Thread-safe, as prometheus_client is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._rpc_seconds = Histogram(
            "prefixd_rpc_seconds",
            "Time from the request's arrival to its answer, for streams to their end.",
            ["method", "tenant"],
            buckets=RPC_BUCKETS_S,
            registry=self.registry,
        )
        self._rpc_errors = Counter(
            "prefixd_rpc_errors",
            "Calls that ended with an error, by code and reason.",
            ["method", "tenant", "code", "reason"],
            registry=self.registry,
        )
        self._crossing_seconds = Histogram(
            "prefixd_tier_crossing_seconds",
            "Time of one transfer between tiers: waiting for movers, copying, verifying.",
            ["source", "target"],
            buckets=CROSSING_BUCKETS_S,
            registry=self.registry,
        )
        self._crossing_bytes = Counter(
            "prefixd_tier_crossing_bytes",
            "Bytes copied between tiers and found right.",
            ["source", "target"],
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "prefixd_loop_lag_seconds",
            "How late the event loop ran a timer.",
            buckets=LOOP_LAG_BUCKETS_S,
            registry=self.registry,
        )
        build = Gauge(
            "prefixd_build_info", "1, labelled with the version.", ["version"], registry=self.registry
        )
        build.labels(prefixd_server.__version__).set(1)
        # CPU time, memory, descriptors: prefixd_process_*.
        ProcessCollector(namespace="prefixd", registry=self.registry)

    def rpc_seconds(self, method: str, tenant: str) -> Histogram:
        """The latency histogram of one method, to be kept by its handler."""
        return self._rpc_seconds.labels(method, tenant)

    def rpc_error(self, method: str, tenant: str, code: str, reason: str) -> None:
        """Counts one call that ended with an error."""
        self._rpc_errors.labels(method, tenant, code, reason).inc()

    def crossed(self, source: Tier, target: Tier, seconds: float, good_bytes: int) -> None:
        """Tells of one transfer between tiers."""
        names = source.name.lower(), target.name.lower()
        self._crossing_seconds.labels(*names).observe(seconds)
        self._crossing_bytes.labels(*names).inc(good_bytes)

    def render(self, node: Stats, tenants: Mapping[str, Stats]) -> bytes:
        """The text format, with these statistics. May run in any thread."""
        scrape = CollectorRegistry(auto_describe=False)
        scrape.register(StatsCollector(node, tenants))
        return generate_latest(self.registry) + generate_latest(scrape)


def metrics_table() -> str:
    """The table of docs/metrics.md: every metric as it is served, what is observed first."""
    metrics = Metrics()
    # Labels show only on samples that exist.
    metrics.rpc_seconds("m", "t")
    metrics.rpc_error("m", "t", "c", "r")
    metrics.crossed(Tier.DRAM, Tier.NVME, 0.0, 0)
    lines = ["| metric | type | labels | what it tells |", "|---|---|---|---|"]
    for metric in metrics.registry.collect():
        labels = [name for name in metric.samples[0].labels if name != "le"]
        lines.append(_row(metric.name, metric.type, labels, metric.documentation))
    lines += [_row(item.name, item.type, item.labels, item.about) for item in FAMILIES]
    return "\n".join(lines) + "\n"


def _row(name: str, kind: str, labels: Sequence[str], about: str) -> str:
    served = f"{name}_total" if kind == "counter" else name
    return f"| `{served}` | {kind} | {', '.join(labels) or '-'} | {about} |"
