"""What the client answers with: plain values. Hits, pending, misses and declined are values, never errors.

Enum values are the wire's; a value that only a newer daemon knows reads as UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class _OpenEnum(IntEnum):
    """An enum that a newer daemon may extend: 0 stands for what this client does not know."""

    @classmethod
    def _missing_(cls, value: object) -> _OpenEnum | None:
        return cls(0) if isinstance(value, int) else None


class Tier(_OpenEnum):
    """Where a copy lies, fastest first."""

    UNKNOWN = 0
    HBM = 1
    DRAM = 2
    NVME = 3


class ReserveOutcome(_OpenEnum):
    """What happened to one block of a reserve()."""

    UNKNOWN = 0
    RESERVED = 1
    PRESENT = 2
    PENDING = 3
    DECLINED = 4


class DeclineReason(_OpenEnum):
    """Why blocks were declined; UNKNOWN also where none were."""

    UNKNOWN = 0
    PARENT_MISSING = 1
    TIER_FULL = 2
    QUARANTINE_FULL = 3
    LIMIT_REACHED = 4
    SEGMENT_PREPARING = 5
    QUOTA_REACHED = 6


class RequestPhase(_OpenEnum):
    """Where a request stands in its life."""

    UNKNOWN = 0
    QUEUED = 1
    STARTED = 2
    FINISHED = 3


class StopReason(_OpenEnum):
    """Why a reply ended."""

    UNKNOWN = 0
    END_TURN = 1
    TOOL_USE = 2
    LENGTH = 3
    ABORT = 4


@dataclass(frozen=True, slots=True)
class RunHits:
    """hit_count + pending_count + miss_count = blocks asked for.

    hits holds (tier, blocks) in run order; a hit is always a leading run. ready_after_s is the daemon's
    estimate of when all that is kept of the run could be read: 0 where it can be now, None where that is
    not known.
    """

    hits: tuple[tuple[Tier, int], ...]
    pending_count: int
    miss_count: int
    ready_after_s: float | None = None

    @property
    def hit_count(self) -> int:
        """Leading blocks that hit, whatever the tier."""
        return sum(count for _, count in self.hits)


@dataclass(frozen=True, slots=True)
class PrefetchStatus:
    """How the run of a prefetch stands. ready_count + pending_count + miss_count = blocks named.

    prefetch_id names it for cancel_prefetch(). ready_after_s: when the pending blocks could be read, if
    they come next; None where nobody knows.
    """

    prefetch_id: bytes
    ready_count: int
    pending_count: int
    miss_count: int
    ready_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of stored blocks; the three add up to the blocks given.

    visible: every reader of the tenant hits them. waiting: they will be visible once another writer
    has committed their ancestors. dropped: not kept, for whatever cause.
    """

    visible: int = 0
    waiting: int = 0
    dropped: int = 0

    def __add__(self, other: Committed) -> Committed:
        return Committed(
            self.visible + other.visible, self.waiting + other.waiting, self.dropped + other.dropped
        )


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of put blocks; the three counts add up to the blocks given.

    With the daemon away every block is declined, with reason UNKNOWN.
    """

    stored_count: int
    present_count: int
    declined_count: int
    decline_reason: DeclineReason = DeclineReason.UNKNOWN


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive slots of one segment that hold consecutive blocks of a run; no checksums for writes."""

    segment_id: int
    offset_bytes: int
    stride_bytes: int
    first_block: int
    block_count: int
    checksums: tuple[int, ...] = ()

    @property
    def end_block(self) -> int:
        """Index behind the last block."""
        return self.first_block + self.block_count


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """One step of one request's life; see UsageReport in cache_service.proto for each field.

    block_hashes is the request's whole run, sent once per request with the first report that knows it. What
    lies beyond the daemon's limit of one request (16,384 blocks) is not sent.
    attention_mass: one share per block of the run, 0 to 1, summing to at most 1.
    """

    request_id: str
    phase: RequestPhase
    block_hashes: Sequence[bytes] = ()
    queue_position: int = 0
    engine_hit_block_count: int = 0
    output_token_count: int = 0
    stop_reason: StopReason = StopReason.UNKNOWN
    decode_latency_s: float | None = None
    prefill_time_s: float | None = None
    prefill_token_count: int = 0
    attention_mass: Sequence[float] | NDArray[np.float32] = ()


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """How a client stands.

    state: "ready", "draining" (the daemon is about to leave), "away" (the breaker is open) or "closed".
    away_reason and away_s tell why and since how many seconds calls answer miss; "" and 0 when ready.
    The counts are since the client was made.
    """

    state: str
    boot_id: bytes
    away_reason: str
    away_s: float
    breaker_opened_count: int
    read_block_count: int
    written_block_count: int
    bad_block_count: int
    timeout_count: int
