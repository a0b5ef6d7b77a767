"""Counts of what the connector does, on whichever thread it does it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from prefixd_client.values import Tier

COUNTERS = {
    "questions": "Runs asked for",
    "questions_found": "Runs of which blocks beyond the engine's own were found",
    "hit_blocks_hbm": "Blocks to load from GPU memory",
    "hit_blocks_dram": "Blocks to load from host memory",
    "hit_blocks_nvme": "Blocks to load from NVMe",
    "passed_over_blocks": "Blocks found and computed all the same, as that was estimated to be sooner",
    "loaded_blocks": "Blocks loaded and verified",
    "loaded_bytes": "Bytes loaded and verified",
    "load_seconds": "Seconds that loads took",
    "unloaded_blocks": "Blocks that were promised and could not be loaded: computed instead",
    "saved_blocks": "Blocks saved, or found kept already",
    "saved_bytes": "Bytes copied into the cache",
    "save_seconds": "Seconds that saves took",
    "unsaved_blocks": "Blocks that the cache did not keep",
}
"""Every counter and what it counts; Prometheus names them vllm:prefixd_<name>_total."""

_HIT_BLOCKS = {Tier.HBM: "hit_blocks_hbm", Tier.DRAM: "hit_blocks_dram", Tier.NVME: "hit_blocks_nvme"}


class Tallies:
    """Counts on any thread; take() hands the counts over and starts anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Adds to counters of COUNTERS; zeros are left out."""
        with self._lock:
            for name, value in counts.items():
                if value:
                    self._counts[name] = self._counts.get(name, 0) + value

    def add_hits(self, blocks: Mapping[Tier, int]) -> None:
        """Blocks to be loaded, by tier."""
        self.add(**{_HIT_BLOCKS[tier]: count for tier, count in blocks.items() if tier in _HIT_BLOCKS})

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
