"""Law 5 in HBM: a slot is reused only when nobody can still read or write it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from prefixd_server.base.errors import NotFound, StateConflict
from prefixd_server.base.types import BadBlock, LeaseRelease, SlotState, Tier

from tests.gpu.tier import (
    SLOTS_PER_SEGMENT,
    DeviceEngine,
    device_engine,
    device_of,
    end_all,
    settle,
    start_device_node,
    tiers_of,
)
from tests.support.busy_movers import busy
from tests.support.fake_cuda import FakeCuda
from tests.support.node import Node, chain, packed


@pytest.fixture
def node(machine: FakeCuda) -> Iterator[Node]:
    started = start_device_node(segment_count=1)
    yield started
    settle(started)
    assert started.cache.check() == []
    end_all(started)
    started.close()


def leased(node: Node) -> int:
    """Leases on slots in HBM."""
    return node.cache.state.catalog.slots[Tier.HBM].lease_total()


def quarantined(node: Node) -> int:
    return node.cache.state.catalog.slots[Tier.HBM].counts().quarantined


def release(engine: DeviceEngine, token: bytes) -> tuple[int, int]:
    """The engine's word that it has stopped: (leases found, bad blocks)."""
    ids = (engine.tenant, engine.session.session_id, [LeaseRelease(token)])
    return engine.node.run(engine.node.cache.release(*ids))


def test_slots_of_an_expired_read_wait_for_the_readers_word(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abc")
    engine.put_there(hashes)
    lease = engine.acquire(hashes).lease
    assert lease is not None
    node.clock.advance(11.0)
    node.cache.step()
    assert leased(node) == 3
    assert node.cache.state.quarantined_bytes("red") == 3 * engine.block_bytes
    assert release(engine, lease.token) == (1, 0)
    assert leased(node) == 0
    assert node.cache.state.quarantined_bytes("red") == 0
    assert release(engine, lease.token) == (0, 0)


def test_a_word_counts_though_its_lease_ends_while_a_bad_block_is_verified(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abc")
    engine.put_there(hashes)
    lease = engine.acquire(hashes).lease
    assert lease is not None
    ids = (engine.tenant, engine.session.session_id)
    word = node.cache.release(*ids, [LeaseRelease(lease.token, (), (BadBlock(0, 0, 1),))])

    async def give_it_too_late() -> tuple[int, int]:
        async with busy(device_of(node).movers):
            giving = asyncio.ensure_future(word)
            await asyncio.sleep(0)
            node.clock.advance(11.0)
            node.cache.step()
        return await giving

    assert node.run(give_it_too_late()) == (1, 0)
    assert leased(node) == 0
    assert node.cache.state.quarantined_bytes("red") == 0


def test_slots_of_an_expired_read_wait_for_the_readers_death(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abc")
    engine.put_there(hashes)
    engine.acquire(hashes)
    node.clock.advance(11.0)
    node.cache.step()
    assert leased(node) == 3
    engine.loses_its_connection()
    assert leased(node) == 3
    engine.dies()
    assert leased(node) == 0


def test_a_lost_connection_is_no_proof_and_a_death_is(node: Node) -> None:
    engine, other, hashes = device_engine(node), device_engine(node, instance="two"), chain(*"abc")
    engine.put_there(hashes)
    engine.acquire(hashes)
    engine.loses_its_connection()
    assert leased(node) == 3
    other.dies()
    assert leased(node) == 3
    engine.dies()
    assert leased(node) == 0


def test_death_known_first_frees_at_once(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abc")
    engine.put_there(hashes)
    engine.acquire(hashes)
    engine.dies()
    assert leased(node) == 0


def test_an_orphan_is_let_go_by_nobody_elses_word(node: Node) -> None:
    engine, other, hashes = device_engine(node), device_engine(node, instance="two"), chain(*"ab")
    engine.put_there(hashes)
    lease = engine.acquire(hashes).lease
    assert lease is not None
    node.clock.advance(11.0)
    node.cache.step()
    assert release(other, lease.token) == (0, 0)
    assert leased(node) == 2


def test_an_orphan_is_listed_with_its_holder_until_it_is_let_go(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abc")
    engine.put_there(hashes)
    lease = engine.acquire(hashes).lease
    assert lease is not None
    (live,) = node.cache.list_leases("red")
    assert not live.quarantined
    node.clock.advance(11.0)
    node.cache.step()
    (orphan,) = node.cache.list_leases("red")
    assert orphan == replace(live, quarantined=True, expires_after_s=0.0)
    assert (orphan.pid, orphan.slot_count) == (engine.session.pid, 3)
    assert node.cache.list_leases("blue") == []
    release(engine, lease.token)
    assert node.cache.list_leases("red") == []


def test_an_orphan_is_listed_by_each_process_that_may_still_read(node: Node) -> None:
    engine, hashes = device_engine(node, shard_count=2, tensor_parallel_size=2), chain(*"ab")
    worker = node.open_session("red", "one", engine.session.readable_devices)
    second = replace(engine, session=worker, shard=1)
    engine.put_there(hashes)
    second.put_there(hashes)
    ids = ("red", engine.session.session_id, engine.ref)
    lease = node.cache.acquire(*ids, packed(hashes), 0, (0, 1), None).lease
    assert lease is not None
    node.cache.redeem("red", worker.session_id, lease.token, 1)
    node.clock.advance(11.0)
    node.cache.step()
    listed = {info.pid: (info.open_shards, info.slot_count) for info in node.cache.list_leases("red")}
    assert listed == {engine.session.pid: ((0,), 2), worker.pid: ((1,), 2)}
    second.dies()
    (left,) = node.cache.list_leases("red")
    assert left.pid == engine.session.pid


def test_dram_slots_of_an_expired_read_are_free_at_once(node: Node) -> None:
    engine = device_engine(node)
    hashes = engine.put(*"ab")
    node.clock.advance(1000.0)
    assert tiers_of(engine.acquire(hashes)) == [(Tier.DRAM, 2)]
    node.clock.advance(11.0)
    node.cache.step()
    assert node.cache.state.catalog.slots[Tier.DRAM].lease_total() == 0


def test_orphaned_slots_are_given_to_nobody(node: Node) -> None:
    engine, other = device_engine(node), device_engine(node, instance="two")
    held = chain(*range(SLOTS_PER_SEGMENT // 2))
    engine.put_there(held)
    engine.acquire(held)
    slots = node.cache.state.catalog.slots[Tier.HBM]
    places = np.flatnonzero(slots.leases[: slots.stride])
    node.clock.advance(11.0)
    node.cache.step()
    node.cache.evict(engine.tenant, engine.ref, None, 0)
    for number in range(40):
        reserved = other.reserve_there(chain("other", number, *range(9)))
        assert reserved.lease is not None
        lease = node.cache.state.leases.writes[reserved.lease.token]
        if lease.tier is Tier.HBM:
            assert not set(lease.slots.tolist()) & set(places.tolist())
        node.cache.abort(other.tenant, other.session.session_id, reserved.lease.token)


def test_an_expired_write_quarantines_its_slots_until_the_process_is_dead(node: Node) -> None:
    engine = device_engine(node)
    reserved = engine.reserve_there(chain(*"abc"))
    node.clock.advance(11.0)
    node.cache.step()
    assert quarantined(node) == 3
    assert reserved.lease is not None
    with pytest.raises(StateConflict, match="expired"):
        node.cache.commit("red", engine.session.session_id, reserved.lease.token, 0, np.zeros(3, np.uint64))
    engine.loses_its_connection()
    assert quarantined(node) == 3
    engine.dies()
    assert quarantined(node) == 0
    assert not (node.cache.state.catalog.slots[Tier.HBM].state == SlotState.RESERVED).any()


def test_a_dropped_namespace_leaves_its_readers_slots_leased(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"abc")
    engine.put_there(hashes)
    lease = engine.acquire(hashes).lease
    assert lease is not None
    node.run(node.cache.drop_namespace("red", engine.ref))
    node.settle()
    assert leased(node) == 3
    release(engine, lease.token)
    assert leased(node) == 0
    assert node.cache.state.catalog.slots[Tier.HBM].counts().free == SLOTS_PER_SEGMENT


def test_a_worker_without_the_device_is_not_given_a_shard_that_lies_there(node: Node) -> None:
    engine, hashes = device_engine(node), chain(*"ab")
    engine.put_there(hashes)
    lease = engine.acquire(hashes).lease
    assert lease is not None
    worker = node.open_session("red", "one")
    with pytest.raises(NotFound, match="device"):
        node.cache.redeem("red", worker.session_id, lease.token, 0)
    redeemed = node.cache.redeem("red", engine.session.session_id, lease.token, 0)
    assert [segment.length_bytes for segment in redeemed.device_segments] == [2 << 20]
