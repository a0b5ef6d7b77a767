"""What goes wrong with one of two devices: it goes off or waits, and the other goes on."""

from __future__ import annotations

import os

import numpy as np
from prefixd_server.base.config import HbmConfig
from prefixd_server.base.types import SlotState, Tier

from tests.gpu.tier import (
    SEGMENT,
    DeviceEngine,
    data_of,
    device_engine,
    device_of,
    device_stats,
    end_all,
    hbm_of,
    is_off,
    release,
    require_two_devices,
    share,
    tiers_of,
    until,
)
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.node import Node, chain, start_node


def test_one_device_is_lost_and_the_other_goes_on(
    pair: Node, machine: FakeCuda, near: DeviceEngine, far: DeviceEngine
) -> None:
    lost, kept, alone = near.put(*"abc"), chain("kept", *"xy"), chain("alone")
    near.put_there(alone)
    far.put_there(kept)
    machine.lose(0)
    share(near, lost)
    until(pair, lambda: is_off(pair, 0))
    until(pair, lambda: device_stats(pair, 0).resident_slot_count == 0)
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in device_stats(pair, 0).state_reason
    assert device_stats(pair, 1).is_ready
    (hbm,) = [tier for tier in pair.cache.stats(None).tiers if tier.tier is Tier.HBM]
    assert hbm.is_ready
    assert f"{uuid_of(0)} is off: " in hbm.state_reason
    assert uuid_of(1) not in hbm.state_reason
    found = far.acquire(kept)
    assert tiers_of(found) == [(Tier.HBM, 3)]
    assert far.read_all(found) == data_of(far, kept)
    share(far, lost)
    assert tiers_of(far.acquire(lost)) == [(Tier.HBM, 3)]
    assert tiers_of(near.acquire(lost)) == [(Tier.DRAM, 3)]
    assert near.acquire(alone).run.hit_count == 0
    assert {extent.tier for extent in near.reserve_there(chain("later")).extents} == {Tier.DRAM}
    assert {extent.tier for extent in far.reserve_there(chain("later", "too")).extents} == {Tier.HBM}


def test_a_write_lease_on_the_other_device_outlives_a_lost_one(
    pair: Node, machine: FakeCuda, near: DeviceEngine, far: DeviceEngine
) -> None:
    run = near.put("fresh")
    lost, live = near.reserve_there(chain(*"ab")).lease, far.reserve_there(chain(*"xy")).lease
    assert lost is not None
    assert live is not None
    machine.lose(0)
    share(near, run)
    until(pair, lambda: is_off(pair, 0))
    assert pair.cache.state.leases.writes[lost.token].quarantined
    assert not pair.cache.state.leases.writes[live.token].quarantined
    table = pair.cache.state.catalog.slots[Tier.HBM]
    assert [table.counts(None, device).quarantined for device in (0, 1)] == [2, 0]


def test_a_stuck_copy_turns_off_its_device_and_holds_up_no_other(
    pair: Node, machine: FakeCuda, near: DeviceEngine, far: DeviceEngine
) -> None:
    stranger = device_engine(pair, instance="three", devices=())
    stuck, kept = chain(*"abc"), far.put(*"xyz")
    near.put_there(stuck)
    with machine.hanging(os.getpid(), device=0):
        stranger.acquire(stuck)
        table = pair.cache.state.catalog.slots[Tier.DRAM]
        targets = np.flatnonzero(table.state == SlotState.RESERVED)
        assert len(targets) == 3
        first, second = far.acquire(kept), far.acquire(kept)
        until(pair, lambda: device_stats(pair, 1).resident_slot_count == 3)
        until(pair, lambda: is_off(pair, 0))
        release(far, first, second)
    assert "CUDA_EVENT_STUCK" in device_stats(pair, 0).state_reason
    assert tiers_of(far.acquire(kept)) == [(Tier.HBM, 3)]
    assert (table.state[targets] == SlotState.RESERVED).all()
    assert (table.row[targets] < 0).all()


def test_memory_that_one_device_lacks_is_tried_again_while_the_other_is_whole(machine: FakeCuda) -> None:
    machine.set_capacity(machine.in_use_bytes(0) + SEGMENT + (1 << 20), 0)
    uuids = (uuid_of(0), uuid_of(1))
    config = HbmConfig(size_bytes=2 * SEGMENT, segment_bytes=SEGMENT, devices=uuids)
    node = start_node(tenants=("red",), hbm=config)
    until(node, lambda: "OUT_OF_MEMORY" in device_of(node, 0).reason and not device_of(node, 1).reason)
    assert [device_stats(node, device).allocated_bytes for device in (0, 1)] == [SEGMENT, 2 * SEGMENT]
    machine.heal()
    until(node, lambda: hbm_of(node).tier.reason == "")
    assert [device_stats(node, device).allocated_bytes for device in (0, 1)] == [2 * SEGMENT, 2 * SEGMENT]
    (hbm,) = [tier for tier in node.cache.stats(None).tiers if tier.tier is Tier.HBM]
    assert hbm.prefaulted_bytes == hbm.capacity_bytes == 4 * SEGMENT
    node.close()


def test_a_device_that_is_not_there_is_off_and_the_other_serves(machine: FakeCuda) -> None:
    require_two_devices()
    config = HbmConfig(size_bytes=SEGMENT, segment_bytes=SEGMENT, devices=("GPU-of-nobody", uuid_of(1)))
    node = start_node(tenants=("red",), hbm=config)
    until(node, lambda: is_off(node, 0) and device_stats(node, 1).is_ready)
    assert "DEVICE_UNKNOWN" in device_stats(node, 0).state_reason
    assert device_stats(node, 0).uuid == "GPU-of-nobody"
    engine = device_engine(node, devices=(1,))
    engine.put_there(chain(*"ab"))
    assert tiers_of(engine.acquire(chain(*"ab"))) == [(Tier.HBM, 2)]
    end_all(node)
    node.close()
