"""What goes into HBM and what is kept when it leaves: decided as requests come, carried out tick by tick.

Up: the leading blocks of a run that live requests share (policy/sharing.py), when they are worth more than
what would have to go. Down: blocks that HBM alone holds and would lose next are copied to DRAM first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import numpy as np
import structlog

from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_SLOT, Hashes, Rows, Tier
from prefixd_server.base.work import Errand, Reason, Urgency
from prefixd_server.cache.hbm_tier import HbmState, HbmTier
from prefixd_server.cache.hbm_transfers import HbmTransfers
from prefixd_server.cache.migration import Migration
from prefixd_server.cache.sessions import Session
from prefixd_server.cache.state import State
from prefixd_server.policy.placement import Watermarks, demotion_count
from prefixd_server.policy.sharing import shared_count

TICK_INTERVAL_S = 0.01
WINDOW_S = 60.0
"""How far ahead a use counts: a block that waits longer for its next reader is as well off in DRAM."""
CANDIDATE_COUNT_MAX = 256
"""Runs that wait for their promotion; the oldest are dropped, and come again if they are still shared."""
TRANSFERS_UNDER_WAY_MAX = 4
BATCH_BYTES_MAX = 64 << 20
MARKS = Watermarks(high=0.9, low=0.8)

log = structlog.get_logger(__name__)


class HbmPlacement:
    """See the module. Owned by the event loop."""

    def __init__(self, state: State, tier: HbmTier, transfers: HbmTransfers, migration: Migration) -> None:
        self._state = state
        self._migration = migration
        self.tier = tier
        self.transfers = transfers
        self._candidates: deque[tuple[int, Hashes]] = deque(maxlen=CANDIDATE_COUNT_MAX)
        """(space, keys): rows may be other blocks' by the time."""

    def serves(self, session: Session) -> bool:
        """See HbmTier.serves."""
        return self.tier.serves(session)

    def consider(self, session: Session, runs: Iterable[Rows]) -> None:
        """A request is about to use these hit runs, and has not been counted yet."""
        if not self.tier.serves(session):
            return
        for rows in runs:
            missing = self._state.catalog.columns.slot[Tier.HBM][rows] == NO_SLOT
            if len(rows) and missing.any():
                self._consider(rows)

    def _consider(self, rows: Rows) -> None:
        catalog = self._state.catalog
        nodes = catalog.columns.node[rows]
        holds = np.ones(len(rows), dtype=np.int64)
        for tier in (Tier.HBM, Tier.DRAM):
            slots = catalog.columns.slot[tier][rows]
            held = slots != NO_SLOT
            holds[held] += catalog.slots[tier].leases[slots[held]]
        uses = catalog.tree.use_count[nodes].astype(np.int64) + 1
        gaps = self._state.clock.now() - catalog.tree.last_use[nodes]
        count = shared_count(holds, uses, gaps, WINDOW_S)
        if count:
            self._candidates.append(
                (int(catalog.columns.space[rows[0]]), catalog.columns.key[rows[:count]].copy())
            )

    # -- the tick ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ticks for ever; ends when cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_INTERVAL_S)

    def tick(self) -> None:
        """Starts what may be under way now: room first, then promotions."""
        if self.tier.state is not HbmState.READY:
            self._candidates.clear()
            return
        if not self._migration.observe():
            # What is shared is asked for again; what HBM alone holds may be lost, as in any shortage.
            self._candidates.clear()
            return
        for pool in range(self._state.catalog.namespaces.pool_count):
            for rows in self.plan_demotion(pool):
                if self.transfers.under_way_count >= TRANSFERS_UNDER_WAY_MAX:
                    return
                self.transfers.demote(rows, Errand(Urgency.DEMOTION, Reason.WATERMARK))
        while self._candidates and self.transfers.under_way_count < TRANSFERS_UNDER_WAY_MAX:
            self._promote(*self._candidates.popleft())

    @property
    def settled(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return not self._candidates and self.transfers.under_way_count == 0

    def _promote(self, space: int, keys: Hashes) -> None:
        catalog = self._state.catalog
        rows = catalog.find(space, keys)
        rows = rows[: leading(rows >= 0)]
        rows = rows[catalog.columns.slot[Tier.HBM][rows] == NO_SLOT]
        rows = (
            rows[: max(1, BATCH_BYTES_MAX // catalog.slot_bytes_of_row(int(rows[0])))] if len(rows) else rows
        )
        if len(rows) and self._is_worth(space, rows):
            self.transfers.promote(rows, Errand(Urgency.PREFETCH, Reason.HOT))

    def _is_worth(self, space: int, rows: Rows) -> bool:
        """Whether there is room, or what would go is kept elsewhere and worth less to the policy."""
        catalog = self._state.catalog
        namespace, _, group = catalog.namespaces.owner(space)
        pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[group].slot_bytes)
        table = catalog.slots[Tier.HBM]
        if table.free_count(pool) >= len(rows) or table.slot_count(pool) == 0 or table.unassigned():
            return True
        now, policy = self._state.clock.now(), self._state.policy
        view = catalog.tree.view(Tier.HBM, pool, self.tier.replaceable())
        victims = policy.victims(view, len(rows), now, self._state.rng)
        if not victims:
            return False
        nodes = np.array([node for node, _ in victims], dtype=np.int32)
        own = np.unique(catalog.columns.node[rows])
        return bool(policy.scores(view, own, now).min() > policy.scores(view, nodes, now).max())

    def plan_demotion(self, pool: int) -> list[Rows]:
        """What HBM alone holds of what would go next: one array a space, parents first."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.HBM]
        wanted = demotion_count(table.slot_count(pool), table.free_count(pool), MARKS)
        if wanted == 0:
            return []
        view = catalog.tree.view(Tier.HBM, pool, catalog.evictable(Tier.HBM))
        chosen: dict[int, dict[int, None]] = {}
        for node, count in self._state.policy.victims(view, wanted, self._state.clock.now(), self._state.rng):
            path = catalog.tree.path(int(catalog.tree.tail_rows(Tier.HBM, node, count)[0]))
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
