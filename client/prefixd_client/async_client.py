"""The async client: the sync one's twin for an event loop, over the same pure core and keeper thread.

Calls go through grpc.aio on the caller's loop; copies run on a thread, so the loop is never held. Belongs to
the loop it was first used on. Cancelling a caller cancels its wait, never a copy that is under way.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from prefixd.v1 import cache_service_pb2_grpc

from . import portable
from .async_leases import AsyncReadLease, AsyncWriteLease
from .calls import AnswerRejected, block_bytes_of, checked_hashes, usage_message
from .channel import open_async_channel
from .client import end_control, start_control, stop_control
from .control import Control, log
from .failures import failure_of
from .namespace import NamespaceSpec
from .operations import Call, Operations, failed, succeeded, unread
from .options import ClientOptions
from .session import Session
from .values import ClientStatus, PrefetchStatus, PutResult, RunHits, UsageReport

T = TypeVar("T")

_STUB: Any = cache_service_pb2_grpc.CacheServiceStub
"""Generated without types."""


class AsyncClient:
    """See Client; use as `async with AsyncClient(address) as client`.

    Args:
        address, instance_id, engine_name, options: see Client.
    """

    def __init__(
        self,
        address: str | Path,
        instance_id: str | None = None,
        engine_name: str = "",
        options: ClientOptions | None = None,
    ) -> None:
        self._control, self._keeper = start_control(address, instance_id, engine_name, options)
        weakref.finalize(self, end_control, self._control, self._keeper).atexit = False
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._channel_session: Session | None = None
        """The session that the channel was made for: a new boot gets a new one."""

    async def __aenter__(self) -> AsyncClient:
        await self.wait_ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def instance_id(self) -> str:
        """See Client."""
        return self._control.instance_id

    @property
    def control(self) -> Control:
        """The shared half; for this library."""
        return self._control

    async def wait_ready(self) -> None:
        """Waits for the first attempt to reach the daemon, at most options.open_wait_s."""
        await asyncio.to_thread(self._control.attempted.wait, self._control.options.open_wait_s)

    async def namespace(self, spec: NamespaceSpec) -> AsyncNamespace:
        """See Client.namespace."""
        self._control.check_usable()
        await asyncio.to_thread(self._control.use, spec)
        return AsyncNamespace(self, spec)

    def status(self) -> ClientStatus:
        """See Client.status."""
        return self._control.status()

    async def close(self) -> None:
        """See Client.close."""
        await asyncio.to_thread(stop_control, self._control, self._keeper)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    # -- for AsyncNamespace ------------------------------------------------------------------------------

    async def stub(self, session: Session) -> Any:
        """The stub to reach the session's boot with; for this library."""
        if session is not self._channel_session:
            old, self._channel_session = self._channel, session
            self._channel = open_async_channel(self._control.target, self._control.options)
            self._stub = _STUB(self._channel)
            if old is not None:
                await old.close(None)
        return self._stub

    async def run(self, call: Call[T]) -> T:
        """Sends a call and waits, until its deadline or until the breaker opens; for this library.

        Raises DaemonRefused.
        """
        session, control = call.session, self._control
        if session is None or session.is_lost:
            return call.miss
        stub = await self.stub(session)
        sent_at = control.now()
        sent = getattr(stub, call.method)(call.request, timeout=call.timeout_s)
        async with _Waiting(control, sent) as waiting:
            try:
                answer = await sent
            except grpc.aio.AioRpcError as error:
                return failed(control, call, failure_of(error, call.method))
            except asyncio.CancelledError:
                miss = unread(control, call)
                if waiting.is_callers():
                    raise
                return miss
        return succeeded(control, call, answer, sent_at)


class _Waiting:
    """A call of this loop that the breaker may cancel, from any thread."""

    def __init__(self, control: Control, sent: Any) -> None:
        self._breaker = control.breaker
        self._sent = sent
        self._loop = asyncio.get_running_loop()
        self._ticket = -1

    async def __aenter__(self) -> _Waiting:
        self._ticket = self._breaker.enter(lambda: self._loop.call_soon_threadsafe(self._sent.cancel))
        if self._ticket < 0:
            self._sent.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._breaker.leave(self._ticket)

    def is_callers(self) -> bool:
        """Whether it was the caller's task that was cancelled, not the call: by the breaker, or with its
        channel."""
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0


class AsyncNamespace:
    """See Namespace; made by AsyncClient.namespace()."""

    def __init__(self, client: AsyncClient, spec: NamespaceSpec) -> None:
        self.spec = spec
        self._client = client
        self._control = client.control
        self._operations = Operations(client.control, spec)

    async def lookup(self, hashes: Sequence[bytes], *, timeout_s: float | None = None) -> RunHits:
        """See Namespace.lookup."""
        return await self._client.run(self._operations.lookup(hashes, timeout_s))

    async def acquire(
        self,
        hashes: Sequence[bytes],
        *,
        skip_blocks: int = 0,
        shards: Sequence[int] = (0,),
        ttl_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        max_wait_s: float = 0.0,
    ) -> AsyncReadLease | None:
        """See Namespace.acquire."""
        call = self._operations.acquire(hashes, skip_blocks, shards, ttl_s, timeout_s, request_id, max_wait_s)
        granted = await self._client.run(call)
        return None if granted is None else AsyncReadLease(self._control, self.spec, granted)

    async def prefetch(
        self,
        hashes: Sequence[bytes],
        *,
        queue_position: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> PrefetchStatus | None:
        """See Namespace.prefetch."""
        call = self._operations.prefetch(hashes, queue_position, deadline_s, timeout_s)
        return await self._client.run(call)

    async def cancel_prefetch(self, prefetch_ids: Sequence[bytes]) -> int:
        """See Namespace.cancel_prefetch."""
        return await self._client.run(self._operations.cancel_prefetch(prefetch_ids))

    async def keep_quiet(self, span_s: float) -> bool:
        """See Namespace.keep_quiet."""
        return await self._client.run(self._operations.keep_quiet(span_s))

    async def redeem(self, token: bytes, shard: int) -> AsyncReadLease | None:
        """See Namespace.redeem."""
        granted = await self._client.run(self._operations.redeem(token, shard))
        return None if granted is None else AsyncReadLease(self._control, self.spec, granted)

    async def reserve(
        self,
        hashes: Sequence[bytes],
        *,
        parent_hash: bytes = b"",
        shard: int = 0,
        kv_group: int = 0,
        ttl_s: float | None = None,
        recompute_cost_s: float | None = None,
        in_hbm: bool = False,
    ) -> AsyncWriteLease | None:
        """See Namespace.reserve."""
        granted = await self._client.run(
            self._operations.reserve(hashes, parent_hash, shard, kv_group, ttl_s, recompute_cost_s, in_hbm)
        )
        if granted is None:
            return None
        block_bytes = block_bytes_of(self.spec, shard, kv_group)
        return AsyncWriteLease(self._control, self.spec, granted, block_bytes, self._client.run)

    async def put(
        self,
        blocks: Iterable[tuple[bytes, bytes]],
        *,
        parent_hash: bytes = b"",
        shard: int = 0,
        kv_group: int = 0,
    ) -> PutResult:
        """See Namespace.put."""
        session, ref = self._operations.session()
        stream = portable.PutStream(
            self.spec, blocks, parent_hash=parent_hash, shard=shard, kv_group=kv_group
        )
        if session is None or ref is None:
            return PutResult(0, 0, stream.drain())

        async def messages() -> AsyncIterator[Any]:
            for message in stream.messages(ref):
                yield message

        stub = await self._client.stub(session)
        sent = stub.Put(messages(), timeout=self._control.options.stream_timeout_s)

        async def receive() -> Any:
            return await sent

        answer = await self._stream("Put", session, sent, receive)
        if stream.error is not None:
            raise stream.error
        return PutResult(0, 0, stream.drain()) if answer is None else stream.result(answer)

    async def get(self, hashes: Sequence[bytes], *, shard: int = 0, kv_group: int = 0) -> list[bytes]:
        """See Namespace.get."""
        session, ref = self._operations.session()
        assembly = portable.GetAssembly(
            block_bytes_of(self.spec, shard, kv_group), len(hashes), self.spec.checksum_algorithm
        )
        if session is None or ref is None or not hashes:
            checked_hashes(hashes, self.spec)
            return []
        limit = session.opened.hash_count_max
        request = portable.get_request(self.spec, ref, hashes, shard, kv_group, limit)
        stub = await self._client.stub(session)
        sent = stub.Get(request, timeout=self._control.options.stream_timeout_s)

        async def receive() -> None:
            async for message in sent:
                assembly.take(message)

        try:
            await self._stream("Get", session, sent, receive)
        except AnswerRejected as error:
            sent.cancel()
            self._control.statistics.add(bad=1)
            log.warning("a get ended early: %s", error)
        return assembly.blocks

    def report_usage(self, report: UsageReport) -> None:
        """See Namespace.report_usage; never waits."""
        self._control.check_usable()
        self._control.outbox.report_usage(self.spec, usage_message(report, self.spec))
        self._control.wake.ring()

    async def _stream(self, method: str, session: Session, sent: Any, receive: Any) -> Any:
        """What receive() returns; None when the stream failed. Raises DaemonRefused."""
        async with _Waiting(self._control, sent) as waiting:
            try:
                return await receive()
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error, method)
                if failure.code is not grpc.StatusCode.CANCELLED:
                    self._control.follow(failure, session, self.spec)
                return None
            except asyncio.CancelledError:
                if waiting.is_callers():
                    raise
                return None
