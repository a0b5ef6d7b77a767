"""The NVMe tier at work: recovery first, then the background tasks, as one thing that the cache starts."""

from __future__ import annotations

import asyncio

import structlog

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.types import Tier
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.recovery import Recovery
from prefixd_server.cache.scheduler import Scheduler
from prefixd_server.cache.state import State
from prefixd_server.cache.transfers import Transfers

log = structlog.get_logger(__name__)


class Storage:
    """See the module."""

    def __init__(
        self, state: State, nvme: NvmeTier, transfers: Transfers, epochs: Epochs, scheduler: Scheduler
    ) -> None:
        self._state = state
        self.nvme = nvme
        self.transfers = transfers
        self.recovery = Recovery(state, nvme, epochs)
        self.scheduler = scheduler

    async def run(self) -> None:
        """Recovers, then works for ever; ends when cancelled, or when the index is refused."""
        try:
            await self.recovery.run()
        except ConfigError as refusal:
            self.nvme.health.refuse(refusal)
            return
        await asyncio.gather(self.nvme.run(), self.nvme.health.run(), self.scheduler.run())

    async def hand_over(self) -> bool:
        """close(), while the daemon goes on: from now on the tier is as good as away."""
        self.nvme.health.hand_over()
        self.transfers.hurry()
        return await self.close()

    async def close(self) -> bool:
        """Lets what is under way arrive, then closes index and files: no mover may write to a closed one.

        Returns:
            Whether all of it arrived. A disk that hangs is left as it is, and so must be the memory
            that it writes to: the end of the process takes both.
        """
        disk = self._state.movers_of(Tier.NVME)
        try:
            async with asyncio.timeout(self._state.drain_timeout_s):
                await self.transfers.drain()
                await disk.drain()
        except TimeoutError:
            log.warning("the NVMe disk hangs and is left as it is", waited_s=self._state.drain_timeout_s)
            await self.nvme.index.close()
            return False
        disk.close()
        await self.nvme.close()
        return True
