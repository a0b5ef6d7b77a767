"""One tier over two devices: whose copies lie where, who reads them, and whose room is made for what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefixd_server.base.config import TenantConfig
from prefixd_server.base.errors import NotFound
from prefixd_server.base.types import Acquired, BadBlock, LeaseRelease, NamespaceRef, Tier
from prometheus_client.parser import text_string_to_metric_families

from tests.gpu.tier import (
    SEGMENT,
    SLOTS_PER_SEGMENT,
    DeviceEngine,
    Place,
    data_of,
    device_engine,
    device_stats,
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
from tests.support.node import Node, chain, packed

SEGMENTS = 2
"""Of each device."""


def devices_of(acquired: Acquired) -> set[str]:
    """Of the segments that the lease names."""
    return {segment.device_uuid for segment in acquired.device_segments}


def test_each_engine_puts_and_reads_on_its_own_device(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    for number, engine in enumerate((near, far)):
        run = chain(number, *range(3))
        reserved = engine.put_there(run)
        assert {segment.device_uuid for segment in reserved.device_segments} == {uuid_of(number)}
        acquired = engine.acquire(run)
        assert tiers_of(acquired) == [(Tier.HBM, 4)]
        assert devices_of(acquired) == {uuid_of(number)}
        assert engine.read_all(acquired) == data_of(engine, run)
        assert device_stats(pair, number).resident_slot_count == 4
        release(engine, acquired)


def test_an_engine_reads_what_lies_on_another_device_from_dram(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    run = chain(*"abc")
    near.put_there(run)
    missed = far.acquire(run)
    assert (missed.run.hit_count, missed.run.pending_count, missed.lease) == (0, 3, None)
    settle(pair)
    found = far.acquire(run)
    assert tiers_of(found) == [(Tier.DRAM, 3)]
    assert far.read_all(found) == data_of(far, run)
    assert tiers_of(near.acquire(run)) == [(Tier.HBM, 3)]


def test_what_an_engine_can_read_itself_is_not_brought_down_for_it(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    head, run = chain(*"ab"), chain(*"abcd")
    near.put_there(head)
    pair.clock.advance(1000.0)
    far.acquire(run)
    settle(pair)
    far.put_there(run)
    assert [device_stats(pair, device).resident_slot_count for device in (0, 1)] == [2, 2]
    dram = pair.cache.state.catalog.slots[Tier.DRAM].counts().resident
    found = far.acquire(run)
    settle(pair)
    assert tiers_of(found) == [(Tier.DRAM, 2), (Tier.HBM, 2)]
    assert pair.cache.state.catalog.slots[Tier.DRAM].counts().resident == dram
    assert tiers_of(near.acquire(run)) == [(Tier.HBM, 2)]
    settle(pair)
    assert tiers_of(near.acquire(run)) == [(Tier.HBM, 2), (Tier.DRAM, 2)]


def test_a_shared_run_goes_to_the_device_of_those_who_share_it(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    runs = [engine.put(name, *"xy") for name, engine in (("near", near), ("far", far))]
    for number, engine in enumerate((near, far)):
        share(engine, runs[number])
        acquired = engine.acquire(runs[number])
        assert tiers_of(acquired) == [(Tier.HBM, 3)]
        assert devices_of(acquired) == {uuid_of(number)}
        release(engine, acquired)


def test_a_run_that_both_devices_want_stays_where_it_is_read(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    run = near.put(*"abcd")
    share(near, run)
    reading = near.acquire(run)
    for _ in range(3):
        share(far, run)
        found = far.acquire(run)
        assert tiers_of(found) == [(Tier.DRAM, 4)]
        release(far, found)
    assert near.read_all(reading) == data_of(near, run)
    assert device_stats(pair, 0).resident_slot_count == 4
    release(near, reading)


def test_a_run_moves_to_the_device_where_live_requests_share_it(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    run = near.put(*"abcd")
    share(near, run)
    once = far.acquire(run)
    settle(pair)
    release(far, once)
    assert device_stats(pair, 0).resident_slot_count == 4, "one request, however soon, moves nothing"
    share(far, run)
    found = far.acquire(run)
    assert (tiers_of(found), devices_of(found)) == ([(Tier.HBM, 4)], {uuid_of(1)})
    assert far.read_all(found) == data_of(far, run)
    assert [device_stats(pair, device).resident_slot_count for device in (0, 1)] == [0, 4]
    assert tiers_of(near.acquire(run)) == [(Tier.DRAM, 4)]


@pytest.fixture
def workers(pair: Node) -> list[DeviceEngine]:
    """Of one instance of two shards: the first on device 0, the second on device 1."""
    first = device_engine(pair, instance="tp", shard_count=2, tensor_parallel_size=2)
    session = pair.open_session("red", "tp", frozenset({uuid_of(1)}))
    return [first, replace(first, session=session, shard=1)]


def test_each_shard_goes_to_the_device_of_who_redeems_it(pair: Node, workers: list[DeviceEngine]) -> None:
    run = chain(*"abc")
    session = pair.open_session("red", "tp", frozenset({uuid_of(0), uuid_of(1)}))
    scheduler = replace(workers[0], session=session)
    for worker in workers:
        worker.put(*"abc")
    share(scheduler, run)
    assert pair.cache.state.catalog.slots[Tier.HBM].counts().resident == 0, "nobody knows yet where to"
    for _ in range(2):
        acquired = [scheduler.acquire(run), scheduler.acquire(run)]
        for one in acquired:
            assert one.lease is not None
            for worker in workers:
                pair.cache.redeem("red", worker.session.session_id, one.lease.token, worker.shard)
        settle(pair)
        release(scheduler, *acquired)
    assert [device_stats(pair, device).resident_slot_count for device in (0, 1)] == [3, 3]
    lease = scheduler.acquire(run).lease
    assert lease is not None
    for device, worker in enumerate(workers):
        redeemed = pair.cache.redeem("red", worker.session.session_id, lease.token, worker.shard)
        assert {segment.device_uuid for segment in redeemed.device_segments} == {uuid_of(device)}
        assert {extent.tier for shard in redeemed.shard_extents for extent in shard.extents} == {Tier.HBM}


def test_what_its_redeemer_cannot_read_is_no_hit_again(pair: Node, workers: list[DeviceEngine]) -> None:
    run = chain(*"ab")
    for worker in workers:
        worker.put_there(run)
    named = frozenset({uuid_of(0), uuid_of(1)})
    other = [pair.open_session("red", "swapped", frozenset({uuid_of(1 - shard)})) for shard in (0, 1)]
    scheduler = replace(workers[0], session=pair.open_session("red", "swapped", named))
    ids = ("red", scheduler.session.session_id, scheduler.ref)
    acquired = pair.run(_acquire(pair, ids, run))
    assert acquired.lease is not None
    for shard, session in enumerate(other):
        with pytest.raises(NotFound, match="device"):
            pair.cache.redeem("red", session.session_id, acquired.lease.token, shard)
    release(scheduler, acquired)
    missed = pair.run(_acquire(pair, ids, run))
    assert (missed.run.hit_count, missed.run.pending_count) == (0, 2)
    settle(pair)
    again = pair.run(_acquire(pair, ids, run))
    assert (tiers_of(again), again.lease is None) == ([(Tier.DRAM, 2)], False)
    assert again.lease is not None
    for shard, session in enumerate(other):
        redeemed = pair.cache.redeem("red", session.session_id, again.lease.token, shard)
        assert redeemed.device_segments == ()


async def _acquire(pair: Node, ids: tuple[str, bytes, NamespaceRef], run: list[bytes]) -> Acquired:
    """A lease that other processes redeem."""
    return pair.cache.acquire(*ids, packed(run), 0, (), None)


def test_a_worker_of_another_device_is_not_given_a_shard(pair: Node, near: DeviceEngine) -> None:
    run = chain(*"ab")
    near.put_there(run)
    lease = near.acquire(run).lease
    assert lease is not None
    worker = pair.open_session("red", "one", frozenset({uuid_of(1)}))
    with pytest.raises(NotFound, match="device"):
        pair.cache.redeem("red", worker.session_id, lease.token, 0)


def test_one_full_device_makes_room_of_its_own(pair: Node, near: DeviceEngine, far: DeviceEngine) -> None:
    kept = chain("kept", *range(7))
    far.put_there(kept)
    count = SEGMENTS * SLOTS_PER_SEGMENT
    for number in range(2 * count // 8):
        pair.clock.advance(10.0)
        near.put_there(chain(number, *range(7)))
        until(pair, lambda: not hbm_of(pair).plan_demotion(0, 0) and hbm_of(pair).settled)
        assert pair.cache.check() == []
    assert far.hits(kept) == 8
    assert device_stats(pair, 1).resident_slot_count == 8
    assert device_stats(pair, 0).resident_slot_count > count - 8
    assert sum(near.hits(chain(number, *range(7))) for number in range(2 * count // 8)) == 2 * count


def test_a_devices_room_does_not_wait_for_what_lies_below_on_another(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    head = chain("head", *range(SLOTS_PER_SEGMENT * SEGMENTS - 1))
    near.put_there(head)
    until(pair, lambda: not hbm_of(pair).plan_demotion(0, 0) and hbm_of(pair).settled)
    far.acquire(head)
    settle(pair)
    tail = [*head, *chain("tail", *range(3))]
    assert {extent.tier for extent in far.reserve_there(tail).extents} == {Tier.HBM}
    pair.clock.advance(10.0)
    near.put_there(chain("newer", *range(7)))
    assert device_stats(pair, 0).resident_slot_count == SLOTS_PER_SEGMENT * SEGMENTS
    assert near.hits(chain("newer", *range(7))) == 8


def test_the_metrics_of_the_devices_add_up_to_the_tiers(
    pair: Node, near: DeviceEngine, far: DeviceEngine
) -> None:
    near.put_there(chain(*"abc"))
    far.reserve_there(chain(*"xy"))
    text = pair.cache.state.metrics.render(pair.cache.stats(None), {}).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_state: dict[str, list[float]] = {}
    for sample in samples:
        if sample.name == "prefixd_device_slots":
            by_state.setdefault(sample.labels["state"], []).append(sample.value)
    assert (by_state["resident"], by_state["reserved"]) == ([3.0, 0.0], [0.0, 2.0])
    in_all = {
        sample.labels["state"]: sample.value
        for sample in samples
        if sample.name == "prefixd_tier_slots" and sample.labels["tier"] == "hbm"
    }
    assert in_all == {state: sum(values) for state, values in by_state.items()}
    ready = {s.labels["device"]: s.value for s in samples if s.name == "prefixd_device_ready"}
    assert ready == {uuid_of(0): 1.0, uuid_of(1): 1.0}


def test_a_quota_counts_both_devices(machine: FakeCuda) -> None:
    tenants = (TenantConfig(name="red", hbm_quota_bytes=2 * SEGMENT), "blue")
    node = start_device_node(SEGMENTS, device_count=2, tenants=tenants)
    engines = [device_engine(node, instance=str(device), devices=(device,)) for device in (0, 1)]
    for engine in engines:
        engine.put_there(chain(engine.session.instance_id, *range(SLOTS_PER_SEGMENT - 1)))
    more = engines[0].reserve_there(chain("more", *range(SLOTS_PER_SEGMENT)))
    assert {extent.tier for extent in more.extents} == {Tier.DRAM}
    (hbm,) = [tier for tier in node.cache.stats("red").tiers if tier.tier is Tier.HBM]
    assert hbm.assigned_bytes == 2 * SEGMENT
    assert node.cache.check() == []
    end_all(node)
    node.close()


def test_host_memory_is_pinned_once_for_both(pair: Node, machine: FakeCuda) -> None:
    until(pair, lambda: machine.pinned_count == pair.cache.state.catalog.slots[Tier.DRAM].segment_count)


def test_a_bad_copy_is_verified_where_it_lies(pair: Node, far: DeviceEngine) -> None:
    run = far.put(*"ab")
    share(far, run)
    acquired = far.acquire(run)
    assert acquired.lease is not None
    Place(pair, acquired.shard_extents[0].extents[0], 1).write_all(b"\xff" * far.block_bytes)
    report = [LeaseRelease(acquired.lease.token, (), (BadBlock(0, 0, 1),))]
    done = pair.run(pair.cache.release(far.tenant, far.session.session_id, report))
    assert done == (1, 1)
    assert tiers_of(far.acquire(run)) == [(Tier.HBM, 1), (Tier.DRAM, 1)]
