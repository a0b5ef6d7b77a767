"""Empties a segment for another block size or tenant (DESIGN section 4).

The pool whose least important segment is worth least gives one; of its blocks, those
that the policy would keep are copied into slots of the same pool elsewhere, the rest
are evicted. What another tier has stays there. A segment never changes tenant with its
memory: it is renewed on a mover first. One segment is under way at a time.

A pool that has none gets its first for the asking. For a further one, what it lost for
want of room must be worth clearly more, and the giver must not just have got one: two
pools that are both used come to a rest, and what is taken is not soon taken back.
"""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.errors import PrefixdError
from prefixd_server.base.types import Rows, Slots, SlotState, Tier
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import SegmentsRetiredNotice, Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.worth import segment_worth
from prefixd_server.catalog.columns import PINNED
from prefixd_server.catalog.events import (
    BlocksRemoved,
    CopiesEvicted,
    CopiesLeased,
    CopiesReleased,
    CopyAbandoned,
    CopyReplaced,
)
from prefixd_server.catalog.freeruns import run_edges
from prefixd_server.media.movers import CopyJob, RenewJob

COPY_BLOCK_COUNT_MAX = 64
"""Blocks in one job: a block each would cost the loop more than the copies."""
EVICT_BLOCK_COUNT = 64
"""Blocks evicted in one step of the loop; the policy chooses them."""
DROP_BLOCK_COUNT = 512
"""Copies dropped in one step."""
FORGET_TOP_COUNT = 16
FORGET_BLOCK_COUNT = 32
"""Blocks without another copy that one step begins with, and of each as many with what hangs below it."""
SEGMENT_SAMPLE_COUNT_MAX = 64
"""Segments of a donor that are looked at before one is chosen."""
WORTH_FACTOR = 2.0
"""A pool that has segments gets another's only if what it lost is worth this many times what goes for it."""
KEPT_AT_LEAST_S = 60.0
"""A pool that was given a segment gives none for so long to one that has others: bursts that take turns
would have every segment emptied for each other."""
FIRST_USE_WITHIN_S = 1.0
"""A pool that was given a segment has so long to put its first block there before another may take it:
longer than a declined writer waits until it tries again. Else two newcomers take it in turns for ever."""
STORED_WITHIN_S = 10.0
"""So long NVMe has for taking what goes with a segment of an idle pool. Then it goes all the same."""

NOBODY = ""
"""Former tenant of a segment whose memory is being renewed, or could not be."""

log = structlog.get_logger(__name__)


class Rebalancing:
    """See the module. `run()` is the background task; Room.wake wakes it."""

    def __init__(self, state: State, sessions: Sessions, room: Room) -> None:
        self._state = state
        self._sessions = sessions
        self._room = room
        self.busy = False
        """Whether a segment is under way."""
        self._giving_since: dict[int, float] = {}
        """When a pool was first asked for its next segment, monotonic seconds."""

    async def run(self) -> None:
        """Serves hungry pools for ever; ends when cancelled."""
        while True:
            await self._room.wake.wait()
            self._room.wake.clear()
            while self._room.hungry:
                pool = next(iter(self._room.hungry))
                lost_worth = self._room.hungry.pop(pool)
                if await self.serve(pool, lost_worth):
                    # What it lost meanwhile was for want of this one.
                    self._room.hungry.pop(pool, None)
                else:
                    self._room.refused_at[pool] = self._state.clock.now()

    async def serve(self, pool: int, lost_worth: float) -> bool:
        """Gives the pool one more segment, if another pool's is worth less. Whether it did.

        Movers that are busy and memory that is not to be had are no end: who wants the room asks again.

        Args:
            lost_worth: what the pool lost for want of room, as Room.hungry has it.
        """
        self.busy = True
        try:
            return await self._serve(pool, lost_worth)
        except (PrefixdError, OSError) as error:
            log.warning("no segment could be given; it is tried again", pool=pool, error=str(error))
            return False
        finally:
            self.busy = False

    async def _serve(self, pool: int, lost_worth: float) -> bool:
        room = self._room
        # At its quota, a tenant's pools can have segments of one another alone.
        at_quota = not room.may_grow(pool)
        segment = None if at_quota else self._unassigned()
        if segment is None:
            segment = await self._choose(pool, lost_worth, own_alone=at_quota)
            if segment is None or not await self._empty(segment):
                return False
        tenant = self._state.catalog.namespaces.pool_of(pool).tenant
        former = room.former_tenant[segment]
        if former not in {None, tenant}:
            await self._renew(segment, former)
        room.assign(segment, pool)
        log.info("segment assigned", segment=segment, tenant=tenant, former_tenant=former)
        return True

    def _unassigned(self) -> int | None:
        free = self._state.catalog.slots[Tier.DRAM].unassigned()
        return free[0] if free else None

    async def _renew(self, segment: int, former: str | None) -> None:
        """Fresh memory for another tenant; the former one's clients are told to unmap.

        Raises OSError when there is none, and as Movers.run does.
        """
        retired = SegmentsRetiredNotice((self._room.segment_ids[segment],))
        self._room.former_tenant[segment] = NOBODY
        for session in self._sessions.open_of(former):
            session.notify(retired)
        await self._state.movers.run(RenewJob(self._state.dram, segment))
        self._room.renewed(segment)

    # -- choosing ------------------------------------------------------------------------------

    async def _choose(self, pool: int, lost_worth: float, *, own_alone: bool) -> int | None:
        """The segment to empty for `pool`: of the donor for which one is worth least. A step for each donor.

        Args:
            own_alone: whether only the tenant's other pools may give one.
        """
        table, names = self._state.catalog.slots[Tier.DRAM], self._state.catalog.namespaces
        now = self._state.clock.now()
        candidates = (
            names.pools_of_tenant(names.pool_of(pool).tenant) if own_alone else range(names.pool_count)
        )
        further = table.segment_count_of(pool) > 0
        donors = [p for p in candidates if p != pool and table.segment_count_of(p) > 0]
        donors = [p for p in donors if not self._keeps_its_own(p, now, further=further)]
        worths = []
        for donor in donors:
            worths.append((segment_worth(self._state, donor), donor))
            await asyncio.sleep(0)
        for worth, donor in sorted(worths):
            if further and lost_worth <= WORTH_FACTOR * worth:
                return None
            segment = self._least_used(donor)
            if segment is not None:
                return segment if not further or self._is_stored(donor, segment, now) else None
        return None

    def _is_stored(self, donor: int, segment: int, now: float) -> bool:
        """Whether NVMe has had its chance to take what goes with a segment; if not, it gets it now.

        Who has segments of its own can wait for it: it is refused, and asks again.
        """
        line = self._room.next_to_go
        if line is None:
            return True
        table = self._state.catalog.slots[Tier.DRAM]
        line.giving[donor] = max(0, len(table.rows_in(segment)) - table.free_count(donor))
        since = self._giving_since.setdefault(donor, now)
        if not line.may_give(donor) and now - since < STORED_WITHIN_S:
            return False
        del self._giving_since[donor], line.giving[donor]
        return True

    def _keeps_its_own(self, donor: int, now: float, *, further: bool) -> bool:
        """Whether the donor was given a segment just now, and gives none yet."""
        since = now - self._room.assigned_at.get(donor, -math.inf)
        if further:
            return since < KEPT_AT_LEAST_S
        table = self._state.catalog.slots[Tier.DRAM]
        return since < FIRST_USE_WITHIN_S and table.free_count(donor) == table.slot_count(donor)

    def _least_used(self, donor: int) -> int | None:
        """The donor's segment with the least recently used blocks, among those that can be emptied now."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.DRAM]
        best: tuple[float, int] | None = None
        for segment in table.segments_of(donor)[:SEGMENT_SAMPLE_COUNT_MAX]:
            if table.is_held(segment) or not table.can_empty(segment):
                continue
            rows = table.rows_in(segment)
            used = float(catalog.tree.last_use[catalog.columns.node[rows]].mean()) if len(rows) else 0.0
            if best is None or used < best[0]:
                best = (used, segment)
        return None if best is None else best[1]

    # -- emptying ------------------------------------------------------------------------------

    async def _empty(self, segment: int) -> bool:
        """Empties one segment: evict the least important, copy the rest, drop what finds no place."""
        table = self._state.catalog.slots[Tier.DRAM]
        pool = table.pool_of(segment)
        table.hold(segment)
        try:
            if table.segment_count_of(pool) > 1:
                await self._evict(pool, len(table.rows_in(segment)) - table.free_count(pool))
                await self._relocate(pool, self._movable(segment))
            while self._drop_some(pool, segment):
                await asyncio.sleep(0)
            if not table.is_empty(segment):
                return False
            table.unassign(segment)
        finally:
            table.unhold(segment)
        return True

    async def _evict(self, pool: int, count: int) -> None:
        """Evicts up to `count` blocks of the pool, the policy's choice, some at a time."""
        while count > 0:
            freed = self._room.evict(Tier.DRAM, pool, min(count, EVICT_BLOCK_COUNT))
            if freed == 0:
                return
            count -= freed
            await asyncio.sleep(0)

    def _drop_some(self, pool: int, segment: int) -> bool:
        """One step of dropping what found no place; whether it dropped any. Nothing goes when not all may.

        Where another tier has the block, the copy goes. Where none has, the block does, after what
        hangs below it.
        """
        catalog = self._state.catalog
        table = catalog.slots[Tier.DRAM]
        left = table.rows_in(segment)
        kept = self._kept_elsewhere(left)
        last = left[~kept]
        if len(left) == 0 or not table.can_empty(segment) or catalog.held(last).any():
            return False
        if kept.any():
            going = left[kept][:DROP_BLOCK_COUNT]
            self._state.apply(CopiesEvicted(Tier.DRAM, going))
        else:
            going = self._lowest(last)
            if catalog.held(going).any():
                return False
            self._state.apply(BlocksRemoved(going))
        self._state.counters_of(catalog.namespaces.pool_of(pool).tenant).evicted += len(going)
        return True

    def _kept_elsewhere(self, rows: Rows) -> NDArray[np.bool_]:
        """Which blocks another tier has, so that their copies in DRAM may go: pinned ones stay there."""
        catalog = self._state.catalog
        kept = np.zeros(len(rows), dtype=np.bool_)
        for tier in catalog.slots:
            if tier is not Tier.DRAM:
                kept |= catalog.resident(tier, rows)
        kept &= (catalog.columns.flags[rows] & PINNED) == 0
        return kept

    def _lowest(self, rows: Rows) -> Rows:
        """Some of these blocks and of what hangs below them, closed under descendants."""
        columns, tree = self._state.catalog.columns, self._state.catalog.tree
        tops = rows[~np.isin(columns.parent[rows], rows)]
        deepest = tops[np.argsort(columns.depth[tops])[-FORGET_TOP_COUNT:]]
        parts = [tree.lowest(row, FORGET_BLOCK_COUNT) for row in deepest.tolist()]
        # One may hang below another.
        return np.unique(np.concatenate(parts))

    def _movable(self, segment: int) -> Rows:
        """Rows of the segment with a readable, unleased copy there."""
        table = self._state.catalog.slots[Tier.DRAM]
        rows = table.rows_in(segment)
        slots = self._state.catalog.columns.slot[Tier.DRAM][rows]
        movable: Rows = rows[(table.state[slots] == SlotState.RESIDENT) & (table.leases[slots] == 0)]
        return movable

    async def _relocate(self, pool: int, rows: Rows) -> None:
        """Copies the rows' blocks into free slots of the pool elsewhere, as far as there are any."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.DRAM]
        new = table.allocate(pool, len(rows), None)
        rows = rows[: len(new)]
        old = catalog.columns.slot[Tier.DRAM][rows]
        order = np.argsort(old)
        rows, old = rows[order], old[order]
        self._state.apply(CopiesLeased(Tier.DRAM, old))
        done = 0
        try:
            for first, last in self._pieces(rows, old, new):
                sources, targets, moved = old[first:last], new[first:last], rows[first:last]
                good = await self._copy(moved, sources, targets)
                good &= table.row[sources] == moved
                done = last
                self._state.apply(CopiesReleased(Tier.DRAM, sources))
                if good.any():
                    self._state.apply(CopyReplaced(Tier.DRAM, moved[good], sources[good], targets[good]))
                if not good.all():
                    self._state.apply(CopyAbandoned(Tier.DRAM, targets[~good]))
        finally:
            if done < len(old):
                self._state.apply(CopiesReleased(Tier.DRAM, old[done:]))
                self._state.apply(CopyAbandoned(Tier.DRAM, new[done:]))

    def _pieces(self, rows: Rows, old: Slots, new: Slots) -> list[tuple[int, int]]:
        """(first, end) of what one job can copy: blocks of one space, side by side before and after."""
        catalog = self._state.catalog
        stride = catalog.slots[Tier.DRAM].stride
        spaces = np.flatnonzero(np.diff(catalog.columns.space[rows])) + 1
        every = range(0, len(rows), COPY_BLOCK_COUNT_MAX)
        edges = sorted({*run_edges(old, stride), *run_edges(new, stride), *spaces.tolist(), *every})
        return list(pairwise(edges))

    async def _copy(self, rows: Rows, sources: Slots, targets: Slots) -> NDArray[np.bool_]:
        """One piece from slots to slots, on a mover; which copies are verified."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.DRAM]
        namespace, _, group = catalog.namespaces.owner(int(catalog.columns.space[rows[0]]))
        spec = namespace.spec
        (read,) = table.extents(sources, None)
        (write,) = table.extents(targets, None)
        result = await self._state.movers.run(
            CopyJob(
                source=self._state.dram,
                source_segment_index=table.segment_of(int(sources[0])),
                source_offset_bytes=read.offset_bytes,
                target=self._state.dram,
                target_segment_index=table.segment_of(int(targets[0])),
                target_offset_bytes=write.offset_bytes,
                stride_bytes=read.stride_bytes,
                block_bytes=spec.kv_groups[group].block_bytes,
                checksums=catalog.columns.checksum[rows],
                algorithm=spec.checksum_algorithm,
            )
        )
        return ~result.bad
