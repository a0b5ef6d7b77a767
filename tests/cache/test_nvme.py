"""The NVMe tier in the node: demotion ahead of need, promotion on demand, recovery after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefixd_server.base.config import NvmeConfig
from prefixd_server.base.types import LeaseRelease, Tier

from tests.support.engine import Engine
from tests.support.node import MIB, Node, block_data, chain, packed, read_blocks, start_node
from tests.support.specs import spec

NVME = NvmeConfig(size_bytes=64 * MIB, segment_bytes=2 * MIB, retry_pause_s=0.05)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path


def start(data_dir: Path, nvme: NvmeConfig = NVME) -> Node:
    node = start_node(nvme=nvme, data_dir=data_dir, tenants=("red",))
    storage = node.cache.storage
    assert storage is not None
    node.run(until(lambda: storage.nvme.health.writable))
    return node


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def node(data_dir: Path) -> Iterator[Node]:
    started = start(data_dir)
    yield started
    assert started.cache.check() == []
    started.close()


def make_engine(node: Node, instance: str = "one") -> Engine:
    ref = node.cache.open_namespace("red", spec())
    return Engine(node, node.open_session("red", instance), ref)


def stored(node: Node) -> int:
    return node.cache.state.catalog.slots[Tier.NVME].counts().resident


def fill(engine: Engine, runs: int, length: int = 4) -> list[list[bytes]]:
    """Puts runs one by one and lets the background copy them down; their hashes."""
    done = []
    for number in range(runs):
        done.append(engine.put(("fill", number), *range(length)))
        engine.node.clock.advance(0.01)
        engine.node.run(settled(engine.node))
    return done


async def settled(node: Node) -> None:
    storage = node.cache.storage
    assert storage is not None
    await until(lambda: storage.scheduler.settled)


def read(engine: Engine, hashes: list[bytes]) -> int:
    """Waits for a run, reads it, checks its bytes; blocks read."""
    engine.node.run(engine.node.cache.wait_for("red", engine.ref, packed(hashes), 10.0))
    answer = engine.acquire(hashes)
    for part in answer.shard_extents:
        for key, (data, _) in zip(hashes, read_blocks(engine.node, part.extents, 65_536), strict=False):
            assert data == block_data(key, 0, 65_536)
    if answer.lease is not None:
        engine.node.run(
            engine.node.cache.release("red", engine.session.session_id, [LeaseRelease(answer.lease.token)])
        )
    engine.node.run(settled(engine.node))
    return answer.run.hit_count


def test_what_falls_out_of_dram_is_read_back_from_nvme(node: Node) -> None:
    engine = make_engine(node)
    runs = fill(engine, 60)
    assert node.cache.stats(None).counters.evicted > 0
    assert [read(engine, hashes) for hashes in runs] == [len(hashes) for hashes in runs]


def test_a_restart_recovers_what_was_durable(data_dir: Path) -> None:
    first = start(data_dir)
    runs = fill(make_engine(first), 60)
    kept = stored(first)
    assert kept > 0
    first.close()
    second = start(data_dir)
    assert second.cache.check() == []
    assert stored(second) == kept
    engine = make_engine(second)
    hits = sum(read(engine, hashes) for hashes in runs)
    assert hits == kept
    assert second.cache.check() == []
    second.close()


def test_a_dropped_namespace_stays_dropped_after_a_restart(data_dir: Path) -> None:
    first = start(data_dir)
    engine = make_engine(first)
    runs = fill(engine, 60)
    first.run(first.cache.drop_namespace("red", engine.ref))
    first.close()
    second = start(data_dir)
    again = make_engine(second)
    assert sum(again.hits(hashes) for hashes in runs) == 0
    assert stored(second) == 0
    assert second.cache.check() == []
    second.close()


def test_a_full_nvme_tier_makes_room_and_stays_whole(data_dir: Path) -> None:
    node = start(data_dir, NvmeConfig(size_bytes=32 * MIB, segment_bytes=2 * MIB))
    engine = make_engine(node)
    fill(engine, 150)
    table = node.cache.state.catalog.slots[Tier.NVME]
    assert table.counts().total <= 8 * 32
    assert node.cache.check() == []
    node.close()


def test_the_write_budget_is_never_exceeded(data_dir: Path) -> None:
    node = start(data_dir, NvmeConfig(size_bytes=64 * MIB, segment_bytes=2 * MIB, write_budget_bytes=MIB))
    engine = make_engine(node)
    assert node.cache.storage is not None
    for number in range(200):
        engine.put(("fill", number))
        node.clock.advance(0.01)
        node.run(node.cache.storage.scheduler.tick())
    assert 0 < node.cache.storage.nvme.written_bytes <= MIB
    assert stored(node) == MIB // 65_536
    node.close()


def test_bytes_that_rot_on_nvme_are_a_miss_and_forgotten(node: Node) -> None:
    engine = make_engine(node)
    runs = fill(engine, 60)
    cold = next(h for h in runs if node.cache.lookup("red", engine.ref, packed(h)).hits[0][0] is Tier.NVME)
    catalog = node.cache.state.catalog
    space = catalog.namespaces.space(catalog.namespaces.get("red", engine.ref), 0, 0)
    slot = int(catalog.columns.slot[Tier.NVME][catalog.find(space, packed(cold))[1]])
    storage = node.cache.storage
    assert storage is not None
    segment, position = divmod(slot, catalog.slots[Tier.NVME].stride)
    storage.nvme.medium.write(segment, position * 65_536, memoryview(bytes(4096)))
    assert read(engine, cold) == 1
    assert node.cache.stats("red").counters.bad == 1
    assert engine.hits(cold) == 1


def test_a_chain_keeps_its_order_in_the_tiers(node: Node) -> None:
    engine = make_engine(node)
    hashes = engine.put("long", *range(100))
    fill(engine, 40)
    hits = node.cache.lookup("red", engine.ref, packed(hashes)).hits
    assert sum(count for _, count in hits) == len(hashes) == len(chain("long", *range(100)))
