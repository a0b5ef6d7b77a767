"""The HBM tier's memory on one device: a CUDA allocation per segment, exported to engines by IPC handle.

Whole extents are copied at a time, by a stream of their own in each direction. A fault is for good: the
medium refuses everything from then on, and what a failed copy may still touch is never given back.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from prefixd_server.base.types import Tier
from prefixd_server.media.cuda import CudaFault, Gpu

COPY_TIMEOUT_S = 10.0
"""A copy of one extent takes milliseconds; a device that needs longer has hung."""


class HbmMedium:
    """See the module. Implements media/medium.py; nothing is allocated until open() and allocate().

    Args:
        uuid: of the device; empty for the first.
        segment_bytes: a multiple of 2 MiB: the driver exports memory in such pieces.
        segment_count: segments.
        timeout_s: for one copy.
    """

    tier = Tier.HBM

    def __init__(
        self, uuid: str, segment_bytes: int, segment_count: int, timeout_s: float = COPY_TIMEOUT_S
    ) -> None:
        self.segment_bytes = segment_bytes
        self.segment_count = segment_count
        self.uuid = uuid
        """Of the device; what was asked for until it is open."""
        self._timeout_s = timeout_s
        self._gpu: Gpu | None = None
        self._addresses: list[int | None] = [None] * segment_count
        self._handles: list[bytes] = [b""] * segment_count
        self._pinned: set[int] = set()
        self._streams: list[int] = []
        self._lock = threading.Lock()
        """Guards opening, closing and pinning, which come from several threads."""
        self._held: list[Any] = []
        """Host memory that a failed copy may still touch."""
        self.fault: CudaFault | None = None
        """What has put the device out of use; None while it works."""

    # -- life ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Takes the device: its context and a stream per direction. Again does nothing. Raises CudaFault."""
        with self._lock:
            if self._gpu is None:
                gpu = Gpu(self.uuid)
                self._streams = [gpu.stream(), gpu.stream()]
                self._gpu, self.uuid = gpu, gpu.uuid

    def allocate(self, segment_index: int) -> None:
        """Gives the segment zeroed memory that can be exported. Raises CudaFault, also for want of memory."""
        gpu = self._device()
        address = gpu.allocate(self.segment_bytes)
        try:
            gpu.clear(address, self.segment_bytes, self._streams[0], self._timeout_s)
            self._handles[segment_index] = gpu.export(address)
        except CudaFault as fault:
            # Something may still write there: the memory stays with the process.
            self.give_up(fault)
            raise
        self._addresses[segment_index] = address

    def renew(self, segment_index: int) -> None:
        """Gives the segment fresh memory. No process may have the old one open. Raises CudaFault."""
        address, self._addresses[segment_index] = self._addresses[segment_index], None
        if address is not None:
            self._guarded(lambda: self._device().free(address))
        self.allocate(segment_index)

    def is_present(self, segment_index: int) -> bool:
        """Whether the segment has memory."""
        return self._addresses[segment_index] is not None

    @property
    def allocated_bytes(self) -> int:
        """Memory of all segments."""
        return self.segment_bytes * sum(address is not None for address in self._addresses)

    def handle(self, segment_index: int) -> bytes:
        """The segment's IPC handle, 64 bytes; it stands for the present memory."""
        return self._handles[segment_index]

    def close(self, open_elsewhere: frozenset[int] = frozenset()) -> None:
        """Gives everything back but segments that a living process may have open, which the driver frees
        when both processes are gone. After a fault nothing is given back before the process ends. Idempotent.
        """
        with self._lock:
            gpu, self._gpu = self._gpu, None
            if gpu is None or self.fault is not None:
                return
            for pinned in self._pinned:
                gpu.unpin(pinned)
            self._pinned.clear()
            for index, address in enumerate(self._addresses):
                if address is not None and index not in open_elsewhere:
                    gpu.free(address)
                    self._addresses[index] = None
            for stream in self._streams:
                gpu.end_stream(stream)
            if self.allocated_bytes == 0:
                gpu.close()

    # -- bytes ---------------------------------------------------------------------------------

    def read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        """See Medium. Raises CudaFault."""
        source = self._place(segment_index, offset_bytes, target.nbytes)
        self._copy(_address(target), source, target, self._streams[1])

    def write(self, segment_index: int, offset_bytes: int, source: memoryview) -> None:
        """See Medium. Raises CudaFault."""
        target = self._place(segment_index, offset_bytes, source.nbytes)
        self._copy(target, _address(source), source, self._streams[0])

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> None:
        """See Medium: the host cannot address it."""

    def _copy(self, target: int, source: int, host: memoryview, stream: int) -> None:
        def copy() -> None:
            try:
                self._device().copy(target, source, host.nbytes, stream, self._timeout_s)
            except CudaFault:
                self._held.append(host)
                raise

        self._guarded(copy)

    def _place(self, segment_index: int, offset_bytes: int, length_bytes: int) -> int:
        address = self._addresses[segment_index]
        if address is None:
            raise CudaFault("SEGMENT_ABSENT", f"segment {segment_index} has no memory")
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self.segment_bytes:
            raise ValueError(f"[{offset_bytes}, +{length_bytes}) is not within {self.segment_bytes} bytes")
        return address + offset_bytes

    # -- host memory ---------------------------------------------------------------------------

    def pin(self, address: int, length_bytes: int) -> bool:
        """Page-locks host memory that copies go to and from, for all devices; whether it was done.

        Where it cannot be, or there is no device, nothing happens: copies are slower, and correct.
        """
        with self._lock:
            if self._gpu is None or self.fault is not None or address in self._pinned:
                return False
            try:
                self._gpu.pin(address, length_bytes)
            except CudaFault:
                return False
            self._pinned.add(address)
            return True

    def unpin(self, address: int) -> bool:
        """Ends pin() before the memory is unmapped; see Pinner. A driver that refuses it is a fault."""
        with self._lock:
            gpu = self._gpu
            if address not in self._pinned:
                return True
            if gpu is None or self.fault is not None:
                return False
            try:
                self._guarded(lambda: gpu.unpin(address))
            except CudaFault:
                return False
            self._pinned.discard(address)
            return True

    # -- faults --------------------------------------------------------------------------------

    def _device(self) -> Gpu:
        if self.fault is not None:
            raise self.fault
        if self._gpu is None:
            raise CudaFault("CUDA_UNAVAILABLE", "the device is not open")
        return self._gpu

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except CudaFault as fault:
            self.give_up(fault)
            raise

    def give_up(self, fault: CudaFault) -> None:
        """Puts the device out of use for good; the first fault is what is told."""
        if self.fault is None:
            self.fault = fault


def _address(view: memoryview) -> int:
    """Where the view's bytes lie, read-only ones included."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
