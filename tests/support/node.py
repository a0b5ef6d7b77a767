"""A whole cache floor in the test's process: real catalog, memory and movers, a clock that the test moves.

Engines are played by FakeEngine: it opens sessions the way the sockets would,
and reads and writes the segments' real memory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.config import (
    Config,
    DramConfig,
    HbmConfig,
    LeaseConfig,
    MoverConfig,
    NvmeConfig,
    ServerConfig,
    TenantConfig,
)
from prefixd_server.base.types import Extent, Hashes, hashes_from_bytes
from prefixd_server.cache.build import DiskSeams, build_cache
from prefixd_server.cache.cache import Cache
from prefixd_server.cache.sessions import Session
from prefixd_server.media.movers import Movers

MIB = 1 << 20
T = TypeVar("T")


def chain(*parts: object) -> list[bytes]:
    """Chained prefix hashes of a path: one per part."""
    hashes: list[bytes] = []
    above = b"root"
    for part in parts:
        above = hashlib.sha256(above + repr(part).encode()).digest()
        hashes.append(above)
    return hashes


def packed(hashes: list[bytes]) -> Hashes:
    """As the cache floor takes them."""
    return hashes_from_bytes(hashes, 32)


def block_data(key: bytes, shard: int, block_bytes: int) -> bytes:
    """What an honest engine computes for a block: it depends on the prefix and the shard alone."""
    seed = hashlib.sha256(key + bytes([shard])).digest()
    return (seed * (block_bytes // len(seed) + 1))[:block_bytes]


def checksum(data: bytes | memoryview) -> int:
    """XXH3_64."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass
class Node:
    """The cache and its surroundings."""

    cache: Cache
    clock: ManualClock
    loop: asyncio.AbstractEventLoop
    next_pid: int = 1000
    sessions: dict[bytes, Session] = field(default_factory=dict)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something to its end on the node's loop, and the background work that it has caused too."""

        async def quietly() -> T:
            try:
                return await work
            finally:
                await self._quiet()

        return self.loop.run_until_complete(quietly())

    async def _quiet(self) -> None:
        cache = self.cache
        while (
            cache.room.wake.is_set() or cache.room.hungry or cache.rebalancing.busy or cache.room.has_garbage
        ):
            cache.raise_if_broken()
            cache.step()
            await asyncio.sleep(0)

    def view(self, extent: Extent, index: int, block_bytes: int) -> memoryview:
        """The memory of one block of an extent, as an engine's mapping shows it."""
        room = self.cache.room
        segment = room.segment_ids.index(extent.segment_id)
        offset = extent.offset_bytes + index * extent.stride_bytes
        view = self.cache.state.dram.view(segment, offset, block_bytes)
        assert view is not None
        return view

    def open_session(self, tenant: str, instance_id: str, devices: frozenset[str] = frozenset()) -> Session:
        """A session with a companion, of a process of its own, which can open these GPUs' memory."""
        session = self.cache.sessions.open(tenant, instance_id, "test", "0.1.0", 0, True, devices)
        self.next_pid += 1
        self.cache.companions.attach(session.session_id, tenant, self.next_pid, 0)
        return session

    def settle(self) -> None:
        """Housekeeping until nothing of a dropped namespace is left."""
        self.cache.step()
        while self.cache.room.has_garbage:
            self.cache.step()

    def close(self) -> None:
        """Gives everything back."""
        self.loop.run_until_complete(self.cache.stop())
        self.loop.close()


def start_node(
    dram_bytes: int = 8 * MIB,
    segment_bytes: int = 2 * MIB,
    leases: LeaseConfig | None = None,
    tenants: tuple[str | TenantConfig, ...] = (),
    seed: int = 1,
    nvme: NvmeConfig | None = None,
    data_dir: Path | None = None,
    disk: DiskSeams | None = None,
    hbm: HbmConfig | None = None,
    movers: MoverConfig | None = None,
) -> Node:
    """A running cache floor; close() it."""
    loop = asyncio.new_event_loop()
    clock = ManualClock()
    config = Config(
        dram=DramConfig(size_bytes=dram_bytes, segment_bytes=segment_bytes, prefault=False),
        leases=leases or LeaseConfig(ttl_max_s=10.0),
        nvme=nvme or NvmeConfig(),
        hbm=hbm or HbmConfig(),
        movers=movers or MoverConfig(),
        server=ServerConfig(data_dir=data_dir),
        tenants=tuple(TenantConfig(name=tenant) if isinstance(tenant, str) else tenant for tenant in tenants),
    )

    async def build() -> Cache:
        movers = Movers(config.movers.thread_count, config.movers.queue_limit)
        cache = build_cache(config, clock, movers, seed, disk)
        cache.start()
        return cache

    try:
        return Node(loop.run_until_complete(build()), clock, loop)
    except BaseException:
        loop.close()
        raise


def read_blocks(node: Node, extents: tuple[Extent, ...], block_bytes: int) -> list[tuple[bytes, int]]:
    """(bytes, checksum given) of every block of the extents, in run order."""
    blocks = []
    for extent in extents:
        assert extent.checksums is not None
        for index in range(extent.block_count):
            given = int(np.uint64(extent.checksums[index]))
            blocks.append((bytes(node.view(extent, index, block_bytes)), given))
    return blocks


def write_blocks(node: Node, extents: tuple[Extent, ...], datas: list[bytes]) -> None:
    """Writes blocks into reserved extents, in run order."""
    pending = iter(datas)
    for extent in extents:
        for index in range(extent.block_count):
            data = next(pending)
            node.view(extent, index, len(data))[:] = data
