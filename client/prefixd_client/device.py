"""GPU memory that the daemon shares with this process: opened once, copied on the engine's stream, closed.

A DeviceMap belongs to one session, as a SegmentMap does. Its handles are closed when the session ends, also
when the daemon is gone: an open one keeps the dead daemon's memory in use, and its successor waits for it.
After a fault nothing is given back before the process ends, since a copy may still be under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import addressof, c_char

from prefixd.v1 import types_pb2

from .device_driver import DeviceFault, Driver
from .segments import MappedSegment

COPY_TIMEOUT_S = 10.0
"""A copy of a run takes milliseconds; a device that needs longer has hung."""
POLL_S_MIN = 20e-6
POLL_S_MAX = 1e-3

Copy = tuple[int, int, int]
"""(target address, source address, bytes)"""


class DeviceMap:
    """See the module. Thread-safe.

    Args:
        uuid: of the GPU that the engine uses.
        timeout_s: for the copies of one run.

    Raises:
        DeviceFault: there is no such device.
    """

    def __init__(self, uuid: str, timeout_s: float = COPY_TIMEOUT_S) -> None:
        self.uuid = uuid
        self._timeout_s = timeout_s
        self._driver = Driver(uuid)
        self.ordinal = self._driver.ordinal
        self._known: dict[int, types_pb2.DeviceSegment] = {}
        self._opened: dict[int, int] = {}
        self._pinned: dict[int, MappedSegment] = {}
        self._lock = threading.Lock()
        """Guards _known, _opened, _pinned and is_closed."""
        self._kept: list[bytearray] = []
        self.is_closed = False
        self.fault: DeviceFault | None = None
        """Why the device is not used any more."""

    def learn(self, segments: Iterable[types_pb2.DeviceSegment]) -> None:
        """Takes what an answer says about segments; nothing is opened before it is used."""
        with self._lock:
            self._known.update({segment.segment_id: segment for segment in segments})

    def knows(self, segment_id: int) -> bool:
        """Whether the segment is one in GPU memory."""
        return segment_id in self._known

    def segment(self, segment_id: int) -> tuple[int, int]:
        """(address, length in bytes) of a segment, opened now if it is not yet.

        Raises:
            DeviceFault: it cannot be opened: what lies there is a miss.
        """
        with self._lock:
            known = self._known.get(segment_id)
            if self.fault is not None or self.is_closed or known is None or known.device_uuid != self.uuid:
                raise DeviceFault("SEGMENT_UNKNOWN", f"opening segment {segment_id}")
            if segment_id not in self._opened:
                self._opened[segment_id] = self._driver.open(known.ipc_handle)
            return self._opened[segment_id], known.length_bytes

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Gives the engine's stream all copies, and waits for them: until then, no memory of them may be
        used otherwise, nor a slot be released or committed.

        Raises:
            DeviceFault: none, some or all of the bytes have been copied, or will be; the device is given up.
        """
        if self.fault is not None:
            raise self.fault
        try:
            event = self._driver.event()
            for target, source, length_bytes in merged(copies):
                self._driver.copy(target, source, length_bytes, stream)
            self._driver.record(event, stream)
            self._wait(event)
        except DeviceFault as fault:
            self.fault = fault
            raise
        self._driver.end_event(event)

    def read(self, address: int, length_bytes: int, stream: int) -> bytearray:
        """Bytes of device memory, or of memory that the stream writes. Raises DeviceFault."""
        target = bytearray(length_bytes)
        try:
            self.copy([(addressof(c_char.from_buffer(target)), address, length_bytes)], stream)
        except DeviceFault:
            # The device may write there at any later moment.
            self._kept.append(target)
            raise
        return target

    def _wait(self, event: int) -> None:
        wait_for(self._driver, event, self._timeout_s)

    # -- host memory ---------------------------------------------------------------------------------

    def pin(self, segment: MappedSegment) -> None:
        """Page-locks a mapped segment, which stays mapped for as long; without it copies are slower."""
        with self._lock:
            if self.fault is None and not self.is_closed and segment.address not in self._pinned:
                with suppress(DeviceFault):
                    self._driver.pin(segment.address, segment.length_bytes)
                    self._pinned[segment.address] = segment

    def unpin_retired(self, is_mapped: Callable[[MappedSegment], bool]) -> None:
        """Ends pin() of segments that are not mapped any more; nobody may be copying."""
        with self._lock:
            if self.fault is None and not self.is_closed:
                for segment in [pinned for pinned in self._pinned.values() if not is_mapped(pinned)]:
                    self._driver.unpin(segment.address)
                    del self._pinned[segment.address]

    def close(self) -> None:
        """Closes every handle; the caller's copies have ended. Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            if self.fault is not None:
                return
            for address in self._pinned:
                self._driver.unpin(address)
            self._pinned.clear()
            for address in self._opened.values():
                self._driver.close(address)
            self._opened.clear()
            self._driver.release()


def wait_for(driver: Driver, event: int, timeout_s: float) -> None:
    """Returns when the event is done. Raises DeviceFault when it is not in time, or the device fails."""
    deadline = time.monotonic() + timeout_s
    pause = POLL_S_MIN
    while not driver.is_done(event):
        if time.monotonic() > deadline:
            raise DeviceFault("CUDA_EVENT_STUCK", f"waiting {timeout_s:g} s for a copy")
        time.sleep(pause)
        pause = min(2 * pause, POLL_S_MAX)


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """The same copies, those that follow each other on both sides as one."""
    joined: list[Copy] = []
    for target, source, length_bytes in copies:
        if joined:
            last_target, last_source, last_bytes = joined[-1]
            if (target, source) == (last_target + last_bytes, last_source + last_bytes):
                joined[-1] = (last_target, last_source, last_bytes + length_bytes)
                continue
        joined.append((target, source, length_bytes))
    return joined
