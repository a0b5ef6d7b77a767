"""A run that is no chain is a hit up to its first break, and harms no book, whichever call it comes with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.wire_engine import WireEngine, wire_engine

A, B, C = chain("a", "b", "c")
(OTHER,) = chain("other")
BLOCK_BYTES = 4096
RUNS = [
    ([A, B, C], 3),
    ([A, A, A], 1),
    ([A, C], 1),
    ([A, B, A], 2),
    ([A, OTHER], 1),
    ([OTHER, B], 1),
    ([B, C], 0),
    ([C, B, A], 0),
]


@pytest.fixture
async def kept() -> AsyncIterator[tuple[WireEngine, types_pb2.NamespaceRef]]:
    """An engine whose namespace keeps A, B below A, C below B, and another first block."""
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path) as engine:
        ref = await engine.open_namespace(block_bytes=BLOCK_BYTES)
        await engine.store(ref, [A, B, C], [key * 128 for key in (A, B, C)])
        await engine.store(ref, [OTHER], [OTHER * 128])
        yield engine, ref
        assert daemon.cache.check() == []


@pytest.mark.parametrize(("run", "hits"), RUNS)
async def test_a_run_hits_up_to_its_first_break(
    kept: tuple[WireEngine, types_pb2.NamespaceRef], run: list[bytes], hits: int
) -> None:
    engine, ref = kept
    assert await engine.lookup_counts(ref, run) == (hits, 0, len(run) - hits)
    assert await engine.get(ref, run) == [key * 128 for key in run[:hits]]
    acquired = await engine.acquire(ref, run, request_id="r")
    assert sum(hit.block_count for hit in acquired.hits) == hits
    report = wire.UsageReport(
        namespace=ref, request_id="s", phase=wire.REQUEST_PHASE_STARTED, block_hashes=run
    )
    finish = wire.UsageReport(namespace=ref, request_id="s", phase=wire.REQUEST_PHASE_FINISHED)
    for reports in ([report], [finish]):
        await engine.call("ReportUsage", session_id=engine.session_id, reports=reports)
    prefetch = wire.PrefetchRun(namespace=ref, block_hashes=run)
    answer = await engine.call("Prefetch", session_id=engine.session_id, runs=[prefetch])
    assert answer.runs[0].ready_block_count == hits
    ids = [answer.runs[0].prefetch_id]
    await engine.call("CancelPrefetch", session_id=engine.session_id, prefetch_ids=ids)
    await engine.call("Pin", namespace=ref, block_hashes=run)
    await engine.call("Unpin", namespace=ref, block_hashes=run)
    if acquired.HasField("lease"):
        releases = [wire.LeaseRelease(token=acquired.lease.token)]
        await engine.call("Release", session_id=engine.session_id, releases=releases)
    await engine.call("Evict", namespace=ref, block_hashes=run)
