"""The NVMe tier in the node: demotion ahead of need, promotion on demand, recovery after a restart."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefixd_server.base.config import NvmeConfig
from prefixd_server.base.config_tenants import TenantConfig
from prefixd_server.base.types import Tier
from prefixd_server.cache.build import DiskSeams

from tests.support.engine import Engine
from tests.support.faulty_files import FaultyFiles
from tests.support.node import MIB, Node, chain, packed
from tests.support.nvme_node import (
    BLOCK_BYTES,
    fill,
    make_engine,
    place_of,
    read,
    start,
    storage_of,
    stored,
    until,
)
from tests.support.specs import spec

SMALL = NvmeConfig(size_bytes=32 * MIB, segment_bytes=2 * MIB)
POOL = 0
"""Of the one tenant and block size."""


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def node(data_dir: Path) -> Iterator[Node]:
    started = start(data_dir)
    yield started
    assert started.cache.check() == []
    started.close()


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


def test_two_who_need_a_segment_do_not_outdate_each_others_records(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(data_dir, NvmeConfig(size_bytes=64 * MIB, segment_bytes=2 * MIB))
    nvme, catalog = storage_of(node).nvme, node.cache.state.catalog
    pool = catalog.namespaces.pool("red", BLOCK_BYTES)
    raised: list[int] = []
    raise_generation = nvme.medium.raise_generation

    def counted(segment: int, slot_bytes: int) -> int:
        raised.append(segment)
        return raise_generation(segment, slot_bytes)

    monkeypatch.setattr(nvme.medium, "raise_generation", counted)

    async def allocate(count: int) -> None:
        found = await asyncio.gather(*(nvme.allocate(pool, [(count, 1.0)], count) for _ in range(2)))
        assert [len(slots) for slots in found] == [count, count]
        catalog.slots[Tier.NVME].free(np.concatenate(found))

    node.run(allocate(10))
    assert len(raised) == 1, "one segment is enough for both"
    node.run(allocate(20))
    assert len(raised) == len(set(raised)) == 2
    node.close()


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


def test_what_a_dropped_namespace_had_in_line_leaves_it_in_a_pool_that_is_empty_now(node: Node) -> None:
    engine, line = make_engine(node), node.cache.room.next_to_go
    assert line is not None
    fill(engine, 60)
    assert line.block_count(POOL) > 0
    node.run(node.cache.drop_namespace("red", engine.ref))
    node.settle()
    node.run(until(lambda: line.block_count(POOL) == 0))


def test_a_full_nvme_tier_makes_room_and_stays_whole(data_dir: Path) -> None:
    node = start(data_dir, SMALL)
    engine = make_engine(node)
    fill(engine, 150)
    table = node.cache.state.catalog.slots[Tier.NVME]
    assert table.counts().total <= 8 * 32
    assert node.cache.check() == []
    node.close()


def dropped_after_filling_all(node: Node) -> None:
    """A model took all of NVMe, and is gone; every segment still serves blocks of its size."""
    engine, table = make_engine(node), node.cache.state.catalog.slots[Tier.NVME]
    fill(engine, 150)
    assert table.unassigned() == []
    node.run(node.cache.drop_namespace("red", engine.ref))
    node.settle()
    node.run(storage_of(node).nvme.flush_departures())
    assert table.counts().free == table.counts().total > 0


def test_a_model_of_another_block_size_gets_the_room_of_one_that_was_dropped(data_dir: Path) -> None:
    node = start(data_dir, SMALL)
    dropped_after_filling_all(node)
    ref = node.cache.open_namespace("red", spec("larger", block_bytes=2 * BLOCK_BYTES))
    larger = Engine(node, node.open_session("red", "larger"), ref, 2 * BLOCK_BYTES)
    fill(larger, 60)
    kept = stored(node)
    assert kept > 0
    assert node.cache.check() == []
    node.close()
    reopened = start(data_dir, SMALL)
    assert stored(reopened) == kept
    reopened.close()


def test_a_segment_that_could_not_be_given_to_another_size_is_no_longer_the_formers(data_dir: Path) -> None:
    files = FaultyFiles()
    node = start(data_dir, SMALL, DiskSeams(files=files))
    dropped_after_filling_all(node)
    nvme, catalog = storage_of(node).nvme, node.cache.state.catalog
    larger = catalog.namespaces.pool("red", 2 * BLOCK_BYTES)
    files.fail("sync_data", errno.EIO)
    with pytest.raises(OSError, match="error"):
        node.run(nvme.allocate(larger, [(1, 1.0)], 1))
    (between,) = catalog.slots[Tier.NVME].unassigned()
    (slot,) = node.run(nvme.allocate(larger, [(1, 1.0)], 1))
    assert slot // catalog.slots[Tier.NVME].stride == between
    assert node.cache.check() == []
    node.close()


def test_at_its_quota_a_tenant_gets_the_empty_segments_of_its_own_pools_alone(data_dir: Path) -> None:
    node = start(data_dir, SMALL)
    dropped_after_filling_all(node)
    nvme, catalog = storage_of(node).nvme, node.cache.state.catalog
    table = catalog.slots[Tier.NVME]
    blue = TenantConfig(name="blue", nvme_quota_bytes=2 * table.segment_bytes)
    node.cache.state.quotas = replace(node.cache.state.quotas, tenants={"blue": blue})
    small, large = (catalog.namespaces.pool("blue", size) for size in (BLOCK_BYTES, 2 * BLOCK_BYTES))
    slots = node.run(nvme.allocate(small, [(100, 1.0)], 100))
    assert (len(slots), table.segment_count_of(small)) == (64, 2)
    assert len(node.run(nvme.allocate(large, [(1, 1.0)], 1))) == 0
    table.free(slots[:32])
    slots = np.append(slots[32:], node.run(nvme.allocate(large, [(1, 1.0)], 1)))
    assert (table.segment_count_of(small), table.segment_count_of(large)) == (1, 1)
    table.free(slots)
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
    segment, position = place_of(engine, cold[1])
    storage_of(node).nvme.medium.write(segment, position * 65_536, memoryview(bytes(4096)))
    assert read(engine, cold) == 1
    assert node.cache.stats("red").counters.bad == 1
    assert engine.hits(cold) == 1


def test_a_chain_keeps_its_order_in_the_tiers(node: Node) -> None:
    engine = make_engine(node)
    hashes = engine.put("long", *range(100))
    fill(engine, 40)
    hits = node.cache.lookup("red", engine.ref, packed(hashes)).hits
    assert sum(count for _, count in hits) == len(hashes) == len(chain("long", *range(100)))
