"""What an engine need not wait for: releases, aborts and usage reports on their way to the daemon.

Bounded: beyond its limit the oldest entry goes, its lease expires by itself, and the loss is counted. Entries
belong to one boot of the daemon and are dropped when another answers.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from prefixd.v1 import cache_service_pb2 as wire

from .namespace import NamespaceSpec

RELEASES_MAX = 4_096
"""In one request."""
RELEASE_ITEMS_MAX = 16_384
"""Shards in one request; bad blocks in one request."""
ABORTS_MAX = 64
"""In one batch: each is a call of its own, and heartbeats wait meanwhile."""
REPORTS_MAX = 1_024
"""In one request."""


@dataclass(frozen=True, slots=True)
class Abort:
    """A write lease to give up, if there is one: nobody in this process writes to its slots."""

    token: bytes


class Outbox:
    """Thread-safe queues.

    Args:
        lease_limit: releases and aborts, together.
        usage_limit: usage reports.
    """

    def __init__(self, lease_limit: int, usage_limit: int) -> None:
        self._lock = threading.Lock()
        self._lease_limit = lease_limit
        self._endings: deque[tuple[bytes, wire.LeaseRelease | Abort]] = deque()
        """(boot id, what ends)."""
        self._usage: deque[tuple[NamespaceSpec, wire.UsageReport]] = deque(maxlen=usage_limit)
        self._abandoned: deque[tuple[bytes, wire.LeaseRelease | Abort]] = deque()
        """Of leases that were collected: filled without a lock, since a collection may run inside any."""
        self.dropped_count = 0
        self.urgent = threading.Event()
        """Set when what waits should not wait for company: a bad block, which others may ask for."""

    def __len__(self) -> int:
        return len(self._endings) + len(self._usage) + len(self._abandoned)

    def abandon(self, boot_id: bytes, ending: wire.LeaseRelease | Abort) -> None:
        """Queues the end of a lease whose holder forgot it. Safe inside __del__."""
        self._abandoned.append((boot_id, ending))

    def end_lease(self, boot_id: bytes, ending: wire.LeaseRelease | Abort) -> None:
        """Queues a release or an abort."""
        with self._lock:
            if len(self._endings) >= self._lease_limit:
                self._endings.popleft()
                self.dropped_count += 1
            self._endings.append((boot_id, ending))
            if isinstance(ending, wire.LeaseRelease) and ending.bad_blocks:
                self.urgent.set()

    def report_usage(self, spec: NamespaceSpec, report: wire.UsageReport) -> None:
        """Queues a usage report; its namespace ref is filled in when it is sent."""
        with self._lock:
            if len(self._usage) == self._usage.maxlen:
                self.dropped_count += 1
            self._usage.append((spec, report))

    def take_endings(self, boot_id: bytes) -> tuple[list[wire.LeaseRelease], list[Abort]]:
        """As many entries of this boot as make a batch, oldest first; those of other boots are dropped."""
        releases: list[wire.LeaseRelease] = []
        aborts: list[Abort] = []
        shard_count = bad_count = 0
        with self._lock:
            while self._abandoned:
                self._endings.append(self._abandoned.popleft())
            while self._endings and len(releases) < RELEASES_MAX and len(aborts) < ABORTS_MAX:
                boot, ending = self._endings[0]
                if boot == boot_id and isinstance(ending, wire.LeaseRelease):
                    shard_count += len(ending.shards)
                    bad_count += len(ending.bad_blocks)
                    if releases and max(shard_count, bad_count) > RELEASE_ITEMS_MAX:
                        break
                    releases.append(ending)
                elif boot == boot_id and isinstance(ending, Abort):
                    aborts.append(ending)
                self._endings.popleft()
            if not self._endings:
                self.urgent.clear()
        return releases, aborts

    def put_back(self, boot_id: bytes, releases: list[wire.LeaseRelease], aborts: list[Abort]) -> None:
        """Entries that could not be sent; they are tried again first."""
        with self._lock:
            endings: list[wire.LeaseRelease | Abort] = [*aborts, *releases]
            self._endings.extendleft((boot_id, ending) for ending in reversed(endings))

    def take_usage(self, hash_limit: int) -> list[tuple[NamespaceSpec, wire.UsageReport]]:
        """As many reports as one request takes, oldest first; a run is cut to `hash_limit` blocks."""
        taken: list[tuple[NamespaceSpec, wire.UsageReport]] = []
        hash_count = 0
        with self._lock:
            while self._usage and len(taken) < REPORTS_MAX:
                report = self._usage[0][1]
                del report.block_hashes[hash_limit:], report.attention_mass[hash_limit:]
                hash_count += len(report.block_hashes)
                if taken and hash_count > hash_limit:
                    break
                taken.append(self._usage.popleft())
        return taken
