"""Copies between DRAM and HBM, as transfers.py makes them between DRAM and NVMe.

A copy is made, verified and published beside the one it was made from; sources are leased and targets
reserved while bytes travel. A transfer concerns one device. When that fails meanwhile, DRAM slots that it may
still write to are never used again: they stay RESERVED, of no block.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.errors import LimitReached, Unavailable
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_SLOT, Rows, Tier
from prefixd_server.base.work import Errand
from prefixd_server.cache.copying import Batch, Copier
from prefixd_server.cache.hbm_device import HbmDevice
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


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What is under way: its blocks, why, whose memory is concerned, and who is told when it has ended."""

    batch: Batch
    errand: Errand
    device: HbmDevice
    arrival: asyncio.Future[None]


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
        self.under_way: Counter[int] = Counter()
        """Transfers under way, by the number of their device."""

    def promote(self, rows: Rows, errand: Errand, device: HbmDevice) -> list[asyncio.Future[None]]:
        """Starts to copy blocks of one space, in run order, from DRAM to a device, as far as there is room.

        Returns:
            What to wait for, those under way already included; empty when nothing comes.
        """
        return self._start(rows, Tier.DRAM, Tier.HBM, errand, device)

    def demote(self, rows: Rows, errand: Errand) -> list[asyncio.Future[None]]:
        """Starts to copy blocks of one space, in run order, from HBM to DRAM. Returns as promote()."""
        table, slots = self._state.catalog.slots[Tier.HBM], self._state.catalog.columns.slot[Tier.HBM][rows]
        rows, slots = rows[slots != NO_SLOT], slots[slots != NO_SLOT]
        devices = table.devices_of(slots)
        waits = []
        for part in np.split(np.arange(len(rows)), np.flatnonzero(devices[1:] != devices[:-1]) + 1):
            if len(part):
                device = self._tier.devices[int(devices[part[0]])]
                waits += self._start(rows[part], Tier.HBM, Tier.DRAM, errand, device)
        return waits

    def _start(
        self, rows: Rows, source: Tier, target: Tier, errand: Errand, device: HbmDevice
    ) -> list[asyncio.Future[None]]:
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
        above = int(catalog.columns.parent[rows[0]])
        if target is Tier.HBM:
            slots = device.allocate_below(above, pool, len(rows), device.replaceable())
        else:
            slots = self._room.allocate_below(above, pool, len(rows))[0]
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
        self.under_way[device.number] += 1
        task = asyncio.ensure_future(self._carry(Transfer(batch, errand, device, arrival)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return [*waits, arrival]

    def _under_way(self, target: Tier, rows: Rows) -> list[asyncio.Future[None]]:
        slots = self._state.catalog.columns.slot[target][rows].tolist()
        found = (self._arriving.get((target, slot)) for slot in slots)
        return list({id(future): future for future in found if future is not None}.values())

    async def _carry(self, transfer: Transfer) -> None:
        batch = transfer.batch
        good = np.zeros(len(batch.target_slots), dtype=np.bool_)
        try:
            copied = await self._copier.copy(batch, transfer.errand)
            good = copied.good
            if batch.source is Tier.HBM and transfer.device.medium.fault is None:
                self._copier.forget_lost(batch, copied)
        except FAULTS as error:
            log.warning("a copy between DRAM and HBM was given up", reason=str(error))
        finally:
            self._settle(transfer, good)
            self.under_way[transfer.device.number] -= 1
            for slot in batch.target_slots.tolist():
                self._arriving.pop((batch.target, slot), None)
            transfer.arrival.set_result(None)

    def _settle(self, transfer: Transfer, good: NDArray[np.bool_]) -> None:
        """Publishes what is good and wanted; the other slots are free, unless a fault may write there."""
        batch, fault = transfer.batch, transfer.device.medium.fault
        slots = batch.target_slots
        rows = self._state.catalog.slots[batch.target].row[slots]
        kept = good & (rows >= 0)
        if batch.target is Tier.HBM and fault is not None:
            kept[:] = False
        if kept.any():
            self._state.apply(CopyPublished(batch.target, rows[kept], slots[kept]))
            count = int(kept.sum())
            slot_bytes = self._state.catalog.slots[batch.target].slot_bytes_of(int(slots[0]))
            self._migration.count(transfer.errand.reason, count, count * slot_bytes)
        if not kept.all():
            in_doubt = batch.target is Tier.DRAM and fault is not None
            end = CopyDetached if in_doubt else CopyAbandoned
            self._state.apply(end(batch.target, slots[~kept]))
        self._state.apply(CopiesReleased(batch.source, batch.source_slots))

    async def drain(self) -> None:
        """Waits for the transfers under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)
