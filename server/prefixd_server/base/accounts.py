"""What the daemon tells its operators: leases, blocks, namespaces, tiers, counters. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd_server.base.types import LeaseKind, NamespaceRef, NamespaceSpec, Tier


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One lease, for ListLeases. Times are seconds: taken_at on the wall clock."""

    token_prefix: str
    kind: LeaseKind
    instance_id: str
    pid: int
    namespace: NamespaceRef
    slot_count: int
    open_shards: tuple[int, ...]
    taken_at: float
    expires_after_s: float
    quarantined: bool


@dataclass(frozen=True, slots=True)
class CopyInfo:
    """One copy of a block, for DescribeBlock."""

    tier: Tier
    segment_id: int
    offset_bytes: int
    state: str
    lease_count: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """Everything known about one block, for DescribeBlock."""

    visible: bool
    parent_hash: bytes
    depth: int
    child_count: int
    copies: tuple[CopyInfo, ...]
    checksum: int
    pinned: bool
    idle_s: float
    use_count: int
    story: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace, for ListNamespaces; opened_at on the wall clock."""

    namespace: NamespaceRef
    spec: NamespaceSpec
    block_count: int
    resident_bytes: int
    opened_at: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """free + reserved + resident + quarantined slots = slots (EVICTING counts as resident)."""

    tier: Tier
    capacity_bytes: int
    assigned_bytes: int
    prefaulted_bytes: int
    segment_count: int
    segment_bytes: int
    slot_count: int
    free_slot_count: int
    reserved_slot_count: int
    resident_slot_count: int
    quarantined_slot_count: int
    numa_nodes: tuple[int, ...] = ()
    page_kind: str = "pages"
    state: str = "ready"
    """"ready", "recovering", "paused" or "refused"; only in the first are blocks read and written."""
    state_reason: str = ""
    """Why it is not ready."""

    @property
    def is_ready(self) -> bool:
        """Whether blocks are read from it and written to it."""
        return self.state == "ready"


@dataclass(slots=True)
class Counters:
    """Blocks since start, per tenant. asked = sum(hits) + pending + missed."""

    asked: int = 0
    hits: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    pending: int = 0
    missed: int = 0
    committed: int = 0
    declined: int = 0
    evicted: int = 0
    bad: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Answer of GetStats."""

    tiers: tuple[TierStats, ...]
    counters: Counters
    lease_count: int
    session_count: int
    metadata_bytes: int
    block_count: int
    draining: bool
    uptime_s: float
