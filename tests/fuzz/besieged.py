"""A daemon under fire: a tenant that sends what it likes, and another that must not feel it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from prefixd.v1 import types_pb2
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.types import LeaseRelease
from prefixd_server.rpc import answers

from tests.support.daemon import running_daemon
from tests.support.fuzzing import Growth
from tests.support.hostile import KEPT, filled
from tests.support.node import chain, packed
from tests.support.request_fields import METHODS, Known, path_of
from tests.support.specs import spec
from tests.support.wire import Refusal, refusal_of
from tests.support.wire_engine import WireEngine, wire_engine

BLOCK_BYTES = 4096
BLOCKS = [key * (BLOCK_BYTES // 32) for key in KEPT]
OWN = chain("bystander", 1, 2)
WRITTEN = chain("written", 1)
CALL_TIMEOUT_S = 5.0
QUIET_TIMEOUT_S = 0.05
"""Of streams that say nothing by themselves, and of calls that may wait for what never comes."""
WROTE_TOO_LATE = "Internal error from Core"
"""What gRPC's client tells instead of an answer that came while it still wrote; our faults are counted."""
SILENT = {"WatchEvents", "OpenSession", "Get", "Acquire", "HandOver"}


@dataclass
class Besieged:
    """Synchronous, since Hypothesis is: every call runs the daemon's loop until it is answered."""

    runner: asyncio.Runner
    daemon: Daemon
    enemy: WireEngine
    channel: grpc.aio.Channel
    bystander: WireEngine
    theirs: types_pb2.NamespaceRef

    def attack(self, method: str, messages: list[bytes]) -> Refusal | None:
        """One call by the enemy; how it was refused. Afterwards everything is as it must be."""
        return self.runner.run(self._attack(method, messages))

    async def _attack(self, method: str, messages: list[bytes]) -> Refusal | None:
        known = await self._prepare(writes=bool(sum(map(len, messages)) % 2))
        refusal = await self._call(method, [_with_known(method, data, known) for data in messages])
        await self._let_go()
        self._is_whole()
        return refusal

    async def _prepare(self, *, writes: bool) -> Known:
        """The enemy keeps KEPT, and holds a lease to read it and another to write."""
        cache, session_id = self.daemon.cache, self.enemy.session_id
        ref = cache.open_namespace("red", spec(block_bytes=BLOCK_BYTES))
        wire_ref = answers.namespace_ref(ref)
        if cache.lookup("red", ref, packed(KEPT)).hit_count < len(KEPT):
            cache.evict("red", ref, None, 0)
            await self.enemy.store(wire_ref, KEPT, BLOCKS)
        read = cache.acquire("red", session_id, ref, packed(KEPT), 0, (0,), None)
        written = cache.reserve("red", session_id, ref, 0, 0, None, packed(WRITTEN), None)
        lease = written.lease if writes and written.lease else read.lease
        assert lease is not None
        return Known(wire_ref, session_id, lease.token)

    async def _call(self, method: str, messages: list[bytes]) -> Refusal | None:
        kind, path = METHODS[method], path_of(METHODS[method])
        timeout = QUIET_TIMEOUT_S if method in SILENT else CALL_TIMEOUT_S
        request: Any = iter(messages) if kind.client_streaming else messages[0]
        make: Any = {
            (False, False): self.channel.unary_unary,
            (True, False): self.channel.stream_unary,
            (False, True): self.channel.unary_stream,
            (True, True): self.channel.stream_stream,
        }[kind.client_streaming, kind.server_streaming]
        call = make(path)(request, timeout=timeout)
        try:
            if kind.server_streaming:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            refusal = refusal_of(error)
            return None if kind.client_streaming and refusal.message == WROTE_TOO_LATE else refusal
        except asyncio.CancelledError:
            # Of a call that ends while it still writes gRPC's client may also say that it was cancelled.
            if not (kind.client_streaming and call.cancelled()):
                raise
        return None

    async def _let_go(self) -> None:
        """Ends what the call may have left, as its holder would."""
        cache, session_id = self.daemon.cache, self.enemy.session_id
        releases = [LeaseRelease(lease.token) for lease in cache.state.leases.reads.values()]
        await cache.release("red", session_id, releases)
        for token in list(cache.state.leases.writes):
            cache.abort("red", session_id, token)
        while len(cache.sessions.open_of("red")) > 1:
            await asyncio.sleep(0)

    def _is_whole(self) -> None:
        """Nothing is held, and every book balances."""
        cache = self.daemon.cache
        cache.raise_if_broken()
        assert cache.check() == []
        assert not cache.state.leases.reads
        assert not cache.state.leases.writes
        errors = [sample for metric in self.daemon.metrics.registry.collect() for sample in metric.samples]
        assert not any(sample.labels.get("reason") == "INTERNAL" for sample in errors)

    def bystander_is_well(self) -> None:
        """The other tenant has what it had."""

        async def look() -> None:
            assert await self.bystander.get(self.theirs, OWN) == BLOCKS[: len(OWN)]

        self.runner.run(look())


def _with_known(method: str, data: bytes, known: Known) -> bytes:
    """The message with what the daemon knows in it, if it is one."""
    message: Any = GetMessageClass(METHODS[method].input_type)()
    try:
        message.MergeFromString(data)
    except DecodeError:
        return data
    filled(message, known)
    encoded: bytes = message.SerializeToString()
    return encoded


@asynccontextmanager
async def _opened(runner: asyncio.Runner) -> AsyncIterator[Besieged]:
    async with running_daemon("red,quota=4MiB", "blue", leases__ttl_max_s="3600") as daemon:
        red, blue = (Path(os.fspath(tenant.socket or "")) for tenant in daemon.config.tenants)
        async with (
            wire_engine(red) as enemy,
            wire_engine(blue) as bystander,
            grpc.aio.insecure_channel(f"unix:{red}") as channel,
        ):
            theirs = await bystander.open_namespace(block_bytes=BLOCK_BYTES)
            await bystander.store(theirs, OWN, BLOCKS[: len(OWN)])
            yield Besieged(runner, daemon, enemy, channel, bystander, theirs)


@contextmanager
def besieged() -> Iterator[Besieged]:
    """See Besieged. At the end nothing has grown, and the bystander has what it had."""
    with asyncio.Runner() as runner:
        opening = _opened(runner)
        town: Besieged = runner.run(opening.__aenter__())
        growth: list[Growth] = []
        try:
            town.attack("Lookup", [b""])
            growth.append(Growth())
            yield town
            town.bystander_is_well()
            growth[0].check()
        finally:
            runner.run(opening.__aexit__(None, None, None))
