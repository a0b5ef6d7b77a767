"""Counts what the storage moves, in the form that SGLang's metrics take."""

from __future__ import annotations

import threading

from sglang.srt.observability.metrics_collector import StorageMetrics

UNREAD_COUNT_MAX = 4_096
"""Transfers kept until SGLang asks; beyond it the latest are left out."""
GIB = 1 << 30


class Tallies:
    """Thread-safe; take() hands the counts over and starts anew."""

    def __init__(self, block_bytes: int) -> None:
        self._gib_a_block = block_bytes / GIB
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def loaded(self, blocks: int, seconds: float) -> None:
        """Blocks that came into the host pool."""
        with self._lock:
            self._add(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, blocks, seconds)

    def stored(self, blocks: int, seconds: float) -> None:
        """Blocks of the host pool that are kept."""
        with self._lock:
            self._add(self._metrics.backup_pgs, self._metrics.backup_bandwidth, blocks, seconds)

    def take(self) -> StorageMetrics:
        """Since the last call: blocks a transfer, and GiB/s."""
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def _add(self, counts: list[int], rates: list[float], blocks: int, seconds: float) -> None:
        if blocks and len(counts) < UNREAD_COUNT_MAX:
            counts.append(blocks)
            rates.append(blocks * self._gib_a_block / max(seconds, 1e-9))
