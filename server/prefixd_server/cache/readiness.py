"""When engines could read what of a run they cannot read now: estimated from the link's measured rate."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import (
    NO_SLOT,
    Hashes,
    NamespaceRef,
    PrefetchStatus,
    Rows,
    Tier,
    TierReadiness,
)
from prefixd_server.cache.migration import DRAM_NVME, Migration
from prefixd_server.cache.reading import Reading
from prefixd_server.cache.state import State


class Standing(IntEnum):
    """How far a block is from being read, over all shards and KV groups."""

    READABLE = 0
    COMING = 1
    """Its copy from NVMe is under way."""
    STORED = 2
    """In NVMe, and nothing brings it."""
    BEING_WRITTEN = 3
    """By an engine, which nobody can tell when."""


class Readiness:
    """See the module."""

    def __init__(self, state: State, migration: Migration, reading: Reading) -> None:
        self._state = state
        self._migration = migration
        self._reading = reading

    def of(self, tenant: str, ref: NamespaceRef, hashes: Hashes) -> tuple[TierReadiness, ...]:
        """By tier, fastest first; each known block of the run is counted once."""
        found = self._reading.find(tenant, ref, hashes)
        return self._by_tier(found.rows, found.known_count)

    def ready_after_s(self, tenant: str, ref: NamespaceRef, hashes: Hashes) -> float | None:
        """When all that is known of a run could be read; None when that is not known."""
        return _latest(self.of(tenant, ref, hashes))

    def status(self, tenant: str, ref: NamespaceRef, hashes: Hashes, token: bytes) -> PrefetchStatus:
        """How the run of a prefetch stands."""
        found = self._reading.find(tenant, ref, hashes)
        run = found.run(len(hashes))
        after = _latest(self._by_tier(found.rows, found.known_count))
        return PrefetchStatus(token, run.hit_count, run.pending_count, run.miss_count, after)

    def _by_tier(
        self, rows_of: Mapping[tuple[int, int], Rows], known_count: int
    ) -> tuple[TierReadiness, ...]:
        standing = self._standing(rows_of, known_count)
        counts = np.bincount(standing, minlength=len(Standing)).tolist()
        stored_bytes = 0
        for rows in rows_of.values():
            if len(rows):
                stored_bytes += counts[Standing.STORED] * self._state.catalog.slot_bytes_of_row(int(rows[0]))
        coming_s = self._estimate_s(0) if counts[Standing.COMING] else 0.0
        pending = counts[Standing.COMING] + counts[Standing.BEING_WRITTEN]
        dram = TierReadiness(
            Tier.DRAM,
            counts[Standing.READABLE],
            pending,
            None if counts[Standing.BEING_WRITTEN] else coming_s,
        )
        nvme = TierReadiness(Tier.NVME, counts[Standing.STORED], 0, self._estimate_s(stored_bytes))
        return tuple(entry for entry in (dram, nvme) if entry.ready_count or entry.pending_count)

    def _standing(self, rows_of: Mapping[tuple[int, int], Rows], known_count: int) -> NDArray[np.uint8]:
        catalog = self._state.catalog
        worst = np.zeros(known_count, dtype=np.uint8)
        for whole in rows_of.values():
            rows = whole[:known_count]
            here = np.full(known_count, Standing.BEING_WRITTEN, dtype=np.uint8)
            if Tier.NVME in catalog.slots:
                here[catalog.resident(Tier.NVME, rows)] = Standing.STORED
            here[(here == Standing.STORED) & (catalog.columns.slot[Tier.DRAM][rows] != NO_SLOT)] = (
                Standing.COMING
            )
            for tier in (Tier.DRAM, Tier.HBM):
                if tier in catalog.slots:
                    here[catalog.resident(tier, rows) & catalog.visible(rows)] = Standing.READABLE
            np.maximum(worst, here, out=worst)
        return worst

    def _estimate_s(self, size_bytes: int) -> float | None:
        governor = self._migration.governors.get(DRAM_NVME)
        return None if governor is None else governor.estimate_s(size_bytes, Tier.NVME.name)


def _latest(entries: tuple[TierReadiness, ...]) -> float | None:
    spans = [entry.ready_after_s for entry in entries]
    known = [span for span in spans if span is not None]
    return max(known, default=0.0) if len(known) == len(spans) else None
