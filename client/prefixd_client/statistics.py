"""Counters of a client: totals for status(), differences for heartbeats."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from prefixd.v1 import cache_service_pb2 as wire


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks and calls, as in the wire's ClientStatistics."""

    read_block_count: int = 0
    written_block_count: int = 0
    bad_block_count: int = 0
    timeout_count: int = 0


class Statistics:
    """Thread-safe; added to once per run, not per block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Counts()
        self._sent = Counts()

    def add(self, *, read: int = 0, written: int = 0, bad: int = 0, timeouts: int = 0) -> None:
        """Counts what was done."""
        with self._lock:
            total = self._total
            self._total = Counts(
                total.read_block_count + read,
                total.written_block_count + written,
                total.bad_block_count + bad,
                total.timeout_count + timeouts,
            )

    def total(self) -> Counts:
        """Since the client was made."""
        return self._total

    def since_last(self) -> wire.ClientStatistics:
        """Since this was asked last: for a heartbeat."""
        with self._lock:
            now, before, self._sent = self._total, self._sent, self._total
        return wire.ClientStatistics(
            read_block_count=now.read_block_count - before.read_block_count,
            written_block_count=now.written_block_count - before.written_block_count,
            bad_block_count=now.bad_block_count - before.bad_block_count,
            timeout_count=now.timeout_count - before.timeout_count,
        )
