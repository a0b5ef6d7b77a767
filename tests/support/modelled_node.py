"""A whole cache floor on virtual time, over one slow drive: copies take the drive's time and move nothing.

Slots hold what they held, so nothing is read: what is watched is when blocks are where.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from prefixd_server.base.config import (
    Config,
    DramConfig,
    LeaseConfig,
    MigrationConfig,
    NvmeConfig,
    PolicyConfig,
    ServerConfig,
)
from prefixd_server.base.types import HASH_WORDS, Acquired, Hashes, LeaseRelease, UsageReport
from prefixd_server.cache.build import DiskSeams, build_cache
from prefixd_server.cache.cache import Cache
from prefixd_server.media.movers import CopyJob, CopyResult, Job, Movers

from tests.support.modelled_storage import ImmediateIndex
from tests.support.specs import spec
from tests.support.virtual_time import LoopClock, VirtualLoop

R = TypeVar("R")
MIB = 1 << 20
SEGMENT_BYTES = 8 * MIB
FILE_BYTES = SEGMENT_BYTES + 8192
INDEX_SHARE = 32
LATENCY_S = 0.0
TENANT = "red"
TTL_S = 3600.0


def run_of(number: int, length: int) -> Hashes:
    """Prefix hashes of a run that shares nothing with those of other numbers, shape (length, 4)."""
    first = (number << 20) + 1
    words = np.arange(first, first + length * HASH_WORDS, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15)).reshape(length, HASH_WORDS)


class SlowDrive(Movers):
    """One queue for reads and writes, served in order; every other job takes no time.

    Args:
        bytes_per_s: of the drive.
    """

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(thread_count=0, queue_limit=0)
        self._bytes_per_s = bytes_per_s
        self._queue = asyncio.Lock()

    async def run(self, job: Job[R]) -> R:
        """See Movers."""
        return await asyncio.shield(asyncio.ensure_future(self._serve(job)))

    async def _serve(self, job: Job[R]) -> R:
        if not isinstance(job, CopyJob):
            return job.perform()
        async with self._queue:
            await asyncio.sleep(LATENCY_S + len(job.checksums) * job.stride_bytes / self._bytes_per_s)
        return cast(R, CopyResult(np.zeros(len(job.checksums), dtype=np.bool_)))


class ModelledNode:
    """See the module; close() it.

    Args:
        dram_bytes, nvme_bytes: multiples of SEGMENT_BYTES; what the index needs comes on top.
        bytes_per_s: of the drive.
    """

    def __init__(
        self,
        data_dir: Path,
        dram_bytes: int,
        nvme_bytes: int,
        bytes_per_s: float,
        block_bytes: int = 65_536,
        migration: MigrationConfig | None = None,
        policy: str = "lru",
    ) -> None:
        self.loop = VirtualLoop()
        files = nvme_bytes // SEGMENT_BYTES * FILE_BYTES
        config = Config(
            dram=DramConfig(size_bytes=dram_bytes, segment_bytes=SEGMENT_BYTES, prefault=False),
            nvme=NvmeConfig(
                size_bytes=files + max(16 * MIB, files // (INDEX_SHARE - 1) + MIB),
                segment_bytes=SEGMENT_BYTES,
                latency_max_s=600.0,
            ),
            leases=LeaseConfig(ttl_max_s=TTL_S),
            policy=PolicyConfig(name=policy),
            migration=migration or MigrationConfig(),
            server=ServerConfig(data_dir=data_dir, tenant=TENANT),
        )
        self.cache = self.run(self._start(config, bytes_per_s))
        self.ref = self.cache.open_namespace(TENANT, spec(block_bytes=block_bytes))
        self.session = self.cache.sessions.open(TENANT, "one", "test", "0.1.0", 0, True)
        self.cache.companions.attach(self.session.session_id, TENANT, 1001, 0)

    async def _start(self, config: Config, bytes_per_s: float) -> Cache:
        drive = SlowDrive(bytes_per_s)
        cache = build_cache(config, LoopClock(self.loop), drive, 1, DiskSeams(movers=drive))
        assert cache.storage is not None
        tier = cache.storage.nvme
        tier.index = ImmediateIndex(tier.medium.index_directory, tier.medium.store_uuid)
        cache.start()
        while not tier.health.writable:
            await asyncio.sleep(0.01)
        return cache

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine to its end, in virtual time."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        """Gives everything back; the books must balance."""
        problems = self.cache.check()
        self.run(self.cache.stop())
        self.loop.close()
        assert problems == []

    # -- what an engine does ---------------------------------------------------------------------------

    def store(self, run: Hashes) -> int:
        """Stores what of a run is not kept, as far as there is room; blocks stored."""
        ids = (TENANT, self.session.session_id)
        reserved = self.cache.reserve(*ids, self.ref, 0, 0, None, run, None)
        if reserved.lease is None:
            return 0
        count = sum(extent.block_count for extent in reserved.extents)
        self.cache.commit(*ids, reserved.lease.token, 0, np.zeros(count, dtype=np.uint64))
        return count

    def acquire(self, run: Hashes, request_id: str = "") -> Acquired:
        """Leases what can be read of a run."""
        return self.cache.acquire(
            TENANT, self.session.session_id, self.ref, run, 0, (), None, request_id=request_id
        )

    async def release(self, *answers: Acquired) -> None:
        """Ends leases."""
        releases = [LeaseRelease(answer.lease.token) for answer in answers if answer.lease]
        if releases:
            await self.cache.release(TENANT, self.session.session_id, releases)

    async def read(self, run: Hashes, max_wait_s: float = 10.0) -> int:
        """Waits for a run and leases it for a moment; blocks that hit."""
        await self.cache.wait_for(TENANT, self.ref, run, max_wait_s)
        answer = self.acquire(run)
        await self.release(answer)
        return answer.run.hit_count

    def report(self, report: UsageReport) -> None:
        """Tells of a request."""
        self.cache.report_usage(TENANT, self.session.session_id, [report])
