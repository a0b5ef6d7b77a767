"""The largest legal requests do not keep the loop from others, and look for no more than may be there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.types import PART_COUNT_MAX, KvGroup, KvGroupKind, NamespaceRef, NamespaceSpec
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.daemon import running_daemon
from tests.support.engine import Engine
from tests.support.node import Node, chain, packed, start_node
from tests.support.specs import spec
from tests.support.wire_engine import WireEngine, wire_engine

LONG = [index.to_bytes(32, "big") for index in range(1, 16_385)]


def wide(shard_count: int, group_count: int) -> NamespaceSpec:
    """So many shards and KV groups."""
    groups = tuple(KvGroup(KvGroupKind.FULL_ATTENTION, 4096, 1) for _ in range(group_count))
    return replace(spec(shard_count=shard_count), kv_groups=groups)


@pytest.fixture
def node() -> Iterator[Node]:
    """A node with one further tenant."""
    with closing(start_node(tenants=("red",))) as made:
        yield made
        assert made.cache.check() == []


def looked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of hashes of each search for keys."""
    counts: list[int] = []
    keys = node.cache.state.catalog.keys
    find = keys.find

    def counted(space: int, hashes: np.ndarray) -> np.ndarray:
        counts.append(len(hashes))
        return find(space, hashes)

    monkeypatch.setattr(keys, "find", counted)
    return counts


def test_of_a_run_that_a_part_does_not_have_the_others_are_not_asked(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = node.cache.open_namespace("red", wide(PART_COUNT_MAX // 16, 16))
    engine = Engine(node, node.open_session("red", "one"), ref, 4096)
    engine.put(*"ab")
    counts = looked_for(node, monkeypatch)
    assert node.cache.lookup("red", ref, packed(chain(*"ab"))).miss_count == 2
    assert counts == [2]


def test_a_long_run_of_which_little_is_kept_is_pinned_and_evicted_by_looking_at_little(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = node.cache.open_namespace("red", spec(block_bytes=4096))
    engine = Engine(node, node.open_session("red", "one"), ref, 4096)
    kept = engine.put(*range(100))
    counts = looked_for(node, monkeypatch)
    assert node.cache.pin("red", ref, packed(LONG), True) == 0
    assert node.cache.evict("red", ref, packed(LONG), 0) == (0, 0)
    assert sum(counts) < 100
    assert node.cache.pin("red", ref, packed([*kept, *LONG[: 16_384 - 100]]), True) == 100
    assert node.cache.pin("red", ref, packed(kept), False) == 100
    assert node.cache.evict("red", ref, packed(kept), 40) == (60, 0)


async def test_more_shards_and_groups_than_may_be_are_refused() -> None:
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path, None) as engine:
        for shards, groups in ((PART_COUNT_MAX, 1), (PART_COUNT_MAX // 16, 16)):
            await engine.call("OpenNamespace", spec=spec_to_wire(wide(shards, groups)))
        refusal = await engine.refused("OpenNamespace", spec=spec_to_wire(wide(PART_COUNT_MAX // 16 + 1, 16)))
    assert (refusal.reason, refusal.metadata["field"]) == ("FIELD_INVALID", "spec.shard_count")


async def large_request(
    daemon: Daemon, enemy: WireEngine, method: str, ref: types_pb2.NamespaceRef
) -> dict[str, object]:
    """The fields of a request of this method that is large."""
    session = {"session_id": enemy.session_id}
    if method == "ReportUsage":
        common = {"namespace": ref, "phase": wire.REQUEST_PHASE_STARTED, "block_hashes": LONG[:16]}
        reports = [wire.UsageReport(request_id=str(index), **common) for index in range(1024)]
        return session | {"reports": reports}
    if method == "Prefetch":
        run = wire.PrefetchRun(namespace=ref, block_hashes=LONG[:256])
        return session | {"runs": [run] * 64}
    await enemy.store(ref, LONG[:8], [bytes(4096)] * 8)
    acquire, known = daemon.cache.acquire, NamespaceRef(ref.fingerprint, ref.epoch)
    taken = [acquire("red", enemy.session_id, known, packed(LONG[:8]), 0, (0,), None) for _ in range(1024)]
    return session | {"releases": [wire.LeaseRelease(token=one.lease.token) for one in taken if one.lease]}


@pytest.mark.parametrize("method", ["ReportUsage", "Prefetch", "Release"])
async def test_between_the_parts_of_a_large_request_others_are_served(method: str) -> None:
    async with running_daemon("red", "blue") as daemon:
        red, blue = (tenant.socket for tenant in daemon.config.tenants)
        assert red is not None
        assert blue is not None
        async with wire_engine(red) as enemy, wire_engine(blue, None) as bystander:
            ref = await enemy.open_namespace(block_bytes=4096, shard_count=64 if method == "Prefetch" else 1)
            theirs = await bystander.open_namespace()
            task = asyncio.ensure_future(
                enemy.call(method, **await large_request(daemon, enemy, method, ref))
            )
            served = 0
            while not task.done():
                await bystander.call("Lookup", namespace=theirs, block_hashes=LONG[:1])
                served += 1
            await task
    assert served > 2
