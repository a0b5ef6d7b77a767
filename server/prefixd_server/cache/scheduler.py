"""The background tick: copies what DRAM will lose next to NVMe, before it must.

Each tick looks at every pool whose free slots have fallen below the watermark,
asks the policy what would go next, and demotes what NVMe does not have yet,
ancestors first, so that what survives a restart is whole. Eviction then drops
DRAM copies without waiting.
"""

from __future__ import annotations

import asyncio

import numpy as np
import structlog

from prefixd_server.base.errors import PrefixdError
from prefixd_server.base.types import NO_SLOT, Rows, Tier
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.state import State
from prefixd_server.cache.transfers import Transfers

TICK_INTERVAL_S = 0.02
HIGH_WATER_SHARE = 1 / 8
"""Below this share of free slots (and of slots whose blocks NVMe has), a pool's oldest blocks are demoted."""
BATCH_BYTES_MAX = 64 << 20
"""Bytes demoted in one batch: one flush and one index commit for all of it."""

log = structlog.get_logger(__name__)


class Scheduler:
    """See the module."""

    def __init__(self, state: State, nvme: NvmeTier, transfers: Transfers) -> None:
        self._state = state
        self._nvme = nvme
        self._transfers = transfers

    async def run(self) -> None:
        """Ticks for ever; ends when cancelled."""
        while True:
            worked = self._nvme.usable and await self.tick()
            await asyncio.sleep(0 if worked else TICK_INTERVAL_S)

    async def tick(self) -> bool:
        """One round over all pools; whether anything was demoted."""
        worked = False
        for pool in range(self._state.catalog.namespaces.pool_count):
            for rows in self.plan(pool):
                if not self._nvme.usable:
                    return worked
                try:
                    worked |= await self._transfers.demote(rows) > 0
                except PrefixdError as error:
                    log.warning("a demotion was given up", reason=str(error))
        return worked

    def plan(self, pool: int) -> list[Rows]:
        """What to demote now, one array of rows per space, parents first."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.DRAM]
        wanted = int(table.slot_count(pool) * HIGH_WATER_SHARE) - table.free_count(pool)
        if wanted <= 0:
            return []
        slot_bytes = catalog.namespaces.pool_of(pool).slot_bytes
        wanted = min(wanted, max(1, BATCH_BYTES_MAX // slot_bytes))
        view = catalog.tree.view(Tier.DRAM, pool, catalog.evictable(Tier.DRAM))
        victims = self._state.policy.victims(view, wanted, self._state.clock.now(), self._state.rng)
        chosen: dict[int, dict[int, None]] = {}
        for node, count in victims:
            rows = catalog.tree.tail_rows(Tier.DRAM, node, count)
            if (catalog.columns.slot[Tier.NVME][rows] == NO_SLOT).any():
                path = catalog.tree.path(int(rows[0]))
                missing = path[catalog.columns.slot[Tier.NVME][path] == NO_SLOT]
                space = int(catalog.columns.space[rows[0]])
                chosen.setdefault(space, {}).update(dict.fromkeys(missing.tolist()))
        return [np.array(list(rows), dtype=np.int32) for rows in chosen.values()]
