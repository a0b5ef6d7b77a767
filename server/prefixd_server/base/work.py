"""Work on the links between tiers: how urgent it is, and why it is done. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Urgency(IntEnum):
    """Who goes first on a link. All but DEMAND is background work."""

    DEMAND = 0
    PREFETCH = 1
    DEMOTION = 2


class Reason(Enum):
    """Why a transfer is made; the values are stable, stats and logs name them."""

    DEMANDED = "demanded"
    """An engine has asked for the blocks and waits, or will ask again."""
    ASKED_AHEAD = "asked-ahead"
    """A Prefetch names them."""
    QUEUED_REQUEST = "queued-request"
    """A request that waits in an engine's queue names them."""
    HOT = "hot"
    """More than one use is expected within the window."""
    WATERMARK = "watermark"
    """Room in the faster tier is short, and they are what would go next."""


@dataclass(slots=True, eq=False)
class Errand:
    """One transfer as a link sees it. `urgency` rises when somebody begins to wait for it."""

    urgency: Urgency
    reason: Reason
