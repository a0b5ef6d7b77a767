"""SetMode, ExplainBlock and WatchEvents over the wire."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from prefixd.v1 import admin_service_pb2 as admin
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.cache.watching import WATCHER_COUNT_MAX

from tests.support.node import chain
from tests.support.wire import refusal_of
from tests.wire.scene import BLOCKS, HASHES, Code, Scene, give_back


async def test_the_policy_is_switched_and_read(scene: Scene) -> None:
    engine = scene.engine
    assert (await engine.call("SetMode")).policy == "importance"
    assert (await engine.call("SetMode", policy="lru")).policy == "lru"
    assert scene.daemon.cache.state.policy.name == "lru"
    refused = await engine.refused("SetMode", policy="magic")
    assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "POLICY_UNKNOWN")
    assert (await engine.call("SetMode")).policy == "lru"


async def test_an_unknown_block_is_answered_with_not_found(scene: Scene) -> None:
    answer = await scene.engine.call("ExplainBlock", namespace=scene.ref, block_hash=chain("nobody")[0])
    assert not answer.found


async def test_a_watcher_hears_of_a_request_and_its_end(scene: Scene) -> None:
    engine = scene.engine
    await engine.store(scene.ref, HASHES, BLOCKS)
    stream = engine.admin.WatchEvents(admin.WatchEventsRequest())
    await until_watched(scene, True)
    lease = (await engine.acquire(scene.ref, HASHES, request_id="r")).lease
    began = (await stream.read()).request_began
    assert list(began.block_hashes) == HASHES
    assert (began.request_id, began.kept_block_count, began.block_tokens) == ("r", len(HASHES), 16)
    report = wire.UsageReport(
        namespace=scene.ref,
        request_id="r",
        phase=wire.REQUEST_PHASE_FINISHED,
        output_token_count=7,
        stop_reason=wire.STOP_REASON_TOOL_USE,
    )
    await engine.call("ReportUsage", reports=[report], session_id=engine.session_id)
    assert (await stream.read()).request_ended == admin.RequestEnded(
        instance_id=began.instance_id,
        request_id="r",
        output_token_count=7,
        stop_reason=wire.STOP_REASON_TOOL_USE,
    )
    stream.cancel()
    await until_watched(scene, False)
    await give_back(scene, read=lease.token)


async def test_a_watcher_hears_that_conservative_mode_begins_and_ends_and_why(scene: Scene) -> None:
    stream = scene.engine.admin.WatchEvents(admin.WatchEventsRequest())
    await until_watched(scene, True)
    for setting, on in (("on", True), ("off", False)):
        await scene.engine.call("SetMode", conservative=setting)
        changed = (await stream.read()).conservative_mode_changed
        assert changed.on is on
        assert "by the operator" in changed.reason
    stream.cancel()
    await until_watched(scene, False)


async def test_one_watcher_too_many_is_refused(scene: Scene) -> None:
    tenant = scene.daemon.config.server.tenant
    for _ in range(WATCHER_COUNT_MAX):
        scene.daemon.cache.watchers.open(tenant)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in scene.engine.admin.WatchEvents(admin.WatchEventsRequest(), timeout=10):
            pass
    refused = refusal_of(caught.value)
    assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "WATCHER_LIMIT")


async def until_watched(scene: Scene, watched: bool) -> None:
    tenant = scene.daemon.config.server.tenant
    async with asyncio.timeout(10):
        while scene.daemon.cache.watchers.watched(tenant) is not watched:
            await asyncio.sleep(0.002)
