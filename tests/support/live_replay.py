"""A trace through the whole cache floor on virtual time, as one engine would send it.

Each request acquires its run, waits for what is stored below DRAM, stores what it
missed, holds all of it until its reply has ended, and reports that end: what
`prefixd simulate` models in tier mode. Blocks are of 4 KiB and hold zeros.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash
from prefixd_server.base.config import (
    Config,
    DramConfig,
    LeaseConfig,
    NvmeConfig,
    PolicyConfig,
    ServerConfig,
)
from prefixd_server.base.types import LeaseRelease, RequestPhase, StopReason, Tier, UsageReport
from prefixd_server.cache.build import build_cache
from prefixd_server.cache.cache import Cache
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.policies import TREE
from prefixd_server.simulate.tiers import TierReplay
from prefixd_server.simulate.traces import Trace

from tests.support.modelled_storage import ImmediateIndex, ModelledMovers
from tests.support.specs import spec
from tests.support.virtual_time import LoopClock, VirtualLoop

BLOCK_BYTES = 4096
SEGMENT_BYTES = 2 << 20
SLOTS_PER_SEGMENT = SEGMENT_BYTES // BLOCK_BYTES
_INDEX_BYTES = 16 << 20
_FILE_BYTES = SEGMENT_BYTES + 8192
_ZEROS = xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES))
_MAX_WAIT_S = 10.0
_TTL_S = 3600.0


class LiveReplay:
    """See the module.

    Args:
        dram_segments, nvme_segments: of SLOTS_PER_SEGMENT blocks each; no NVMe tier for 0.
    """

    def __init__(
        self, trace: Trace, data_dir: Path, dram_segments: int, nvme_segments: int, policy: str, seed: int = 1
    ) -> None:
        self.trace = trace
        self.loop = VirtualLoop()
        self.serving = ServingModel()
        self.hit_blocks = dict.fromkeys((Tier.DRAM, Tier.NVME), 0)
        self._hashes = trace.hashes()
        nvme = NvmeConfig(segment_bytes=SEGMENT_BYTES)
        if nvme_segments:
            size = max(32 << 20, _INDEX_BYTES + nvme_segments * _FILE_BYTES)
            nvme = NvmeConfig(size_bytes=size, segment_bytes=SEGMENT_BYTES)
        self._config = Config(
            dram=DramConfig(
                size_bytes=dram_segments * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES, prefault=False
            ),
            nvme=nvme,
            leases=LeaseConfig(ttl_max_s=_TTL_S),
            policy=PolicyConfig(name=policy),
            server=ServerConfig(data_dir=data_dir, tenant="red"),
        )
        self.cache = self.loop.run_until_complete(self._start(seed))
        self.ref = self.cache.open_namespace("red", spec(block_bytes=BLOCK_BYTES))
        session = self.cache.sessions.open("red", "one", "test", "0.1.0", 0, True)
        self.cache.companions.attach(session.session_id, "red", 1001, 0)
        self.session_id = session.session_id

    async def _start(self, seed: int) -> Cache:
        movers = ModelledMovers()
        cache = build_cache(self._config, LoopClock(self.loop), movers, seed)
        if cache.storage is not None:
            tier = cache.storage.nvme
            cache.state.disk = movers
            tier.index = ImmediateIndex(tier.medium.index_directory, tier.medium.store_uuid)
        cache.start()
        return cache

    def run(self) -> dict[Tier, int]:
        """Replays everything; blocks hit by tier."""
        return self.loop.run_until_complete(self._run())

    def close(self) -> None:
        """Gives everything back."""
        self.loop.run_until_complete(self.cache.stop())
        self.loop.close()

    async def _run(self) -> dict[Tier, int]:
        storage = self.cache.storage
        if storage is not None:
            while not storage.nvme.health.writable:
                await asyncio.sleep(0.01)
        started = self.loop.time()
        tasks = []
        for request, arrival in enumerate(self.trace.arrival_s.tolist()):
            delay = started + arrival - self.loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.ensure_future(self._serve(request)))
            # Its first step is taken before the next request comes.
            await asyncio.sleep(0)
            self.cache.raise_if_broken()
        await asyncio.gather(*tasks)
        return self.hit_blocks

    async def _serve(self, request: int) -> None:
        run = self._hashes[self.trace.run(request)]
        name = str(request)
        hit = 0
        if len(run):
            for tier, count in self.cache.lookup("red", self.ref, run).hits:
                self.hit_blocks[tier] += count
                hit += count
            await self.cache.wait_for("red", self.ref, run, _MAX_WAIT_S)
            leases = [self._acquire(run, name)]
            if hit < len(run):
                self._store(run)
                leases.append(self._acquire(run, name))
        missed = max(0.0, float(self.trace.input_tokens[request]) - hit * self.trace.block_tokens)
        output = int(self.trace.output_tokens[request])
        await asyncio.sleep(self.serving.reply_s(missed, float(output)))
        if len(run):
            self._report(name, output, self.trace.stops[request])
            releases = [LeaseRelease(token) for token in leases if token]
            await self.cache.release("red", self.session_id, releases)

    def _acquire(self, run: np.ndarray, name: str) -> bytes:
        answer = self.cache.acquire("red", self.session_id, self.ref, run, 0, (), None, request_id=name)
        return answer.lease.token if answer.lease else b""

    def _store(self, run: np.ndarray) -> None:
        reserved = self.cache.reserve("red", self.session_id, self.ref, 0, 0, None, run, None)
        if reserved.lease is not None:
            count = sum(extent.block_count for extent in reserved.extents)
            sums = np.full(count, _ZEROS, dtype=np.uint64)
            self.cache.commit("red", self.session_id, reserved.lease.token, 0, sums)

    def _report(self, name: str, output: int, stop: StopReason) -> None:
        report = UsageReport(
            self.ref, name, RequestPhase.FINISHED, output_token_count=output, stop_reason=stop
        )
        self.cache.report_usage("red", self.session_id, [report])


@dataclass(frozen=True)
class Agreement:
    """Blocks hit by tier, in percent of those asked for; and what check() found at the end."""

    daemon: dict[Tier, float]
    simulator: dict[Tier, float]
    problems: list[str]


def agreement(
    trace: Trace, data_dir: Path, dram_segments: int, nvme_segments: int, policy: str, seed: int = 1
) -> Agreement:
    """The trace through the daemon's cache floor and through the simulator, with tiers of the same size."""
    live = LiveReplay(trace, data_dir, dram_segments, nvme_segments, policy, seed)
    tables = live.cache.state.catalog.slots
    sizes = {tier: table.segment_count * SLOTS_PER_SEGMENT for tier, table in tables.items()}
    storage = live.cache.storage
    if storage is not None:
        # Blocks as small as these are bounded by the disk space of their records first.
        sizes[Tier.NVME] = min(sizes[Tier.NVME], storage.nvme.block_count_max)
    try:
        hit = live.run()
        problems = live.cache.check()
    finally:
        live.close()
    replay = TierReplay(trace, TREE[policy](trace, sum(sizes.values())), sizes, BLOCK_BYTES, seed)
    replay.run()
    share = 100 / trace.reference_count
    return Agreement(
        {tier: share * hit[tier] for tier in sizes},
        {tier: share * replay.hit_blocks[tier] for tier in sizes},
        problems,
    )


def spread(trace: Trace, width_s: float = 3.0) -> Trace:
    """The trace with arrivals of one timestamp at chance moments, in their order, within so many seconds.

    At equal distances they would lie on the edges of age classes, where the last bit of a time decides.
    """
    arrivals = trace.arrival_s
    first = np.searchsorted(arrivals, arrivals, "left")
    count = np.searchsorted(arrivals, arrivals, "right") - first
    place = np.arange(len(arrivals)) - first + np.random.default_rng(1).random(len(arrivals))
    return replace(trace, arrival_s=arrivals + width_s * place / count)
