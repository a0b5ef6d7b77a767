"""The words that every floor shares: tiers, identity, runs, extents, results.

Plain values only: no behaviour beyond shaping and no I/O. The wire's messages
are translated to these in rpc/convert.py and nowhere else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Hashes: TypeAlias = NDArray[np.uint64]
"""Prefix hashes of a run, shape (blocks, 4): 32 bytes each, shorter hashes zero-padded."""
Rows: TypeAlias = NDArray[np.int32]
"""Catalog rows, one per block; NO_ROW where a block is not known."""
Slots: TypeAlias = NDArray[np.uint32]
"""Slot ids of one tier: segment index x slots_per_segment_max + position in the segment."""
Checksums: TypeAlias = NDArray[np.uint64]
"""One checksum per block."""

NO_ROW = -1
NO_SLOT = 0xFFFFFFFF
HASH_WORDS = 4
HASH_BYTES_MAX = 8 * HASH_WORDS
HASH_COUNT_MAX = 16_384
KV_GROUP_COUNT_MAX = 16
WORLD_SIZE_MAX = 1024
PART_COUNT_MAX = 1024
"""Shards times KV groups of a namespace: a request looks into each."""
BLOCK_TOKENS_MAX = 65_536
LAYER_COUNT_MAX = 65_535
BLOCK_BYTES_MAX = 1 << 40
"""Keeps sums of sizes within 64 bits; the segment's size is the limit that matters."""
SLOT_ALIGNMENT_BYTES = 4096


class Tier(IntEnum):
    """Where a copy lies, fastest first. Values are the wire's."""

    HBM = 1
    DRAM = 2
    NVME = 3


class ChecksumAlgorithm(IntEnum):
    """Values are the wire's."""

    XXH3_64 = 1
    LANES_64 = 2


class BlockEncoding(IntEnum):
    """Values are the wire's."""

    RAW = 1


class KvGroupKind(IntEnum):
    """Values are the wire's. Only FULL_ATTENTION is served."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    RECURRENT = 3


class SlotState(IntEnum):
    """State of a slot; the copy in it is WRITING when the slot is RESERVED."""

    FREE = 0
    RESERVED = 1
    RESIDENT = 2
    EVICTING = 3
    QUARANTINED = 4


class ReserveOutcome(IntEnum):
    """What happened to one block of a Reserve. Values are the wire's."""

    RESERVED = 1
    PRESENT = 2
    PENDING = 3
    DECLINED = 4


class DeclineReason(IntEnum):
    """Why blocks were declined. Values are the wire's."""

    PARENT_MISSING = 1
    TIER_FULL = 2
    QUARANTINE_FULL = 3
    LIMIT_REACHED = 4
    SEGMENT_PREPARING = 5
    QUOTA_REACHED = 6


class LeaseKind(IntEnum):
    """Values are the wire's."""

    READ = 1
    WRITE = 2


class RequestPhase(IntEnum):
    """Values are the wire's."""

    QUEUED = 1
    STARTED = 2
    FINISHED = 3


class StopReason(Enum):
    """Why a reply ended. Values are the wire's."""

    UNKNOWN = 0
    END_TURN = 1
    TOOL_USE = 2
    LENGTH = 3
    ABORT = 4


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One KV group of a namespace; block_bytes is per block and shard."""

    kind: KvGroupKind
    block_bytes: int
    layer_count: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: block_bytes, rounded up to SLOT_ALIGNMENT_BYTES."""
        return -(-self.block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything the KV's bytes depend on besides the tokens (see types.proto)."""

    model_id: str
    weights_fingerprint: str
    model_config_fingerprint: str
    tokenizer_fingerprint: str
    kv_dtype: str
    kv_scales_fingerprint: str
    kv_layout: str
    attention_backend: str
    cpu_isa_class: str
    adapter_fingerprint: str
    block_tokens: int
    kv_groups: tuple[KvGroup, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    shard_count: int
    hash_algorithm: str
    hash_seed: str
    hash_bytes: int
    engine_name: str
    layout_version: str
    checksum_algorithm: ChecksumAlgorithm
    encoding: BlockEncoding

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Every (shard, kv_group)."""
        return [(shard, group) for shard in range(self.shard_count) for group in range(len(self.kv_groups))]

    def fingerprint(self) -> bytes:
        """sha256 over a canonical encoding: `name=length:value;` per field, in field order.

        Lengths make the encoding injective, so no two specs share an input.
        """
        digest = hashlib.sha256(b"prefixd-namespace-v1\n")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "kv_groups":
                value = ",".join(f"{int(g.kind)}/{g.block_bytes}/{g.layer_count}" for g in value)
            elif isinstance(value, IntEnum):
                value = int(value)
            encoded = str(value).encode()
            digest.update(b"%s=%d:%s;" % (item.name.encode(), len(encoded), encoded))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class NamespaceRef:
    """A namespace at one epoch: 32-byte fingerprint and epoch."""

    fingerprint: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive slots of one segment that hold consecutive blocks of a run.

    first_block is an index into the request's run; checksums is None for writes.
    """

    tier: Tier
    segment_id: int
    offset_bytes: int
    stride_bytes: int
    first_block: int
    block_count: int
    checksums: Checksums | None = None


@dataclass(frozen=True, slots=True)
class DeviceSegment:
    """A segment in GPU memory, as a process of the node opens it."""

    segment_id: int
    ipc_handle: bytes
    device_uuid: str
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ShardExtents:
    """The extents of one shard and KV group, in run order."""

    shard: int
    kv_group: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease as its holder sees it; remaining life in seconds from now."""

    token: bytes
    expires_after_s: float


@dataclass(frozen=True, slots=True)
class RunHits:
    """hits + pending + misses = blocks asked for; hits in run order."""

    hits: tuple[tuple[Tier, int], ...]
    pending_count: int
    miss_count: int

    @property
    def hit_count(self) -> int:
        """Blocks of the leading run that hit, whatever the tier."""
        return sum(count for _, count in self.hits)


@dataclass(frozen=True, slots=True)
class TierReadiness:
    """What of a run lies in one tier or is on its way there; ready_after_s is None when it is not known."""

    tier: Tier
    ready_count: int
    pending_count: int
    ready_after_s: float | None


@dataclass(frozen=True, slots=True)
class PrefetchRun:
    """One run of a Prefetch; deadline_s from now, None for the longest."""

    namespace: NamespaceRef
    hashes: Hashes
    queue_position: int
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class PrefetchStatus:
    """How one run of a Prefetch stands. ready + pending + misses = blocks asked for."""

    token: bytes
    ready_count: int
    pending_count: int
    miss_count: int
    ready_after_s: float | None


@dataclass(frozen=True, slots=True)
class Acquired:
    """Answer of Acquire; lease is None when nothing beyond the skipped blocks hit."""

    run: RunHits
    lease: LeaseGrant | None
    shard_extents: tuple[ShardExtents, ...] = ()
    device_segments: tuple[DeviceSegment, ...] = ()


@dataclass(frozen=True, slots=True)
class Redeemed:
    """Answer of Redeem."""

    lease: LeaseGrant
    shard_extents: tuple[ShardExtents, ...]
    device_segments: tuple[DeviceSegment, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer of Reserve; outcomes cover the run in order as (outcome, count)."""

    lease: LeaseGrant | None
    outcomes: tuple[tuple[ReserveOutcome, int], ...]
    extents: tuple[Extent, ...] = ()
    decline_reason: DeclineReason | None = None
    retry_after_s: float | None = None
    device_segments: tuple[DeviceSegment, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer of Commit; the counts add up to the checksums sent."""

    visible_count: int
    waiting_count: int
    dropped_count: int


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that a reader could not verify; block_index is into the Acquire's run."""

    shard: int
    kv_group: int
    block_index: int


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """One entry of a Release; no shards means all."""

    token: bytes
    shards: tuple[int, ...] = ()
    bad_blocks: tuple[BadBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class UsageReport:
    """One step of one request's life (see UsageReport in cache_service.proto)."""

    namespace: NamespaceRef
    request_id: str
    phase: RequestPhase
    hashes: Hashes | None = None
    queue_position: int = 0
    engine_hit_block_count: int = 0
    output_token_count: int = 0
    stop_reason: StopReason = StopReason.UNKNOWN
    decode_latency_s: float | None = None
    prefill_time_s: float | None = None
    prefill_token_count: int = 0
    attention_mass: NDArray[np.float32] | None = None


def hashes_from_bytes(block_hashes: list[bytes], hash_bytes: int) -> Hashes:
    """Packs equally long hashes into shape (blocks, 4), zero-padded at the end.

    Args:
        block_hashes: each exactly `hash_bytes` long; the caller has checked.
        hash_bytes: 16 or 32.
    """
    packed = np.frombuffer(b"".join(block_hashes), dtype=np.uint64).reshape(
        len(block_hashes), hash_bytes // 8
    )
    if hash_bytes == HASH_BYTES_MAX:
        return packed
    padded = np.zeros((len(block_hashes), HASH_WORDS), dtype=np.uint64)
    padded[:, : packed.shape[1]] = packed
    return padded
