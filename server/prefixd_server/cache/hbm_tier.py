"""The HBM tier's life: its memory, its segments, who has them open, and its end.

Memory is allocated in the background, a segment at a time, and again and again where there is none yet: after
a restart the engines of the last boot have ours open for a moment more. A fault of the device turns the tier
off until the next start: its copies are dropped, blocks with no other are forgotten, everything else goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from functools import partial

import numpy as np
import structlog

from prefixd_server.base.accounts import TierStats
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_ROW, NO_SLOT, DeviceSegment, Extent, Rows, Slots, SlotState, Tier
from prefixd_server.base.views import Evictable
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import BlocksRemoved, CopiesEvicted, CopiesLeased, CopiesReleased
from prefixd_server.media.cuda import CudaFault
from prefixd_server.media.hbm import HbmMedium
from prefixd_server.media.movers import CallJob, Movers, RenewJob

TICK_INTERVAL_S = 0.02
RETRY_S_MIN = 0.1
RETRY_S_MAX = 10.0
"""Pauses between attempts to allocate, doubled each time."""
DROP_BLOCK_COUNT = 512
"""Blocks dropped in one step of the loop when the tier goes off."""
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

log = structlog.get_logger(__name__)


class HbmState(Enum):
    """See the module. READY: some of the memory is there, the rest may follow."""

    STARTING = "starting"
    READY = "ready"
    OFF = "off"


class HbmTier:
    """See the module. Owned by the event loop.

    Args:
        movers: threads of its own: a device that hangs must not hold up the others.
    """

    def __init__(
        self,
        state: State,
        sessions: Sessions,
        endings: Endings,
        room: Room,
        medium: HbmMedium,
        movers: Movers,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._endings = endings
        self._room = room
        self.medium = medium
        self.movers = movers
        self.state = HbmState.STARTING
        self.reason = "memory is being allocated"
        self.segment_ids = [0] * medium.segment_count
        """Wire id of each segment's present memory, by segment index."""
        self._mapped_by: list[set[int]] = [set() for _ in range(medium.segment_count)]
        """Processes that were given the segment's handle, by pid."""
        self._former_tenant: list[str | None] = [None] * medium.segment_count
        """Whose bytes the segment's memory may hold."""
        self._renewing: set[int] = set()
        self.hungry: dict[int, None] = {}
        """Pools that got less than they asked for, in order."""

    # -- who may read --------------------------------------------------------------------------

    def serves(self, session: Session) -> bool:
        """Whether the session can be given extents here: it can open the device, and its death be seen."""
        return (
            self.state is HbmState.READY and session.pid > 0 and self.medium.uuid in session.readable_devices
        )

    def device_segments(self, session: Session, extents: Iterable[Extent]) -> tuple[DeviceSegment, ...]:
        """How the session opens the segments that extents lie in; it may have them open from now on."""
        found = {}
        for extent in extents:
            if extent.tier is Tier.HBM and extent.segment_id not in found:
                segment = self.segment_ids.index(extent.segment_id)
                self._mapped_by[segment].add(session.pid)
                found[extent.segment_id] = DeviceSegment(
                    extent.segment_id,
                    self.medium.handle(segment),
                    self.medium.uuid,
                    self.medium.segment_bytes,
                )
        return tuple(found.values())

    def _open_elsewhere(self, segment: int) -> bool:
        """Whether a living process may have the segment's memory open; the dead are forgotten."""
        self._mapped_by[segment] &= self._sessions.living_pids()
        return bool(self._mapped_by[segment])

    # -- slots ---------------------------------------------------------------------------------

    def allocate_below(self, above: int, pool: int, count: int, evictable: Evictable | None = None) -> Slots:
        """Up to `count` RESERVED slots for blocks below the row `above`, which making room must not evict.

        Args:
            evictable: what may go for them, where that is less than the catalog lets go.
        """
        if self.state is not HbmState.READY:
            return np.zeros(0, dtype=np.uint32)
        table = self._state.catalog.slots[Tier.HBM]
        guarded = np.zeros(0, dtype=np.uint32)
        if above != NO_ROW:
            slot = self._state.catalog.columns.slot[Tier.HBM][above : above + 1].copy()
            if slot[0] != NO_SLOT and table.state[slot[0]] == SlotState.RESIDENT:
                guarded = slot
        self._state.apply(CopiesLeased(Tier.HBM, guarded))
        try:
            return self._allocate(pool, count, int(guarded[0]) if len(guarded) else None, evictable)
        finally:
            self._state.apply(CopiesReleased(Tier.HBM, guarded))

    def _allocate(self, pool: int, count: int, after: int | None, evictable: Evictable | None) -> Slots:
        table = self._state.catalog.slots[Tier.HBM]
        while table.free_count(pool) < count and self._assign(pool):
            pass
        short = count - table.free_count(pool)
        if short > 0:
            self._room.evict(Tier.HBM, pool, short, evictable=evictable)
        slots = table.allocate(pool, count, after)
        if len(slots) < count and self._pool(pool)[1] <= table.segment_bytes:
            self.hungry[pool] = None
        return slots

    def replaceable(self) -> Evictable:
        """What may go for a copy that is made for speed alone: no block is forgotten for it."""
        catalog = self._state.catalog
        evictable = catalog.evictable(Tier.HBM)

        def count(node: int, limit: int) -> int:
            rows = catalog.tree.tail_rows(Tier.HBM, node, evictable(node, limit))
            return leading(self._kept_elsewhere(rows))

        return count

    def _pool(self, pool: int) -> tuple[str, int]:
        """(tenant, bytes of a slot) of a pool."""
        found = self._state.catalog.namespaces.pool_of(pool)
        return found.tenant, found.slot_bytes

    def _assign(self, pool: int) -> bool:
        """Gives the pool a segment that serves nobody and holds no other tenant's bytes."""
        table = self._state.catalog.slots[Tier.HBM]
        tenant, slot_bytes = self._pool(pool)
        if slot_bytes > table.segment_bytes:
            return False
        if not self._state.quotas.may_grow(self._state.catalog, Tier.HBM, pool):
            return False
        for segment in table.unassigned():
            if (
                self.medium.is_present(segment)
                and segment not in self._renewing
                and self._former_tenant[segment] in {None, tenant}
            ):
                self._former_tenant[segment] = tenant
                table.assign(segment, pool, slot_bytes, self.segment_ids[segment])
                return True
        return False

    # -- segments of others --------------------------------------------------------------------

    async def feed(self) -> None:
        """Gives each hungry pool that has no segment one of another pool, where that costs no block."""
        while self.hungry:
            pool = next(iter(self.hungry))
            del self.hungry[pool]
            if self._state.catalog.slots[Tier.HBM].segment_count_of(pool) == 0:
                await self._free_one_for(pool)

    async def _free_one_for(self, pool: int) -> None:
        table = self._state.catalog.slots[Tier.HBM]
        tenant, _ = self._pool(pool)
        for segment in range(table.segment_count):
            foreign = self._former_tenant[segment] not in {None, tenant}
            if foreign and self._open_elsewhere(segment):
                continue
            if table.pool_of(segment) >= 0 and not self._empty(segment):
                continue
            if not foreign or await self._renew(segment):
                return

    def _empty(self, segment: int) -> bool:
        """Drops the segment's copies when all of their blocks are kept elsewhere, and unassigns it."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.HBM]
        rows = table.rows_in(segment)
        if not table.can_empty(segment) or not self._kept_elsewhere(rows).all():
            return False
        if len(rows):
            self._state.apply(CopiesEvicted(Tier.HBM, rows))
        table.unassign(segment)
        return True

    def _kept_elsewhere(self, rows: Rows) -> np.ndarray:
        catalog = self._state.catalog
        kept = np.zeros(len(rows), dtype=np.bool_)
        for tier, table in catalog.slots.items():
            if tier is not Tier.HBM:
                slots = catalog.columns.slot[tier][rows]
                held = slots != NO_SLOT
                kept[held] |= table.state[slots[held]] == SlotState.RESIDENT
        return kept

    async def _renew(self, segment: int) -> bool:
        """Fresh memory and a new id: no tenant sees another's bytes. Whether there is any."""
        self._renewing.add(segment)
        try:
            await self.movers.run(RenewJob(self.medium, segment))
        except CudaFault as fault:
            log.warning("an HBM segment could not be renewed", segment=segment, reason=str(fault))
            return False
        finally:
            self._renewing.discard(segment)
        self.segment_ids[segment] = self._room.new_segment_id()
        self._former_tenant[segment] = None
        return True

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes the device and its memory, then watches it for ever; ends when cancelled or off."""
        try:
            await self.movers.run(CallJob(self.medium.open))
        except CudaFault as fault:
            await self.turn_off(fault)
            return
        pinning = asyncio.ensure_future(
            self.movers.run(CallJob(partial(self._state.dram.pin_with, self.medium)))
        )
        allocating = asyncio.ensure_future(self._allocate_all())
        try:
            while self.medium.fault is None:
                await asyncio.sleep(TICK_INTERVAL_S)
                await self.feed()
            await self.turn_off(self.medium.fault)
        finally:
            allocating.cancel()
            await asyncio.wait({allocating, pinning})

    async def _allocate_all(self) -> None:
        pause = RETRY_S_MIN
        for segment in range(self.medium.segment_count):
            while not await self._attempt(segment):
                if self.medium.fault is not None:
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S_MAX)
            self.segment_ids[segment] = self._room.new_segment_id()
            self.state = HbmState.READY
        self.reason = ""
        log.info("HBM tier ready", device=self.medium.uuid, bytes=self.medium.allocated_bytes)

    async def _attempt(self, segment: int) -> bool:
        try:
            await self.movers.run(CallJob(partial(self.medium.allocate, segment)))
        except CudaFault as fault:
            self.reason = f"{fault}; tried again" if fault.reason == OUT_OF_MEMORY else str(fault)
            log.warning("HBM memory could not be had", segment=segment, reason=str(fault))
            if fault.reason != OUT_OF_MEMORY:
                self.medium.give_up(fault)
            return False
        return True

    async def turn_off(self, fault: CudaFault) -> None:
        """Drops every copy here; leases on them end as leases do, and nothing is given out any more."""
        log.error("HBM tier is off", reason=str(fault))
        self.state, self.reason = HbmState.OFF, str(fault)
        for lease in list(self._state.leases.writes.values()):
            if lease.tier is Tier.HBM and not lease.quarantined:
                self._endings.quarantine(lease)
        catalog = self._state.catalog
        table = catalog.slots[Tier.HBM]
        while len(slots := table.slots_with_row()):
            slots = slots[table.state[slots] == SlotState.RESIDENT][:DROP_BLOCK_COUNT]
            if len(slots):
                self._drop(table.row[slots])
            # What is still being written ends by itself, and is dropped then.
            await asyncio.sleep(0 if len(slots) else TICK_INTERVAL_S)

    def _drop(self, rows: Rows) -> None:
        kept = self._kept_elsewhere(rows)
        if kept.any():
            self._state.apply(CopiesEvicted(Tier.HBM, rows[kept]))
        if not kept.all():
            self._state.apply(BlocksRemoved(self._state.catalog.closure(rows[~kept])))

    async def close(self) -> None:
        """Gives the memory back but what living processes may have open: the driver sees to that."""
        await self.movers.drain()
        open_elsewhere = frozenset(
            segment for segment in range(self.medium.segment_count) if self._open_elsewhere(segment)
        )
        self.movers.close()
        self._state.dram.unpin()
        self.medium.close(open_elsewhere)

    def stats(self, pools: list[int]) -> TierStats:
        """What the given pools hold here."""
        return replace(
            self._state.catalog.slots[Tier.HBM].stats(Tier.HBM, pools),
            prefaulted_bytes=self.medium.allocated_bytes,
            page_kind="device",
            state=self.state.value,
            state_reason=self.reason,
        )
