"""Which queued runs to bring next, and how much of each: a plain function of what is wanted.

The request that runs next comes first, whole; bytes are handed out in that order
until what may be under way is used up. What cannot arrive before its deadline is
left out: it would only be in the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Order = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of one run that are not where they are wanted.

    Args:
        number: names it; smaller asked first.
        position: of its request in the engine's queue, 0 next.
        deadline: monotonic seconds; of no use later.
        block_bytes: of one block, over all shards and KV groups.
        block_count: blocks that are missing, in run order.
    """

    number: int
    position: int
    deadline: float
    block_bytes: int
    block_count: int

    @property
    def order(self) -> Order:
        """Who comes first."""
        return self.position, self.deadline, self.number


def plan(
    wanted: Iterable[Wanted], budget_bytes: int, bytes_per_s: float | None, now: float
) -> list[tuple[int, int]]:
    """(number, blocks to bring now) in the order in which to begin.

    Args:
        budget_bytes: how much more may be under way.
        bytes_per_s: of the link; None while it is not known, then deadlines are not judged.
        now: monotonic seconds.
    """
    chosen: list[tuple[int, int]] = []
    left = budget_bytes
    begun = 0
    for item in sorted(wanted, key=lambda item: item.order):
        count = min(item.block_count, left // item.block_bytes)
        if bytes_per_s:
            in_time = (item.deadline - now) * bytes_per_s - begun
            count = min(count, int(in_time // item.block_bytes))
        if count > 0:
            chosen.append((item.number, count))
            left -= count * item.block_bytes
            begun += count * item.block_bytes
        if left < item.block_bytes:
            break
    return chosen
