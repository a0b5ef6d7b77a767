"""A node with an HBM tier, and engines that read and write it; the daemon's own copies stand for theirs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from prefixd_server.base.accounts import DeviceStats
from prefixd_server.base.config import HbmConfig
from prefixd_server.base.types import Acquired, Extent, LeaseRelease, NamespaceSpec, Reserved, Tier
from prefixd_server.cache.hbm_device import HbmDevice, HbmState
from prefixd_server.cache.hbm_placement import HbmPlacement

from tests.support.engine import Engine
from tests.support.fake_cuda import MIB, UUIDS_VARIABLE, uuid_of
from tests.support.node import Node, block_data, checksum, packed, start_node
from tests.support.specs import spec

SEGMENT = 2 * MIB
BLOCK = 65_536
SLOTS_PER_SEGMENT = SEGMENT // BLOCK
COPY_TIMEOUT_S = 1.0
"""Short for tests that wait for it, long for a machine that is busy."""


def require_two_devices() -> None:
    """Skips the test on a real machine with one."""
    if os.environ.get(UUIDS_VARIABLE, ",").count(",") == 0:
        pytest.skip("this machine has one device")


def start_device_node(segment_count: int = 2, device_count: int = 1, **more: Any) -> Node:
    """A node with so much HBM on device 0, or on each of the first devices, all of it there."""
    if device_count > 1:
        require_two_devices()
    uuids = tuple(map(uuid_of, range(device_count)))
    named = {"device": uuids[0]} if device_count == 1 else {"devices": uuids}
    config = HbmConfig(
        size_bytes=segment_count * SEGMENT, segment_bytes=SEGMENT, copy_timeout_s=COPY_TIMEOUT_S, **named
    )
    node = start_node(**({"tenants": ("red", "blue"), "hbm": config} | more))
    until(node, lambda: hbm_of(node).tier.reason == "")
    return node


def hbm_of(node: Node) -> HbmPlacement:
    """The node's HBM tier."""
    assert node.cache.hbm is not None
    return node.cache.hbm


def device_of(node: Node, number: int = 0) -> HbmDevice:
    """One device of the node's HBM tier."""
    return hbm_of(node).tier.devices[number]


def until(node: Node, reached: Callable[[], bool]) -> None:
    """Lets the node's loop run until the state is reached; the test's own timeout ends it otherwise."""

    async def wait() -> None:
        while not reached():
            node.cache.raise_if_broken()
            await asyncio.sleep(0.002)

    node.loop.run_until_complete(wait())


def settle(node: Node) -> None:
    """Until no transfer is under way or waiting."""
    until(node, lambda: hbm_of(node).settled)


def end_all(node: Node) -> None:
    """Every engine's process is dead."""
    for session in node.cache.sessions.open_of():
        node.cache.companions.process_dead(session.session_id)


def is_off(node: Node, device: int = 0) -> bool:
    return device_of(node, device).state is HbmState.OFF


class DeviceEngine(Engine):
    """An engine process that can open device 0, or the devices given."""

    def reserve_there(self, hashes: list[bytes]) -> Reserved:
        """Slots in HBM for a run from the root."""
        ids = (self.tenant, self.session.session_id, self.ref, self.shard, 0)
        return self.node.cache.reserve(*ids, None, packed(hashes), None, None, Tier.HBM)

    def put_there(self, hashes: list[bytes]) -> Reserved:
        """Stores a run in HBM, as far as the daemon lets us."""
        reserved = self.reserve_there(hashes)
        assert reserved.lease is not None
        fresh = hashes[len(hashes) - sum(extent.block_count for extent in reserved.extents) :]
        datas = [block_data(key, self.shard, self.block_bytes) for key in fresh]
        pending = iter(datas)
        for extent in reserved.extents:
            for index in range(extent.block_count):
                Place(self.node, extent, index).write_all(next(pending))
        sums = np.array([checksum(data) for data in datas], dtype=np.uint64)
        self.node.cache.commit(self.tenant, self.session.session_id, reserved.lease.token, 0, sums)
        return reserved

    def acquire(self, hashes: list[bytes], skip: int = 0) -> Acquired:
        """Leases a run with its extents, on the loop: it may start transfers."""

        async def ask() -> Acquired:
            return Engine.acquire(self, hashes, skip)

        return self.node.loop.run_until_complete(ask())

    def read_all(self, acquired: Acquired) -> list[bytes]:
        """The bytes of every block of shard 0, wherever it lies; each matches its checksum."""
        blocks = []
        for shard in acquired.shard_extents:
            for extent in shard.extents:
                assert extent.checksums is not None
                for index in range(extent.block_count):
                    data = Place(self.node, extent, index).read_all(self.block_bytes)
                    assert checksum(data) == int(extent.checksums[index])
                    blocks.append(data)
        return blocks


class Place:
    """One slot, in DRAM or HBM."""

    def __init__(self, node: Node, extent: Extent, index: int) -> None:
        self._medium = node.cache.state.media[extent.tier]
        ids = node.cache.room.segment_ids
        if extent.tier is Tier.HBM:
            ids = [wire_id for device in hbm_of(node).tier.devices for wire_id in device.segment_ids]
        self._segment = ids.index(extent.segment_id)
        self._offset = extent.offset_bytes + index * extent.stride_bytes

    def write_all(self, data: bytes) -> None:
        self._medium.write(self._segment, self._offset, memoryview(data))

    def read_all(self, length_bytes: int) -> bytes:
        target = bytearray(length_bytes)
        self._medium.read(self._segment, self._offset, memoryview(target))
        return bytes(target)


def device_engine(
    node: Node, tenant: str = "red", instance: str = "one", devices: tuple[int, ...] = (0,), **changes: Any
) -> DeviceEngine:
    """A process that can open these devices' memory."""
    chosen: NamespaceSpec = spec(**changes)
    ref = node.cache.open_namespace(tenant, chosen)
    session = node.open_session(tenant, instance, frozenset(map(uuid_of, devices)))
    return DeviceEngine(node, session, ref, chosen.kv_groups[0].block_bytes)


def tiers_of(acquired: Acquired) -> list[tuple[Tier, int]]:
    """Where the hits lie."""
    return list(acquired.run.hits)


def release(engine: DeviceEngine, *acquired: Acquired) -> None:
    """The engine is done with these."""
    for one in acquired:
        assert one.lease is not None
        releases = [LeaseRelease(one.lease.token)]
        engine.node.run(engine.node.cache.release(engine.tenant, engine.session.session_id, releases))


def share(engine: DeviceEngine, hashes: list[bytes]) -> None:
    """Two of the engine's requests hold the run at once, and it is promoted."""
    first, second = engine.acquire(hashes), engine.acquire(hashes)
    settle(engine.node)
    release(engine, first, second)


def data_of(engine: DeviceEngine, hashes: list[bytes]) -> list[bytes]:
    """What the blocks of shard 0 must hold."""
    return [block_data(key, 0, engine.block_bytes) for key in hashes]


def device_stats(node: Node, device: int) -> DeviceStats:
    """What the node tells of one device of its HBM tier."""
    (hbm,) = [tier for tier in node.cache.stats(None).tiers if tier.tier is Tier.HBM]
    return hbm.devices[device]
