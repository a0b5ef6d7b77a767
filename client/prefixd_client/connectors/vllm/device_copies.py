"""KV on a GPU: runs travel through a staging piece of the worker's own, on a stream of the worker's own.

A load copies slots into the staging piece, where the client library verifies them, and only then into the
paged KV cache; a save goes the other way. So an extent is one copy, the cache is written or read with one
launch a layer, and what is wrong never reaches the engine. The stream follows the engine's through the
mark's event; the engine's never follows ours, except when a copy is stuck.

After a fault the device is given up: everything is a miss, and no memory is given back, since a copy may
still be under way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from prefixd_client.device import COPY_TIMEOUT_S, wait_for
from prefixd_client.device_driver import DeviceFault, Driver
from prefixd_client.device_memory import DeviceMemory
from prefixd_client.leases import ReadLease, WriteLease
from prefixd_client.operations import Call
from prefixd_client.session import Session
from prefixd_client.values import Committed

from .kv_memory import KvMemory

_LOG = logging.getLogger(__name__)
STAGING_BYTES = 32 << 20
"""Of one direction: two of them, and a copy of as much takes a millisecond."""
COMPUTE_TIMEOUT_S = 120.0
"""For what the engine computes: a rank may wait on the device for another one that compiles its kernels."""


class Paging(Protocol):
    """What the engine's own torch does on its GPU: the seam for tests without one."""

    def compute_stream(self) -> int:
        """The stream that the calling thread of the engine computes on."""
        ...

    def gather(self, block_ids: Sequence[int], run: DeviceMemory, stream: int) -> None:
        """Has the stream copy blocks of the paged cache into a run."""
        ...

    def scatter(self, run: DeviceMemory, block_ids: Sequence[int], stream: int) -> None:
        """Has the stream copy a run into blocks of the paged cache."""
        ...


class DeviceCopies:
    """See kv_copies.KvCopies.

    Args:
        memory: the KV cache.
        driver: of its GPU, given over.
        paging: torch's part.
        staging_bytes: of the staging piece, at least a block's.
        timeout_s: for the copies of one part.

    Raises:
        DeviceFault: no memory for the staging piece.
    """

    def __init__(
        self,
        memory: KvMemory,
        driver: Driver,
        paging: Paging,
        staging_bytes: int = STAGING_BYTES,
        timeout_s: float = COPY_TIMEOUT_S,
    ) -> None:
        self.block_bytes = memory.block_bytes
        self.part_count = max(1, staging_bytes // memory.block_bytes)
        self.fault: DeviceFault | None = None
        """Why the device is not used any more."""
        self._driver = driver
        self._paging = paging
        self._timeout_s = timeout_s
        self._block_count = memory.block_count
        self._staging = driver.allocate(self.part_count * self.block_bytes)
        self._stream = driver.stream()
        self._event = driver.event()
        self._compute_stream = 0
        self._lock = threading.Lock()
        self._marks: set[int] = set()
        """Events of marks that no begin() has taken yet; guarded by _lock."""

    @property
    def is_lost(self) -> bool:
        """See KvCopies."""
        return self.fault is not None

    def mark(self) -> int:
        """See KvCopies. 0 when the device is lost."""
        if self.fault is not None:
            return 0
        try:
            self._compute_stream = self._paging.compute_stream()
            event = self._driver.event()
            self._driver.record(event, self._compute_stream)
        except DeviceFault as fault:
            self._give_up(fault)
            return 0
        with self._lock:
            self._marks.add(event)
        return event

    def begin(self, mark: int) -> None:
        """See KvCopies."""
        if self.fault is not None:
            return
        try:
            self._driver.follow(self._stream, mark)
            with self._lock:
                self._marks.remove(mark)
            self._driver.end_event(mark)
            self._wait(COMPUTE_TIMEOUT_S)
        except DeviceFault as fault:
            self._give_up(fault)

    def load(self, lease: ReadLease, shard: int, start: int, block_ids: Sequence[int]) -> int:
        """See KvCopies."""
        good = 0
        while good < len(block_ids) and self._can_copy(lease.session):
            part = block_ids[good : good + self.part_count]
            arrived = lease.load(self._staged(len(part)), shard, start=start + good, stream=self._stream)
            if not self._can_copy(lease.session) or not self._place(part[:arrived]):
                break
            good += arrived
            if arrived < len(part):
                break
        return good

    def copy_in(
        self, lease: WriteLease, indexes: Sequence[int], block_ids: Sequence[int]
    ) -> Call[Committed] | None:
        """See KvCopies."""
        if not self._can_copy(lease.session):
            return None
        self._check(block_ids)
        try:
            with self._waited_for():
                self._paging.gather(block_ids, self._run(len(block_ids)), self._stream)
        except DeviceFault as fault:
            self._give_up(fault)
            return None
        commit = lease.copy_in(self._staged(len(block_ids)), indexes, self._stream)
        self._can_copy(lease.session)
        return commit

    def close(self) -> None:
        """See KvCopies. Nothing is given back after a fault."""
        if self.fault is not None:
            return
        for event in (*self._marks, self._event):
            self._driver.end_event(event)
        self._driver.end_stream(self._stream)
        self._driver.free(self._staging)
        self._driver.release()

    # -- steps ----------------------------------------------------------------------------------------

    def _place(self, block_ids: Sequence[int]) -> bool:
        """Moves the staged run's verified head into its blocks; whether it is there."""
        if not block_ids:
            return True
        self._check(block_ids)
        try:
            with self._waited_for():
                self._paging.scatter(self._run(len(block_ids)), block_ids, self._stream)
        except DeviceFault as fault:
            self._give_up(fault)
            # The copy may come late: whatever the engine computes into these blocks must come later still.
            with suppress(DeviceFault):
                self._driver.follow(self._compute_stream, self._event)
            return False
        return True

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        """What the stream is given meanwhile is done afterwards, also when giving it fails half-way."""
        try:
            yield
        finally:
            self._wait(self._timeout_s)

    def _wait(self, timeout_s: float) -> None:
        self._driver.record(self._event, self._stream)
        wait_for(self._driver, self._event, timeout_s)

    def _can_copy(self, session: Session) -> bool:
        """Whether the lease's session still copies on the device; a fault of its copies is ours too."""
        if session.device is not None and session.device.fault is not None:
            self._give_up(session.device.fault)
        return self.fault is None and session.device is not None

    def _give_up(self, fault: DeviceFault) -> None:
        if self.fault is None:
            _LOG.error("prefixd: the GPU is given up, nothing is loaded or saved any more: %s", fault)
            self.fault = fault

    def _check(self, block_ids: Sequence[int]) -> None:
        """Raises IndexError for an id outside the KV cache: a device would write there."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._block_count:
            raise IndexError(
                f"block ids {min(block_ids)} to {max(block_ids)} in a KV cache of {self._block_count} blocks"
            )

    def _run(self, count: int) -> DeviceMemory:
        """The staging piece as one run of blocks."""
        return DeviceMemory(self._staging, count * self.block_bytes)

    def _staged(self, count: int) -> list[Any]:
        """The same block by block, as leases take it."""
        return [
            DeviceMemory(self._staging + index * self.block_bytes, self.block_bytes) for index in range(count)
        ]
