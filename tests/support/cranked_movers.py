"""Movers without threads: a job is done when the test cranks it, so that every interleaving can be played."""

from __future__ import annotations

import asyncio

from prefixd_server.media.movers import Movers


class CrankedMovers(Movers):
    """Same interface as Movers, plus the crank."""

    def __init__(self, queue_limit: int = 256) -> None:
        super().__init__(thread_count=0, queue_limit=queue_limit)

    async def crank(self, count: int = 1) -> int:
        """Does up to `count` of the oldest waiting jobs and lets their waiters go on; jobs done."""
        await asyncio.sleep(0)
        done = 0
        while done < count and not self._queue.empty():
            ticket = self._queue.get()
            assert ticket is not None
            self._do(ticket)
            done += 1
        # One step delivers the result, one wakes the shield, one the waiter.
        for _ in range(3):
            await asyncio.sleep(0)
        return done

    async def crank_all(self) -> int:
        """Cranks until nothing waits; jobs done."""
        total = 0
        while done := await self.crank(self.depth or 1):
            total += done
        return total
