"""What the daemon tells its operators: leases, blocks, namespaces, tiers, counters. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prefixd_server.base.traffic import Traffic
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
class Placement:
    """How a block stands in one tier: rank is the part of what may go there that is worth less, 0 to 1."""

    tier: Tier
    present: bool
    evictable: bool
    rank: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the policy makes of one block, for ExplainBlock; scores compare within a tier only."""

    policy: str
    signals: tuple[tuple[str, str], ...]
    score: float
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace, for ListNamespaces; opened_at on the wall clock."""

    namespace: NamespaceRef
    spec: NamespaceSpec
    block_count: int
    resident_bytes: int
    opened_at: float


class Fault(StrEnum):
    """What went wrong with a tier's disk, and what was found damaged on it; each costs hits, nothing else.

    docs/nvme.md says what to do about each.
    """

    BAD_CHECKSUM = "bad_checksum"
    """Blocks read whose bytes did not match their checksum."""
    UNREADABLE = "unreadable"
    """Blocks that the disk could not read."""
    SEGMENT_DAMAGED = "segment_damaged"
    """Blocks lost with segment files that were cut short or whose header was wrong."""
    SEGMENT_MISSING = "segment_missing"
    """Blocks lost with segment files that were gone."""
    RECORD_CORRUPT = "record_corrupt"
    """Index records that did not match their checksum."""
    RECORD_STALE = "record_stale"
    """Index records of an earlier use of their segment: their deletes were lost."""
    RECORD_CONFLICT = "record_conflict"
    """Index records that named the slot of a newer one: their deletes were lost."""
    RECORD_MISPLACED = "record_misplaced"
    """Index records of another store, or of no place that the tier has (any more)."""
    RECORD_ORPHANED = "record_orphaned"
    """Index records of blocks whose ancestors were not found, or whose namespace was dropped."""
    INDEX_FAULT = "index_fault"
    """Times that the index process failed, died or hung, and was started again."""
    INDEX_REBUILT = "index_rebuilt"
    """Times that the index was rebuilt from what could be read of it."""
    INDEX_RESET = "index_reset"
    """Times that the index could not be opened, and an empty one took its place."""
    IO_ERROR = "io_error"
    """Reads, writes and syncs that failed."""
    SLOW = "slow"
    """Times that the disk took longer than nvme.latency_max."""
    DISK_FULL = "disk_full"
    """Times that the disk had no room."""


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """One device of the HBM tier; memory is the whole device's part, slots are those of the pools asked."""

    uuid: str
    """Empty until the first device that there is has been found."""
    capacity_bytes: int
    allocated_bytes: int
    free_slot_count: int
    reserved_slot_count: int
    resident_slot_count: int
    quarantined_slot_count: int
    state: str
    """"starting", "ready" or "off"."""
    state_reason: str

    @property
    def is_ready(self) -> bool:
        """Whether blocks are read from it and written to it."""
        return self.state == "ready"


@dataclass(frozen=True, slots=True)
class TierStats:
    """free + reserved + resident + quarantined slots = slots (EVICTING counts as resident)."""

    tier: Tier
    capacity_bytes: int = 0
    assigned_bytes: int = 0
    prefaulted_bytes: int = 0
    segment_count: int = 0
    segment_bytes: int = 0
    slot_count: int = 0
    free_slot_count: int = 0
    reserved_slot_count: int = 0
    resident_slot_count: int = 0
    quarantined_slot_count: int = 0
    numa_nodes: tuple[int, ...] = ()
    page_kind: str = "pages"
    state: str = "ready"
    """"ready", "full" (read, not written), "recovering", "paused", "refused" or "failed" (neither); of HBM
    "starting", "ready" where one device is, or "off"."""
    state_reason: str = ""
    """Why it is not ready."""
    fault_counts: Mapping[Fault, int] = field(default_factory=dict)
    """Since the daemon's start."""
    devices: tuple[DeviceStats, ...] = ()
    """Of HBM."""

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
    traffic: Traffic = field(default_factory=Traffic)
    """Between the tiers of the whole node; of it a tenant is told the mode alone."""
