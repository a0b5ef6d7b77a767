"""Everything that can happen to the catalog. Catalog.apply() takes these and nothing else.

Each event is one transition, named from its outcome, and carries arrays: one
event serves a whole run. Slots are of the tier that the event names; rows are
catalog rows, one per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Checksums, Hashes, Rows, Slots, Tier


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """New blocks below `parent_row` (NO_ROW: the root) get their slots: absent -> WRITING.

    history is the policy's byte for them, used_at when their request began (None: now), and
    returned says that they were used before, forgotten, and are stored again.
    """

    space: int
    parent_row: int
    hashes: Hashes
    tier: Tier
    slots: Slots
    history: int = 0
    returned: bool = False
    used_at: float | None = None


@dataclass(frozen=True, slots=True)
class BlocksCommitted:
    """Their writer has finished: WRITING -> RESIDENT, visible as soon as the parent is."""

    tier: Tier
    slots: Slots
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class WriterFailed:
    """Their writer gave up, expired or died: WRITING -> absent, and what hangs below goes too.

    With `quarantine` the slots stay QUARANTINED until SlotsLifted; without, the
    writer has vouched that it writes no more and they are free.
    """

    tier: Tier
    slots: Slots
    quarantine: bool


@dataclass(frozen=True, slots=True)
class SlotsLifted:
    """Nobody can write to these slots any more: QUARANTINED -> FREE."""

    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class RunUsed:
    """One request used the blocks of `path`, a prefix from its root; history is the policy's byte for it."""

    path: Rows
    history: int


@dataclass(frozen=True, slots=True)
class ReplyEnded:
    """The reply to the request that used `path`, a prefix from its root, at that time; the policy's byte."""

    path: Rows
    used_at: float
    reply: int


@dataclass(frozen=True, slots=True)
class AttentionObserved:
    """An engine saw this much attention mass (0 to 1) fall on each block of `path`."""

    path: Rows
    mass: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CopiesLeased:
    """A lease took hold of these copies."""

    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class CopiesReleased:
    """A lease let go of these copies; those dropped meanwhile become FREE now."""

    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class CopyStarted:
    """A transfer begins to write copies of these blocks: slots RESERVED -> WRITING for the rows."""

    tier: Tier
    rows: Rows
    slots: Slots


@dataclass(frozen=True, slots=True)
class CopyPublished:
    """The transfer has verified its copies: WRITING -> RESIDENT, beside the others."""

    tier: Tier
    rows: Rows
    slots: Slots


@dataclass(frozen=True, slots=True)
class CopyAbandoned:
    """The transfer failed or was overtaken: its slots are FREE again."""

    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class CopyDetached:
    """The transfer failed, and a record may still name its slots: they stay RESERVED, of no block."""

    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class CopyReplaced:
    """Inside one tier a verified copy in `new_slots` takes the place of the one in `old_slots`."""

    tier: Tier
    rows: Rows
    old_slots: Slots
    new_slots: Slots


@dataclass(frozen=True, slots=True)
class CopiesEvicted:
    """Copies dropped for space, leaves first; blocks without another copy are forgotten."""

    tier: Tier
    rows: Rows


@dataclass(frozen=True, slots=True)
class CopyFoundBad:
    """The daemon has verified that this copy's bytes are wrong.

    The slot is QUARANTINED. Without another copy the block is forgotten, and
    what hangs below it too.
    """

    tier: Tier
    slot: int


@dataclass(frozen=True, slots=True)
class BlocksRecovered:
    """Chains found in a durable tier's index after a start: absent -> RESIDENT there, and visible.

    `slots` are RESERVED. Per chain: where it starts in the arrays (and their length at the
    end), the visible row above it (NO_ROW for none) or instead the place in these arrays of
    the block above it (-1 for none), and its last use in monotonic seconds.
    """

    space: int
    starts: Sequence[int]
    parent_rows: Sequence[int]
    parent_places: Sequence[int]
    hashes: Hashes
    checksums: Checksums
    tier: Tier
    slots: Slots
    last_use: Sequence[float]


@dataclass(frozen=True, slots=True)
class RecordsDeleted:
    """The index records of copies that were dropped from a durable tier are gone: slots may be reused."""

    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Forgotten on request, with everything below. `rows` is closed under descendants."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class PinChanged:
    """Pinned blocks are not evicted."""

    rows: Rows
    pinned: bool


Event: TypeAlias = (
    BlocksReserved
    | BlocksCommitted
    | WriterFailed
    | SlotsLifted
    | RunUsed
    | ReplyEnded
    | AttentionObserved
    | CopiesLeased
    | CopiesReleased
    | CopyStarted
    | CopyPublished
    | CopyAbandoned
    | CopyDetached
    | CopyReplaced
    | CopiesEvicted
    | CopyFoundBad
    | BlocksRecovered
    | RecordsDeleted
    | BlocksRemoved
    | PinChanged
)


@dataclass(frozen=True, slots=True)
class Effect:
    """What a transition did, as counts.

    forgotten_count are blocks that the catalog no longer knows; freed_count are
    slots that are FREE now.
    """

    visible_count: int = 0
    waiting_count: int = 0
    dropped_count: int = 0
    forgotten_count: int = 0
    freed_count: int = 0
