"""Prefetch, CancelPrefetch, what Lookup tells of readiness, and quiet periods, over real sockets."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.base.clock import ManualClock

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.wire_engine import wire_engine
from tests.wire.scene import BLOCKS, HASHES, Code, Scene


def run(scene: Scene, hashes: list[bytes] = HASHES, **fields: Any) -> wire.PrefetchRun:
    """A run of a Prefetch."""
    return wire.PrefetchRun(**({"namespace": scene.ref, "block_hashes": hashes} | fields))


async def prefetch(scene: Scene, *runs: wire.PrefetchRun, **fields: Any) -> Any:
    """The answer of a Prefetch."""
    return await scene.engine.call("Prefetch", session_id=scene.engine.session_id, runs=runs, **fields)


async def cancel(scene: Scene, *ids: bytes) -> int:
    """Prefetches that a CancelPrefetch found."""
    answer = await scene.engine.call("CancelPrefetch", session_id=scene.engine.session_id, prefetch_ids=ids)
    return int(answer.cancelled_count)


async def test_a_prefetch_tells_how_its_run_stands_and_is_let_go_once(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES[:3], BLOCKS[:3])
    (status,) = (await prefetch(scene, run(scene))).runs
    assert (status.ready_block_count, status.pending_block_count, status.miss_block_count) == (3, 0, 1)
    assert len(status.prefetch_id) == 16
    assert scene.daemon.cache.prefetching.count == 1
    assert await cancel(scene, status.prefetch_id, b"?" * 16) == 1
    assert await cancel(scene, status.prefetch_id) == 0
    assert scene.daemon.cache.prefetching.count == 0


async def test_what_a_prefetch_holds_is_not_evicted_until_it_is_let_go(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    (status,) = (await prefetch(scene, run(scene), target_tier=types_pb2.TIER_DRAM)).runs
    scene.daemon.cache.step()
    named = {"namespace": scene.ref, "block_hashes": HASHES}
    answer = await scene.engine.call("Evict", **named)
    assert (answer.evicted_block_count, answer.held_block_count) == (0, 4)
    await cancel(scene, status.prefetch_id)
    assert (await scene.engine.call("Evict", **named)).evicted_block_count == 4


async def test_an_acquire_of_the_run_ends_its_prefetch(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    await prefetch(scene, run(scene), run(scene, HASHES[:2]), run(scene, chain("other")))
    lease = await scene.engine.acquire(scene.ref, HASHES)
    assert scene.daemon.cache.prefetching.count == 1
    await scene.engine.call(
        "Release",
        session_id=scene.engine.session_id,
        releases=[wire.LeaseRelease(token=lease.lease.token)],
    )


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"block_hashes": []}, "EMPTY_RUN", "block_hashes"),
        ({"block_hashes": [b"short"]}, "HASH_LENGTH_MISMATCH", "block_hashes[0]"),
        ({"block_hashes": [b"x" * 32] * 16_385}, "TOO_MANY_HASHES", "block_hashes"),
        ({"deadline": Duration()}, "FIELD_INVALID", "deadline"),
        ({"deadline": Duration(seconds=-1)}, "FIELD_INVALID", "deadline"),
        ({"namespace": types_pb2.NamespaceRef()}, "FIELD_INVALID", "namespace.fingerprint"),
    ],
)
async def test_a_malformed_run_is_refused_and_makes_no_prefetch(
    scene: Scene, fields: dict[str, Any], reason: str, field: str
) -> None:
    refusal = await scene.engine.refused(
        "Prefetch", session_id=scene.engine.session_id, runs=[run(scene), run(scene, **fields)]
    )
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, reason)
    assert refusal.metadata["field"] == field
    assert scene.daemon.cache.prefetching.count == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"runs": []}, "runs count"),
        ({"runs": 65}, "runs count"),
        ({"target_tier": types_pb2.TIER_NVME}, "target_tier"),
        ({"target_tier": 77}, "target_tier"),
        ({"session_id": b"short"}, "session_id"),
    ],
)
async def test_a_malformed_prefetch_is_refused(scene: Scene, fields: dict[str, Any], field: str) -> None:
    if isinstance(fields.get("runs"), int):
        fields = {"runs": [run(scene)] * fields["runs"]}
    given = {"session_id": scene.engine.session_id, "runs": [run(scene)]} | fields
    refusal = await scene.engine.refused("Prefetch", **given)
    assert (refusal.code, refusal.reason, refusal.metadata["field"]) == (
        Code.INVALID_ARGUMENT,
        "FIELD_INVALID",
        field,
    )


@pytest.mark.parametrize("ids", [[], [b"short"], [b"x" * 16] * 4097])
async def test_a_malformed_cancellation_is_refused(scene: Scene, ids: list[bytes]) -> None:
    refusal = await scene.engine.refused(
        "CancelPrefetch", session_id=scene.engine.session_id, prefetch_ids=ids
    )
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "FIELD_INVALID")


async def test_an_unknown_session_is_refused(scene: Scene) -> None:
    for method, fields in (
        ("Prefetch", {"runs": [run(scene)]}),
        ("CancelPrefetch", {"prefetch_ids": [bytes(16)]}),
    ):
        refusal = await scene.engine.refused(method, session_id=b"?" * 16, **fields)
        assert (refusal.code, refusal.reason) == (Code.NOT_FOUND, "SESSION_UNKNOWN")


async def test_a_tenant_sees_and_cancels_its_own_alone() -> None:
    async with (
        running_daemon("other") as daemon,
        wire_engine(daemon.config.socket_path) as one,
        wire_engine(daemon.config.socket_path.with_name("other.sock")) as stranger,
    ):
        ref = await one.open_namespace()
        asked = {"runs": [wire.PrefetchRun(namespace=ref, block_hashes=HASHES)]}
        (status,) = (await one.call("Prefetch", session_id=one.session_id, **asked)).runs
        refusal = await stranger.refused("Prefetch", session_id=stranger.session_id, **asked)
        assert (refusal.code, refusal.reason) == (Code.NOT_FOUND, "NAMESPACE_UNKNOWN")
        answer = await stranger.call(
            "CancelPrefetch", session_id=stranger.session_id, prefetch_ids=[status.prefetch_id]
        )
        assert answer.cancelled_count == 0
        assert daemon.cache.prefetching.count == 1


async def test_prefetches_are_bounded_per_tenant_and_all_or_none_is_made() -> None:
    async with (
        running_daemon(migration__prefetch_count_max="3") as daemon,
        wire_engine(daemon.config.socket_path) as engine,
    ):
        ref = await engine.open_namespace()
        asked = [wire.PrefetchRun(namespace=ref, block_hashes=HASHES)] * 2
        await engine.call("Prefetch", session_id=engine.session_id, runs=asked)
        refusal = await engine.refused("Prefetch", session_id=engine.session_id, runs=asked)
        assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "PREFETCH_LIMIT")
        assert refusal.retry_after_s
        assert "migration.prefetch_count_max" in refusal.message
        assert daemon.cache.prefetching.count == 2


async def test_prefetches_end_with_their_session_and_at_their_deadline() -> None:
    clock = ManualClock()
    async with running_daemon(clock=clock) as daemon, wire_engine(daemon.config.socket_path) as engine:
        ref = await engine.open_namespace()
        spans = (Duration(seconds=1), Duration(seconds=3600), None)
        runs = [wire.PrefetchRun(namespace=ref, block_hashes=HASHES, deadline=span) for span in spans]
        await engine.call("Prefetch", session_id=engine.session_id, runs=runs)
        counts = []
        for span_s in (0.5, 1.0, 30.0):
            clock.advance(span_s)
            daemon.cache.step()
            counts.append(daemon.cache.prefetching.count)
        assert counts == [3, 2, 0]
        await engine.call("Prefetch", session_id=engine.session_id, runs=runs)
        daemon.cache.sessions.transport_lost(engine.session_id)
        daemon.cache.step()
        assert daemon.cache.prefetching.count == 0


async def test_lookup_tells_nothing_of_readiness_where_all_can_be_read(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    answer = await scene.engine.call("Lookup", namespace=scene.ref, block_hashes=HASHES)
    assert answer.hits[0].block_count == 4
    assert not answer.readiness


async def test_lookup_says_that_nobody_knows_when_a_writer_will_be_done(scene: Scene) -> None:
    reserved = await scene.engine.reserve(scene.ref, HASHES)
    answer = await scene.engine.call("Lookup", namespace=scene.ref, block_hashes=HASHES)
    (entry,) = answer.readiness
    assert (entry.tier, entry.ready_block_count, entry.pending_block_count) == (types_pb2.TIER_DRAM, 0, 4)
    assert not entry.HasField("ready_after")
    await scene.engine.call("Abort", session_id=scene.engine.session_id, token=reserved.lease.token)


async def test_a_quiet_period_needs_no_report_and_ends_when_told(scene: Scene) -> None:
    pace = scene.daemon.cache.migration.pace
    session = {"session_id": scene.engine.session_id}
    await scene.engine.call("ReportUsage", quiet_period=Duration(seconds=3600), **session)
    assert 59.0 < scene.daemon.cache.migration.traffic().quiet_s <= 60.0
    await scene.engine.call("ReportUsage", quiet_period=Duration(), **session)
    assert scene.daemon.cache.migration.traffic().quiet_s == 0.0
    assert pace.decode_p99_s(0.0) is None
    refusal = await scene.engine.refused("ReportUsage", **session)
    assert (refusal.reason, refusal.metadata["field"]) == ("FIELD_INVALID", "reports count")
