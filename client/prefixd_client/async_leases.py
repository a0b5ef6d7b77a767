"""Leases for an event loop: the same leases, their copies on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar

from .control import Control
from .holds import ReadHold, WriteHold
from .layout import BlockMemory
from .namespace import NamespaceSpec
from .operations import Call, WriteGrant
from .values import Committed

T = TypeVar("T")


async def _finished(copy: Callable[[], T]) -> T:
    """The copy's result, made on a thread. A caller that is cancelled, however often, waits for it first:
    nobody can stop it, and what it reads or writes must stay what it is until then."""
    # A future and no task: asyncio.run() cancels every task when it ends.
    copying = asyncio.get_running_loop().run_in_executor(None, copy)
    cancelled: asyncio.CancelledError | None = None
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return copying.result()


class AsyncReadLease(ReadHold):
    """See ReadLease. Use it with `async with`."""

    async def load(
        self,
        targets: Sequence[BlockMemory],
        shard: int = 0,
        kv_group: int = 0,
        *,
        start: int = 0,
        stream: int = 0,
    ) -> int:
        """See ReadHold.copy_out. A cancelled caller waits for the copy: its memory is its own then."""
        return await _finished(lambda: self.copy_out(targets, shard, kv_group, start, stream))

    async def __aenter__(self) -> AsyncReadLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AsyncWriteLease(WriteHold):
    """See WriteLease. Use it with `async with`."""

    def __init__(
        self,
        control: Control,
        spec: NamespaceSpec,
        granted: WriteGrant,
        block_bytes: int,
        run: Callable[[Call[Committed]], Awaitable[Committed]],
    ) -> None:
        super().__init__(control, spec, granted, block_bytes)
        self._run = run

    async def store(
        self, sources: Sequence[BlockMemory], blocks: Sequence[int] | None = None, *, stream: int = 0
    ) -> Committed:
        """See WriteLease.store. A cancelled caller waits for the copy; its blocks are then given up."""
        try:
            call = await _finished(lambda: self.copy_in(sources, blocks, stream))
            committed = await self._run(call)
        except asyncio.CancelledError:
            self.abort()
            raise
        return self.settle(committed)

    async def __aenter__(self) -> AsyncWriteLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
