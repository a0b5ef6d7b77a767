"""Copies between DRAM and NVMe: demotion ahead of need, promotion on demand.

Nothing is moved: a copy is made, verified and published, and the old one may be
dropped later. Source slots are leased and target slots reserved while bytes
travel; a block that is forgotten meanwhile takes nothing with it. One transfer
per block and tier: a block whose target slot exists is under way already, and
those who want it wait for the same transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.errors import LimitReached, PrefixdError, Unavailable
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, Rows, Slots, SlotState, Tier
from prefixd_server.base.work import Errand, Reason, Urgency
from prefixd_server.cache.copying import Batch, Copied, Copier
from prefixd_server.cache.migration import DRAM_NVME, Migration
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.room import Room
from prefixd_server.cache.state import State
from prefixd_server.cache.worth import Parts, by_worth
from prefixd_server.cache.write_budget import Booking
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
from prefixd_server.media.movers import CallJob
from prefixd_server.policy.placement import worth_promoting

R = TypeVar("R")
Flags: TypeAlias = NDArray[np.bool_]

log = structlog.get_logger(__name__)
FAULTS = (OSError, IndexUnavailable, LimitReached, Unavailable)


class Transfers:
    """See the module."""

    def __init__(
        self, state: State, room: Room, nvme: NvmeTier, copier: Copier, migration: Migration
    ) -> None:
        self._state = state
        self._room = room
        self._nvme = nvme
        self._copier = copier
        self._migration = migration
        self._arriving: dict[int, asyncio.Future[None]] = {}
        """By DRAM slot: done when the promotion that fills it has ended."""
        self._errands: dict[asyncio.Future[None], Errand] = {}
        """Of those promotions."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.claimed: dict[int, asyncio.Task[int]] = {}
        """Rows on their way to NVMe, from the plan on."""
        nvme.health.subscribe(self._let_go)

    # -- demotion ------------------------------------------------------------------------------

    def begin_demotion(self, rows: Rows) -> asyncio.Task[int]:
        """demote() as a task that ends by itself; its rows are `claimed` until then.

        From here on blocks go by their keys: until the task takes its first step, a row may have come
        to serve another block, of another namespace.
        """
        claims = rows.tolist()
        columns = self._state.catalog.columns
        parents = set(columns.parent[rows].tolist()).difference(claims)
        ahead = {self.claimed[row] for row in parents if row in self.claimed}
        space = int(columns.space[rows[0]])
        rows, parts = by_worth(self._state, rows)
        keys = columns.key[rows].copy()

        async def work() -> int:
            try:
                return await self.demote(space, keys, parts, ahead)
            except PrefixdError as error:
                log.warning("a demotion was given up", reason=str(error))
                return 0
            finally:
                for row in claims:
                    self.claimed.pop(row, None)

        task = self._kept(asyncio.ensure_future(work()))
        self.claimed |= dict.fromkeys(claims, task)
        return task

    def _kept(self, task: asyncio.Task[R]) -> asyncio.Task[R]:
        """The task, which drain() waits for."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def demote(self, space: int, keys: Hashes, parts: Parts, ahead: Set[asyncio.Task[int]]) -> int:
        """Copies blocks of one space from DRAM to NVMe, durably; parents first. Blocks published.

        Args:
            parts: of the keys, in their order.
            ahead: demotions of their parents: recorded first.
        """
        catalog = self._state.catalog
        namespace, shard, group = catalog.namespaces.owner(space)
        slot_bytes = namespace.spec.kv_groups[group].slot_bytes
        booking, spent = Booking(0, 0), 0
        slots = np.zeros(0, dtype=np.uint32)
        try:
            pool = catalog.namespaces.pool(namespace.tenant, slot_bytes)
            booking = await self._nvme.budget.book(len(keys) * slot_bytes, slot_bytes)
            slots = await self._nvme.allocate(pool, parts, booking.unit_count)
            # Making room may have taken its time: what is still to be written?
            rows = self._demotable(catalog.find(space, keys[: len(slots)]))
            slots, surplus = slots[: len(rows)], slots[len(rows) :]
            if len(surplus):
                catalog.slots[Tier.NVME].free(surplus)
            spent = len(rows) * slot_bytes
            published = written = 0
            if len(rows):
                published, written = await self._write(namespace, shard, group, rows, slots, ahead)
            spent = written * slot_bytes
        except FAULTS as error:
            self._nvme.health.failed(error)
            return 0
        else:
            return published
        finally:
            self._nvme.budget.give_back(booking, booking.unit_count * slot_bytes - spent)

    def _demotable(self, rows: Rows) -> Rows:
        """The leading blocks that are readable in DRAM and not in NVMe, on a path that NVMe has."""
        catalog = self._state.catalog
        good = (rows >= 0) & catalog.visible(rows) & catalog.resident(Tier.DRAM, rows)
        good &= catalog.columns.slot[Tier.NVME][rows] == NO_SLOT
        return rows[: leading(good)]

    async def _write(
        self,
        namespace: Namespace,
        shard: int,
        group: int,
        rows: Rows,
        slots: Slots,
        ahead: Set[asyncio.Task[int]],
    ) -> tuple[int, int]:
        """Bytes, flush, index records, visible. Blocks (published, written): the link may give some up."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.NVME]
        slot_bytes = table.slot_bytes_of(int(slots[0]))
        dram = catalog.columns.slot[Tier.DRAM][rows]
        batch = Batch(
            namespace, shard, group, Tier.DRAM, dram, Tier.NVME, slots, catalog.columns.checksum[rows].copy()
        )
        records = self._nvme.records(namespace, shard, group, rows, slots)
        seal(records)
        self._state.apply(CopyStarted(Tier.NVME, rows, slots))
        self._state.apply(CopiesLeased(Tier.DRAM, dram))
        failpoint("demotion.begun")
        in_doubt = 0
        settled = False
        try:
            errand = Errand(Urgency.DEMOTION, Reason.WATERMARK)
            log.debug("demotion", reason=errand.reason.value, blocks=len(rows))
            copied = await self._copier.copy(batch, errand)
            self._nvme.written_bytes += copied.tried_count * slot_bytes
            if not self._known(namespace, copied, slots).any():
                return 0, copied.tried_count
            segments = sorted(set((slots // np.uint32(table.stride)).tolist()))
            movers = self._state.movers_of(Tier.NVME)
            await movers.run(CallJob(partial(self._nvme.medium.flush, segments)))
            if ahead:
                await asyncio.wait(ahead)
            async with self._nvme.recording():
                # All that it waited for took its time: what is still to be recorded?
                rooted = self._rooted(self._known(namespace, copied, slots), slots)
                order = np.argsort(~rooted, kind="stable")
                records, slots = records[order], slots[order]
                in_doubt = count = int(rooted.sum())
                if count == 0:
                    return 0, copied.tried_count
                await self._nvme.put(namespace, records[:count])
                failpoint("demotion.recorded")
                settled = True
                published = self._settle(records, slots, count)
                failpoint("demotion.published")
        finally:
            if not settled:
                if in_doubt:
                    # Whether they are durable is not known: they are deleted before the slots are free.
                    self._state.apply(CopyDetached(Tier.NVME, slots[:in_doubt]))
                    self._nvme.disown(records[:in_doubt], slots[:in_doubt])
                self._state.apply(CopyAbandoned(Tier.NVME, slots[in_doubt:]))
            self._state.apply(CopiesReleased(Tier.DRAM, dram))
        self._migration.count(Reason.WATERMARK, published, published * slot_bytes)
        return published, copied.tried_count

    def _known(self, namespace: Namespace, copied: Copied, slots: Slots) -> Flags:
        """Which blocks were copied and are still known; none once their namespace was dropped.

        Another epoch of the namespace has its record in the place of this one's.
        """
        if not self._state.catalog.namespaces.is_open(namespace):
            return np.zeros(len(slots), dtype=np.bool_)
        known: Flags = copied.good & (self._state.catalog.slots[Tier.NVME].row[slots] >= 0)
        return known

    def _rooted(self, known: Flags, slots: Slots) -> Flags:
        """Of these, the blocks whose parents NVMe has or gets with them: parents come first.

        Not what follows a block that is bad in DRAM, or whose parents' demotion has failed: it would be an
        orphan.
        """
        catalog = self._state.catalog
        rows = catalog.slots[Tier.NVME].row[slots]
        parents = catalog.columns.parent[rows]
        rooted: Flags = known & ((parents == NO_ROW) | catalog.resident(Tier.NVME, np.maximum(parents, 0)))
        recorded = set(rows[rooted].tolist())
        for index in np.flatnonzero(known & ~rooted).tolist():
            if int(parents[index]) in recorded:
                recorded.add(int(rows[index]))
                rooted[index] = True
        return rooted

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

    def promote(self, rows: Rows, errand: Errand) -> list[asyncio.Future[None]]:
        """Starts to copy blocks of one space, in run order, from NVMe to DRAM, as far as there is room.

        Args:
            errand: why and how urgently; what is under way already becomes as urgent.

        Returns:
            What to wait for, those under way already included; empty when nothing comes.
        """
        catalog = self._state.catalog
        waits = self._under_way(rows)
        self._urge(waits, errand.urgency)
        stored = catalog.columns.slot[Tier.NVME][rows]
        cold = (catalog.columns.slot[Tier.DRAM][rows] == NO_SLOT) & (stored != NO_SLOT)
        rows, stored = rows[cold], stored[cold]
        readable = catalog.slots[Tier.NVME].state[stored] == SlotState.RESIDENT
        rows, stored = rows[: leading(readable)], stored[: leading(readable)]
        if len(rows) == 0 or not self._nvme.health.readable:
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
        self._errands[arrival] = errand
        log.debug("promotion", reason=errand.reason.value, blocks=len(rows))
        self._kept(asyncio.ensure_future(self._read(batch, arrival, errand)))
        return [*waits, arrival]

    def promote_hot(self, rows: Rows) -> None:
        """Brings the rest of a run that a request is about to use, where more uses are expected soon."""
        catalog, config = self._state.catalog, self._migration.config
        node = int(catalog.columns.node[rows[0]])
        gap_s = self._state.clock.now() - float(catalog.tree.last_use[node])
        use_count = int(catalog.tree.use_count[node]) + 1
        hot = worth_promoting(use_count, gap_s, config.promotion_window_s)
        if hot and self._migration.background_may_begin:
            self.promote(rows, Errand(Urgency.PREFETCH, Reason.HOT))

    def _under_way(self, rows: Rows) -> list[asyncio.Future[None]]:
        slots = self._state.catalog.columns.slot[Tier.DRAM][rows].tolist()
        return list({id(f): f for slot in slots if (f := self._arriving.get(slot)) is not None}.values())

    def _urge(self, arrivals: list[asyncio.Future[None]], urgency: Urgency) -> None:
        """Somebody waits for these: they are as urgent as that from now on."""
        urged = False
        for arrival in arrivals:
            errand = self._errands.get(arrival)
            if errand is not None and errand.urgency > urgency:
                errand.urgency = urgency
                urged = True
        if urged:
            self._migration.governors[DRAM_NVME].urged()

    async def _read(self, batch: Batch, arrival: asyncio.Future[None], errand: Errand) -> None:
        table = self._state.catalog.slots[Tier.DRAM]
        slots = batch.target_slots
        copied: Copied | None = None
        try:
            copied = await self._copier.copy(batch, errand)
        except FAULTS as error:
            self._nvme.health.failed(error)
        finally:
            rows = table.row[slots]
            kept = rows >= 0
            # What follows a block that did not come would hang below a hole.
            kept[0 if copied is None else leading(copied.good) :] = False
            if kept.any():
                self._state.apply(CopyPublished(Tier.DRAM, rows[kept], slots[kept]))
                slot_bytes = table.slot_bytes_of(int(slots[0]))
                self._migration.count(errand.reason, int(kept.sum()), int(kept.sum()) * slot_bytes)
            if not kept.all():
                self._state.apply(CopyAbandoned(Tier.DRAM, slots[~kept]))
            self._state.apply(CopiesReleased(Tier.NVME, batch.source_slots))
            if copied is not None:
                self._nvme.health.read(copied.bad, copied.unreadable, copied.faults)
                self._copier.forget_lost(batch, copied)
            del self._errands[arrival]
            self._arrived(slots, arrival)
        self._nvme.read_bytes += len(slots) * table.slot_bytes_of(int(slots[0]))

    def _arrived(self, slots: Slots, arrival: asyncio.Future[None]) -> None:
        for slot in slots.tolist():
            if self._arriving.get(slot) is arrival:
                del self._arriving[slot]
        if not arrival.done():
            arrival.set_result(None)

    def _let_go(self) -> None:
        """Nobody waits for a disk that is not to be used: what is under way arrives unattended."""
        if not self._nvme.health.readable:
            for arrival in set(self._arriving.values()):
                if not arrival.done():
                    arrival.set_result(None)
            self._arriving.clear()

    def hurry(self) -> None:
        """The tier goes: nothing waits for its turn on the link any more."""
        self._migration.governors[DRAM_NVME].hurry()

    async def drain(self) -> None:
        """Waits for the transfers under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)
