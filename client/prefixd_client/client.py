"""The sync client: what an engine's threads call.

    client = Client("/run/prefixd/prefixd.sock", engine_name="vllm")
    namespace = client.namespace(spec)
    lease = namespace.acquire(hashes)

A daemon that is away, slow, full or hostile is a miss. See errors.py for what is raised.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc

from . import portable
from .calls import AnswerRejected, block_bytes_of, checked_hashes, usage_message
from .channel import target_of
from .control import Control, log
from .errors import InvalidArgument
from .failures import failure_of
from .keeper import Keeper
from .leases import ReadLease, WriteLease
from .namespace import NamespaceSpec
from .operations import Call, Operations, failed, succeeded, unread
from .options import ClientOptions
from .session import Session
from .values import ClientStatus, PrefetchStatus, PutResult, RunHits, UsageReport

T = TypeVar("T")

INSTANCE_ID_BYTES_MAX = 128


def start_control(
    address: str | Path, instance_id: str | None, engine_name: str, options: ClientOptions | None
) -> tuple[Control, Keeper]:
    """The shared half of both clients, at work. Raises InvalidArgument."""
    for field, value in (("instance_id", instance_id or ""), ("engine_name", engine_name)):
        if len(value.encode()) > INSTANCE_ID_BYTES_MAX:
            raise InvalidArgument(field, value, f"has at most {INSTANCE_ID_BYTES_MAX} bytes", "shorten it")
    control = Control(
        target_of(address), instance_id or uuid.uuid4().hex, engine_name, options or ClientOptions()
    )
    return control, Keeper(control)


def stop_control(control: Control, keeper: Keeper) -> None:
    """Closes both; harmless when closed already, and in a forked child."""
    if not control.is_closed:
        keeper.stop()


def end_control(control: Control, keeper: Keeper) -> None:
    """The same for a client that nobody has closed, and without waiting: it is collected on whatever thread
    happens to collect, ours among them, inside any lock."""
    if not control.is_closed:
        keeper.end()


class Client:
    """One process of an engine, connected to the node's daemon. Thread-safe. Close it, or use `with`.

    Making one waits for the first session, at most options.open_wait_s; without a daemon it is made all the
    same, and works as soon as there is one.

    Args:
        address: the daemon's socket (a path, or "unix:..."), or "host:port".
        instance_id: of the engine, shared by its processes, at most 128 bytes; random by default.
        engine_name: for people.
        options: deadlines and bounds.

    Raises:
        InvalidArgument: an address or a name that cannot be one.
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
        self._control.attempted.wait(self._control.options.open_wait_s)

    @property
    def instance_id(self) -> str:
        """The engine instance; give it to the engine's other processes."""
        return self._control.instance_id

    def namespace(self, spec: NamespaceSpec) -> Namespace:
        """A namespace, opened now if the daemon answers, and again by itself whenever it must be.

        Raises:
            DaemonRefused: the daemon does not serve such a namespace.
            ClientClosed, ForkedError: see errors.
        """
        self._control.check_usable()
        self._control.use(spec)
        return Namespace(self, spec)

    def status(self) -> ClientStatus:
        """How the client stands. Never raises."""
        return self._control.status()

    def close(self) -> None:
        """Gives up the leases that are held, sends what waits if the daemon answers, and ends the session.

        Copies under way end after their block, and calls that wait are answered by their miss. Closing again
        does nothing. A client that is forgotten instead closes by itself a little later.
        """
        stop_control(self._control, self._keeper)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for Namespace ---------------------------------------------------------------------------------

    @property
    def control(self) -> Control:
        """The shared half; for this library."""
        return self._control

    def run(self, call: Call[T]) -> T:
        """Sends a call and waits, until its deadline or until the breaker opens; for this library.

        Raises DaemonRefused.
        """
        session, control = call.session, self._control
        if session is None:
            return call.miss
        sent_at = control.now()
        try:
            future = getattr(session.stub, call.method).future(call.request, timeout=call.timeout_s)
        except ValueError:  # the channel was closed by the keeper in this moment
            return call.miss
        ticket = control.breaker.enter(future.cancel)
        if ticket < 0:
            future.cancel()
            return unread(control, call)
        try:
            answer = future.result()
        except grpc.FutureCancelledError:
            return unread(control, call)
        except grpc.RpcError as error:
            return failed(control, call, failure_of(error, call.method))
        finally:
            control.breaker.leave(ticket)
        return succeeded(control, call, answer, sent_at)


class Namespace:
    """The blocks of one namespace. Thread-safe; made by Client.namespace().

    Every hash is of the namespace's hash_bytes; runs start at the root of their prefix unless said
    otherwise. Blocks beyond the daemon's limit of one request (16,384) count as missed or declined.
    """

    def __init__(self, client: Client, spec: NamespaceSpec) -> None:
        self.spec = spec
        self._client = client
        self._control = client.control
        self._operations = Operations(client.control, spec)

    def lookup(self, hashes: Sequence[bytes], *, timeout_s: float | None = None) -> RunHits:
        """What acquire() would hit. Takes no lease, counts as no use."""
        return self._client.run(self._operations.lookup(hashes, timeout_s))

    def acquire(
        self,
        hashes: Sequence[bytes],
        *,
        skip_blocks: int = 0,
        shards: Sequence[int] = (0,),
        ttl_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        max_wait_s: float = 0.0,
    ) -> ReadLease | None:
        """Leases the longest kept prefix, the same length in every shard and KV group.

        Args:
            hashes: the run, from its root.
            skip_blocks: blocks at its start that the engine has itself.
            shards: those that this process will load; others are redeemed by their own processes.
            ttl_s: wished life; the daemon's maximum by default. It is renewed as long as it is held.
            timeout_s: options.lookup_timeout_s by default.
            request_id: the engine's name of the request: one use is counted for it.
            max_wait_s: how long to wait, beyond timeout_s, for kept blocks of slower tiers, at most 10 s.

        Returns:
            None when nothing beyond the skipped blocks hit, or the daemon is away.
        """
        granted = self._client.run(
            self._operations.acquire(hashes, skip_blocks, shards, ttl_s, timeout_s, request_id, max_wait_s)
        )
        return None if granted is None else ReadLease(self._control, self.spec, granted)

    def prefetch(
        self,
        hashes: Sequence[bytes],
        *,
        queue_position: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> PrefetchStatus | None:
        """Has a run brought from slower tiers and held, for a request that will acquire() it.

        Requests that are reported as QUEUED with their run need no prefetch of their own.

        Args:
            hashes: the run, from its root.
            queue_position: of the request, 0 next; lower is brought first.
            deadline_s: from now; it is let go then. The daemon's longest time by default.
            timeout_s: options.lookup_timeout_s by default.

        Returns:
            None when the daemon is away, or takes no more prefetches.
        """
        return self._client.run(self._operations.prefetch(hashes, queue_position, deadline_s, timeout_s))

    def cancel_prefetch(self, prefetch_ids: Sequence[bytes]) -> int:
        """Lets prefetches go; how many were there. One that was acquired has ended by itself."""
        return self._client.run(self._operations.cancel_prefetch(prefetch_ids))

    def keep_quiet(self, span_s: float) -> bool:
        """Asks for no background copies on the node for so long from now, at most 60 s; 0 ends such a time.

        For CUDA graph capture and the like. Whether the daemon has heard it.
        """
        return self._client.run(self._operations.keep_quiet(span_s))

    def redeem(self, token: bytes, shard: int) -> ReadLease | None:
        """One shard of a lease that another process of this engine instance has acquired.

        None when the lease has ended, or the daemon is away; a shard that was asked for in vain is given up.
        """
        granted = self._client.run(self._operations.redeem(token, shard))
        return None if granted is None else ReadLease(self._control, self.spec, granted)

    def reserve(
        self,
        hashes: Sequence[bytes],
        *,
        parent_hash: bytes = b"",
        shard: int = 0,
        kv_group: int = 0,
        ttl_s: float | None = None,
        recompute_cost_s: float | None = None,
        in_hbm: bool = False,
    ) -> WriteLease | None:
        """Reserves slots for the blocks of a run that are not kept yet.

        Args:
            hashes: consecutive blocks.
            parent_hash: of the block before the first; empty at the root.
            shard, kv_group: whose bytes these are.
            ttl_s: wished life; the daemon's maximum by default.
            recompute_cost_s: time to compute the run again, measured or estimated.
            in_hbm: asks for slots in GPU memory; they are in DRAM when there is no room, or no device.

        Returns:
            A lease, which may have reserved no block (see its outcomes). None when the daemon is away.
        """
        granted = self._client.run(
            self._operations.reserve(hashes, parent_hash, shard, kv_group, ttl_s, recompute_cost_s, in_hbm)
        )
        if granted is None:
            return None
        block_bytes = block_bytes_of(self.spec, shard, kv_group)
        return WriteLease(self._control, self.spec, granted, block_bytes, self._client.run)

    def put(
        self,
        blocks: Iterable[tuple[bytes, bytes]],
        *,
        parent_hash: bytes = b"",
        shard: int = 0,
        kv_group: int = 0,
    ) -> PutResult:
        """Stores (hash, bytes) pairs of consecutive blocks through gRPC: slow, and works everywhere."""
        session, ref = self._operations.session()
        stream = portable.PutStream(
            self.spec, blocks, parent_hash=parent_hash, shard=shard, kv_group=kv_group
        )
        if session is None or ref is None:
            return PutResult(0, 0, stream.drain())
        future = session.stub.Put.future(stream.messages(ref), timeout=self._control.options.stream_timeout_s)
        answer = self._stream("Put", session, future, future.result)
        if stream.error is not None:
            raise stream.error
        return PutResult(0, 0, stream.drain()) if answer is None else stream.result(answer)

    def get(self, hashes: Sequence[bytes], *, shard: int = 0, kv_group: int = 0) -> list[bytes]:
        """The bytes of the longest kept prefix through gRPC, each block verified."""
        session, ref = self._operations.session()
        assembly = portable.GetAssembly(
            block_bytes_of(self.spec, shard, kv_group), len(hashes), self.spec.checksum_algorithm
        )
        if session is None or ref is None or not hashes:
            checked_hashes(hashes, self.spec)
            return []
        limit = session.opened.hash_count_max
        request = portable.get_request(self.spec, ref, hashes, shard, kv_group, limit)
        stream = session.stub.Get(request, timeout=self._control.options.stream_timeout_s)

        def receive() -> None:
            for message in stream:
                assembly.take(message)

        try:
            self._stream("Get", session, stream, receive)
        except AnswerRejected as error:
            stream.cancel()
            self._control.statistics.add(bad=1)
            log.warning("a get ended early: %s", error)
        return assembly.blocks

    def report_usage(self, report: UsageReport) -> None:
        """Queues a report, to be sent in the background; beyond a bound the oldest are dropped."""
        self._control.check_usable()
        self._control.outbox.report_usage(self.spec, usage_message(report, self.spec))
        self._control.wake.ring()

    def _stream(self, method: str, session: Session, stream: Any, receive: Any) -> Any:
        """What receive() returns; None when the stream failed. Raises DaemonRefused."""
        ticket = self._control.breaker.enter(stream.cancel)
        if ticket < 0:
            stream.cancel()
            return None
        try:
            return receive()
        except grpc.FutureCancelledError:
            return None
        except grpc.RpcError as error:
            failure = failure_of(error, method)
            if failure.code is not grpc.StatusCode.CANCELLED:
                self._control.follow(failure, session, self.spec)
            return None
        finally:
            self._control.breaker.leave(ticket)
