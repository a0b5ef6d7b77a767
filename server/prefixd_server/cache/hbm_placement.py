"""What goes into HBM and what is kept when it leaves: decided as requests come, carried out tick by tick.

Up: the leading blocks of a run that live requests share (policy/sharing.py), when they are worth more than
what would have to go. They go to the device of the request that made them shared, and stay there: from one
device to another they move only when live requests share them in DRAM while nobody reads them where they are.
Down: blocks that HBM alone holds and would lose next are copied to DRAM first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_SLOT, Hashes, Rows, SlotState, Tier
from prefixd_server.base.work import Errand, Reason, Urgency
from prefixd_server.cache.hbm_device import HbmDevice, HbmState
from prefixd_server.cache.hbm_tier import HbmTier
from prefixd_server.cache.hbm_transfers import HbmTransfers
from prefixd_server.cache.migration import Migration
from prefixd_server.cache.sessions import Session
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import CopiesEvicted
from prefixd_server.policy.placement import Watermarks, demotion_count
from prefixd_server.policy.sharing import LIVE_REQUESTS_MIN, shared_count

TICK_INTERVAL_S = 0.01
WINDOW_S = 60.0
"""How far ahead a use counts: a block that waits longer for its next reader is as well off in DRAM."""
CANDIDATE_COUNT_MAX = 256
"""Runs that wait for their promotion; the oldest are dropped, and come again if they are still shared."""
TRANSFERS_UNDER_WAY_MAX = 4
BATCH_BYTES_MAX = 64 << 20
MARKS = Watermarks(high=0.9, low=0.8)


class HbmPlacement:
    """See the module. Owned by the event loop."""

    def __init__(self, state: State, tier: HbmTier, transfers: HbmTransfers, migration: Migration) -> None:
        self._state = state
        self._table = state.catalog.slots[Tier.HBM]
        self._migration = migration
        self.tier = tier
        self.transfers = transfers
        self._candidates: list[deque[tuple[int, Hashes]]] = [
            deque(maxlen=CANDIDATE_COUNT_MAX) for _ in tier.devices
        ]
        """By device, (space, keys): rows may be other blocks' by the time."""

    def consider(self, session: Session, runs: Iterable[tuple[int, Rows]]) -> None:
        """A request is about to use these hit runs, each of a shard, and has not been counted yet."""
        for shard, rows in runs:
            device = self.tier.device_of_shard(session, shard)
            slots = self._state.catalog.columns.slot[Tier.HBM][rows]
            if device is not None and len(rows) and not self.tier.on((device.number,), slots).all():
                self._consider(rows, device.number)

    def _consider(self, rows: Rows, device: int) -> None:
        catalog = self._state.catalog
        nodes = catalog.columns.node[rows]
        holds = np.ones(len(rows), dtype=np.int64)
        for tier in (Tier.HBM, Tier.DRAM):
            holds += self._leases(tier, rows)
        uses = catalog.tree.use_count[nodes].astype(np.int64) + 1
        gaps = self._state.clock.now() - catalog.tree.last_use[nodes]
        rows = rows[: shared_count(holds, uses, gaps, WINDOW_S)]
        missing = catalog.columns.slot[Tier.HBM][rows] == NO_SLOT
        if (missing | self._movable(rows, device, 1)).any():
            self._candidates[device].append(
                (int(catalog.columns.space[rows[0]]), catalog.columns.key[rows].copy())
            )

    def _leases(self, tier: Tier, rows: Rows) -> NDArray[np.int64]:
        """Leases on the copy of each block in a tier, 0 where it has none."""
        slots = self._state.catalog.columns.slot[tier][rows]
        leases = self._state.catalog.slots[tier].leases.take(slots, mode="clip").astype(np.int64)
        leases[slots == NO_SLOT] = 0
        return leases

    def _movable(self, rows: Rows, device: int, asked_count: int) -> NDArray[np.bool_]:
        """Which blocks lie on another device, read by nobody there, while live requests share them in DRAM.

        Args:
            asked_count: requests for them that hold no lease yet.
        """
        slots = self._state.catalog.columns.slot[Tier.HBM][rows]
        movable: NDArray[np.bool_] = (slots != NO_SLOT) & ~self.tier.on((device,), slots)
        movable &= self._table.state.take(slots, mode="clip") == SlotState.RESIDENT
        movable &= self._leases(Tier.HBM, rows) == 0
        movable &= self._leases(Tier.DRAM, rows) + asked_count >= LIVE_REQUESTS_MIN
        return movable

    # -- the tick ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ticks for ever; ends when cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_INTERVAL_S)

    def tick(self) -> None:
        """Starts what may be under way now."""
        # What is shared is asked for again; what HBM alone holds may be lost, as in any shortage.
        may_begin = self.tier.state is HbmState.READY and self._migration.observe()
        for device in self.tier.devices:
            if may_begin and device.state is HbmState.READY:
                self._tick_device(device)
            else:
                self._candidates[device.number].clear()

    def _tick_device(self, device: HbmDevice) -> None:
        """Room first, then promotions."""
        for pool in range(self._state.catalog.namespaces.pool_count):
            for rows in self.plan_demotion(pool, device.number):
                if self._is_busy(device):
                    return
                self.transfers.demote(rows, Errand(Urgency.DEMOTION, Reason.WATERMARK))
        candidates = self._candidates[device.number]
        while candidates and not self._is_busy(device):
            self._promote(device, *candidates.popleft())

    def _is_busy(self, device: HbmDevice) -> bool:
        return self.transfers.under_way[device.number] >= TRANSFERS_UNDER_WAY_MAX

    @property
    def settled(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return not any(self._candidates) and self.transfers.under_way.total() == 0

    def _promote(self, device: HbmDevice, space: int, keys: Hashes) -> None:
        catalog = self._state.catalog
        rows = catalog.find(space, keys)
        rows = rows[: leading(rows >= 0)]
        movable = self._movable(rows, device.number, 0)
        wanted = movable | (catalog.columns.slot[Tier.HBM][rows] == NO_SLOT)
        rows, movable = rows[wanted], movable[wanted]
        if len(rows) == 0:
            return
        count = max(1, BATCH_BYTES_MAX // catalog.slot_bytes_of_row(int(rows[0])))
        rows, moving = rows[:count], rows[:count][movable[:count]]
        if self._is_worth(device, space, rows):
            if len(moving):
                self._state.apply(CopiesEvicted(Tier.HBM, moving))
            self.transfers.promote(rows, Errand(Urgency.PREFETCH, Reason.HOT), device)

    def _is_worth(self, device: HbmDevice, space: int, rows: Rows) -> bool:
        """Whether there is room, or what would go is kept elsewhere and worth less to the policy."""
        catalog, here = self._state.catalog, device.number
        namespace, _, group = catalog.namespaces.owner(space)
        pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[group].slot_bytes)
        free, total = self._table.free_count(pool, here), self._table.slot_count(pool, here)
        if free >= len(rows) or total == 0 or device.unassigned():
            return True
        now, policy = self._state.clock.now(), self._state.policy
        view = catalog.tree.view(Tier.HBM, pool, device.replaceable(), device=here)
        victims = policy.victims(view, len(rows), now, self._state.rng)
        if not victims:
            return False
        nodes = np.array([node for node, _ in victims], dtype=np.int32)
        own = np.unique(catalog.columns.node[rows])
        return bool(policy.scores(view, own, now).min() > policy.scores(view, nodes, now).max())

    def plan_demotion(self, pool: int, device: int) -> list[Rows]:
        """What HBM alone holds of what would go next from a device: one array a space, parents first."""
        catalog, table = self._state.catalog, self._table
        wanted = demotion_count(table.slot_count(pool, device), table.free_count(pool, device), MARKS)
        if wanted == 0:
            return []
        view = catalog.tree.view(Tier.HBM, pool, catalog.evictable(Tier.HBM, device), device=device)
        chosen: dict[int, dict[int, None]] = {}
        for node, count in self._state.policy.victims(view, wanted, self._state.clock.now(), self._state.rng):
            path = catalog.tree.path(int(catalog.tree.tail_rows(Tier.HBM, node, count, device)[0]))
            alone = np.ones(len(path), dtype=np.bool_)
            for tier in catalog.slots:
                slots = catalog.columns.slot[tier][path]
                alone &= (slots != NO_SLOT) if tier is Tier.HBM else (slots == NO_SLOT)
            if alone.any():
                space = int(catalog.columns.space[path[0]])
                chosen.setdefault(space, {}).update(dict.fromkeys(path[alone].tolist()))
        return [np.array(list(rows), dtype=np.int32) for rows in chosen.values()]

    async def close(self) -> None:
        """Lets what is under way arrive, then gives the memory back."""
        await self.transfers.drain()
        await self.tier.close()
