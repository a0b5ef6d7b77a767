"""Demand reads beside migration on one slow drive, and how long they take.

Some runs, more than DRAM holds, are read again and again at random times. Where they are read one
after the other each read is one of NVMe, whatever goes on beside it; where some are read more often
than others, as prefixes are, DRAM serves those that it has room for. What is asked for and when is
always the same. Beside it new runs are stored without end, so that there is always something to demote.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.types import Hashes, Tier

from tests.support.modelled_node import TENANT, ModelledNode, run_of

BLOCK_BYTES = 1 << 20
RUN_BLOCKS = 8
RUN_BYTES = RUN_BLOCKS * BLOCK_BYTES
READ_RUN_COUNT = 64
PUSH_RUN_COUNT = 30
"""Stored after those, so that all of them have left DRAM when the reading begins."""
DRAM_BYTES = 28 * RUN_BYTES
NVME_BYTES = 120 * RUN_BYTES
RATE = 1e9
WARM_UP_S = 1.5
"""A storm is seen for what it is after a while; reads are counted from then on."""
RETRY_S = 0.005
RETRY_COUNT_MAX = 40


@dataclass
class StormResult:
    """Seconds of each read, and what went on beside."""

    seconds: list[float] = field(default_factory=list)
    span_s: float = 0.0
    demoted_bytes: int = 0
    entered_count: int = 0
    reasons: list[str] = field(default_factory=list)
    left: bool = False
    lost_count: int = 0
    """Reads of runs that are nowhere any more: none should be."""

    def percentile(self, share: float) -> float:
        """Of the reads' seconds."""
        return float(np.percentile(self.seconds, share))

    @property
    def reads_per_s(self) -> float:
        """Throughput of demand."""
        return len(self.seconds) / self.span_s


class Storm:
    """See the module.

    Args:
        conservative: setting of conservative mode; "on" keeps all migration off.
        load: of the drive by demand, if all of it were read from there; 1 for all it can do.
        skew: exponent of Zipf's law by which runs are chosen; 0 reads one after the other.
        store_load: of the drive by what is stored, if all of it were demoted.
    """

    def __init__(
        self,
        directory: Path,
        conservative: str,
        load: float,
        skew: float = 0.0,
        seed: int = 7,
        store_load: float = 0.8,
    ) -> None:
        migration = MigrationConfig(conservative="off")
        self.node = ModelledNode(directory, DRAM_BYTES, NVME_BYTES, RATE, BLOCK_BYTES, migration)
        self._conservative = conservative
        self._load = load
        self._skew = skew
        self._store_load = store_load
        self._rng = np.random.default_rng(seed)
        self._next = 0
        self._counts_from = 0.0

    def run(self, read_count: int) -> StormResult:
        """Fills the node, then the storm, then the calm after it."""
        return self.node.run(self._run(read_count))

    def close(self) -> None:
        """Gives everything back."""
        self.node.close()

    def _new_run(self) -> Hashes:
        self._next += 1
        return run_of(self._next, RUN_BLOCKS)

    async def _run(self, read_count: int) -> StormResult:
        runs = [self._new_run() for _ in range(READ_RUN_COUNT)]
        for run in runs + [self._new_run() for _ in range(PUSH_RUN_COUNT)]:
            self.node.store(run)
            await asyncio.sleep(4 * RUN_BYTES / RATE)
        runs = [run for run in runs if self._is_stored(run)]
        mode = self.node.cache.migration.mode
        self.node.cache.migration.set_conservative(type(mode.setting)(self._conservative))
        result = StormResult()
        before = self._demoted_bytes()
        storing = asyncio.ensure_future(self._store())
        watching = asyncio.ensure_future(self._watch(result))
        began = self.node.loop.time()
        self._counts_from = began + WARM_UP_S
        await self._read_all(runs, read_count, result)
        result.span_s = self.node.loop.time() - began
        result.demoted_bytes = self._demoted_bytes() - before
        storing.cancel()
        await asyncio.sleep(10.0)
        watching.cancel()
        for task in (storing, watching):
            with suppress(asyncio.CancelledError):
                await task
        result.entered_count = mode.entered_count
        result.left = not mode.mode.on
        return result

    def _is_stored(self, run: Hashes) -> bool:
        hits = self.node.cache.lookup(TENANT, self.node.ref, run).hits
        return hits == ((Tier.NVME, RUN_BLOCKS),)

    def _demoted_bytes(self) -> int:
        return sum(link.demotion_bytes for link in self.node.cache.migration.traffic().links)

    async def _read_all(self, runs: list[Hashes], count: int, result: StormResult) -> None:
        reads = []
        gaps = self._rng.exponential(RUN_BYTES / RATE / self._load, count)
        for number, gap in zip(self._choices(len(runs), count), gaps, strict=True):
            await asyncio.sleep(gap)
            reads.append(asyncio.ensure_future(self._read(runs[number], result)))
        await asyncio.gather(*reads)

    def _choices(self, run_count: int, count: int) -> list[int]:
        """Which runs are read, in order."""
        if not self._skew:
            return [number % run_count for number in range(count)]
        weights = np.arange(1, run_count + 1, dtype=np.float64) ** -self._skew
        return self._rng.choice(run_count, count, p=weights / weights.sum()).tolist()

    async def _read(self, run: Hashes, result: StormResult) -> None:
        began = self.node.loop.time()
        for _ in range(RETRY_COUNT_MAX):
            if await self.node.read(run, max_wait_s=60.0) == RUN_BLOCKS:
                break
            # DRAM had no room for all of it: demand must be the same whatever goes on beside.
            await asyncio.sleep(RETRY_S)
        else:
            result.lost_count += 1
            return
        if began >= self._counts_from:
            result.seconds.append(self.node.loop.time() - began)

    async def _store(self) -> None:
        while True:
            self.node.store(self._new_run())
            await asyncio.sleep(RUN_BYTES / RATE / self._store_load)

    async def _watch(self, result: StormResult) -> None:
        while True:
            mode = self.node.cache.migration.mode.mode
            if mode.on and mode.reason not in result.reasons:
                result.reasons.append(mode.reason)
            await asyncio.sleep(0.02)


def storm(
    directory: Path, conservative: str, load: float, read_count: int, skew: float = 0.0, seed: int = 7
) -> StormResult:
    """One storm from its beginning to its end."""
    made = Storm(directory, conservative, load, skew, seed)
    try:
        return made.run(read_count)
    finally:
        made.close()
