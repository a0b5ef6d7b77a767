"""What goes wrong with a device: the tier goes off or waits, and everything else goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from prefixd_server.base.config import HbmConfig, MoverConfig
from prefixd_server.base.types import BadBlock, LeaseRelease, SlotState, Tier
from prefixd_server.cache.build import HBM_MOVER_COUNT
from prefixd_server.media.movers import CallJob

from tests.gpu.tier import (
    SEGMENT,
    SLOTS_PER_SEGMENT,
    device_engine,
    device_of,
    device_stats,
    end_all,
    hbm_of,
    is_off,
    settle,
    share,
    start_device_node,
    tiers_of,
    until,
)
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.node import Node, chain, start_node


@pytest.fixture
def node(machine: FakeCuda) -> Iterator[Node]:
    started = start_device_node()
    yield started
    assert started.cache.check() == []
    end_all(started)
    started.close()


def reason(node: Node) -> str:
    (hbm,) = [tier for tier in node.cache.stats(None).tiers if tier.tier is Tier.HBM]
    assert hbm.state == "off"
    return str(hbm.state_reason)


def test_a_lost_device_turns_the_tier_off_and_dram_serves(node: Node, machine: FakeCuda) -> None:
    engine = device_engine(node)
    kept, alone = engine.put(*"abc"), chain("alone", "x")
    engine.put_there(alone)
    first, second = engine.acquire(kept), engine.acquire(kept)
    settle(node)
    assert tiers_of(first) == tiers_of(second) == [(Tier.DRAM, 3)]
    machine.lose(0)
    other = engine.put("fresh")
    engine.acquire(other)
    engine.acquire(other)
    until(node, lambda: is_off(node))
    settle(node)
    until(node, lambda: len(node.cache.state.catalog.slots[Tier.HBM].slots_with_row()) == 0)
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in reason(node)
    assert tiers_of(engine.acquire(kept)) == [(Tier.DRAM, 3)]
    assert engine.acquire(alone).run.hit_count == 0
    assert {extent.tier for extent in engine.reserve_there(chain("later")).extents} == {Tier.DRAM}


def test_a_write_lease_in_hbm_cannot_be_committed_once_the_tier_is_off(node: Node, machine: FakeCuda) -> None:
    engine = device_engine(node)
    reserved = engine.reserve_there(chain(*"ab"))
    assert reserved.lease is not None
    machine.lose(0)
    run = engine.put("fresh")
    engine.acquire(run)
    engine.acquire(run)
    until(node, lambda: is_off(node))
    lease = node.cache.state.leases.writes[reserved.lease.token]
    assert lease.quarantined
    assert engine.hits(chain(*"ab")) == 0


def test_dram_that_a_hung_device_may_still_write_to_is_never_used_again(
    node: Node, machine: FakeCuda
) -> None:
    engine, stranger = device_engine(node), device_engine(node, instance="two", devices=())
    hashes = chain(*"abc")
    engine.put_there(hashes)
    with machine.hanging(os.getpid()):
        stranger.acquire(hashes)
        table = node.cache.state.catalog.slots[Tier.DRAM]
        targets = np.flatnonzero(table.state == SlotState.RESERVED)
        assert len(targets) == 3
        until(node, lambda: is_off(node))
        settle(node)
    assert "CUDA_EVENT_STUCK" in reason(node)
    assert (table.state[targets] == SlotState.RESERVED).all()
    assert (table.row[targets] < 0).all()


def test_memory_that_is_not_there_yet_is_tried_again(machine: FakeCuda) -> None:
    machine.set_capacity(machine.in_use_bytes() + SEGMENT + (1 << 20))
    config = HbmConfig(size_bytes=2 * SEGMENT, segment_bytes=SEGMENT, device=uuid_of(0))
    node = start_node(tenants=("red",), hbm=config)
    until(node, lambda: "OUT_OF_MEMORY" in hbm_of(node).tier.reason)
    engine = device_engine(node)
    engine.put_there(chain(*"ab"))
    assert tiers_of(engine.acquire(chain(*"ab"))) == [(Tier.HBM, 2)]
    machine.heal()
    until(node, lambda: hbm_of(node).tier.reason == "")
    assert device_of(node).medium.allocated_bytes == 2 * SEGMENT
    end_all(node)
    node.close()


def test_memory_that_is_lost_on_its_way_to_another_tenant_is_tried_again(machine: FakeCuda) -> None:
    node = start_device_node(2)
    red, blue = device_engine(node), device_engine(node, tenant="blue", instance="two")
    for name in "ab":
        share(red, red.put(name, *range(SLOTS_PER_SEGMENT - 1)))
    red.dies()
    machine.set_capacity(machine.in_use_bytes() - 1)
    blue.reserve_there(chain("x"))
    until(node, lambda: "OUT_OF_MEMORY" in device_stats(node, 0).state_reason)
    assert device_stats(node, 0).is_ready
    assert device_stats(node, 0).allocated_bytes == SEGMENT
    before = list(device_of(node).segment_ids)
    assert {e.tier for e in blue.reserve_there(chain("y")).extents} == {Tier.DRAM}
    until(node, lambda: device_of(node).segment_ids != before)
    assert {e.tier for e in blue.reserve_there(chain("z")).extents} == {Tier.HBM}
    machine.heal()
    until(node, lambda: hbm_of(node).tier.reason == "")
    assert device_stats(node, 0).allocated_bytes == 2 * SEGMENT
    later = device_engine(node, instance="three")
    assert {e.tier for e in later.reserve_there(chain("later")).extents} == {Tier.HBM}
    assert node.cache.check() == []
    end_all(node)
    node.close()


def test_a_segment_changes_tenant_when_the_devices_movers_have_time(machine: FakeCuda) -> None:
    node = start_device_node(1, movers=MoverConfig(queue_limit=1))
    red, blue = device_engine(node), device_engine(node, tenant="blue", instance="two")
    share(red, red.put("a"))
    red.dies()
    gate, movers = threading.Event(), device_of(node).movers

    async def keep_busy() -> list[asyncio.Future[bool]]:
        jobs = [asyncio.ensure_future(movers.run(CallJob(gate.wait))) for _ in range(HBM_MOVER_COUNT + 1)]
        await asyncio.sleep(0)
        return jobs

    jobs = node.loop.run_until_complete(keep_busy())
    blue.reserve_there(chain("x"))
    until(node, lambda: not device_of(node).hungry)
    gate.set()
    until(node, lambda: all(job.done() for job in jobs))
    before = set(device_of(node).segment_ids)
    assert {e.tier for e in blue.reserve_there(chain("y")).extents} == {Tier.DRAM}
    until(node, lambda: set(device_of(node).segment_ids) != before)
    assert {e.tier for e in blue.reserve_there(chain("z")).extents} == {Tier.HBM}
    assert node.cache.check() == []
    end_all(node)
    node.close()


def test_a_device_that_is_not_there_turns_the_tier_off_and_the_daemon_serves(machine: FakeCuda) -> None:
    config = HbmConfig(size_bytes=SEGMENT, segment_bytes=SEGMENT, device="GPU-of-somebody-else")
    node = start_node(tenants=("red",), hbm=config)
    until(node, lambda: is_off(node))
    assert "DEVICE_UNKNOWN" in reason(node)
    engine = device_engine(node)
    assert tiers_of(engine.acquire(engine.put(*"ab"))) == [(Tier.DRAM, 2)]
    node.close()


def test_no_tenant_is_given_memory_that_anothers_process_may_have_open(node: Node) -> None:
    red, blue = device_engine(node), device_engine(node, tenant="blue", instance="two")
    for name in "ab":
        red.put_there(chain(name, *range(31)))
    red.acquire(chain("a"))
    before = set(device_of(node).segment_ids)
    red.node.cache.evict("red", red.ref, None, 0)
    assert {e.tier for e in blue.reserve_there(chain("x")).extents} == {Tier.DRAM}
    assert set(device_of(node).segment_ids) == before
    red.dies()
    red.node.cache.evict("red", red.ref, None, 0)
    blue.reserve_there(chain("y"))
    until(node, lambda: not device_of(node).hungry and set(device_of(node).segment_ids) != before)
    reserved = blue.reserve_there(chain("z"))
    assert [(e.tier, e.segment_id in before) for e in reserved.extents] == [(Tier.HBM, False)]


def test_a_report_about_a_copy_that_cannot_be_read_is_answered(node: Node, machine: FakeCuda) -> None:
    engine, hashes = device_engine(node), chain(*"ab")
    engine.put_there(hashes)
    acquired = engine.acquire(hashes)
    assert acquired.lease is not None
    machine.lose(0)
    report = [LeaseRelease(acquired.lease.token, (), (BadBlock(0, 0, 1),))]
    done = node.run(node.cache.release(engine.tenant, engine.session.session_id, report))
    assert done == (1, 0)
    until(node, lambda: is_off(node))
    assert engine.hits(hashes) == 0
