"""A trace through a modelled node whose requests wait in the engine's queue for a while before they run.

Each request is reported as queued, with its run, `ahead_s` before it asks for it. What is counted
is where its blocks lie at the moment when it asks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from prefixd_server.base.types import Hashes, RequestPhase, Tier, UsageReport
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.traces import Trace

from tests.support.modelled_node import SEGMENT_BYTES, TENANT, ModelledNode

BLOCK_BYTES = 4096
BLOCKS_PER_SEGMENT = SEGMENT_BYTES // BLOCK_BYTES
BLOCK_S = 0.011
"""A block of 512 tokens of an 8B model, 64 MiB, at a drive's 6 GB/s; here it has 4 KiB."""


@dataclass
class Outcome:
    """Blocks of all requests, and bytes of all prefetches.

    dram_blocks: hits in DRAM that no prefetch brought; stored_blocks: hits that were on NVMe when asked for.
    """

    asked_blocks: int = 0
    dram_blocks: int = 0
    brought_in_time_blocks: int = 0
    stored_blocks: int = 0
    brought_bytes: int = 0
    useless_bytes: int = 0

    @property
    def in_time(self) -> float:
        """Of the hits that NVMe had, those that were in DRAM when asked for."""
        return self.brought_in_time_blocks / max(1, self.brought_in_time_blocks + self.stored_blocks)

    @property
    def useless(self) -> float:
        """Of the bytes that were brought, those that nobody asked for in time."""
        return self.useless_bytes / max(1, self.brought_bytes)


class QueuedTrace:
    """See the module; close() it.

    Args:
        ahead_s: how long each request waits in the queue; 0 tells nobody of it.
    """

    def __init__(
        self, trace: Trace, data_dir: Path, dram_segments: int, nvme_segments: int, ahead_s: float
    ) -> None:
        self._trace = trace
        self._ahead_s = ahead_s
        self._hashes = trace.hashes()
        self._serving = ServingModel()
        self.node = ModelledNode(
            data_dir,
            dram_segments * SEGMENT_BYTES,
            nvme_segments * SEGMENT_BYTES,
            BLOCK_BYTES / BLOCK_S,
            BLOCK_BYTES,
            policy="importance",
        )
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Replays everything."""
        self.node.run(self._run())
        counters = self.node.cache.prefetching.holds.counters
        self.outcome.brought_bytes = counters.brought_bytes
        self.outcome.useless_bytes = counters.useless_bytes
        return self.outcome

    def close(self) -> None:
        """Gives everything back."""
        self.node.close()

    async def _run(self) -> None:
        started = self.node.loop.time()
        tasks = []
        for request, arrival in enumerate(self._trace.arrival_s.tolist()):
            delay = started + arrival - self.node.loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.ensure_future(self._live(request)))
            await asyncio.sleep(0)
            self.node.cache.raise_if_broken()
        await asyncio.gather(*tasks)

    async def _live(self, request: int) -> None:
        run = self._hashes[self._trace.run(request)]
        if len(run) == 0:
            return
        name = str(request)
        if self._ahead_s:
            self.node.report(UsageReport(self.node.ref, name, RequestPhase.QUEUED, hashes=run))
        await asyncio.sleep(self._ahead_s)
        hit = self._count(run)
        await self.node.cache.wait_for(TENANT, self.node.ref, run, 10.0)
        first = self.node.acquire(run, name)
        self.node.store(run)
        leases = [first, self.node.acquire(run, name)]
        output = int(self._trace.output_tokens[request])
        missed = max(0.0, float(self._trace.input_tokens[request]) - hit * self._trace.block_tokens)
        await asyncio.sleep(self._serving.reply_s(missed, float(output)))
        stop = self._trace.stops[request]
        self.node.report(
            UsageReport(
                self.node.ref, name, RequestPhase.FINISHED, output_token_count=output, stop_reason=stop
            )
        )
        await self.node.release(*leases)

    def _count(self, run: Hashes) -> int:
        """Where the run's blocks are now."""
        hits = dict.fromkeys(Tier, 0)
        for tier, count in self.node.cache.lookup(TENANT, self.node.ref, run).hits:
            hits[tier] += count
        brought = min(hits[Tier.DRAM], self._waiting_for(run))
        outcome = self.outcome
        outcome.asked_blocks += len(run)
        outcome.stored_blocks += hits[Tier.NVME]
        outcome.brought_in_time_blocks += brought
        outcome.dram_blocks += hits[Tier.DRAM] - brought
        return hits[Tier.DRAM] + hits[Tier.NVME]

    def _waiting_for(self, run: Hashes) -> int:
        """Blocks of the run that a prefetch has brought and nobody has used yet."""
        cache = self.node.cache
        catalog = cache.state.catalog
        namespace = catalog.namespaces.get(TENANT, self.node.ref)
        rows = catalog.find(catalog.namespaces.space(namespace, 0, 0), run)
        slots = catalog.columns.slot[Tier.DRAM][rows[rows >= 0]]
        return cache.prefetching.holds.unused_count(slots)
