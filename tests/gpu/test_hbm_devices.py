"""Several devices as one medium: whose segment is whose, whose movers do a job, and who pins host memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest
from prefixd_server.base.errors import Unavailable
from prefixd_server.base.types import ChecksumAlgorithm
from prefixd_server.media.cuda import CudaFault
from prefixd_server.media.dram import DramMedium
from prefixd_server.media.hbm import HbmMedium
from prefixd_server.media.hbm_devices import DeviceMovers, HbmDevices
from prefixd_server.media.memfd import Memfd
from prefixd_server.media.movers import CopyJob, CopyResult, Movers, VerifyJob

from tests.support.fake_cuda import MIB, FakeCuda, uuid_of
from tests.support.node import checksum

SEGMENT = 2 * MIB
BLOCK = 65_536
DATA = os.urandom(BLOCK)


@pytest.fixture
def devices(machine: FakeCuda) -> Iterator[HbmDevices]:
    """Two segments on each of two devices."""
    made = HbmDevices([HbmMedium(uuid_of(device), SEGMENT, 2, 0.2) for device in (0, 1)])
    for medium in made.media:
        try:
            medium.open()
        except CudaFault:
            pytest.skip("this machine has one device")
        for segment in range(2):
            medium.allocate(segment)
    yield made
    for medium in made.media:
        medium.close()


@pytest.fixture
def dram() -> Iterator[DramMedium]:
    made = DramMedium(SEGMENT, 1, prefault=False)
    made.write(0, 0, memoryview(DATA))
    yield made
    made.close()


def copy_job(source: DramMedium, target: HbmDevices, segment: int) -> CopyJob:
    sums = np.array([checksum(DATA)], dtype=np.uint64)
    return CopyJob(source, 0, 0, target, segment, 0, BLOCK, BLOCK, sums, ChecksumAlgorithm.XXH3_64)


def address_of(dram: DramMedium) -> int:
    """Where the segment is mapped."""
    return int(np.frombuffer(dram.view(0, 0, 1), np.uint8).ctypes.data)


def verify_job(source: HbmDevices, segment: int) -> VerifyJob:
    sums = np.array([checksum(DATA)], dtype=np.uint64)
    return VerifyJob(source, segment, 0, BLOCK, BLOCK, sums, ChecksumAlgorithm.XXH3_64)


def test_segments_are_numbered_through_the_devices(devices: HbmDevices) -> None:
    assert (devices.segment_count, [devices.device_of(segment) for segment in range(4)]) == (4, [0, 0, 1, 1])
    for segment in range(4):
        devices.write(segment, 7, memoryview(b"%d" % segment))
    target = bytearray(1)
    for segment, (device, own) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        devices.media[device].read(own, 7, memoryview(target))
        assert target == b"%d" % segment
        devices.read(segment, 7, memoryview(target))
        assert target == b"%d" % segment
    assert devices.view(0, 0, 1) is None


async def test_a_job_is_done_by_the_movers_of_its_device(
    devices: HbmDevices, dram: DramMedium, machine: FakeCuda
) -> None:
    movers = DeviceMovers(devices, [Movers(1, 4) for _ in devices.media])
    with machine.hanging(os.getpid(), device=0):
        stuck = asyncio.ensure_future(movers.run(copy_job(dram, devices, 1)))
        await asyncio.sleep(0)
        done: list[CopyResult] = [
            await movers.run(copy_job(dram, devices, 2)),
            await movers.run(verify_job(devices, 2)),
        ]
        assert [result.bad.tolist() for result in done] == [[False], [False]]
        assert not stuck.done()
        with pytest.raises(CudaFault, match="CUDA_EVENT_STUCK"):
            await stuck
    assert [medium.fault is None for medium in devices.media] == [False, True]
    await movers.drain()
    movers.close()
    for segment in (0, 2):
        with pytest.raises(Unavailable, match="nothing more"):
            await movers.run(verify_job(devices, segment))


async def test_drained_movers_have_done_what_was_asked(devices: HbmDevices, dram: DramMedium) -> None:
    movers = DeviceMovers(devices, [Movers(1, 4) for _ in devices.media])
    jobs = [asyncio.ensure_future(movers.run(copy_job(dram, devices, segment))) for segment in (0, 2)]
    await asyncio.sleep(0)
    await movers.drain()
    await asyncio.sleep(0)
    assert all(job.done() for job in jobs)
    movers.close()


def test_host_memory_is_pinned_once_by_the_first_that_can(devices: HbmDevices, machine: FakeCuda) -> None:
    memory = Memfd(SEGMENT)
    closed = HbmMedium(uuid_of(0), SEGMENT, 2)
    for media in (devices.media, (closed, devices.media[1]), (closed, closed)):
        tier = HbmDevices(media)
        tier.pin(memory.address, SEGMENT)
        tier.pin(memory.address, SEGMENT)
        assert machine.pinned_count == (media[1] is not closed)
        tier.unpin(memory.address)
        tier.unpin(memory.address)
        assert machine.pinned_count == 0
    memory.close()


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed before", "noticed by unpinning"])
def test_memory_that_a_lost_device_keeps_pinned_stays_mapped(
    devices: HbmDevices, dram: DramMedium, machine: FakeCuda, noticed: bool
) -> None:
    dram.pin_with(devices)
    before = address_of(dram)
    machine.lose(0)
    if noticed:
        with pytest.raises(CudaFault):
            devices.read(0, 0, memoryview(bytearray(1)))
    dram.renew(0)
    assert address_of(dram) != before
    assert machine.pinned_count == 2, "the old memory by the lost device, the new by the other"
    dram.unpin()
    assert machine.pinned_count == 1
