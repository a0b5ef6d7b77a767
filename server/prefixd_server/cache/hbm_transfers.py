"""Copies between DRAM and HBM, as transfers.py makes them between DRAM and NVMe.

A copy is made, verified and published beside the one it was made from; sources are leased and targets
reserved while bytes travel. When the device fails meanwhile, DRAM slots that it may still write to are never
used again: they stay RESERVED, of no block.
"""

from __future__ import annotations

import asyncio

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.errors import LimitReached, Unavailable
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_SLOT, Rows, Slots, SlotState, Tier
from prefixd_server.base.work import Errand
from prefixd_server.cache.copying import Batch, Copier
from prefixd_server.cache.hbm_tier import HbmTier
from prefixd_server.cache.migration import Migration
from prefixd_server.cache.room import Room
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import (
    CopiesLeased,
    CopiesReleased,
    CopyAbandoned,
    CopyDetached,
    CopyPublished,
    CopyStarted,
)

FAULTS = (OSError, LimitReached, Unavailable)

log = structlog.get_logger(__name__)


class HbmTransfers:
    """See the module."""

    def __init__(self, state: State, room: Room, tier: HbmTier, copier: Copier, migration: Migration) -> None:
        self._state = state
        self._room = room
        self._tier = tier
        self._copier = copier
        self._migration = migration
        self._arriving: dict[tuple[Tier, int], asyncio.Future[None]] = {}
        """By target slot: done when the transfer that fills it has ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    def promote(self, rows: Rows, errand: Errand) -> list[asyncio.Future[None]]:
        """Starts to copy blocks of one space, in run order, from DRAM to HBM, as far as there is room.

        Returns:
            What to wait for, those under way already included; empty when nothing comes.
        """
        return self._start(rows, Tier.DRAM, Tier.HBM, errand)

    def demote(self, rows: Rows, errand: Errand) -> list[asyncio.Future[None]]:
        """Starts to copy blocks of one space, in run order, from HBM to DRAM. Returns as promote()."""
        return self._start(rows, Tier.HBM, Tier.DRAM, errand)

    def _start(self, rows: Rows, source: Tier, target: Tier, errand: Errand) -> list[asyncio.Future[None]]:
        catalog = self._state.catalog
        waits = self._under_way(target, rows)
        held = catalog.columns.slot[source][rows]
        rows = rows[(catalog.columns.slot[target][rows] == NO_SLOT) & (held != NO_SLOT)]
        rows = rows[: leading(catalog.visible(rows) & catalog.resident(source, rows))]
        if len(rows) == 0:
            return waits
        sources = catalog.columns.slot[source][rows]
        self._state.apply(CopiesLeased(source, sources))
        namespace, shard, group = catalog.namespaces.owner(int(catalog.columns.space[rows[0]]))
        pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[group].slot_bytes)
        slots = self._room_for(target, int(catalog.columns.parent[rows[0]]), pool, len(rows))
        if len(slots) < len(rows):
            self._state.apply(CopiesReleased(source, sources[len(slots) :]))
            rows, sources = rows[: len(slots)], sources[: len(slots)]
        if len(rows) == 0:
            return waits
        self._state.apply(CopyStarted(target, rows, slots))
        checksums = catalog.columns.checksum[rows].copy()
        batch = Batch(namespace, shard, group, source, sources, target, slots, checksums)
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arriving.update(dict.fromkeys(((target, slot) for slot in slots.tolist()), arrival))
        task = asyncio.ensure_future(self._carry(batch, errand, arrival))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return [*waits, arrival]

    def _room_for(self, target: Tier, above: int, pool: int, count: int) -> Slots:
        if target is Tier.HBM:
            return self._tier.allocate_below(above, pool, count, self._tier.replaceable())
        return self._room.allocate_below(above, pool, count)[0]

    def _under_way(self, target: Tier, rows: Rows) -> list[asyncio.Future[None]]:
        slots = self._state.catalog.columns.slot[target][rows].tolist()
        found = (self._arriving.get((target, slot)) for slot in slots)
        return list({id(future): future for future in found if future is not None}.values())

    async def _carry(self, batch: Batch, errand: Errand, arrival: asyncio.Future[None]) -> None:
        good = np.zeros(len(batch.target_slots), dtype=np.bool_)
        try:
            copied = await self._copier.copy(batch, errand)
            good = copied.good
            if batch.source is Tier.HBM and self._tier.medium.fault is None:
                self._copier.forget_lost(batch, copied)
        except FAULTS as error:
            log.warning("a copy between DRAM and HBM was given up", reason=str(error))
        finally:
            self._settle(batch, errand, good)
            for slot in batch.target_slots.tolist():
                self._arriving.pop((batch.target, slot), None)
            arrival.set_result(None)

    def _settle(self, batch: Batch, errand: Errand, good: NDArray[np.bool_]) -> None:
        """Publishes what is good and wanted; the other slots are free, unless a fault may write there."""
        slots = batch.target_slots
        rows = self._state.catalog.slots[batch.target].row[slots]
        kept = good & (rows >= 0)
        if batch.target is Tier.HBM and self._tier.medium.fault is not None:
            kept[:] = False
        if kept.any():
            self._state.apply(CopyPublished(batch.target, rows[kept], slots[kept]))
            count = int(kept.sum())
            slot_bytes = self._state.catalog.slots[batch.target].slot_bytes_of(int(slots[0]))
            self._migration.count(errand.reason, count, count * slot_bytes)
        if not kept.all():
            in_doubt = batch.target is Tier.DRAM and self._tier.medium.fault is not None
            end = CopyDetached if in_doubt else CopyAbandoned
            self._state.apply(end(batch.target, slots[~kept]))
        self._state.apply(CopiesReleased(batch.source, batch.source_slots))

    @property
    def under_way_count(self) -> int:
        """Transfers under way."""
        return len(self._tasks)

    def is_writing(self, rows: Rows) -> bool:
        """Whether a copy of one of these blocks is on its way into HBM."""
        slots = self._state.catalog.columns.slot[Tier.HBM][rows]
        table = self._state.catalog.slots[Tier.HBM]
        return bool((table.state[slots[slots != NO_SLOT]] == SlotState.RESERVED).any())

    async def drain(self) -> None:
        """Waits for the transfers under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)
