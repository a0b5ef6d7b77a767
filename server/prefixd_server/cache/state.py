"""What the rooms of the cache floor share: one object, owned by the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from prefixd_server.base.accounts import Counters
from prefixd_server.base.clock import Clock
from prefixd_server.base.config import LeaseConfig
from prefixd_server.base.errors import Unavailable
from prefixd_server.base.metrics import Metrics
from prefixd_server.base.types import Tier
from prefixd_server.cache.costs import Costs
from prefixd_server.cache.quotas import Quotas
from prefixd_server.catalog.catalog import Catalog
from prefixd_server.catalog.events import Effect, Event
from prefixd_server.catalog.leases import LeaseTable
from prefixd_server.media.dram import DramMedium
from prefixd_server.media.medium import Medium
from prefixd_server.media.movers import JobRunner, Movers
from prefixd_server.policy.learning import LearningPolicy
from prefixd_server.policy.policy import DaemonPolicy


@dataclass(frozen=True, slots=True)
class BadSlot:
    """A slot whose bytes were found wrong; held while one of `witnesses` could still write to it."""

    tier: Tier
    slot: int
    slot_bytes: int
    tenant: str
    witnesses: set[bytes]


class Metered(Protocol):
    """What holds memory for blocks or requests."""

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        ...


@dataclass(slots=True)
class State:
    """The node's metadata and its collaborators."""

    catalog: Catalog
    policy: DaemonPolicy
    """Which chooses victims now: one of `policies`."""
    policies: dict[str, DaemonPolicy]
    """By name: those that can be switched to; each keeps what it knows meanwhile."""
    learner: LearningPolicy
    """Which is told of every request, also while another policy chooses."""
    costs: Costs
    """What engines tell of prefill; the learner weighs by it where that is configured."""
    dram: DramMedium
    media: dict[Tier, Medium]
    movers: Movers
    clock: Clock
    limits: LeaseConfig
    rng: np.random.Generator
    drain_timeout_s: float
    boot_id: bytes
    device: JobRunner | None = None
    """Movers of the HBM tier, when it is on."""
    disk: Movers | None = None
    """Movers of the NVMe tier alone: a disk that hangs holds up nothing else. None without that tier."""
    metrics: Metrics = field(default_factory=Metrics)
    quotas: Quotas = field(default_factory=Quotas)
    leases: LeaseTable = field(default_factory=LeaseTable)
    counters: dict[str, Counters] = field(default_factory=dict)
    bad_slots: list[BadSlot] = field(default_factory=list)
    draining: bool = False
    handed_over: bool = False
    """Whether what outlives the daemon is, or is about to be, the next daemon's to write."""
    retry_after_drain_s: float = 1.0
    metered: list[Metered] = field(default_factory=list)
    """What counts as metadata beside the catalog."""

    def apply(self, event: Event) -> Effect:
        """Applies one event to the catalog, now."""
        return self.catalog.apply(event, self.clock.now())

    @property
    def metadata_bytes(self) -> int:
        """Bytes of all metadata in use, what the policy has learned included."""
        return self.catalog.metadata_bytes + sum(holder.nbytes for holder in self.metered)

    def movers_of(self, *tiers: Tier) -> JobRunner:
        """Who copies between these tiers."""
        if self.device is not None and Tier.HBM in tiers:
            return self.device
        return self.disk if self.disk is not None and Tier.NVME in tiers else self.movers

    def counters_of(self, tenant: str) -> Counters:
        """The tenant's counters since start."""
        found = self.counters.get(tenant)
        if found is None:
            found = self.counters[tenant] = Counters()
        return found

    def lease_ttl_s(self, wished_s: float | None) -> float:
        """Life of a new lease: what was wished, at most the configured maximum."""
        longest = self.limits.ttl_max_s
        return longest if wished_s is None else min(wished_s, longest)

    def refuse_when_draining(self) -> None:
        """Raises Unavailable DRAINING once the daemon admits nothing new."""
        if self.draining:
            raise Unavailable(
                "DRAINING",
                "the daemon is draining and takes nothing new; go on without it and retry",
                retry_after_s=self.retry_after_drain_s,
            )

    def refuse_when_handed_over(self) -> None:
        """Raises Unavailable HANDING_OVER once nothing durable may be changed here."""
        if self.handed_over:
            raise Unavailable(
                "HANDING_OVER",
                "the next daemon takes over what is durable; retry, and it will answer",
                retry_after_s=self.retry_after_drain_s,
            )

    def quarantined_bytes(self, tenant: str) -> int:
        """Bytes of slots that wait for proofs of death on the tenant's account."""
        total = 0
        for lease in self.leases.writes.values():
            if lease.quarantined and lease.tenant == tenant:
                group = lease.namespace.spec.kv_groups[lease.kv_group]
                total += len(lease.open_slots) * group.slot_bytes
        for orphan in self.leases.orphans.values():
            if orphan.tenant == tenant:
                groups = orphan.namespace.spec.kv_groups
                total += sum(
                    len(piece.slots) * groups[piece.kv_group].slot_bytes
                    for hold in orphan.shards.values()
                    for piece in hold.pieces
                )
        return total + sum(bad.slot_bytes for bad in self.bad_slots if bad.tenant == tenant)
