"""What the daemon tells Prometheus: names, units, buckets.

One registry of our own, so that two daemons in one process do not mix. What
happens often is observed where it happens; what can be read at any time (tier
gauges, block counters) is taken from statistics at each scrape. Serving the
text is app/exposition.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from prefixd_server.base.accounts import Stats, TierStats
from prefixd_server.base.types import Tier

RPC_BUCKETS_S = (
    *(0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0),
)
"""Fine up to the client's default deadline of 50 ms, so that p99.9 can be read off."""
LOOP_LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
"""2 ms is the bound on one step of the loop."""

_SLOT_STATES = ("free", "reserved", "resident", "quarantined")


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
        self.loop_lag = Histogram(
            "prefixd_loop_lag_seconds",
            "How late the event loop ran a timer.",
            buckets=LOOP_LAG_BUCKETS_S,
            registry=self.registry,
        )

    def rpc_seconds(self, method: str, tenant: str) -> Histogram:
        """The latency histogram of one method, to be kept by its handler."""
        return self._rpc_seconds.labels(method, tenant)

    def rpc_error(self, method: str, tenant: str, code: str, reason: str) -> None:
        """Counts one call that ended with an error."""
        self._rpc_errors.labels(method, tenant, code, reason).inc()

    def render(self, node: Stats, tenants: Mapping[str, Stats]) -> bytes:
        """The text format, with these statistics. May run in any thread."""
        scrape = CollectorRegistry(auto_describe=False)
        scrape.register(StatsCollector(node, tenants))
        return generate_latest(self.registry) + generate_latest(scrape)


class StatsCollector:
    """Statistics as metric families; made for one scrape."""

    def __init__(self, node: Stats, tenants: Mapping[str, Stats]) -> None:
        self._node = node
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield from self._node_gauges()
        yield from self._tier_gauges()
        yield from self._tenant_counters()

    def _node_gauges(self) -> Iterator[Metric]:
        node = self._node
        for name, about, value in (
            ("prefixd_leases", "Live leases.", node.lease_count),
            ("prefixd_sessions", "Open sessions.", node.session_count),
            ("prefixd_blocks", "Blocks known to the catalog.", node.block_count),
            ("prefixd_metadata_bytes", "Bytes of metadata in use.", node.metadata_bytes),
            ("prefixd_draining", "1 while the daemon drains.", float(node.draining)),
            ("prefixd_uptime_seconds", "Time since start.", node.uptime_s),
        ):
            yield GaugeMetricFamily(name, about, value=value)

    def _tier_gauges(self) -> Iterator[Metric]:
        for name, about, attribute in (
            ("prefixd_tier_capacity_bytes", "Bytes configured.", "capacity_bytes"),
            ("prefixd_tier_assigned_bytes", "Bytes in segments assigned to a block size.", "assigned_bytes"),
            ("prefixd_tier_prefaulted_bytes", "Bytes pre-faulted so far.", "prefaulted_bytes"),
            ("prefixd_tier_segments", "Segments that exist.", "segment_count"),
            ("prefixd_tier_ready", "1 while blocks are read from it and written to it.", "is_ready"),
        ):
            family = GaugeMetricFamily(name, about, labels=["tier"])
            for tier in self._node.tiers:
                family.add_metric([tier.tier.name.lower()], getattr(tier, attribute))
            yield family
        slots = GaugeMetricFamily(
            "prefixd_tier_slots", "Slots in assigned segments, by state.", labels=["tier", "state"]
        )
        for tier in self._node.tiers:
            for state in _SLOT_STATES:
                slots.add_metric([tier.tier.name.lower(), state], _slot_count(tier, state))
        yield slots

    def _tenant_counters(self) -> Iterator[Metric]:
        hits = CounterMetricFamily(
            "prefixd_block_hits", "Blocks that hit, by tier.", labels=["tenant", "tier"]
        )
        for tenant, stats in self._tenants.items():
            for tier in Tier:
                hits.add_metric([tenant, tier.name.lower()], stats.counters.hits[tier])
        yield hits
        for name, about, attribute in (
            ("prefixd_blocks_asked", "Blocks asked for: hits + pending + missed.", "asked"),
            ("prefixd_blocks_pending", "Blocks that were being written or moved.", "pending"),
            ("prefixd_blocks_missed", "Blocks that missed.", "missed"),
            ("prefixd_blocks_committed", "Blocks committed.", "committed"),
            ("prefixd_blocks_declined", "Blocks not admitted.", "declined"),
            ("prefixd_blocks_evicted", "Blocks dropped for space.", "evicted"),
            ("prefixd_blocks_bad", "Blocks found bad, quarantined and forgotten.", "bad"),
        ):
            family = CounterMetricFamily(name, about, labels=["tenant"])
            for tenant, stats in self._tenants.items():
                family.add_metric([tenant], getattr(stats.counters, attribute))
            yield family


def _slot_count(tier: TierStats, state: str) -> int:
    count: int = getattr(tier, f"{state}_slot_count")
    return count
