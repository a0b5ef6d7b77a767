"""Sessions and leases over the wire: heartbeats, several processes of an instance, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.clock import ManualClock

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.wire import refusal_of
from tests.support.wire_engine import WireEngine, wire_engine

HASHES = chain("a", "b", "c")
BLOCKS = [bytes([index]) * 4096 for index in range(3)]
TURNS_MAX = 2000


@dataclass
class Scene:
    """A daemon on a clock that the test moves, one engine, an open namespace."""

    daemon: Daemon
    clock: ManualClock
    engine: WireEngine
    ref: types_pb2.NamespaceRef

    @property
    def lease_count(self) -> int:
        """Leases held."""
        return self.daemon.cache.stats(None).lease_count

    async def until_leases(self, count: int) -> None:
        """Turns the loop until so many leases are held."""
        for _ in range(TURNS_MAX):
            if self.lease_count == count:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{self.lease_count} leases are held, not {count}")


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """See Scene."""
    clock = ManualClock()
    settings = {"leases__ttl_max_s": "10", "leases__session_count_max": "3"}
    async with (
        running_daemon(clock=clock, **settings) as daemon,
        wire_engine(daemon.config.socket_path) as engine,
    ):
        yield Scene(daemon, clock, engine, await engine.open_namespace(block_bytes=4096, shard_count=2))


async def store_both_shards(scene: Scene) -> None:
    """The run, in each shard."""
    for shard in (0, 1):
        blocks = [block[:-1] + bytes([shard]) for block in BLOCKS]
        assert (await scene.engine.store(scene.ref, HASHES, blocks, shard=shard)).visible_count == 3


async def test_a_session_is_told_what_it_needs(scene: Scene) -> None:
    opened = scene.engine.opened
    assert len(opened.session_id) == len(opened.boot_id) == 16
    assert opened.companion_path == f"{scene.daemon.config.socket_path}.fd"
    assert opened.lease_ttl_max.seconds == 10
    assert opened.heartbeat_interval.seconds == 5
    assert opened.hash_count_max == 16_384
    assert opened.server_version


async def test_a_scheduler_acquires_and_workers_redeem_the_same_length(scene: Scene) -> None:
    await store_both_shards(scene)
    read = await scene.engine.acquire(scene.ref, HASHES, redeem_shards=[], skip_block_count=1)
    assert (len(read.shard_extents), read.lease.boot_id) == (0, scene.engine.opened.boot_id)
    async with wire_engine(scene.daemon.config.socket_path) as worker:
        for shard in (0, 1):
            redeemed = await worker.call(
                "Redeem", session_id=worker.session_id, token=read.lease.token, shard=shard
            )
            (part,) = redeemed.shard_extents
            assert (part.shard, sum(extent.block_count for extent in part.extents)) == (shard, 2)
            assert part.extents[0].first_block == 1
            blocks = await worker.read(part.extents, 4096)
            assert [block[-1] for block in blocks] == [shard, shard]
        release = wire.LeaseRelease(token=read.lease.token, shards=[1])
        await worker.call("Release", session_id=worker.session_id, releases=[release])
        gone = await worker.refused("Redeem", session_id=worker.session_id, token=read.lease.token, shard=1)
        assert (gone.code, gone.reason) == (grpc.StatusCode.NOT_FOUND, "SHARD_NOT_LEASED")
        assert scene.lease_count == 1
    await scene.until_leases(0)


async def test_heartbeats_renew_and_name_what_is_lost(scene: Scene) -> None:
    await store_both_shards(scene)
    token = (await scene.engine.acquire(scene.ref, HASHES)).lease.token
    scene.clock.advance(8)
    answer = await scene.engine.heartbeat(token, b"?" * 16)
    assert (list(answer.lost_tokens), answer.expires_after.seconds) == ([b"?" * 16], 10)
    scene.clock.advance(8)
    assert scene.lease_count == 1
    scene.clock.advance(3)
    await scene.until_leases(0)
    assert (await scene.engine.heartbeat(token)).lost_tokens == [token]


async def test_the_end_of_the_stream_ends_the_sessions_leases(scene: Scene) -> None:
    await store_both_shards(scene)
    await scene.engine.acquire(scene.ref, HASHES)
    await scene.engine.stream.done_writing()
    assert not await scene.engine.stream.read()
    await scene.until_leases(0)


async def test_a_lost_companion_ends_the_session_and_the_next_heartbeat_says_so(scene: Scene) -> None:
    await store_both_shards(scene)
    await scene.engine.acquire(scene.ref, HASHES)
    assert scene.engine.companion is not None
    scene.engine.companion.close()
    await scene.until_leases(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scene.engine.heartbeat()
    assert refusal_of(caught.value).reason == "SESSION_UNKNOWN"


async def test_sessions_are_bounded_and_the_bound_is_told(scene: Scene) -> None:
    path = scene.daemon.config.socket_path
    async with wire_engine(path, "b", attach=False), wire_engine(path, "c", attach=False):
        stream = scene.engine.cache.OpenSession()
        await stream.write(wire.OpenSessionRequest(hello=wire.SessionHello(instance_id="d")))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    refusal = refusal_of(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SESSION_LIMIT")
    assert refusal.retry_after_s is not None


async def test_a_wrong_heartbeat_ends_the_stream_with_its_reason(scene: Scene) -> None:
    hello = wire.SessionHello(instance_id="again")
    await scene.engine.stream.write(wire.OpenSessionRequest(hello=hello))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scene.engine.stream.read()
    assert refusal_of(caught.value).reason == "HEARTBEAT_EXPECTED"


async def test_a_reserve_tells_outcomes_of_the_whole_run(scene: Scene) -> None:
    await store_both_shards(scene)
    more = [*HASHES, *chain("a", "b", "c", "d")[3:]]
    reserved = await scene.engine.reserve(scene.ref, more)
    outcomes = [(item.outcome, item.block_count) for item in reserved.outcomes]
    assert outcomes == [(types_pb2.RESERVE_OUTCOME_PRESENT, 3), (types_pb2.RESERVE_OUTCOME_RESERVED, 1)]
    (extent,) = reserved.extents
    assert (extent.first_block, extent.block_count, list(extent.checksums)) == (3, 1, [])
    orphan = await scene.engine.reserve(scene.ref, [b"o" * 32], parent=b"?" * 32)
    assert orphan.decline_reason == types_pb2.DECLINE_REASON_PARENT_MISSING
    assert not orphan.HasField("lease")
    aborted = await scene.engine.call("Abort", session_id=scene.engine.session_id, token=reserved.lease.token)
    assert aborted.freed_slot_count == 1
