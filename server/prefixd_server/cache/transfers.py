"""Copies between DRAM and NVMe: demotion ahead of need, promotion on demand.

Nothing is moved: a copy is made, verified and published, and the old one may be
dropped later. Source slots are leased and target slots reserved while bytes
travel; a block that is forgotten meanwhile takes nothing with it. One transfer
per block and tier: a block whose target slot exists is under way already, and
those who want it wait for the same transfer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.errors import LimitReached, Unavailable
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_SLOT, Checksums, Rows, Slots, SlotState, Tier
from prefixd_server.cache.bad_copies import BadCopies
from prefixd_server.cache.nvme_tier import NvmeTier
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
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.index.line import IndexUnavailable
from prefixd_server.index.records import Records, seal
from prefixd_server.media.medium import Medium
from prefixd_server.media.movers import CallJob, CopyJob

IO_BYTES_MAX = 8 << 20
"""Bytes of one read or write: long enough for the disk's speed, short enough for the next in the queue."""

log = structlog.get_logger(__name__)
FAULTS = (OSError, IndexUnavailable, LimitReached, Unavailable)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks of one space on their way from slots of one tier to slots of another; checksums are copies."""

    namespace: Namespace
    shard: int
    kv_group: int
    source: Tier
    source_slots: Slots
    target: Tier
    target_slots: Slots
    checksums: Checksums


class Transfers:
    """See the module."""

    def __init__(self, state: State, room: Room, nvme: NvmeTier, bad_copies: BadCopies) -> None:
        self._state = state
        self._room = room
        self._nvme = nvme
        self._bad_copies = bad_copies
        self._arriving: dict[int, asyncio.Future[None]] = {}
        """By DRAM slot: done when the promotion that fills it has ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    # -- demotion ------------------------------------------------------------------------------

    async def demote(self, rows: Rows) -> int:
        """Copies blocks of one space from DRAM to NVMe, durably; parents first. Blocks published."""
        catalog = self._state.catalog
        namespace, shard, group = catalog.namespaces.owner(int(catalog.columns.space[rows[0]]))
        slot_bytes = namespace.spec.kv_groups[group].slot_bytes
        units = self._nvme.budget.take(len(rows) * slot_bytes, slot_bytes)
        spent = 0
        slots = np.zeros(0, dtype=np.uint32)
        keys = catalog.columns.key[rows[:units]].copy()
        space = int(catalog.columns.space[rows[0]])
        try:
            pool = catalog.namespaces.pool(namespace.tenant, slot_bytes)
            slots = await self._nvme.allocate(pool, units)
            # Making room may have taken its time: what is still to be written?
            rows = self._demotable(catalog.find(space, keys[: len(slots)]))
            slots, surplus = slots[: len(rows)], slots[len(rows) :]
            if len(surplus):
                catalog.slots[Tier.NVME].free(surplus)
            spent = len(rows) * slot_bytes
            return await self._write(namespace, shard, group, rows, slots) if len(rows) else 0
        except FAULTS as error:
            self._nvme.pause(error)
            return 0
        finally:
            self._nvme.budget.give_back(units * slot_bytes - spent)

    def _demotable(self, rows: Rows) -> Rows:
        """The leading blocks that are readable in DRAM and not in NVMe, on a path that NVMe has."""
        catalog = self._state.catalog
        good = (rows >= 0) & catalog.visible(rows) & catalog.resident(Tier.DRAM, rows)
        good &= catalog.columns.slot[Tier.NVME][rows] == NO_SLOT
        return rows[: leading(good)]

    async def _write(self, namespace: Namespace, shard: int, group: int, rows: Rows, slots: Slots) -> int:
        catalog = self._state.catalog
        table = catalog.slots[Tier.NVME]
        dram = catalog.columns.slot[Tier.DRAM][rows]
        batch = Batch(
            namespace, shard, group, Tier.DRAM, dram, Tier.NVME, slots, catalog.columns.checksum[rows].copy()
        )
        records = self._nvme.records(namespace, shard, group, rows, slots)
        seal(records)
        self._state.apply(CopyStarted(Tier.NVME, rows, slots))
        self._state.apply(CopiesLeased(Tier.DRAM, dram))
        recording = settled = False
        try:
            good = await self._copy(batch)
            segments = sorted(set((slots // np.uint32(table.stride)).tolist()))
            await self._state.movers.run(CallJob(partial(self._nvme.medium.flush, segments)))
            # A block that is bad in DRAM is not recorded, and what follows it would be an orphan.
            count = leading(good & (table.row[slots] >= 0))
            recording = True
            await self._nvme.put(namespace, records[:count])
            failpoint("demotion.recorded")
            settled = True
            published = self._settle(records, slots, count)
        finally:
            if recording and not settled:
                # Whether the records are durable is not known: they are deleted before the slots are free.
                self._state.apply(CopyDetached(Tier.NVME, slots))
                self._nvme.disown(records, slots)
            elif not settled:
                self._state.apply(CopyAbandoned(Tier.NVME, slots))
            self._state.apply(CopiesReleased(Tier.DRAM, dram))
        self._nvme.written_bytes += len(slots) * table.slot_bytes_of(int(slots[0]))
        return published

    def _settle(self, records: Records, slots: Slots, count: int) -> int:
        """Durable copies become visible; those whose blocks were forgotten meanwhile are deleted again."""
        table = self._state.catalog.slots[Tier.NVME]
        if count < len(slots):
            self._state.apply(CopyAbandoned(Tier.NVME, slots[count:]))
        rows = table.row[slots[:count]]
        alive = rows >= 0
        if alive.any():
            self._state.apply(CopyPublished(Tier.NVME, rows[alive], slots[:count][alive]))
        if not alive.all():
            self._nvme.disown(records[:count][~alive], slots[:count][~alive])
        return int(alive.sum())

    # -- promotion -----------------------------------------------------------------------------

    def promote(self, rows: Rows) -> list[asyncio.Future[None]]:
        """Starts to copy blocks of one space, in run order, from NVMe to DRAM, as far as there is room.

        Returns:
            What to wait for, those under way already included; empty when nothing comes.
        """
        catalog = self._state.catalog
        waits = self._under_way(rows)
        stored = catalog.columns.slot[Tier.NVME][rows]
        cold = (catalog.columns.slot[Tier.DRAM][rows] == NO_SLOT) & (stored != NO_SLOT)
        rows, stored = rows[cold], stored[cold]
        readable = catalog.slots[Tier.NVME].state[stored] == SlotState.RESIDENT
        rows, stored = rows[: leading(readable)], stored[: leading(readable)]
        if len(rows) == 0 or not self._nvme.usable:
            return waits
        self._state.apply(CopiesLeased(Tier.NVME, stored))
        namespace, shard, group = catalog.namespaces.owner(int(catalog.columns.space[rows[0]]))
        pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[group].slot_bytes)
        slots, _ = self._room.allocate_below(int(catalog.columns.parent[rows[0]]), pool, len(rows))
        if len(slots) < len(rows):
            self._state.apply(CopiesReleased(Tier.NVME, stored[len(slots) :]))
            rows, stored = rows[: len(slots)], stored[: len(slots)]
        if len(rows) == 0:
            return waits
        self._state.apply(CopyStarted(Tier.DRAM, rows, slots))
        batch = Batch(
            namespace,
            shard,
            group,
            Tier.NVME,
            stored,
            Tier.DRAM,
            slots,
            catalog.columns.checksum[rows].copy(),
        )
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arriving.update(dict.fromkeys(slots.tolist(), arrival))
        task = asyncio.ensure_future(self._read(batch, arrival))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return [*waits, arrival]

    def _under_way(self, rows: Rows) -> list[asyncio.Future[None]]:
        slots = self._state.catalog.columns.slot[Tier.DRAM][rows].tolist()
        return list({id(f): f for slot in slots if (f := self._arriving.get(slot)) is not None}.values())

    async def _read(self, batch: Batch, arrival: asyncio.Future[None]) -> None:
        table = self._state.catalog.slots[Tier.DRAM]
        slots = batch.target_slots
        good = np.zeros(len(slots), dtype=np.bool_)
        whole = False
        try:
            good = await self._copy(batch)
            whole = True
        except FAULTS as error:
            self._nvme.pause(error)
        finally:
            rows = table.row[slots]
            kept = good & (rows >= 0)
            if kept.any():
                self._state.apply(CopyPublished(Tier.DRAM, rows[kept], slots[kept]))
            if not kept.all():
                self._state.apply(CopyAbandoned(Tier.DRAM, slots[~kept]))
            self._state.apply(CopiesReleased(Tier.NVME, batch.source_slots))
            if whole and not good.all():
                self._found_bad(batch, good)
            for slot in slots.tolist():
                self._arriving.pop(slot, None)
            arrival.set_result(None)
        self._nvme.read_bytes += len(slots) * table.slot_bytes_of(int(slots[0]))

    # -- bytes ---------------------------------------------------------------------------------

    async def _copy(self, batch: Batch) -> NDArray[np.bool_]:
        """Has movers copy and verify the batch; which blocks are good. Raises FAULTS."""
        good = np.zeros(len(batch.source_slots), dtype=np.bool_)
        spans = self._spans(batch)
        results = await asyncio.gather(
            *(self._state.movers.run(self._job(batch, first, end)) for first, end in spans),
            return_exceptions=True,
        )
        for (first, end), result in zip(spans, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            good[first:end] = ~result.bad
        if batch.source is Tier.DRAM and not good.all():
            self._found_bad(batch, good)
        return good

    def _spans(self, batch: Batch) -> list[tuple[int, int]]:
        """Pieces of the batch that are consecutive on both sides, of at most IO_BYTES_MAX."""
        tables = self._state.catalog.slots
        count = len(batch.source_slots)
        breaks = np.zeros(count, dtype=np.bool_)
        for tier, slots in ((batch.source, batch.source_slots), (batch.target, batch.target_slots)):
            stride = np.uint32(tables[tier].stride)
            breaks[1:] |= (slots[1:] != slots[:-1] + np.uint32(1)) | (slots[1:] % stride == 0)
        longest = max(1, IO_BYTES_MAX // tables[batch.source].slot_bytes_of(int(batch.source_slots[0])))
        edges = [0, *np.flatnonzero(breaks).tolist(), count]
        return [
            (at, min(at + longest, end))
            for first, end in pairwise(edges)
            for at in range(first, end, longest)
        ]

    def _job(self, batch: Batch, first: int, end: int) -> CopyJob:
        source, source_segment, source_offset = self._place(batch.source, int(batch.source_slots[first]))
        target, target_segment, target_offset = self._place(batch.target, int(batch.target_slots[first]))
        spec = batch.namespace.spec
        return CopyJob(
            source=source,
            source_segment_index=source_segment,
            source_offset_bytes=source_offset,
            target=target,
            target_segment_index=target_segment,
            target_offset_bytes=target_offset,
            stride_bytes=spec.kv_groups[batch.kv_group].slot_bytes,
            block_bytes=spec.kv_groups[batch.kv_group].block_bytes,
            checksums=batch.checksums[first:end],
            algorithm=spec.checksum_algorithm,
        )

    def _place(self, tier: Tier, slot: int) -> tuple[Medium, int, int]:
        table = self._state.catalog.slots[tier]
        medium: Medium = self._state.dram if tier is Tier.DRAM else self._nvme.medium
        segment, position = divmod(slot, table.stride)
        return medium, segment, position * table.slot_bytes_of(slot)

    def _found_bad(self, batch: Batch, good: NDArray[np.bool_]) -> None:
        """Copies whose bytes did not match are forgotten, deepest first: each takes what hangs below."""
        for slot in batch.source_slots[~good][::-1].tolist():
            self._bad_copies.found(batch.namespace.tenant, batch.source, slot)

    async def drain(self) -> None:
        """Waits for the promotions under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)
