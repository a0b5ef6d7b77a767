"""Movers and an index for nodes on virtual time: they take the time of a modelled link, and touch no disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar, cast

import numpy as np
from prefixd_server.base.types import Tier
from prefixd_server.index.process import Index, IndexState
from prefixd_server.index.records import Keys, NamespaceRecord, Records
from prefixd_server.media.movers import CopyJob, CopyResult, Job, Movers
from prefixd_server.simulate.links import DRAM_NVME_READ, DRAM_NVME_WRITE, Link

R = TypeVar("R")


class ModelledMovers(Movers):
    """Copies take the time that a modelled link needs, and move nothing: slots hold what they held."""

    def __init__(self) -> None:
        super().__init__(thread_count=0, queue_limit=0)
        self._read = Link("NVMe to DRAM", DRAM_NVME_READ)
        self._write = Link("DRAM to NVMe", DRAM_NVME_WRITE)

    async def run(self, job: Job[R]) -> R:
        """See Movers."""
        if not isinstance(job, CopyJob):
            return job.perform()
        loop = asyncio.get_running_loop()
        link = self._read if job.source.tier is Tier.NVME else self._write
        arrives_at = link.move(len(job.checksums) * job.stride_bytes, loop.time())
        await asyncio.shield(asyncio.sleep(arrives_at - loop.time()))
        return cast(R, CopyResult(np.zeros(len(job.checksums), dtype=np.bool_)))


class ImmediateIndex(Index):
    """An index that is empty at the start, and durable at once."""

    async def start(self) -> IndexState:
        """See Index."""
        self.state = IndexState.READY
        return self.state

    async def ready(self) -> None:
        """See Index."""

    async def commit(
        self,
        puts: Records | None = None,
        deletes: Keys | None = None,
        namespaces: Sequence[NamespaceRecord] = (),
        forgotten: Sequence[bytes] = (),
    ) -> None:
        """See Index."""

    async def namespaces(self) -> AsyncIterator[list[NamespaceRecord]]:
        """See Index."""
        for nothing in cast("list[list[NamespaceRecord]]", []):
            yield nothing

    async def load(self) -> AsyncIterator[Records]:
        """See Index."""
        for nothing in cast("list[Records]", []):
            yield nothing
