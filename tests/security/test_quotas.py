"""Hard quotas: a tenant has what it may have and no more, is told so, and takes nothing from another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from prefixd.v1 import cache_service_pb2, types_pb2
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.config_tenants import TenantConfig
from prefixd_server.base.errors import ConfigError, LimitReached
from prefixd_server.base.types import DeclineReason, ReserveOutcome, Tier
from prefixd_server.cache import quotas
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.daemon import running_daemon
from tests.support.engine import Engine
from tests.support.node import MIB, Node, chain, start_node
from tests.support.nvme_node import NVME, fill, storage_of, until
from tests.support.specs import spec
from tests.support.wire import Refusal, refusal_of
from tests.support.wire_engine import WireEngine, wire_engine

BLOCK_BYTES = 65_536
BLOCKS_OF_A_SEGMENT = 2 * MIB // BLOCK_BYTES
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@contextmanager
def node_with(*tenants: TenantConfig) -> Iterator[Node]:
    """Four DRAM segments for the first tenant and these."""
    with closing(start_node(tenants=tenants)) as node:
        yield node
        assert node.cache.check() == []


def engine_of(node: Node, tenant: str, block_bytes: int = BLOCK_BYTES) -> Engine:
    """An engine of the tenant, on a namespace of this block size."""
    ref = node.cache.open_namespace(tenant, spec(block_bytes=block_bytes))
    return Engine(node, node.open_session(tenant, f"{tenant}-{block_bytes}"), ref, block_bytes)


def assigned(node: Node, tenant: str, tier: Tier = Tier.DRAM) -> int:
    """Bytes of segments that the tenant has."""
    return next(s.assigned_bytes for s in node.cache.stats(tenant).tiers if s.tier is tier)


def test_dram_beyond_the_quota_is_declined_with_its_reason_and_others_go_on() -> None:
    with node_with(TenantConfig(name="red", quota_bytes=4 * MIB), TenantConfig(name="blue")) as node:
        red, blue = engine_of(node, "red"), engine_of(node, "blue")
        wanted = chain(*range(3 * BLOCKS_OF_A_SEGMENT))
        reserved = red.reserve(wanted)
        assert reserved.outcomes == (
            (ReserveOutcome.RESERVED, 2 * BLOCKS_OF_A_SEGMENT),
            (ReserveOutcome.DECLINED, BLOCKS_OF_A_SEGMENT),
        )
        assert reserved.decline_reason is DeclineReason.QUOTA_REACHED
        assert reserved.retry_after_s is not None
        assert assigned(node, "red") == 4 * MIB
        full = blue.reserve(wanted)
        assert full.outcomes[0] == (ReserveOutcome.RESERVED, 2 * BLOCKS_OF_A_SEGMENT)
        assert full.decline_reason is DeclineReason.TIER_FULL


def test_at_its_quota_a_tenants_own_blocks_make_room_for_its_own() -> None:
    with node_with(TenantConfig(name="red", quota_bytes=2 * MIB)) as node:
        red = engine_of(node, "red")
        first = red.put("first", *range(BLOCKS_OF_A_SEGMENT - 1))
        node.clock.advance(1.0)
        second = red.put("second", *range(BLOCKS_OF_A_SEGMENT - 1))
        assert red.hits(second) == len(second)
        assert red.hits(first) == 0
        assert assigned(node, "red") == 2 * MIB


def test_at_its_quota_a_tenants_other_block_size_gets_a_segment_of_its_own_and_of_nobody_else() -> None:
    with node_with(TenantConfig(name="red", quota_bytes=2 * MIB), TenantConfig(name="blue")) as node:
        large, small, blue = engine_of(node, "red"), engine_of(node, "red", 4096), engine_of(node, "blue")
        kept = blue.put("blue", 1, 2)
        large.put("large", 1)
        node.clock.advance(60.0)
        assert small.reserve(chain("small")).decline_reason is DeclineReason.QUOTA_REACHED
        node.run(until(lambda: not node.cache.room.hungry and not node.cache.rebalancing.busy))
        small.put("small")
        assert (small.hits(chain("small")), large.hits(chain("large", 1))) == (1, 0)
        assert blue.hits(kept) == len(kept)
        assert assigned(node, "red") == 2 * MIB


def test_nvme_beyond_the_quota_is_not_taken(tmp_path: Path) -> None:
    for quota_bytes, most in ((4 * MIB, 4 * MIB), (0, 64 * MIB)):
        red = TenantConfig(name="red", nvme_quota_bytes=quota_bytes)
        with closing(start_node(nvme=NVME, data_dir=tmp_path / str(quota_bytes), tenants=(red,))) as node:
            node.run(until(lambda node=node: storage_of(node).nvme.health.writable))
            fill(engine_of(node, "red"), 40)
            held = assigned(node, "red", Tier.NVME)
            assert 0 < held <= most
            assert quota_bytes == 0 or held == quota_bytes, "the quota is used"
            assert quota_bytes or held > 4 * MIB, "without one more is taken"
            assert node.cache.check() == []


@dataclass
class Bounded:
    """A daemon whose tenant "red" has small bounds, and an engine of it and of "blue"."""

    daemon: Daemon
    red: WireEngine
    blue: WireEngine

    def socket(self, name: str) -> Path:
        """A tenant's socket."""
        return next(t.socket for t in self.daemon.config.tenants if t.name == name and t.socket is not None)


@pytest.fixture
async def bounded() -> AsyncIterator[Bounded]:
    """See Bounded."""
    counts = "namespace_count_max=2,session_count_max=2,lease_count_max=1"
    async with (
        running_daemon(f"red,{counts}", "blue") as daemon,
        AsyncExitStack() as engines,
    ):
        sockets = {tenant.name: tenant.socket for tenant in daemon.config.tenants}
        assert sockets["red"] is not None
        assert sockets["blue"] is not None
        red = await engines.enter_async_context(wire_engine(sockets["red"]))
        blue = await engines.enter_async_context(wire_engine(sockets["blue"]))
        yield Bounded(daemon, red, blue)


async def test_namespaces_beyond_the_tenants_bound_are_refused_and_others_go_on(bounded: Bounded) -> None:
    refs = [await bounded.red.open_namespace(model_id=f"m{number}") for number in range(2)]
    refusal = await bounded.red.refused("OpenNamespace", spec=spec_to_wire(spec("m2")))
    assert (refusal.code, refusal.reason, refusal.metadata["limit"]) == (EXHAUSTED, "NAMESPACE_LIMIT", "2")
    for number in range(3):
        await bounded.blue.open_namespace(model_id=f"m{number}")
    await bounded.red.call("DropNamespace", namespace=refs[0])
    await bounded.red.open_namespace(model_id="m2")


async def refused_session(engine: WireEngine) -> Refusal:
    """How a hello is refused."""
    hello = cache_service_pb2.SessionHello(instance_id="one too many")
    stream = engine.cache.OpenSession(iter([cache_service_pb2.OpenSessionRequest(hello=hello)]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    return refusal_of(caught.value)


async def test_sessions_beyond_the_tenants_bound_are_refused_and_others_go_on(bounded: Bounded) -> None:
    async with wire_engine(bounded.socket("red"), "second"):
        async with wire_engine(bounded.socket("red"), None) as third:
            refusal = await refused_session(third)
        assert (refusal.code, refusal.reason, refusal.metadata["limit"]) == (EXHAUSTED, "SESSION_LIMIT", "2")
        assert refusal.retry_after_s
        async with wire_engine(bounded.socket("blue"), "second"), wire_engine(bounded.socket("blue"), "3"):
            assert len(bounded.daemon.cache.sessions.open_of("blue")) == 3
    async with wire_engine(bounded.socket("red"), None) as third:
        while len(bounded.daemon.cache.sessions.open_of("red")) == 2:
            await third.call("ListLeases")
        await third.open_session("third")


async def test_leases_beyond_the_tenants_bound_are_refused_or_declined_and_others_go_on(
    bounded: Bounded,
) -> None:
    hashes = chain("a", "b")
    for engine, limited in ((bounded.red, True), (bounded.blue, False)):
        ref = await engine.open_namespace(block_bytes=4096)
        await engine.store(ref, hashes[:1], [bytes(4096)])
        await engine.acquire(ref, hashes[:1])
        declined = (await engine.reserve(ref, hashes[1:], hashes[0])).decline_reason
        if limited:
            refusal = await engine.refused(
                "Acquire", session_id=engine.session_id, namespace=ref, block_hashes=hashes[:1]
            )
            assert (refusal.code, refusal.reason) == (EXHAUSTED, "LEASE_LIMIT")
            assert refusal.metadata["limit"] == "1"
            assert declined == types_pb2.DECLINE_REASON_LIMIT_REACHED
        else:
            await engine.acquire(ref, hashes[:1])
            assert declined == types_pb2.DECLINE_REASON_UNSPECIFIED


def test_what_opening_and_dropping_leaves_behind_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "NAME_COUNT_MAX", 3)
    with node_with(TenantConfig(name="red"), TenantConfig(name="blue")) as node:
        refs = []
        for number in range(3):
            refs.append(node.cache.open_namespace("red", spec(f"m{number}")))
            node.run(node.cache.drop_namespace("red", refs[-1]))
        with pytest.raises(LimitReached, match="dropped ones counted") as refused:
            node.cache.open_namespace("red", spec("m3"))
        assert refused.value.reason == "NAMESPACE_LIMIT"
        assert node.cache.open_namespace("red", spec("m0")).epoch > refs[0].epoch
        node.cache.open_namespace("blue", spec("m3"))


@pytest.mark.parametrize("bound", ["SPACE_COUNT_MAX", "POOL_COUNT_MAX"])
def test_shards_and_block_sizes_of_a_tenant_are_bounded(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(quotas, bound, 1)
    with node_with(TenantConfig(name="red"), TenantConfig(name="blue")) as node:
        red, other, blue = engine_of(node, "red"), engine_of(node, "red", 8192), engine_of(node, "blue", 8192)
        red.put("a")
        declined = other.reserve(chain("a"))
        assert declined.outcomes == ((ReserveOutcome.DECLINED, 1),)
        assert declined.decline_reason is DeclineReason.LIMIT_REACHED
        assert red.hits(red.put("a", "b")) == 2
        assert blue.hits(blue.put("a")) == 1


@pytest.mark.parametrize("key", ["quota", "hbm_quota", "nvme_quota"])
def test_a_quota_below_one_segment_is_refused(key: str) -> None:
    flags = {
        "socket": "/run/p.sock",
        "dram.segment": "64MiB",
        "hbm.segment": "64MiB",
        "nvme.segment": "64MiB",
    }
    tenant = "name=red,socket=/run/r.sock,"
    with pytest.raises(ConfigError, match=rf"tenants\[red\]\.{key} = 32MiB: must be at least one segment"):
        load_config(flags=flags, tenants=[f"{tenant}{key}=32MiB"])
    assert load_config(flags=flags, tenants=[f"{tenant}{key}=64MiB"])
