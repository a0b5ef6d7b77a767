"""The media of several devices as the one of their tier, and their movers as one.

The tier's segments are numbered through the devices, as many of each in a row. Nothing that one device does
or fails to do reaches another: each has memory, streams and movers of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from prefixd_server.base.types import Tier
from prefixd_server.media.hbm import HbmMedium
from prefixd_server.media.movers import CopyJob, Job, Movers, VerifyJob

R = TypeVar("R")


class HbmDevices:
    """See the module. Implements media/medium.py.

    Args:
        media: one a device, of as many and as large segments each.
    """

    tier = Tier.HBM

    def __init__(self, media: Sequence[HbmMedium]) -> None:
        self.media = tuple(media)
        self.segment_bytes = media[0].segment_bytes
        self.segment_count = sum(medium.segment_count for medium in media)
        self._pinned_by: dict[int, HbmMedium] = {}
        """Who has pinned host memory, by its address; guarded by whoever pins it with us."""

    def device_of(self, segment_index: int) -> int:
        """The device that a segment lies on."""
        return segment_index // self.media[0].segment_count

    def read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        """See Medium. Raises CudaFault."""
        device, segment = divmod(segment_index, self.media[0].segment_count)
        self.media[device].read(segment, offset_bytes, target)

    def write(self, segment_index: int, offset_bytes: int, source: memoryview) -> None:
        """See Medium. Raises CudaFault."""
        device, segment = divmod(segment_index, self.media[0].segment_count)
        self.media[device].write(segment, offset_bytes, source)

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> None:
        """See Medium: the host cannot address it."""

    # -- host memory ---------------------------------------------------------------------------

    def pin(self, address: int, length_bytes: int) -> None:
        """Page-locks host memory for every device, by the first that can; nothing where it is already."""
        if address not in self._pinned_by:
            for medium in self.media:
                if medium.pin(address, length_bytes):
                    self._pinned_by[address] = medium
                    return

    def unpin(self, address: int) -> bool:
        """Ends pin() before the memory is unmapped; see Pinner."""
        medium = self._pinned_by.get(address)
        if medium is not None and not medium.unpin(address):
            return False
        self._pinned_by.pop(address, None)
        return True


class DeviceMovers:
    """The movers of each device: a job goes to those of the device that its bytes lie on.

    Args:
        devices: the tier's media.
        movers: one pool of threads a device.
    """

    def __init__(self, devices: HbmDevices, movers: Sequence[Movers]) -> None:
        self._devices = devices
        self._movers = tuple(movers)

    async def run(self, job: Job[R]) -> R:
        """See Movers.run; the job copies or verifies bytes on one device."""
        return await self._movers[self._device_of(job)].run(job)

    def _device_of(self, job: object) -> int:
        assert isinstance(job, CopyJob | VerifyJob), "no bytes of a device are concerned"
        if isinstance(job, VerifyJob):
            return self._devices.device_of(job.segment_index)
        comes_from = job.source is self._devices
        return self._devices.device_of(job.source_segment_index if comes_from else job.target_segment_index)

    async def drain(self) -> None:
        """Waits until no job is waiting or at work."""
        await asyncio.gather(*(movers.drain() for movers in self._movers))

    def close(self) -> None:
        """Takes no more jobs; see Movers.close."""
        for movers in self._movers:
            movers.close()
