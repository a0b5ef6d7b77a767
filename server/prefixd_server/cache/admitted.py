"""What admission found and gave, for a run or for the parts of a long one; what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.types import DeclineReason, Hashes, ReserveOutcome, Rows, Slots, Tier
from prefixd_server.policy.importance import Newcomers

RETRY_AFTER_FULL_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """In run order: known rows, then reserved slots, then declined blocks.

    committed: of the known rows, which were whole.
    reason: why blocks were declined; None where none were.
    newcomers: what the reserved blocks and those after them were taken for.
    """

    known: Rows
    committed: NDArray[np.bool_]
    tier: Tier = Tier.DRAM
    slots: Slots = field(default_factory=lambda: np.zeros(0, np.uint32))
    declined_count: int = 0
    reason: DeclineReason | None = None
    newcomers: Newcomers | None = None

    def then(self, part: Admitted) -> Admitted:
        """With what the next part of the run got."""
        return replace(
            part,
            known=np.concatenate([self.known, part.known]),
            committed=np.concatenate([self.committed, part.committed]),
            slots=np.concatenate([self.slots, part.slots]),
        )

    @property
    def retry_after_s(self) -> float | None:
        """When a retry may help."""
        helps = self.reason in {
            DeclineReason.TIER_FULL,
            DeclineReason.SEGMENT_PREPARING,
            DeclineReason.QUARANTINE_FULL,
            DeclineReason.LIMIT_REACHED,
            DeclineReason.QUOTA_REACHED,
        }
        return RETRY_AFTER_FULL_S if helps else None

    def outcomes(self) -> tuple[tuple[ReserveOutcome, int], ...]:
        """(outcome, count) in run order, covering every block."""
        edges = np.flatnonzero(self.committed[1:] != self.committed[:-1]) + 1
        ranges = [
            (ReserveOutcome.PRESENT if part[0] else ReserveOutcome.PENDING, len(part))
            for part in np.split(self.committed, edges)
            if len(part)
        ]
        if len(self.slots):
            ranges.append((ReserveOutcome.RESERVED, len(self.slots)))
        if self.declined_count:
            ranges.append((ReserveOutcome.DECLINED, self.declined_count))
        return tuple(ranges)


def refuse_repeats(hashes: Hashes) -> None:
    """Within one run every block has a hash of its own. Raises InvalidRequest DUPLICATE_HASH."""
    count = len(hashes)
    if count > 1 and len(np.unique(hashes[:, 0])) < count and len(np.unique(hashes, axis=0)) < count:
        raise InvalidRequest(
            "DUPLICATE_HASH",
            "two blocks of the run have the same prefix hash; a chained hash never repeats: hash the "
            "parent in",
            field="block_hashes",
        )


def chain_mismatch() -> InvalidRequest:
    """A block of the run is kept, below another parent."""
    return InvalidRequest(
        "CHAIN_MISMATCH",
        "a block of the run is kept below another parent; a prefix hash must cover all tokens before it: "
        "send the run in order, with the hash of the block before it as parent_hash",
        field="block_hashes",
    )
