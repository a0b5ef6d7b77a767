"""A tenant's quota of GPU memory."""

from __future__ import annotations

from prefixd_server.base.config import TenantConfig
from prefixd_server.base.types import Tier

from tests.gpu.tier import SEGMENT, SLOTS_PER_SEGMENT, device_engine, end_all, settle, start_device_node
from tests.support.fake_cuda import FakeCuda
from tests.support.node import Node, chain


def hbm_bytes(node: Node, tenant: str) -> int:
    """Bytes of HBM segments that the tenant has."""
    return next(s.assigned_bytes for s in node.cache.stats(tenant).tiers if s.tier is Tier.HBM)


def test_beyond_its_quota_a_tenant_writes_to_dram_and_another_has_the_rest(machine: FakeCuda) -> None:
    node = start_device_node(2, tenants=(TenantConfig(name="red", hbm_quota_bytes=SEGMENT), "blue"))
    red, blue = device_engine(node, "red"), device_engine(node, "blue", "two")
    tiers = []
    for engine, name in ((red, "a"), (red, "b"), (blue, "c")):
        reserved = engine.put_there(chain(name, *range(SLOTS_PER_SEGMENT * 2 // 3)))
        tiers.append({extent.tier for extent in reserved.extents})
    settle(node)
    assert hbm_bytes(node, "red") == SEGMENT
    assert hbm_bytes(node, "blue") == SEGMENT
    assert tiers[0] == tiers[2] == {Tier.HBM}
    assert node.cache.check() == []
    end_all(node)
    node.close()
