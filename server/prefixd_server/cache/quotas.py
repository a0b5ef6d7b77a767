"""How much of the node each tenant may have: hard bounds, asked before anything is given.

Bytes are counted in whole segments, since a segment serves one tenant. A tenant
at its quota goes on within what it has: its own blocks make room for its own.
What it had when a quota was lowered is not taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixd_server.base.config import Config
from prefixd_server.base.config_tenants import TenantConfig
from prefixd_server.base.errors import LimitReached
from prefixd_server.base.types import Tier
from prefixd_server.catalog.catalog import Catalog

UNLIMITED = TenantConfig()
NAME_COUNT_MAX = 16_384
"""Namespaces that a tenant may open in one boot, dropped ones counted: each leaves its epoch behind."""
SPACE_COUNT_MAX = 65_536
"""Shards and KV groups, over all of a tenant's namespaces, that blocks are kept of."""
POOL_COUNT_MAX = 1024
"""Sizes of slots that a tenant may use: each is a pool, which decisions about room go through."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """See the module. The general bounds hold where a tenant has none of its own."""

    session_count_max: int = 1024
    lease_count_max: int = 65_536
    namespace_count_max: int = 1024
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> Quotas:
        """Those of a configuration."""
        return cls(
            config.leases.session_count_max,
            config.leases.lease_count_max,
            config.catalog.namespace_count_max,
            {tenant.name: tenant for tenant in config.all_tenants},
        )

    def sessions(self, tenant: str) -> int:
        """Most open sessions."""
        return self._own(tenant).session_count_max or self.session_count_max

    def leases(self, tenant: str) -> int:
        """Most live leases."""
        return self._own(tenant).lease_count_max or self.lease_count_max

    def namespaces(self, tenant: str) -> int:
        """Most open namespaces."""
        return self._own(tenant).namespace_count_max or self.namespace_count_max

    def size_bytes(self, tenant: str, tier: Tier) -> int:
        """Most bytes of a tier; 0 where there is no bound."""
        own = self._own(tenant)
        return {Tier.DRAM: own.quota_bytes, Tier.HBM: own.hbm_quota_bytes, Tier.NVME: own.nvme_quota_bytes}[
            tier
        ]

    def may_grow(self, catalog: Catalog, tier: Tier, pool: int) -> bool:
        """Whether the pool's tenant may have one more segment of the tier."""
        names, table = catalog.namespaces, catalog.slots[tier]
        tenant = names.pool_of(pool).tenant
        quota = self.size_bytes(tenant, tier)
        if quota == 0:
            return True
        held = sum(map(table.segment_count_of, names.pools_of_tenant(tenant)))
        return (held + 1) * table.segment_bytes <= quota

    def may_store(self, catalog: Catalog, tenant: str, slot_bytes: int) -> bool:
        """Whether the tenant may keep blocks of one more shard and KV group, with slots of these bytes."""
        names = catalog.namespaces
        if names.space_count(tenant) >= SPACE_COUNT_MAX:
            return False
        return names.has_pool(tenant, slot_bytes) or len(names.pools_of_tenant(tenant)) < POOL_COUNT_MAX

    def check_names(self, catalog: Catalog, tenant: str, fingerprint: bytes) -> None:
        """Raises LimitReached NAMESPACE_LIMIT for a new name beyond those of one boot."""
        names = catalog.namespaces
        if not names.is_known(tenant, fingerprint) and names.name_count(tenant) >= NAME_COUNT_MAX:
            raise LimitReached(
                "NAMESPACE_LIMIT",
                f"{NAME_COUNT_MAX:,} namespaces were opened since the daemon's start, dropped ones counted; "
                "restart it to open others",
                limit=NAME_COUNT_MAX,
            )

    def _own(self, tenant: str) -> TenantConfig:
        return self.tenants.get(tenant, UNLIMITED)
