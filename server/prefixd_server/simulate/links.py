"""Modelled links between tiers: one queue each, a fixed rate and a latency per transfer.

What moves waits for what was asked for before. Nothing here is measured; the
rates are assumptions that the operator can set, and the report states them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd_server.base.types import Tier


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Bytes per second, and seconds before the first byte."""

    bytes_per_s: float
    latency_s: float


HBM_DRAM = LinkRate(25e9, 20e-6)
"""PCIe 4 x16, as engines reach it."""
DRAM_NVME_READ = LinkRate(6e9, 100e-6)
DRAM_NVME_WRITE = LinkRate(3e9, 30e-6)
"""One data-centre drive."""


@dataclass(slots=True)
class Link:
    """One direction of a link: when it is free, and what it has carried.

    carried: (second of the clock, bytes), for plots.
    """

    name: str
    rate: LinkRate
    free_at: float = 0.0
    bytes_total: int = 0
    carried: dict[int, int] = field(default_factory=dict)

    def move(self, size_bytes: int, now: float) -> float:
        """Queues a transfer; when it has arrived."""
        if size_bytes == 0:
            return now
        start = max(now, self.free_at)
        self.free_at = start + self.rate.latency_s + size_bytes / self.rate.bytes_per_s
        self.bytes_total += size_bytes
        second = int(start)
        self.carried[second] = self.carried.get(second, 0) + size_bytes
        return self.free_at

    def by_bins(self, duration_s: float, bin_count: int) -> list[int]:
        """Bytes carried in each of equal parts of the duration, which reaches to the last transfer."""
        width = max(duration_s / bin_count, 1e-9)
        bins = [0] * bin_count
        for second, size_bytes in self.carried.items():
            bins[min(int(second / width), bin_count - 1)] += size_bytes
        return bins


class Links:
    """The links of a node, up (towards the GPU) and down."""

    def __init__(self) -> None:
        self.up = {
            Tier.NVME: Link("NVMe to DRAM", DRAM_NVME_READ),
            Tier.DRAM: Link("DRAM to GPU", HBM_DRAM),
        }
        """By the tier that the bytes leave."""
        self.down = {
            Tier.HBM: Link("GPU to DRAM", HBM_DRAM),
            Tier.DRAM: Link("DRAM to NVMe", DRAM_NVME_WRITE),
        }

    def all(self) -> list[Link]:
        """Every direction, for reports."""
        return [*self.up.values(), *self.down.values()]
