"""Whether the books balance: the catalog's cross-links, leases, counters, prefetches.

`everything` is of one instant, and holds the loop: for tests and small nodes. On a
live daemon `at_leisure` goes the same steps (catalog/passes.py) with pauses: what
was there from its beginning to its end has been verified, each part as it was at
one instant, and every problem was one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import numpy as np

from prefixd_server.base.types import Slots, Tier
from prefixd_server.cache.prefetch_holds import PrefetchHolds
from prefixd_server.cache.state import State
from prefixd_server.catalog.leases import ReadLease
from prefixd_server.catalog.passes import STRETCH, Problems, Steps, everything, named

PACE_S = 0.001
"""So long steps are taken before as long a pause; no step is longer than a few of these."""
PROBLEM_COUNT_MAX = 1000
PIECES_AT_ONCE = 256
"""Leased pieces counted together."""


class Checking:
    """See the module."""

    def __init__(self, state: State, holds: PrefetchHolds) -> None:
        self._state = state
        self._holds = holds
        self._one_at_a_time = asyncio.Lock()

    def everything(self) -> Problems:
        """What is wrong now, in words."""
        return everything(self.steps())

    async def at_leisure(self) -> Problems:
        """What is wrong, in words, at most PROBLEM_COUNT_MAX; others are served meanwhile."""
        found: dict[str, None] = {}
        async with self._one_at_a_time:
            began = time.perf_counter()
            for problems in self.steps():
                found |= dict.fromkeys(problems)
                if len(found) >= PROBLEM_COUNT_MAX:
                    break
                if time.perf_counter() - began >= PACE_S:
                    await asyncio.sleep(PACE_S)
                    began = time.perf_counter()
        return list(found)[:PROBLEM_COUNT_MAX]

    def steps(self) -> Steps:
        """The check, a bounded step at a time (catalog/passes.py)."""
        yield from self._state.catalog.steps()
        yield from self._leases()
        yield self._counters()
        yield from self._holds.steps()

    def _counters(self) -> Problems:
        """hits + pending + misses = blocks asked for."""
        return [
            f"tenant {tenant}: hits + pending + misses differ from blocks asked for"
            for tenant, counters in self._state.counters.items()
            if counters.asked != sum(counters.hits.values()) + counters.pending + counters.missed
        ]

    def _leases(self) -> Steps:
        """Every slot that read leases hold is counted as leased, as often as some of them hold it."""
        pieces: dict[Tier, list[Slots]] = defaultdict(list)
        pieces_count = slot_count = 0
        for lease in list(self._state.leases.reads.values()):
            for shard in list(lease.shards):
                held = self._held(lease, shard)
                for tier, slots in held:
                    pieces[tier].append(slots)
                pieces_count += max(1, len(held))
                slot_count += sum(len(slots) for _, slots in held)
                if pieces_count >= PIECES_AT_ONCE or slot_count >= STRETCH:
                    yield self._counted(pieces)
                    pieces.clear()
                    pieces_count = slot_count = 0
        yield self._counted(pieces)

    def _held(self, lease: ReadLease, shard: int) -> list[tuple[Tier, Slots]]:
        """What the lease holds of a shard, nothing once it has ended."""
        hold = lease.shards.get(shard)
        if hold is None or self._state.leases.reads.get(lease.token) is not lease:
            return []
        return [(piece.tier, piece.slots) for piece in hold.pieces]

    def _counted(self, pieces: dict[Tier, list[Slots]]) -> Problems:
        problems: Problems = []
        for tier, parts in pieces.items():
            slots, times = np.unique(np.concatenate(parts), return_counts=True)
            wrong = self._state.catalog.slots[tier].leases[slots] < times
            problems += named(wrong, f"{tier.name}: a slot has more leases than it counts")
        return problems
