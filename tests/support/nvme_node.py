"""A node with a small NVMe tier: starting it, filling it, reading back what fell out of DRAM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from prefixd_server.base.accounts import TierStats
from prefixd_server.base.config import NvmeConfig
from prefixd_server.base.types import LeaseRelease, Tier
from prefixd_server.cache.build import DiskSeams
from prefixd_server.cache.storage import Storage

from tests.support.engine import Engine
from tests.support.node import MIB, Node, block_data, packed, read_blocks, start_node
from tests.support.specs import spec

BLOCK_BYTES = 65_536
NVME = NvmeConfig(size_bytes=64 * MIB, segment_bytes=2 * MIB, retry_pause_s=0.05)


def start(
    data_dir: Path, nvme: NvmeConfig = NVME, disk: DiskSeams | None = None, dram_bytes: int = 8 * MIB
) -> Node:
    """A node whose NVMe tier is ready; close() it."""
    node = start_node(dram_bytes, nvme=nvme, data_dir=data_dir, tenants=("red",), disk=disk)
    node.run(until(lambda: storage_of(node).nvme.health.writable))
    return node


def storage_of(node: Node) -> Storage:
    """The NVMe tier at work."""
    assert node.cache.storage is not None
    return node.cache.storage


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits for a state of the node."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def make_engine(node: Node, instance: str = "one", model: str = "model") -> Engine:
    """An engine of the tenant "red"."""
    ref = node.cache.open_namespace("red", spec(model))
    return Engine(node, node.open_session("red", instance), ref)


def nvme_stats(node: Node) -> TierStats:
    """What the daemon tells of its NVMe tier."""
    return next(stats for stats in node.cache.stats(None).tiers if stats.tier is Tier.NVME)


def stored(node: Node) -> int:
    """Blocks with a copy on NVMe."""
    return node.cache.state.catalog.slots[Tier.NVME].counts().resident


def fill(engine: Engine, runs: int, length: int = 4, name: str = "fill") -> list[list[bytes]]:
    """Puts runs one by one and lets the background copy them down; their hashes."""
    done = []
    for number in range(runs):
        done.append(engine.put((name, number), *range(length)))
        engine.node.clock.advance(0.01)
        engine.node.run(settled(engine.node))
    return done


async def settled(node: Node) -> None:
    """Waits until nothing more is to be demoted."""
    await until(lambda: storage_of(node).scheduler.settled)


def cold(engine: Engine, runs: list[list[bytes]]) -> list[list[bytes]]:
    """Those of the runs that are on NVMe from their first block to their last, and not in DRAM at all."""
    cache = engine.node.cache
    asked = [(hashes, cache.lookup("red", engine.ref, packed(hashes))) for hashes in runs]
    return [hashes for hashes, found in asked if found.hits == ((Tier.NVME, len(hashes)),)]


def read(engine: Engine, hashes: list[bytes]) -> int:
    """Waits for a run, reads it, checks its bytes; blocks read."""
    engine.node.run(engine.node.cache.wait_for("red", engine.ref, packed(hashes), 10.0))
    count = read_now(engine, hashes)
    engine.node.run(settled(engine.node))
    return count


def read_now(engine: Engine, hashes: list[bytes]) -> int:
    """Reads what can be read of a run now, checks its bytes; blocks read."""
    answer = engine.acquire(hashes)
    for part in answer.shard_extents:
        for key, (data, _) in zip(hashes, read_blocks(engine.node, part.extents, BLOCK_BYTES), strict=False):
            assert data == block_data(key, 0, BLOCK_BYTES)
    if answer.lease is not None:
        releases = [LeaseRelease(answer.lease.token)]
        engine.node.run(engine.node.cache.release("red", engine.session.session_id, releases))
    return answer.run.hit_count


def place_of(engine: Engine, key: bytes) -> tuple[int, int]:
    """Segment and slot within it of a block's copy on NVMe."""
    catalog = engine.node.cache.state.catalog
    space = catalog.namespaces.space(catalog.namespaces.get("red", engine.ref), 0, 0)
    row = catalog.find(space, packed([key]))[0]
    slot = int(np.uint32(catalog.columns.slot[Tier.NVME][row]))
    return divmod(slot, catalog.slots[Tier.NVME].stride)
