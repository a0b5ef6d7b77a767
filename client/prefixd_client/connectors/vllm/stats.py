"""Counts what the connector does: for vLLM's log line, for Prometheus, and from workers to the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

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


class PrefixdStats(KVConnectorStats):
    """Counters of one interval; data holds those of COUNTERS that are not 0."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Back to nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PrefixdStats:
        """Adds another interval or worker."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows: counts, and rates where there were bytes."""
        shown: dict[str, int | float] = {
            f"prefixd {name}": round(value, 3) for name, value in sorted(self.data.items())
        }
        for verb, count in (("load", "loaded_bytes"), ("save", "saved_bytes")):
            if self.data.get(f"{verb}_seconds") and self.data.get(count):
                rate = self.data[count] / self.data[f"{verb}_seconds"] / 1e9
                shown[f"prefixd {verb} GB/s"] = round(rate, 2)
        return shown

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def __bool__(self) -> bool:
        return bool(self.data)


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

    def take(self) -> PrefixdStats | None:
        """The counts since the last call, None when there are none."""
        if not self._counts:
            return None
        with self._lock:
            counts, self._counts = self._counts, {}
        return PrefixdStats(data=counts)


class PrefixdMetrics(KVConnectorPromMetrics):
    """The counters on vLLM's /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter(name=f"vllm:prefixd_{name}", documentation=text + ".", labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval of one engine."""
        for name, value in transfer_stats_data.items():
            counter = self._counters.get(name)
            if counter is not None:
                counter[engine_idx].inc(value)
