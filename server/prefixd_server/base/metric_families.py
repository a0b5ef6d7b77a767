"""The metrics that are read from statistics at each scrape: one line each, with its name, meaning and source.

What happens often is observed where it happens instead, see metrics.py. The identities that hold among
them stand in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from prefixd_server.base.accounts import DeviceStats, Stats, TierStats
from prefixd_server.base.traffic import LinkStats
from prefixd_server.base.types import Tier

SLOT_STATES = ("free", "reserved", "resident", "quarantined")
Values = Iterator[tuple[tuple[str, ...], float]]
"""Label values, in the family's order, and the number."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape reads: statistics of the whole node, and of each tenant by name."""

    node: Stats
    tenants: Mapping[str, Stats]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. A counter's name is given without the "_total" that it is served with."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    labels: tuple[str, ...]
    about: str
    read: Callable[[Scrape], Values]

    @property
    def type(self) -> str:
        """ "gauge" or "counter"."""
        return "gauge" if self.kind is GaugeMetricFamily else "counter"

    def collect(self, scrape: Scrape) -> Metric:
        """The family with its samples."""
        family = self.kind(self.name, self.about, labels=self.labels)
        for labels, value in self.read(scrape):
            family.add_metric(labels, value)
        return family


def _node(name: str, about: str, read: Callable[[Stats], float]) -> Family:
    """A gauge of the whole daemon."""
    return Family(name, GaugeMetricFamily, (), about, lambda scrape: iter([((), read(scrape.node))]))


def _tier(name: str, about: str, read: Callable[[TierStats], float]) -> Family:
    """A gauge of each tier."""
    return Family(
        name,
        GaugeMetricFamily,
        ("tier",),
        about,
        lambda scrape: (((tier.tier.name.lower(),), read(tier)) for tier in scrape.node.tiers),
    )


def _tenant(name: str, about: str, read: Callable[[Stats], float]) -> Family:
    """A counter of each tenant."""
    return Family(
        name,
        CounterMetricFamily,
        ("tenant",),
        about,
        lambda scrape: (((tenant,), read(stats)) for tenant, stats in scrape.tenants.items()),
    )


def _device(name: str, about: str, read: Callable[[DeviceStats], float]) -> Family:
    """A gauge of each device of the HBM tier."""
    return Family(
        name,
        GaugeMetricFamily,
        ("device",),
        about,
        lambda scrape: (((device.uuid,), read(device)) for device in _devices(scrape)),
    )


def _devices(scrape: Scrape) -> Iterator[DeviceStats]:
    for tier in scrape.node.tiers:
        yield from tier.devices


def _device_slots(scrape: Scrape) -> Values:
    for device in _devices(scrape):
        for state in SLOT_STATES:
            yield (device.uuid, state), getattr(device, f"{state}_slot_count")


def _slots(scrape: Scrape) -> Values:
    for tier in scrape.node.tiers:
        for state in SLOT_STATES:
            yield (tier.tier.name.lower(), state), getattr(tier, f"{state}_slot_count")


def _hits(scrape: Scrape) -> Values:
    for tenant, stats in scrape.tenants.items():
        for tier in Tier:
            yield (tenant, tier.name.lower()), stats.counters.hits[tier]


def _faults(scrape: Scrape) -> Values:
    for tier in scrape.node.tiers:
        for kind, count in tier.fault_counts.items():
            yield (tier.tier.name.lower(), kind), count


def _link_bytes(scrape: Scrape) -> Values:
    for link in scrape.node.traffic.links:
        yield (link.name, "demand"), link.demand_bytes
        yield (link.name, "prefetch"), link.prefetch_bytes
        yield (link.name, "demotion"), link.demotion_bytes


def _link(name: str, about: str, read: Callable[[LinkStats], float]) -> Family:
    """A gauge of each link."""
    return Family(
        name,
        GaugeMetricFamily,
        ("link",),
        about,
        lambda scrape: (((link.name,), read(link)) for link in scrape.node.traffic.links),
    )


def _transfers(scrape: Scrape) -> Values:
    for reason, count in scrape.node.traffic.transfers.items():
        yield (reason.value,), count.block_count


def _prefetched(scrape: Scrape) -> Values:
    prefetch = scrape.node.traffic.prefetch
    yield ("brought",), prefetch.brought_bytes
    yield ("used",), prefetch.used_bytes
    yield ("useless",), prefetch.useless_bytes


FAMILIES: tuple[Family, ...] = (
    _node("prefixd_leases", "Live leases.", lambda node: node.lease_count),
    _node("prefixd_sessions", "Open sessions of engine processes.", lambda node: node.session_count),
    _node("prefixd_blocks", "Blocks known to the catalog.", lambda node: node.block_count),
    _node("prefixd_metadata_bytes", "Bytes of metadata in use.", lambda node: node.metadata_bytes),
    _node("prefixd_draining", "1 while the daemon drains.", lambda node: float(node.draining)),
    _node("prefixd_uptime_seconds", "Time since start.", lambda node: node.uptime_s),
    _tier("prefixd_tier_capacity_bytes", "Bytes configured.", lambda tier: tier.capacity_bytes),
    _tier(
        "prefixd_tier_assigned_bytes",
        "Bytes in segments that are assigned to a block size; the rest of the capacity is spare.",
        lambda tier: tier.assigned_bytes,
    ),
    _tier("prefixd_tier_prefaulted_bytes", "Bytes pre-faulted so far.", lambda tier: tier.prefaulted_bytes),
    _tier("prefixd_tier_segments", "Segments that exist.", lambda tier: tier.segment_count),
    _tier(
        "prefixd_tier_ready",
        "1 while blocks are read from it and written to it.",
        lambda tier: float(tier.is_ready),
    ),
    _tier("prefixd_tier_assigned_slots", "Slots in assigned segments.", lambda tier: tier.slot_count),
    Family("prefixd_tier_slots", GaugeMetricFamily, ("tier", "state"), "Slots, by state.", _slots),
    _device(
        "prefixd_device_ready",
        "1 while blocks are read from the device and written to it.",
        lambda device: float(device.is_ready),
    ),
    _device(
        "prefixd_device_allocated_bytes",
        "Bytes of the HBM tier that were allocated on the device so far.",
        lambda device: device.allocated_bytes,
    ),
    Family(
        "prefixd_device_slots",
        GaugeMetricFamily,
        ("device", "state"),
        "Slots of the HBM tier on the device, by state.",
        _device_slots,
    ),
    Family(
        "prefixd_tier_faults",
        CounterMetricFamily,
        ("tier", "kind"),
        "Damage found and faults met; docs/nvme.md explains each kind.",
        _faults,
    ),
    Family(
        "prefixd_link_bytes",
        CounterMetricFamily,
        ("link", "urgency"),
        "Bytes copied between tiers, by what they were for: demand, prefetch or demotion.",
        _link_bytes,
    ),
    _link(
        "prefixd_link_background_share",
        "Part of the link's rate that background work may take now.",
        lambda link: link.background_share,
    ),
    _link(
        "prefixd_link_demand_share",
        "Part of the last second in which demand was under way.",
        lambda link: link.demand_share,
    ),
    Family(
        "prefixd_transferred_blocks",
        CounterMetricFamily,
        ("reason",),
        "Blocks copied between tiers, by why.",
        _transfers,
    ),
    Family(
        "prefixd_prefetch_bytes",
        CounterMetricFamily,
        ("fate",),
        "Bytes brought by prefetches, of these used by an engine, and let go before anybody asked.",
        _prefetched,
    ),
    _node("prefixd_prefetches", "Prefetches that wait or hold.", lambda node: node.traffic.prefetch_count),
    _node(
        "prefixd_conservative",
        "1 while only demand and needed evictions go on.",
        lambda node: float(node.traffic.conservative),
    ),
    _node(
        "prefixd_quiet_seconds",
        "Until the last announced quiet period ends.",
        lambda node: node.traffic.quiet_s,
    ),
    Family("prefixd_block_hits", CounterMetricFamily, ("tenant", "tier"), "Blocks that hit.", _hits),
    _tenant(
        "prefixd_blocks_asked", "Blocks asked for by Acquire and Get.", lambda stats: stats.counters.asked
    ),
    _tenant(
        "prefixd_blocks_pending",
        "Blocks asked for that were being written or moved.",
        lambda stats: stats.counters.pending,
    ),
    _tenant("prefixd_blocks_missed", "Blocks asked for that missed.", lambda stats: stats.counters.missed),
    _tenant("prefixd_blocks_committed", "Blocks committed.", lambda stats: stats.counters.committed),
    _tenant("prefixd_blocks_declined", "Blocks not admitted.", lambda stats: stats.counters.declined),
    _tenant("prefixd_blocks_evicted", "Blocks dropped for space.", lambda stats: stats.counters.evicted),
    _tenant(
        "prefixd_blocks_bad",
        "Copies found bad, quarantined and forgotten.",
        lambda stats: stats.counters.bad,
    ),
)
"""In the order of docs/metrics.md."""


class StatsCollector:
    """Statistics as metric families; made for one scrape."""

    def __init__(self, node: Stats, tenants: Mapping[str, Stats]) -> None:
        self._scrape = Scrape(node, tenants)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for family in FAMILIES:
            yield family.collect(self._scrape)
