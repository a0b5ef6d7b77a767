"""Modelled links between tiers: one queue each, a fixed rate and a latency per transfer.

What moves waits for what was asked for before and is there. Nothing here is measured; the
rates are assumptions (docs/simulator.md).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

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
    """One direction of a link: when it is free, and what it has carried."""

    name: str
    rate: LinkRate
    free_at: float = 0.0
    bytes_total: int = 0
    _gaps: list[tuple[float, float]] = field(default_factory=list)
    """Before free_at, ascending: what transfers leave free that wait for their bytes."""
    _begun: array[float] = field(default_factory=lambda: array("d"))
    _ended: array[float] = field(default_factory=lambda: array("d"))
    _sizes: array[int] = field(default_factory=lambda: array("q"))

    def move(self, size_bytes: int, now: float, ready_at: float = 0.0) -> float:
        """Queues a transfer; when it has arrived.

        Args:
            ready_at: when its bytes are there, if later. What is asked for meanwhile goes before it,
                where it fits whole.
        """
        ready_at = max(now, ready_at)
        if size_bytes == 0:
            return ready_at
        takes = self.rate.latency_s + size_bytes / self.rate.bytes_per_s
        start = self._reserve(now, ready_at, takes)
        self.bytes_total += size_bytes
        self._begun.append(start)
        self._ended.append(start + takes)
        self._sizes.append(size_bytes)
        return start + takes

    def _reserve(self, now: float, ready_at: float, takes: float) -> float:
        """Takes the first time from `ready_at` on that nobody has taken; its beginning."""
        while self._gaps and self._gaps[0][1] <= now:
            del self._gaps[0]
        for place, (first, end) in enumerate(self._gaps):
            start = max(first, ready_at)
            if start + takes <= end:
                left = ((first, start), (start + takes, end))
                self._gaps[place : place + 1] = [gap for gap in left if gap[0] < gap[1]]
                return start
        start = max(ready_at, self.free_at)
        if start > max(now, self.free_at):
            self._gaps.append((max(now, self.free_at), start))
        self.free_at = start + takes
        return start

    def by_bins(self, duration_s: float, bin_count: int) -> list[int]:
        """Bytes carried in each of equal parts of the duration, which reaches to the last transfer."""
        if self.bytes_total == 0:
            return [0] * bin_count
        begun, ended, sizes = np.array(self._begun), np.array(self._ended), np.array(self._sizes)
        order = np.argsort(begun)
        carried = np.cumsum(sizes[order])
        times = np.column_stack([begun[order], ended[order]]).ravel()
        totals = np.column_stack([carried - sizes[order], carried]).ravel()
        edges = np.linspace(0.0, duration_s, bin_count + 1)
        by_edge = np.rint(np.interp(edges, times, totals)).astype(np.int64)
        by_edge[-1] = self.bytes_total
        parts: list[int] = np.diff(by_edge).tolist()
        return parts


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
