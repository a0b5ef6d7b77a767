"""Get over the wire: what it holds, it holds for a reader that goes on reading."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.types import Tier

from tests.support.companions import until
from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.wire import refusal_of
from tests.support.wire_engine import WireEngine, put_messages, wire_engine

BLOCK_BYTES = 1 << 20
TTL_S = 10
HASHES = chain(*range(8))
BLOCKS = [bytes([index]) * BLOCK_BYTES for index in range(len(HASHES))]


@dataclass
class Scene:
    """A daemon on a clock that the test moves, and a run that is more than a connection takes unread."""

    daemon: Daemon
    clock: ManualClock
    engine: WireEngine
    request: wire.GetRequest

    @property
    def held(self) -> int:
        """Holds on slots in DRAM."""
        return self.daemon.cache.state.catalog.slots[Tier.DRAM].lease_total()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """See Scene."""
    clock = ManualClock()
    async with (
        running_daemon(clock=clock, leases__ttl_max_s=str(TTL_S)) as daemon,
        wire_engine(daemon.config.socket_path, None) as engine,
    ):
        ref = await engine.open_namespace(block_bytes=BLOCK_BYTES)
        stored = await engine.put(*put_messages(ref, HASHES, BLOCKS))
        assert stored.stored_count == len(HASHES)
        yield Scene(daemon, clock, engine, wire.GetRequest(namespace=ref, block_hashes=HASHES))


async def rest_of(call: Any) -> None:
    """Reads on; what was on its way is whole."""
    while (message := await call.read()) is not grpc.aio.EOF:
        assert message.block.data == BLOCKS[message.block.block_index]


async def test_a_reader_that_stops_reading_holds_its_blocks_no_longer_than_a_lease(scene: Scene) -> None:
    call = scene.engine.cache.Get(scene.request)
    assert (await call.read()).summary.hit_block_count == len(HASHES)
    assert scene.held == len(HASHES)

    def has_let_go_in_time() -> bool:
        scene.clock.advance(TTL_S / 100)
        return scene.held == 0

    await until(has_let_go_in_time)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    refusal = refusal_of(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GET_EXPIRED")
    assert refusal.metadata["limit"] == str(float(TTL_S))
    assert await scene.engine.get(scene.request.namespace, HASHES) == BLOCKS
