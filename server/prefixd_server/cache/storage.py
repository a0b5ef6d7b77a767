"""The NVMe tier at work: recovery first, then the background tasks, as one thing that the cache starts."""

from __future__ import annotations

import asyncio

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.types import Tier
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.recovery import Recovery
from prefixd_server.cache.scheduler import Scheduler
from prefixd_server.cache.state import State
from prefixd_server.cache.transfers import Transfers


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

    async def close(self) -> None:
        """Lets what is under way arrive, then closes index and files: no mover may write to a closed one."""
        await self.transfers.drain()
        disk = self._state.movers_of(Tier.NVME)
        await disk.drain()
        disk.close()
        await self.nvme.close()
