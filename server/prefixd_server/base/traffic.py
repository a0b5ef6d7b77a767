"""What moves between the tiers, for operators: links, prefetches, transfers by reason. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixd_server.base.work import Reason


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One link between two tiers; bytes since start.

    background_share: part of the link's rate that background work may take now;
    demand_share: part of the last second in which demand was under way;
    bytes_per_s: as measured while busy, by direction; 0 when not measured yet.
    """

    name: str
    demand_bytes: int
    prefetch_bytes: int
    demotion_bytes: int
    background_share: float
    demand_share: float
    bytes_per_s: Mapping[str, float]


@dataclass(slots=True)
class PrefetchCounters:
    """Bytes brought ahead of need since start. brought = used + useless + waiting."""

    brought_bytes: int = 0
    used_bytes: int = 0
    """An engine has acquired them."""
    useless_bytes: int = 0
    """Nobody had asked for them when they were let go, by deadline or cancellation."""


@dataclass(slots=True)
class TransferCount:
    """Blocks and bytes of the transfers of one reason, published, since start."""

    block_count: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """All of it."""

    links: tuple[LinkStats, ...] = ()
    prefetch: PrefetchCounters = field(default_factory=PrefetchCounters)
    prefetch_count: int = 0
    """Prefetches that wait, are under way, or hold what they have brought."""
    transfers: Mapping[Reason, TransferCount] = field(default_factory=dict)
    conservative: bool = False
    conservative_setting: str = "auto"
    conservative_reason: str = ""
    conservative_entered_count: int = 0
    quiet_s: float = 0.0
    """Until the last announced quiet period ends."""
    decode_p99_s: float | None = None
    """As engines reported it in the last second."""

    def mode_alone(self) -> Traffic:
        """How the daemon decides, without what moves."""
        return Traffic(
            conservative=self.conservative,
            conservative_setting=self.conservative_setting,
            conservative_reason=self.conservative_reason,
        )
