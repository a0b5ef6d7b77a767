"""The HBM tier on the cache floor, over the driver: put, get, promote, demote, evict."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from prefixd_server.base.config import MoverConfig
from prefixd_server.base.types import BadBlock, LeaseRelease, Tier
from prefixd_server.cache.conservative import Setting
from prefixd_server.cache.migration import Migration

from tests.gpu.tier import (
    BLOCK,
    SLOTS_PER_SEGMENT,
    Place,
    data_of,
    device_engine,
    end_all,
    hbm_of,
    release,
    settle,
    share,
    start_device_node,
    tiers_of,
    until,
)
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.node import Node, block_data, chain, packed


@pytest.fixture
def node(machine: FakeCuda) -> Iterator[Node]:
    before = machine.in_use_bytes()
    started = start_device_node()
    yield started
    settle(started)
    assert started.cache.check() == []
    end_all(started)
    started.close()
    assert machine.in_use_bytes() == before


def test_a_run_is_put_into_hbm_and_read_from_it(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abcd")
    reserved = engine.put_there(hashes)
    assert {extent.tier for extent in reserved.extents} == {Tier.HBM}
    acquired = engine.acquire(hashes)
    assert tiers_of(acquired) == [(Tier.HBM, 4)]
    assert engine.read_all(acquired) == [block_data(key, 0, engine.block_bytes) for key in hashes]
    (segment,) = acquired.device_segments
    assert segment.device_uuid == uuid_of(0)
    assert len(segment.ipc_handle) == 64
    assert segment.segment_id == acquired.shard_extents[0].extents[0].segment_id
    release(engine, acquired)


def test_an_engine_without_the_device_never_sees_hbm(node: Node) -> None:
    engine, stranger = device_engine(node), device_engine(node, instance="two", devices=())
    other = device_engine(node, instance="three", devices=(1,))
    hashes = chain(*"abc")
    assert {extent.tier for extent in stranger.reserve_there(chain("x")).extents} == {Tier.DRAM}
    assert {extent.tier for extent in other.reserve_there(chain("y")).extents} == {Tier.DRAM}
    engine.put_there(hashes)
    missed = stranger.acquire(hashes)
    assert (missed.run.hit_count, missed.run.pending_count, missed.lease) == (0, 3, None)
    settle(node)
    found = stranger.acquire(hashes)
    assert tiers_of(found) == [(Tier.DRAM, 3)]
    assert found.device_segments == ()
    assert tiers_of(engine.acquire(hashes)) == [(Tier.HBM, 3)]


def test_waiting_brings_what_hbm_alone_holds_to_those_who_cannot_read_it(node: Node) -> None:
    engine, stranger = device_engine(node), device_engine(node, instance="two", devices=())
    hashes = chain(*"abc")
    engine.put_there(hashes)
    ids = (stranger.tenant, stranger.ref, packed(hashes), 5.0)
    node.run(node.cache.wait_for(*ids, session_id=stranger.session.session_id))
    assert tiers_of(stranger.acquire(hashes)) == [(Tier.DRAM, 3)]


@pytest.mark.parametrize("queue_limit", [30, 1], ids=["roomy", "always full"])
def test_a_run_in_more_pieces_than_the_movers_queue_takes_arrives_whole(
    machine: FakeCuda, queue_limit: int
) -> None:
    node = start_device_node(movers=MoverConfig(queue_limit=queue_limit))
    engine = device_engine(node, block_bytes=BLOCK // 4)
    stranger = device_engine(node, instance="two", devices=(), block_bytes=BLOCK // 4)
    runs = [chain(name, *range(47)) for name in "ab"]
    for count in range(1, 49):
        for run in runs:
            engine.put_there(run[:count])
    ids = (stranger.tenant, stranger.ref, packed(runs[0]), 5.0)
    node.run(node.cache.wait_for(*ids, session_id=stranger.session.session_id))
    found = stranger.acquire(runs[0])
    assert tiers_of(found) == [(Tier.DRAM, 48)]
    assert stranger.read_all(found) == data_of(stranger, runs[0])
    assert node.cache.check() == []
    end_all(node)
    node.close()


def test_what_two_live_requests_share_is_promoted(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abcd")
    engine.put(*"abcd")
    first = engine.acquire(hashes)
    settle(node)
    assert tiers_of(first) == [(Tier.DRAM, 4)]
    second = engine.acquire(hashes)
    settle(node)
    third = engine.acquire(hashes)
    assert tiers_of(third) == [(Tier.HBM, 4)]
    assert engine.read_all(third) == [block_data(key, 0, engine.block_bytes) for key in hashes]
    release(engine, first, second, third)


def test_only_the_shared_head_of_two_runs_is_promoted(node: Node) -> None:
    engine = device_engine(node)
    long, other = engine.put(*"abcd"), engine.put(*"abx")
    node.clock.advance(1000.0)
    first, second = engine.acquire(long), engine.acquire(other)
    settle(node)
    third = engine.acquire(long)
    assert tiers_of(third) == [(Tier.HBM, 2), (Tier.DRAM, 2)]
    release(engine, first, second, third)


def test_what_one_request_used_once_stays_in_dram(node: Node) -> None:
    engine = device_engine(node)
    hashes = engine.put(*"abcd")
    node.clock.advance(1000.0)
    release(engine, engine.acquire(hashes))
    settle(node)
    assert tiers_of(engine.acquire(hashes)) == [(Tier.DRAM, 4)]


def test_a_burst_on_one_prefix_is_promoted_though_no_two_requests_overlap(node: Node) -> None:
    engine = device_engine(node)
    hashes = engine.put(*"abcd")
    node.clock.advance(1.0)
    release(engine, engine.acquire(hashes))
    settle(node)
    assert tiers_of(engine.acquire(hashes)) == [(Tier.HBM, 4)]


def on_loop(node: Node, act: Callable[[], None]) -> None:
    """Acts where time is the loop's."""

    async def once() -> None:
        act()

    node.loop.run_until_complete(once())


HOLDS: dict[str, Callable[[Migration, bool], None]] = {
    "quiet period": lambda migration, on: migration.keep_quiet("one", 600.0 if on else 0.0),
    "conservative mode": lambda migration, on: migration.set_conservative(Setting.ON if on else Setting.AUTO),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_nothing_is_promoted_while_background_copies_may_not_begin(
    node: Node, hold: Callable[[Migration, bool], None]
) -> None:
    engine, hashes = device_engine(node), chain(*"abcd")
    engine.put(*"abcd")
    on_loop(node, lambda: hold(node.cache.migration, True))
    share(engine, hashes)
    held = engine.acquire(hashes)
    assert tiers_of(held) == [(Tier.DRAM, 4)]
    release(engine, held)
    settle(node)
    on_loop(node, lambda: hold(node.cache.migration, False))
    share(engine, hashes)
    assert tiers_of(engine.acquire(hashes)) == [(Tier.HBM, 4)]


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_nothing_goes_down_from_hbm_while_background_copies_may_not_begin(
    node: Node, hold: Callable[[Migration, bool], None]
) -> None:
    engine, dram = device_engine(node), node.cache.state.catalog.slots[Tier.DRAM]
    on_loop(node, lambda: hold(node.cache.migration, True))
    engine.put_there(chain(*range(2 * SLOTS_PER_SEGMENT)))
    share(engine, engine.put("seen by a tick"))
    assert dram.counts().resident == 1
    on_loop(node, lambda: hold(node.cache.migration, False))
    until(node, lambda: dram.counts().resident > 1)


def test_eviction_from_hbm_leaves_the_copies_in_dram(node: Node) -> None:
    engine = device_engine(node)
    runs = [engine.put(number, *range(SLOTS_PER_SEGMENT - 1)) for number in range(3)]
    for run in runs:
        node.clock.advance(100.0)
        share(engine, run)
    table = node.cache.state.catalog.slots[Tier.HBM]
    assert table.counts().resident <= 2 * SLOTS_PER_SEGMENT
    assert all(engine.hits(run) == len(run) for run in runs)
    assert node.cache.check() == []


def test_no_block_is_forgotten_for_one_that_is_promoted(node: Node) -> None:
    engine = device_engine(node)
    shared = engine.put("shared", *range(23))
    alone = [chain(number, *range(7)) for number in range(2 * SLOTS_PER_SEGMENT // 8)]
    for run in alone:
        node.clock.advance(10.0)
        engine.put_there(run)
    assert node.cache.state.catalog.slots[Tier.HBM].counts().free == 0
    for _ in range(3):
        share(engine, shared)
        assert [engine.hits(run) for run in alone] == [8] * len(alone)
    assert tiers_of(engine.acquire(shared)) == [(Tier.HBM, 24)], "what went down has made room"


def test_what_hbm_alone_holds_goes_down_before_it_must_leave(node: Node) -> None:
    engine = device_engine(node)
    runs = [chain(number, *range(SLOTS_PER_SEGMENT - 1)) for number in range(3)]
    for run in runs:
        engine.put_there(run)
        node.clock.advance(10.0)
        until(node, lambda: not hbm_of(node).plan_demotion(0, 0) and hbm_of(node).settled)
    assert sum(engine.hits(run) for run in runs[:2]) == 2 * SLOTS_PER_SEGMENT
    assert node.cache.check() == []


@pytest.mark.parametrize(("count", "fits"), [(48, True), (49, False), (65, False)])
def test_nothing_leaves_hbm_for_a_run_that_would_go_to_dram_all_the_same(
    node: Node, count: int, fits: bool
) -> None:
    engine, table = device_engine(node), node.cache.state.catalog.slots[Tier.HBM]
    on_loop(node, lambda: HOLDS["quiet period"](node.cache.migration, True))
    runs = [chain(number, *range(SLOTS_PER_SEGMENT // 2 - 1)) for number in range(4)]
    for run in runs:
        engine.put_there(run)
    engine.acquire(runs[0])
    assert (table.counts().free, table.counts().resident) == (0, 64)
    reserved = engine.reserve_there(chain("new", *range(count - 1)))
    assert {extent.tier for extent in reserved.extents} == {Tier.HBM if fits else Tier.DRAM}
    assert table.counts().resident == (16 if fits else 64)


def test_a_copy_that_is_bad_in_hbm_is_forgotten_and_dram_serves(node: Node) -> None:
    engine = device_engine(node)
    hashes = engine.put(*"ab")
    share(engine, hashes)
    acquired = engine.acquire(hashes)
    assert tiers_of(acquired) == [(Tier.HBM, 2)]
    extent = acquired.shard_extents[0].extents[0]
    Place(node, extent, 1).write_all(b"\xff" * engine.block_bytes)
    assert acquired.lease is not None
    report = [LeaseRelease(acquired.lease.token, (), (BadBlock(0, 0, 1),))]
    done = node.run(node.cache.release(engine.tenant, engine.session.session_id, report))
    assert done == (1, 1)
    assert tiers_of(engine.acquire(hashes)) == [(Tier.HBM, 1), (Tier.DRAM, 1)]


def test_a_block_that_is_larger_than_a_segment_there_stays_in_dram(machine: FakeCuda) -> None:
    node = start_device_node(dram_bytes=32 << 20, segment_bytes=8 << 20)
    engine = device_engine(node, block_bytes=3 << 20)
    assert {extent.tier for extent in engine.reserve_there(chain("big")).extents} == {Tier.DRAM}
    assert node.cache.check() == []
    end_all(node)
    node.close()
