"""Puts that are begun and not ended hold bounded memory, each tenant's for itself."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.rpc import put_assembly
from prefixd_server.rpc.put_assembly import PutBuffers

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.wire import Refusal, refusal_of
from tests.support.wire_engine import WireEngine, put_messages, wire_engine

BLOCK_BYTES = 4096


async def begun(engine: WireEngine, ref: Any) -> Any:
    """A Put that waits in the middle of a block."""
    call: Any = engine.cache.Put(timeout=30)
    await call.write(wire.PutRequest(header=wire.PutHeader(namespace=ref)))
    await call.write(put_messages(ref, chain("x"), [bytes(10)])[1])
    return call


async def put(engine: WireEngine, ref: Any) -> Refusal | None:
    """How a whole Put is refused; None when it is not."""
    try:
        await engine.put(*put_messages(ref, chain("a"), [bytes(BLOCK_BYTES)]))
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    return None


async def test_puts_beyond_the_bound_are_refused_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_assembly, "BUFFER_BYTES_MAX", 2 * BLOCK_BYTES)
    async with running_daemon("blue") as daemon:
        first, second = (tenant.socket for tenant in daemon.config.all_tenants)
        assert first is not None
        assert second is not None
        async with wire_engine(first, None) as engine, wire_engine(second, None) as other:
            ref = await engine.open_namespace(block_bytes=BLOCK_BYTES)
            theirs = await other.open_namespace(block_bytes=BLOCK_BYTES)
            open_puts = [await begun(engine, ref) for _ in range(2)]
            while (refusal := await put(engine, ref)) is None:
                """The daemon has yet to see both."""
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PUT_LIMIT")
            assert refusal.retry_after_s
            assert await put(other, theirs) is None
            for call in open_puts:
                call.cancel()
            while await put(engine, ref) is not None:
                """The daemon has yet to see their end."""


def test_one_put_may_go_on_however_large_its_blocks_are() -> None:
    buffers = PutBuffers()
    with buffers.hold(put_assembly.BUFFER_BYTES_MAX * 4):
        assert buffers.held_bytes > put_assembly.BUFFER_BYTES_MAX
    assert buffers.held_bytes == 0
