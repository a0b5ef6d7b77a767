"""Requests that wait in the engine's queue, and what is brought for them meanwhile.

The daemon is told of a request when it begins to wait. What lies in NVMe is copied to DRAM within a
window, the next request's first (policy/prefetch.py), and held there until the request begins,
within the same bounds as in the daemon (cache/prefetching.py).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.runs import leading
from prefixd_server.base.types import Rows, Tier
from prefixd_server.cache.prefetching import RETRY_S, WINDOW_BYTES
from prefixd_server.cache.scheduler import TICK_INTERVAL_S
from prefixd_server.policy.prefetch import Wanted, plan
from prefixd_server.simulate.copies import NodeCopies


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    until: what is held for it is let go then. held_count: its leading blocks that are held.
    complete: nothing more can be brought. retry_at: there was no room; it is looked at again then.
    """

    request: int
    run: Rows
    until: float
    held_count: int = 0
    under_way: bool = False
    complete: bool = False
    retry_at: float = 0.0


class Queue:
    """See the module. DRAM and NVMe are there."""

    def __init__(self, node: NodeCopies, config: MigrationConfig) -> None:
        self._node = node
        self._config = config
        self._waiting: dict[int, Waiting] = {}
        """In the order of the queue."""
        self._coming: list[tuple[float, int, int]] = []
        """Transfers under way: (when they arrive, request, blocks)."""
        self._arrives_at: NDArray[np.float64] = np.zeros(node.trace.block_count)
        """By block: of its latest transfer."""
        self._unused: NDArray[np.bool_] = np.zeros(node.trace.block_count, dtype=np.bool_)
        """Brought, and asked for by no request since."""
        self._tick_at = math.inf
        self._held_count = 0
        self.brought_count = 0
        self.useless_count = 0

    @property
    def next_at(self) -> float:
        """When the next transfer arrives, or the next tick has something to do."""
        return min(self._tick_at, self._coming[0][0] if self._coming else math.inf)

    def step(self, may_bring: bool) -> None:
        """The next transfer arrives, or a tick has come; what is next begins."""
        now = self._node.clock.at = self.next_at
        while self._coming and self._coming[0][0] <= now:
            request = heapq.heappop(self._coming)[1]
            if request in self._waiting:
                self._waiting[request].under_way = False
        self.bring(may_bring)

    def joined(self, request: int, run: Rows, may_bring: bool) -> None:
        """A request begins to wait."""
        until = self._node.clock.at + self._config.prefetch_hold_max_s
        self._waiting[request] = Waiting(request, run, until)
        self.bring(may_bring)

    def left(self, request: int, rows: Rows) -> float:
        """A request begins, and hits these rows; when what is still on its way for it arrives."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._let_go(waiting)
        self._unused[rows] = False
        return float(self._arrives_at[rows].max(initial=0.0))

    def arrived(self, rows: Rows) -> NDArray[np.bool_]:
        """Of blocks with a slot in DRAM, those that are there."""
        there: NDArray[np.bool_] = self._arrives_at.take(rows) <= self._node.clock.at
        return there

    def bring(self, may_bring: bool) -> None:
        """Holds what is next, and brings it where background copies may begin."""
        node, now = self._node, self._node.clock.at
        for waiting in list(self._waiting.values()):
            if waiting.until <= now:
                del self._waiting[waiting.request]
                self._let_go(waiting, in_vain=True)
        open_ones = [
            (position, waiting)
            for position, waiting in enumerate(self._waiting.values())
            if not waiting.under_way and not waiting.complete
        ]
        wanted = [
            Wanted(
                number=waiting.request,
                position=position,
                deadline=waiting.until,
                block_bytes=node.block_bytes,
                block_count=len(waiting.run) - waiting.held_count,
            )
            for position, waiting in open_ones
            if waiting.retry_at <= now
        ]
        coming = sum(count for _, _, count in self._coming) * node.block_bytes
        rate = node.links.up[Tier.NVME].rate.bytes_per_s
        for number, count in plan(wanted, WINDOW_BYTES - coming, rate, now):
            self._advance(self._waiting[number], count, may_bring)
        self._tick_at = now + TICK_INTERVAL_S if open_ones else math.inf

    def _advance(self, waiting: Waiting, count: int, may_bring: bool) -> None:
        """Holds the next blocks that are in DRAM, and brings those behind them that NVMe has."""
        node = self._node
        rows = waiting.run[waiting.held_count : waiting.held_count + count]
        rows = rows[: node.known_count(rows)]
        cold = node.lacking(Tier.DRAM, rows)
        here = min(leading(~cold), self._room())
        self._hold(waiting, rows[:here])
        rows, cold = rows[here:], cold[here:]
        cold &= ~node.lacking(Tier.NVME, rows)
        brought = self._bring(waiting, rows[: leading(cold)]) if may_bring else 0
        stuck = len(rows) == 0 or not cold[0]
        moved = here + brought > 0
        waiting.complete = waiting.held_count == len(waiting.run) or (not moved and stuck)
        if not moved:
            waiting.retry_at = node.clock.at + RETRY_S

    def _bring(self, waiting: Waiting, rows: Rows) -> int:
        """Starts to copy these blocks up, as far as there is room; how many."""
        node = self._node
        rows = rows[: self._room()]
        node.hold(Tier.NVME, rows)
        room = node.make_room(Tier.DRAM, len(rows))
        node.let_go(Tier.NVME, rows)
        rows = rows[:room]
        if len(rows):
            node.put(Tier.DRAM, rows)
            self._hold(waiting, rows)
            arrives_at = node.links.up[Tier.NVME].move(len(rows) * node.block_bytes, node.clock.at)
            self._arrives_at[rows] = arrives_at
            self._unused[rows] = True
            self.brought_count += len(rows)
            waiting.under_way = True
            heapq.heappush(self._coming, (arrives_at, waiting.request, len(rows)))
        return len(rows)

    def _room(self) -> int:
        """Blocks of DRAM that may be held beside those that are."""
        share = self._config.prefetch_share_max
        return max(0, int(self._node.capacity[Tier.DRAM] * share) - self._held_count)

    def _hold(self, waiting: Waiting, rows: Rows) -> None:
        self._node.hold(Tier.DRAM, rows)
        self._held_count += len(rows)
        waiting.held_count += len(rows)

    def _let_go(self, waiting: Waiting, *, in_vain: bool = False) -> None:
        rows = waiting.run[: waiting.held_count]
        self._node.let_go(Tier.DRAM, rows)
        self._held_count -= len(rows)
        if in_vain:
            useless = rows[self._unused[rows] & (self._node.holds[Tier.DRAM][rows] == 0)]
            self._unused[useless] = False
            self.useless_count += len(useless)
