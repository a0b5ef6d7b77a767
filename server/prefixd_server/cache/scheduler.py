"""The background tick: brings what queued requests need, and copies what DRAM will lose next to NVMe.

Each tick first lets the prefetches go on (prefetching.py). Then it looks at every
pool that is above its high-water mark, asks the policy what would go next, and
demotes what NVMe does not have yet, ancestors first, so that what survives a restart
is whole. A few batches are under way at a time: while one waits for the index, the
next is written. Eviction then drops DRAM copies without waiting.
"""

from __future__ import annotations

import asyncio

from prefixd_server.base.types import Rows, Tier
from prefixd_server.cache.migration import DRAM_NVME, Migration
from prefixd_server.cache.next_to_go import NextToGo
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.prefetching import Prefetching
from prefixd_server.cache.state import State
from prefixd_server.cache.transfers import Transfers
from prefixd_server.policy.placement import Watermarks, demotion_count

TICK_INTERVAL_S = 0.01
BATCH_SHARE_MAX = 1 / 8
"""Of a pool that one batch takes: while it is under way its blocks cannot go."""
BATCH_BYTES_MAX = 64 << 20
"""Bytes demoted in one batch: one flush and one index commit for all of it."""
BATCHES_UNDER_WAY_MAX = 3
"""One is written, one recorded, one is about to begin."""


class Scheduler:
    """See the module."""

    def __init__(
        self,
        state: State,
        nvme: NvmeTier,
        transfers: Transfers,
        migration: Migration,
        prefetching: Prefetching,
        next_to_go: NextToGo,
    ) -> None:
        self._state = state
        self._nvme = nvme
        self._transfers = transfers
        self._migration = migration
        self._prefetching = prefetching
        self._next_to_go = next_to_go
        config = migration.config
        self._marks = Watermarks(config.high_water, config.low_water)
        self._demotions: set[asyncio.Task[int]] = set()

    async def run(self) -> None:
        """Ticks for ever; ends when cancelled. What it has begun goes on, and is the transfers' to end."""
        while True:
            self._step()
            worked = False
            if self._demotions:
                done, _ = await asyncio.wait(
                    self._demotions, timeout=TICK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                worked = any(task.result() for task in done)
            if not worked:
                await asyncio.sleep(TICK_INTERVAL_S)

    async def tick(self) -> bool:
        """One round over all pools, to its end; whether anything was demoted."""
        begun = self._step()
        return any([await task > 0 for task in begun])

    def _step(self) -> list[asyncio.Task[int]]:
        """Begins what is due, the requests that wait in engines' queues first; the demotions begun."""
        may_begin = self._migration.observe()
        if self._nvme.health.readable:
            rate = self._migration.governors[DRAM_NVME].bytes_per_s(Tier.NVME.name)
            self._prefetching.bring(may_begin, rate)
        return self._begin_demotions() if may_begin else []

    def _begin_demotions(self) -> list[asyncio.Task[int]]:
        """Starts what is to be demoted now, as many batches as may be under way."""
        begun: list[asyncio.Task[int]] = []
        if not self._nvme.health.writable or len(self._demotions) >= BATCHES_UNDER_WAY_MAX:
            return begun
        for pool in range(self._state.catalog.namespaces.pool_count):
            at_once = self._batch_count(pool)
            for rows in self.plan(pool):
                for first in range(0, len(rows), at_once):
                    if len(self._demotions) >= BATCHES_UNDER_WAY_MAX:
                        return begun
                    batch = rows[first : first + at_once]
                    self._next_to_go.asked(batch)
                    task = self._transfers.begin_demotion(batch)
                    self._demotions.add(task)
                    task.add_done_callback(self._demotions.discard)
                    begun.append(task)
        return begun

    @property
    def settled(self) -> bool:
        """Whether nothing is under way and nothing is to be demoted."""
        pools = range(self._state.catalog.namespaces.pool_count)
        return not self._demotions and not any(self.plan(pool) for pool in pools)

    def plan(self, pool: int) -> list[Rows]:
        """What of the pool is to be demoted and is not under way yet: one array a space, parents first."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.DRAM]
        wanted = demotion_count(table.slot_count(pool), table.free_count(pool), self._marks)
        if table.free_count(pool) < table.slot_count(pool):
            wanted = max(wanted, self._next_to_go.giving.get(pool, 0))
        if wanted <= 0:
            if table.free_count(pool) == table.slot_count(pool):
                # What was dropped with its namespace leaves the line, too: its nodes come to serve others.
                self._next_to_go.clear(pool)
            return []
        self._next_to_go.choose(pool, wanted)
        return self._next_to_go.plan(
            pool, self._transfers.claimed, BATCHES_UNDER_WAY_MAX * self._batch_count(pool)
        )

    def _batch_count(self, pool: int) -> int:
        """Blocks of one batch."""
        catalog = self._state.catalog
        slot_count = catalog.slots[Tier.DRAM].slot_count(pool)
        return batch_count(slot_count, catalog.namespaces.pool_of(pool).slot_bytes)


def batch_count(slot_count: int, slot_bytes: int) -> int:
    """Blocks that are demoted in one batch, of a pool of so many slots."""
    return max(1, min(int(slot_count * BATCH_SHARE_MAX), BATCH_BYTES_MAX // slot_bytes))
