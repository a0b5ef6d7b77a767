"""A node on virtual time whose disk and index fail at random, from a seed: the same seed, the same story.

The plain model is the hash itself: a block's bytes follow from it, so whatever is
served can be told right from wrong without remembering it. After every step the
node's books must balance.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from prefixd_server.base.config import Config, DramConfig, LeaseConfig, NvmeConfig, ServerConfig, TenantConfig
from prefixd_server.base.types import LeaseRelease, Tier
from prefixd_server.cache.build import DiskSeams, build_cache
from prefixd_server.cache.nvme_health import NvmeState
from prefixd_server.index.process import IndexOptions
from prefixd_server.index.records import KIND_BLOCK
from prefixd_server.media.nvme_format import HEADER_BYTES, segment_name

from tests.support.engine import Engine
from tests.support.faulty_files import DISK_BROKEN, DISK_FULL, FaultyFiles
from tests.support.memory_index import MemoryIndex
from tests.support.node import MIB, Node, block_data, packed, read_blocks
from tests.support.paced_movers import AtOnce, PacedMovers
from tests.support.specs import spec
from tests.support.virtual_time import LoopClock, VirtualLoop

BLOCK_BYTES = 65_536
MODELS = ("one", "two")
NVME = NvmeConfig(size_bytes=32 * MIB, segment_bytes=2 * MIB, retry_pause_s=0.05)
SETTLE_S = 60.0
"""Far more than the longest pause between two probes."""
REMEMBERED_RUNS = 60
RUN_BLOCKS_MAX = 8


@dataclass
class SlowFiles(FaultyFiles):
    """`slow`: the next call takes so many virtual seconds."""

    loop: VirtualLoop | None = None
    slow_s: float = 0.0

    def _step(self, call: str, name: str) -> None:
        assert self.loop is not None
        self.loop.now += self.slow_s
        self.slow_s = 0.0
        super()._step(call, name)


class DiskSimulation:
    """See the module."""

    def __init__(self, data_dir: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loop = VirtualLoop()
        self.loop.set_default_executor(AtOnce())
        self.files = SlowFiles(loop=self.loop)
        self.index = MemoryIndex(self.rng)
        self.data_dir = data_dir
        self.runs: list[tuple[str, list[bytes]]] = []
        self.number = 0
        self.seen: Counter[str] = Counter()
        """What the simulation has come by."""
        self.node: Node

    def run(self, steps: int) -> None:
        """A whole story; AssertionError when something is wrong."""

        async def story() -> None:
            for _ in range(steps):
                await self._step()
                self._check()

        self.tell(story)

    # -- the story -----------------------------------------------------------------------------

    def tell(self, story: Callable[[], Awaitable[None]]) -> None:
        """As run(), with this story in the place of random steps."""
        try:
            self.loop.run_until_complete(self._around(story))
        finally:
            self.loop.close()

    async def _around(self, story: Callable[[], Awaitable[None]]) -> None:
        await self._start()
        await story()
        self._check()
        self.files.forget_plans()
        self.files.replace_sectors()
        await self._heal()
        await self._comes_to(NvmeState.READY)
        await self._forgets_everything()
        await self.node.cache.stop()
        await self._start()
        assert self._kept(Tier.NVME) == 0, "what was deleted is back"
        await self.node.cache.stop()

    async def _start(self) -> None:
        config = Config(
            dram=DramConfig(size_bytes=2 * MIB, segment_bytes=2 * MIB, prefault=False),
            leases=LeaseConfig(ttl_max_s=10.0),
            nvme=NVME,
            server=ServerConfig(data_dir=self.data_dir),
            tenants=(TenantConfig(name="red"),),
        )
        disk = DiskSeams(
            files=self.files,
            movers=PacedMovers(self.rng),
            index_options=IndexOptions(restart_pause_min_s=0.01, restart_pause_max_s=0.2),
            open_index=self.index.open,
        )
        clock = LoopClock(self.loop)
        cache = build_cache(config, clock, PacedMovers(self.rng), 1, disk)
        cache.start()
        self.node = Node(cache, clock, self.loop)
        self.node.next_pid += 1000
        self.engines = {model: self._engine(model) for model in MODELS}
        await self._comes_to(NvmeState.READY)

    def _engine(self, model: str) -> Engine:
        ref = self.node.cache.open_namespace("red", spec(model))
        return Engine(self.node, self.node.open_session("red", model), ref)

    async def _step(self) -> None:
        kinds = {
            self._put: 40,
            self._get: 35,
            self._evict: 5,
            self._drop: 1,
            self._spoil_something: 5,
            self._heal: 10,
            self._reopen: 1,
        }
        await self.rng.choices(list(kinds), list(kinds.values()))[0]()
        await asyncio.sleep(self.rng.choice((0, 0, 0.01, 0.1)))

    # -- engines -------------------------------------------------------------------------------

    async def _put(self) -> None:
        model = self.rng.choice(MODELS)
        self.number += 1
        parts = [self.number, *range(self.rng.randint(0, RUN_BLOCKS_MAX - 1))]
        hashes = self.engines[model].put(model, *parts)
        self.runs = [*self.runs[-REMEMBERED_RUNS + 1 :], (model, hashes)]

    async def _get(self) -> None:
        if self.runs:
            model, hashes = self.rng.choice(self.runs)
            ref = self.engines[model].ref
            stored = self.node.cache.lookup("red", ref, packed(hashes)).hits
            self.seen["block asked for on NVMe"] += sum(count for tier, count in stored if tier is Tier.NVME)
            await self.node.cache.wait_for("red", ref, packed(hashes), self.rng.choice((0.0, 0.05, 1.0)))
            await self._read(model, hashes)

    async def _read(self, model: str, hashes: list[bytes]) -> None:
        engine = self.engines[model]
        answer = engine.acquire(hashes)
        if answer.lease is None:
            return
        for part in answer.shard_extents:
            blocks = read_blocks(self.node, part.extents, BLOCK_BYTES)
            for key, (data, _) in zip(hashes, blocks, strict=False):
                assert data == block_data(key, 0, BLOCK_BYTES), "wrong bytes were served"
                self.seen["block served"] += 1
        releases = [LeaseRelease(answer.lease.token)]
        await self.node.cache.release("red", engine.session.session_id, releases)

    async def _evict(self) -> None:
        if self.runs:
            model, hashes = self.rng.choice(self.runs)
            self.node.cache.evict("red", self.engines[model].ref, packed(hashes), 0)

    async def _drop(self) -> None:
        model = self.rng.choice(MODELS)
        dropped = self.engines[model].ref
        await self.node.cache.drop_namespace("red", dropped)
        self.engines[model] = self._engine(model)
        for other, hashes in self.runs:
            if other == model:
                assert self.engines[model].hits(hashes) == 0, "a dropped block is back"

    # -- the disk ------------------------------------------------------------------------------

    async def _spoil_something(self) -> None:
        call = self.rng.choice(("read_at", "write_at", "sync_data", "allocate"))
        number = self.rng.choice((DISK_BROKEN, DISK_FULL)) if call != "read_at" else DISK_BROKEN
        match self.rng.randrange(8):
            case 0 | 1:
                self.files.fail(call, number, after=self.rng.randint(0, 5), times=self.rng.randint(1, 3))
            case 2:
                self.files.always[call] = number
            case 3:
                self.files.slow_s = 2 * NVME.latency_max_s
            case 4:
                self.index.disk_full = True
                self.files.always["allocate"] = DISK_FULL
            case 5:
                self.index.die_within_commit = True
            case 6:
                self.index.kill()
            case 7:
                name = segment_name(self.rng.randrange(7))
                self.files.spoil(name, HEADER_BYTES + self.rng.randrange(32) * BLOCK_BYTES, BLOCK_BYTES)

    async def _heal(self) -> None:
        """What is wrong with the disk is over; bad sectors stay for a while."""
        self.files.always.clear()
        self.index.disk_full = False
        if self.rng.random() < 0.3:
            self.files.replace_sectors()

    async def _reopen(self) -> None:
        """A restart, also while the disk fails; it is well again when it is opened."""
        await self.node.cache.stop()
        self.files.forget_plans()
        await self._heal()
        await self._start()

    # -- what must hold ------------------------------------------------------------------------

    def _check(self) -> None:
        cache = self.node.cache
        cache.raise_if_broken()
        assert cache.check() == []
        assert cache.storage is not None
        self.seen[cache.storage.nvme.health.state.value] += 1

    async def _comes_to(self, state: NvmeState) -> None:
        storage = self.node.cache.storage
        assert storage is not None
        async with asyncio.timeout(SETTLE_S):
            while storage.nvme.health.state is not state:
                await asyncio.sleep(0.05)

    def _kept(self, tier: Tier) -> int:
        """Slots that are not free."""
        counts = self.node.cache.state.catalog.slots[tier].counts()
        return counts.total - counts.free

    async def _forgets_everything(self) -> None:
        """Evicted, nothing is left: no slot, no lease, no record."""
        cache = self.node.cache
        async with asyncio.timeout(SETTLE_S):
            while self._kept(Tier.DRAM) or self._kept(Tier.NVME):
                for engine in self.engines.values():
                    cache.evict("red", engine.ref, None, 0)
                await asyncio.sleep(0.1)
        assert [table.lease_total() for table in cache.state.catalog.slots.values()] == [0, 0]
        assert self.index.of_kind(KIND_BLOCK) == []
        assert cache.check() == []
