"""Mover threads, and the jobs that they do.

The event loop hands over an immutable job and awaits its result; nothing else
is shared, so there are no locks. Cancelling the one who waits does not cancel
the job: bytes under way always arrive somewhere that is still reserved for them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.errors import LimitReached, Unavailable
from prefixd_server.base.types import ChecksumAlgorithm, Checksums
from prefixd_server.media.checksum import checksum, checksums
from prefixd_server.media.medium import Medium

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Job(Protocol[R_co]):
    """Work for a mover: immutable, knows all that it needs."""

    def perform(self) -> R_co:
        """Does the work, on a mover thread; what it raises reaches the one who waits."""
        ...


class Renewable(Protocol):
    """A medium whose segments can get fresh memory."""

    def renew(self, segment_index: int) -> None:
        """See DramMedium.renew."""
        ...


@dataclass(frozen=True, slots=True)
class CopyResult:
    """bad: one flag per block, True where the bytes did not match their checksum.

    unread_from: index of the block that the medium could not read; it and those after it were not looked at.
    fault: what the medium raised; also when a second attempt has read everything.
    """

    bad: NDArray[np.bool_]
    unread_from: int | None = None
    fault: OSError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """Copies an extent from slot to slot, verified; len(checksums) blocks.

    What is verified is the copy in an addressable target, else what was written to it.
    """

    source: Medium
    source_segment_index: int
    source_offset_bytes: int
    target: Medium
    target_segment_index: int
    target_offset_bytes: int
    stride_bytes: int
    block_bytes: int
    checksums: Checksums
    algorithm: ChecksumAlgorithm

    def perform(self) -> CopyResult:
        """See Job."""
        length = len(self.checksums) * self.stride_bytes
        target = self.target.view(self.target_segment_index, self.target_offset_bytes, length)
        if target is not None:
            return self._read_into(target)
        staged = self.source.view(self.source_segment_index, self.source_offset_bytes, length)
        if staged is None:
            staged = memoryview(bytearray(length))
            self.source.read(self.source_segment_index, self.source_offset_bytes, staged)
        result = self._compare(staged)
        self.target.write(self.target_segment_index, self.target_offset_bytes, staged)
        return result

    def _read_into(self, target: memoryview) -> CopyResult:
        try:
            self.source.read(self.source_segment_index, self.source_offset_bytes, target)
        except OSError as fault:
            return self._read_singly(target, fault)
        return self._compare(target)

    def _read_singly(self, target: memoryview, fault: OSError) -> CopyResult:
        """Finds the block that cannot be read; those before it are read."""
        count, unread_from = len(self.checksums), None
        for index in range(count):
            at = index * self.stride_bytes
            try:
                self.source.read(
                    self.source_segment_index,
                    self.source_offset_bytes + at,
                    target[at : at + self.stride_bytes],
                )
            except OSError:
                unread_from = index
                break
        bad = self._compare(target).bad
        if unread_from is not None:
            bad[unread_from:] = False
        return CopyResult(bad, unread_from, fault)

    def _compare(self, extent: memoryview) -> CopyResult:
        return _compare(extent, self.stride_bytes, self.block_bytes, self.checksums, self.algorithm)


@dataclass(frozen=True, slots=True, eq=False)
class VerifyJob:
    """Compares the blocks of an extent with their checksums; len(checksums) blocks."""

    source: Medium
    segment_index: int
    offset_bytes: int
    stride_bytes: int
    block_bytes: int
    checksums: Checksums
    algorithm: ChecksumAlgorithm

    def perform(self) -> CopyResult:
        """See Job."""
        length = len(self.checksums) * self.stride_bytes
        extent = self.source.view(self.segment_index, self.offset_bytes, length)
        if extent is None:
            extent = memoryview(bytearray(length))
            self.source.read(self.segment_index, self.offset_bytes, extent)
        return _compare(extent, self.stride_bytes, self.block_bytes, self.checksums, self.algorithm)


@dataclass(frozen=True, slots=True, eq=False)
class FillJob:
    """Writes one block's bytes from our own memory into a slot, if they match their checksum.

    The checksum is over `data`, which nobody else can change, never over the slot.
    """

    target: Medium
    segment_index: int
    offset_bytes: int
    data: memoryview
    checksum: int
    algorithm: ChecksumAlgorithm

    def perform(self) -> CopyResult:
        """See Job."""
        good = checksum(self.data, self.algorithm) == self.checksum
        if good:
            self.target.write(self.segment_index, self.offset_bytes, self.data)
        return CopyResult(np.array([not good]))


@dataclass(frozen=True, slots=True, eq=False)
class RenewJob:
    """Gives a segment fresh memory."""

    target: Renewable
    segment_index: int

    def perform(self) -> None:
        """See Job."""
        self.target.renew(self.segment_index)


@dataclass(frozen=True, slots=True, eq=False)
class CallJob(Generic[R]):
    """Calls a function that blocks and touches nothing that the loop owns."""

    function: Callable[[], R]

    def perform(self) -> R:
        """See Job."""
        return self.function()


def _compare(
    extent: memoryview, stride_bytes: int, block_bytes: int, expected: Checksums, algorithm: ChecksumAlgorithm
) -> CopyResult:
    return CopyResult(checksums(extent, stride_bytes, block_bytes, len(expected), algorithm) != expected)


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A job in the queue, and who waits for it on which loop."""

    job: Job[object]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[object]


class JobRunner(Protocol):
    """Whoever has movers do jobs: one pool of them (Movers), or one a device (hbm_devices.py)."""

    async def run(self, job: Job[R]) -> R:
        """See Movers.run."""
        ...

    async def drain(self) -> None:
        """See Movers.drain."""
        ...

    def close(self) -> None:
        """See Movers.close."""
        ...


class Movers:
    """A bounded pool of threads. Every method is called on the event loop.

    Args:
        thread_count: jobs at work at a time.
        queue_limit: jobs waiting at a time; beyond it run() raises LimitReached.
    """

    def __init__(self, thread_count: int, queue_limit: int) -> None:
        self._depth_max = thread_count + queue_limit
        self._queue: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._depth = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"mover-{number}", daemon=True)
            for number in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Jobs waiting and at work."""
        return self._depth

    async def run(self, job: Job[R]) -> R:
        """Has a mover do the job; its result, or what it raised.

        Raises:
            LimitReached: MOVERS_BUSY, when the queue is full.
            Unavailable: MOVERS_CLOSED, after close().
        """
        if self._closed:
            raise Unavailable("MOVERS_CLOSED", "the daemon is going away and copies nothing more")
        if self._depth >= self._depth_max:
            raise LimitReached(
                "MOVERS_BUSY",
                f"{self._depth} copies are waiting or under way; retry, or raise movers.queue_limit",
                limit=self._depth_max,
            )
        loop = asyncio.get_running_loop()
        ticket = _Ticket(job, loop, loop.create_future())
        ticket.result.add_done_callback(_retrieve)
        self._depth += 1
        self._idle.clear()
        self._queue.put(ticket)
        return cast(R, await asyncio.shield(ticket.result))

    async def drain(self) -> None:
        """Waits until no job is waiting or at work."""
        await self._idle.wait()

    def close(self) -> None:
        """Takes no more jobs; ends the threads once those taken are done. Idempotent."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
            for thread in self._threads:
                thread.join()

    # -- mover threads -------------------------------------------------------------------------

    def _work(self) -> None:
        while (ticket := self._queue.get()) is not None:
            self._do(ticket)

    def _do(self, ticket: _Ticket) -> None:
        result: object = None
        failure: BaseException | None = None
        try:
            result = ticket.job.perform()
        except BaseException as error:  # the thread's outermost seam: the waiter gets what was raised
            failure = error
        # A loop that is closed has nobody left who waits.
        with suppress(RuntimeError):
            ticket.loop.call_soon_threadsafe(self._finish, ticket, result, failure)

    # -- loop ----------------------------------------------------------------------------------

    def _finish(self, ticket: _Ticket, result: object, failure: BaseException | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._idle.set()
        if failure is None:
            ticket.result.set_result(result)
        else:
            ticket.result.set_exception(failure)


def _retrieve(future: asyncio.Future[object]) -> None:
    """A failure whose waiter was cancelled is nobody's: it must not be reported as forgotten."""
    if not future.cancelled():
        future.exception()
