"""The connector's counts as vLLM takes them: its log line, Prometheus, and from workers to the scheduler."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from .tallies import COUNTERS


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
