"""The HBM tier's life on one device: its memory, its segments, who has them open, and its end.

Memory is allocated in the background, a segment at a time, and again and again where there is none yet: after
a restart the engines of the last boot have ours open for a moment more, and what a segment gives back on its
way to another tenant somebody else may take. A fault of the device turns the tier off there until the next
start: its copies are dropped, blocks with no other are forgotten, everything else goes on, other devices too
(hbm_tier.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.accounts import DeviceStats
from prefixd_server.base.errors import LimitReached
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_ROW, NO_SLOT, DeviceSegment, Rows, Slots, SlotState, Tier
from prefixd_server.base.views import Evictable
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import BlocksRemoved, CopiesEvicted, CopiesLeased, CopiesReleased
from prefixd_server.media.cuda import CudaFault
from prefixd_server.media.hbm_devices import HbmDevices
from prefixd_server.media.movers import CallJob, Job, Movers, RenewJob

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


class HbmDevice:
    """See the module. Owned by the event loop. Its segments are those of the tier from `first` on.

    Args:
        number: of the device in the tier.
        movers: threads of its own: a device that hangs must not hold up the others.
    """

    def __init__(
        self,
        state: State,
        sessions: Sessions,
        endings: Endings,
        room: Room,
        devices: HbmDevices,
        number: int,
        movers: Movers,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._endings = endings
        self._room = room
        self._devices = devices
        self.number = number
        self.medium = medium = devices.media[number]
        self.movers = movers
        self._table = state.catalog.slots[Tier.HBM]
        self._first = self._table.segments_on(number).start
        self.state = HbmState.STARTING
        self.reason = "memory is being allocated"
        self.segment_ids = [0] * medium.segment_count
        """Wire id of each segment's present memory, by segment of the device."""
        self._mapped_by: list[set[int]] = [set() for _ in range(medium.segment_count)]
        """Processes that were given the segment's handle, by pid."""
        self._former_tenant: list[str | None] = [None] * medium.segment_count
        """Whose bytes the segment's memory may hold."""
        self._renewing: set[int] = set()
        """Segments that are being given fresh memory: not to be used before they have their new id."""
        self.hungry: dict[int, None] = {}
        """Pools that got less than they asked for, in order."""

    # -- who may read --------------------------------------------------------------------------

    def serves(self, session: Session) -> bool:
        """Whether the session can be given extents here: it can open the device, and its death be seen."""
        return (
            self.state is HbmState.READY and session.pid > 0 and self.medium.uuid in session.readable_devices
        )

    def opened_by(self, session: Session, segment_id: int) -> DeviceSegment:
        """How the session opens one of our segments; it may have it open from now on."""
        segment = self.segment_ids.index(segment_id)
        self._mapped_by[segment].add(session.pid)
        return DeviceSegment(
            segment_id, self.medium.handle(segment), self.medium.uuid, self.medium.segment_bytes
        )

    def _open_elsewhere(self, segment: int) -> bool:
        """Whether a living process may have the segment's memory open; the dead are forgotten."""
        self._mapped_by[segment] &= self._sessions.living_pids()
        return bool(self._mapped_by[segment])

    # -- slots ---------------------------------------------------------------------------------

    def allocate_below(
        self, above: int, pool: int, count: int, evictable: Evictable | None = None, *, whole: bool = False
    ) -> Slots:
        """Up to `count` RESERVED slots for blocks below the row `above`, which making room must not evict.

        Args:
            evictable: what may go for them, where that is less than the catalog lets go.
            whole: fewer are of no use: nothing goes for them where not enough may.
        """
        if self.state is not HbmState.READY:
            return np.zeros(0, dtype=np.uint32)
        table = self._table
        guarded = np.zeros(0, dtype=np.uint32)
        if above != NO_ROW:
            slot = self._state.catalog.columns.slot[Tier.HBM][above : above + 1].copy()
            if slot[0] != NO_SLOT and table.state[slot[0]] == SlotState.RESIDENT:
                guarded = slot
        self._state.apply(CopiesLeased(Tier.HBM, guarded))
        try:
            may_go = evictable or self._state.catalog.evictable(Tier.HBM, self.number)
            return self._allocate(pool, count, int(guarded[0]) if len(guarded) else None, may_go, whole)
        finally:
            self._state.apply(CopiesReleased(Tier.HBM, guarded))

    def _allocate(self, pool: int, count: int, after: int | None, evictable: Evictable, whole: bool) -> Slots:
        table, here = self._table, self.number
        while table.free_count(pool, here) < count and self._assign(pool):
            pass
        short = count - table.free_count(pool, here)
        if short > 0 and (not whole or self._may_go(pool, short, evictable)):
            self._room.evict(Tier.HBM, pool, short, evictable=evictable, device=here)
        slots = table.allocate(pool, count, after, here)
        if len(slots) < count and self._pool(pool)[1] <= table.segment_bytes:
            self.hungry[pool] = None
        return slots

    def _may_go(self, pool: int, count: int, evictable: Evictable) -> bool:
        """Whether as many of the pool's copies here may go."""
        state = self._state
        view = state.catalog.tree.view(Tier.HBM, pool, evictable, device=self.number)
        victims = state.policy.victims(view, count, state.clock.now(), state.rng)
        return sum(going for _, going in victims) >= count

    def replaceable(self) -> Evictable:
        """What may go for a copy that is made for speed alone: no block is forgotten for it."""
        catalog = self._state.catalog
        evictable = catalog.evictable(Tier.HBM, self.number)

        def count(node: int, limit: int) -> int:
            rows = catalog.tree.tail_rows(Tier.HBM, node, evictable(node, limit), self.number)
            return leading(kept_elsewhere(self._state, rows))

        return count

    def _pool(self, pool: int) -> tuple[str, int]:
        """(tenant, bytes of a slot) of a pool."""
        found = self._state.catalog.namespaces.pool_of(pool)
        return found.tenant, found.slot_bytes

    def _assign(self, pool: int) -> bool:
        """Gives the pool a segment that serves nobody and holds no other tenant's bytes."""
        tenant, slot_bytes = self._pool(pool)
        if slot_bytes > self._table.segment_bytes:
            return False
        if not self._state.quotas.may_grow(self._state.catalog, Tier.HBM, pool):
            return False
        for segment in self.unassigned():
            if (
                self.medium.is_present(segment)
                and segment not in self._renewing
                and self._former_tenant[segment] in {None, tenant}
            ):
                self._former_tenant[segment] = tenant
                self._table.assign(self._first + segment, pool, slot_bytes, self.segment_ids[segment])
                return True
        return False

    def unassigned(self) -> list[int]:
        """Segments of the device that serve nobody."""
        count = self.medium.segment_count
        return [s - self._first for s in self._table.unassigned() if 0 <= s - self._first < count]

    # -- segments of others --------------------------------------------------------------------

    async def feed(self) -> None:
        """Gives each hungry pool that has no segment one of another pool, where that costs no block."""
        while self.hungry:
            pool = next(iter(self.hungry))
            del self.hungry[pool]
            if self._table.slot_count(pool, self.number) == 0:
                await self._free_one_for(pool)

    async def _free_one_for(self, pool: int) -> None:
        tenant, _ = self._pool(pool)
        for segment in filter(self.medium.is_present, range(self.medium.segment_count)):
            foreign = self._former_tenant[segment] not in {None, tenant}
            if foreign and self._open_elsewhere(segment):
                continue
            if self._table.pool_of(self._first + segment) >= 0 and not self._empty(self._first + segment):
                continue
            if foreign:
                await self._attempt(segment, RenewJob(self.medium, segment))
            return

    def _empty(self, segment: int) -> bool:
        """Drops a segment's copies when all of their blocks are kept elsewhere, and unassigns it."""
        rows = self._table.rows_in(segment)
        if not self._table.can_empty(segment) or not kept_elsewhere(self._state, rows).all():
            return False
        if len(rows):
            self._state.apply(CopiesEvicted(Tier.HBM, rows))
        self._table.unassign(segment)
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
            self.movers.run(CallJob(partial(self._state.dram.pin_with, self._devices)))
        )
        allocating = asyncio.ensure_future(self._allocate_all())
        try:
            while self.medium.fault is None:
                await asyncio.sleep(TICK_INTERVAL_S)
                await self.feed()
                if allocating.done() and self._absent():
                    allocating.result()
                    allocating = asyncio.ensure_future(self._allocate_all())
            await self.turn_off(self.medium.fault)
        finally:
            allocating.cancel()
            await asyncio.wait({allocating, pinning})

    async def _allocate_all(self) -> None:
        """Gives every segment memory that has none, at the start and when a renewal found none."""
        pause = RETRY_S_MIN
        while absent := self._absent():
            segment = absent[0]
            had = await self._attempt(segment, CallJob(partial(self.medium.allocate, segment)))
            if self.medium.fault is not None:
                return
            if had:
                self.state = HbmState.READY
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S_MAX)
        self.reason = ""
        log.info("HBM tier ready", device=self.medium.uuid, bytes=self.medium.allocated_bytes)

    def _absent(self) -> list[int]:
        """Segments without memory, but for those that are about to get it."""
        segments = range(self.medium.segment_count)
        return [s for s in segments if not self.medium.is_present(s) and s not in self._renewing]

    async def _attempt(self, segment: int, job: Job[None]) -> bool:
        """Has a mover give the segment fresh memory, with nobody's bytes and a new id; whether it did."""
        self._renewing.add(segment)
        try:
            await self.movers.run(job)
        except (CudaFault, LimitReached) as error:
            log.warning("HBM memory could not be had", device=self.medium.uuid, reason=str(error))
            if isinstance(error, CudaFault) and error.reason != OUT_OF_MEMORY:
                self.medium.give_up(error)
            if not self.medium.is_present(segment):
                self._former_tenant[segment] = None
                self.reason = f"{error}; tried again" if self.medium.fault is None else str(error)
            return False
        finally:
            self._renewing.discard(segment)
        self.segment_ids[segment] = self._room.new_segment_id()
        self._former_tenant[segment] = None
        return True

    async def turn_off(self, fault: CudaFault) -> None:
        """Drops every copy here; leases on them end as leases do, and nothing is given out any more."""
        log.error("HBM tier is off", device=self.medium.uuid, reason=str(fault))
        self.state, self.reason = HbmState.OFF, str(fault)
        table = self._table
        for lease in list(self._state.leases.writes.values()):
            if lease.tier is Tier.HBM and not lease.quarantined and self.has(lease.slots):
                self._endings.quarantine(lease)
        while len(slots := table.slots_with_row(table.segments_on(self.number))):
            slots = slots[table.state[slots] == SlotState.RESIDENT][:DROP_BLOCK_COUNT]
            if len(slots):
                self._drop(table.row[slots])
            # What is still being written ends by itself, and is dropped then.
            await asyncio.sleep(0 if len(slots) else TICK_INTERVAL_S)

    def _drop(self, rows: Rows) -> None:
        kept = kept_elsewhere(self._state, rows)
        if kept.any():
            self._state.apply(CopiesEvicted(Tier.HBM, rows[kept]))
        if not kept.all():
            self._state.apply(BlocksRemoved(self._state.catalog.closure(rows[~kept])))

    def close(self) -> None:
        """Gives the memory back but what living processes may have open: the driver sees to that.

        No copy is under way or begins any more, and host memory is no longer pinned.
        """
        open_elsewhere = frozenset(
            segment for segment in range(self.medium.segment_count) if self._open_elsewhere(segment)
        )
        self.medium.close(open_elsewhere)

    # -- answers -------------------------------------------------------------------------------

    def has(self, slots: Slots) -> bool:
        """Whether slots, all on one device, lie on this one."""
        return int(self._table.devices_of(slots[:1])[0]) == self.number

    def stats(self, pools: Sequence[int]) -> DeviceStats:
        """What the given pools hold here."""
        counts = [self._table.counts(pool, self.number) for pool in pools]
        return DeviceStats(
            uuid=self.medium.uuid,
            capacity_bytes=self.medium.segment_count * self.medium.segment_bytes,
            allocated_bytes=self.medium.allocated_bytes,
            free_slot_count=sum(c.free for c in counts),
            reserved_slot_count=sum(c.reserved for c in counts),
            resident_slot_count=sum(c.resident for c in counts),
            quarantined_slot_count=sum(c.quarantined for c in counts),
            state=self.state.value,
            state_reason=self.reason,
        )


def kept_elsewhere(state: State, rows: Rows) -> NDArray[np.bool_]:
    """Of which blocks another tier has a readable copy."""
    catalog = state.catalog
    kept = np.zeros(len(rows), dtype=np.bool_)
    for tier, table in catalog.slots.items():
        if tier is not Tier.HBM:
            slots = catalog.columns.slot[tier][rows]
            held = slots != NO_SLOT
            kept[held] |= table.state[slots[held]] == SlotState.RESIDENT
    return kept
