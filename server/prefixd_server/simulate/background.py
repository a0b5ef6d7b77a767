"""Copies between tiers that no request waits for, as the daemon's ticks make them.

Down: what DRAM would lose next is copied to NVMe ahead of need, as long as the link is free, and
what HBM alone holds to DRAM. Up: what live requests share goes into HBM. What is copied, when and at
whose cost is decided by the daemon's code: policy/placement.py and policy/sharing.py, the
line of cache/next_to_go.py and the order of cache/worth.py.

Not here: what a queued request needs (queueing.py).
"""

from __future__ import annotations

import math

import numpy as np

from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.runs import leading
from prefixd_server.base.types import Rows, Tier
from prefixd_server.cache import hbm_placement
from prefixd_server.cache.conservative import ConservativeMode, Setting
from prefixd_server.cache.migration import DRAM_HELD
from prefixd_server.cache.next_to_go import SWEEP_COUNT_MAX
from prefixd_server.cache.nvme_tier import EVICTION_SLACK_COUNT
from prefixd_server.cache.scheduler import BATCHES_UNDER_WAY_MAX, TICK_INTERVAL_S, batch_count
from prefixd_server.cache.worth import AT_ANY_PRICE, Parts, ranked
from prefixd_server.policy.learning import learns
from prefixd_server.policy.placement import Watermarks, demotion_count
from prefixd_server.policy.sharing import shared_count
from prefixd_server.simulate.copies import NodeCopies
from prefixd_server.simulate.history import POOL


class Background:
    """See the module."""

    def __init__(self, node: NodeCopies, config: MigrationConfig) -> None:
        self._node = node
        self._marks = Watermarks(config.high_water, config.low_water)
        self._mode = ConservativeMode(Setting(config.conservative), 0.0)
        self._stepped_at = 0.0
        self.next_at = math.inf
        """When the next step is due; never while nothing changes."""

    def wake(self, now: float) -> None:
        """Something has changed: there may be something to do at the next tick."""
        if self._node.line is not None:
            self.next_at = min(self.next_at, now + TICK_INTERVAL_S)

    def may_begin(self) -> bool:
        """Whether conservative mode is off: nothing is begun while hardly any of DRAM can be given up."""
        node = self._node
        held = (
            {DRAM_HELD: node.held_count[Tier.DRAM] / node.capacity[Tier.DRAM]}
            if Tier.DRAM in node.tiers
            else {}
        )
        return not self._mode.observe(held, node.clock.at).on

    # -- from DRAM to NVMe ---------------------------------------------------------------------

    def step(self) -> None:
        """One tick: the line grows, and some batches are copied."""
        node, line = self._node, self._node.line
        assert line is not None, "nothing is due without a slower tier"
        now = node.clock.at = self.next_at
        node.end_replies(now)
        tick_count = int((now - self._stepped_at) / TICK_INTERVAL_S)
        self._stepped_at = now
        if not self.may_begin():
            self.next_at = now + TICK_INTERVAL_S
            return
        before = line.block_count(POOL)
        worked = False
        wanted = demotion_count(node.capacity[Tier.DRAM], node.free(Tier.DRAM), self._marks)
        if wanted > 0:
            line.sweep(POOL, max(0, tick_count - 1) * SWEEP_COUNT_MAX)
            line.choose(POOL, wanted)
            worked = self._copy_some(now) or line.has_unstored(POOL) or line.block_count(POOL) > before
        if worked:
            self.next_at = max(now + TICK_INTERVAL_S, node.links.down[Tier.DRAM].free_at)
        else:
            self.next_at = node.running.next_end + TICK_INTERVAL_S

    def _copy_some(self, now: float) -> bool:
        """Copies as many batches as the daemon has under way at a time; whether there were any."""
        node, line = self._node, self._node.line
        assert line is not None, "asked in a step"
        at_once = batch_count(node.capacity[Tier.DRAM], node.block_bytes)
        left = BATCHES_UNDER_WAY_MAX
        for rows in line.plan(POOL, (), left * at_once):
            for first in range(0, len(rows), at_once):
                if left == 0:
                    return True
                batch = rows[first : first + at_once]
                line.asked(batch)
                self._copy_down(batch, now)
                left -= 1
        return left < BATCHES_UNDER_WAY_MAX

    def _copy_down(self, rows: Rows, now: float) -> None:
        """Copies the worthiest of these blocks to NVMe, parents first, as far as it has room for them."""
        node = self._node
        rows, parts = ranked(node.policy, node.view(Tier.DRAM), rows, node.columns.node[rows], now)
        rows = rows[: self._room_below(parts, len(rows))]
        rows = rows[: leading(~node.lacking(Tier.DRAM, rows) & node.lacking(Tier.NVME, rows))]
        node.links.down[Tier.DRAM].move(len(rows) * node.block_bytes, now)
        node.put(Tier.NVME, rows)

    def _room_below(self, parts: Parts, count: int) -> int:
        """Room in NVMe for the leading parts, at the cost of what is worth less; of `count` blocks."""
        node = self._node
        free, left = node.free(Tier.NVME), count
        for part, worth in parts if count > free else ():
            taken = min(part, left)
            left -= taken
            free -= taken
            if free < 0:
                slack = EVICTION_SLACK_COUNT if worth == AT_ANY_PRICE else 0
                free += node.evict(Tier.NVME, slack - free, worth)
                if free < 0:
                    break
        return min(count, node.free(Tier.NVME))

    # -- between HBM and DRAM ------------------------------------------------------------------

    def shared(self, rows: Rows) -> Rows:
        """Of a run that a request is about to use, the leading blocks that belong into HBM."""
        node = self._node
        if Tier.HBM not in node.tiers or len(rows) == 0 or not node.lacking(Tier.HBM, rows).any():
            return rows[:0]
        nodes = node.columns.node[rows]
        holds = 1 + node.holds[Tier.HBM][rows] + node.holds[Tier.DRAM][rows]
        uses = node.tree.use_count[nodes].astype(np.int64) + 1
        gaps = node.clock.at - node.tree.last_use[nodes]
        return rows[: shared_count(holds.astype(np.int64), uses, gaps, hbm_placement.WINDOW_S)]

    def place(self, rows: Rows) -> None:
        """Brings shared blocks into HBM where they are worth more than what would go."""
        node = self._node
        if len(rows):
            rows = rows[node.lacking(Tier.HBM, rows) & ~node.lacking(Tier.DRAM, rows)]
            rows = rows[: max(1, hbm_placement.BATCH_BYTES_MAX // node.block_bytes)]
        if len(rows) and self._is_worth(rows):
            node.links.up[Tier.DRAM].move(len(rows) * node.block_bytes, node.clock.at)
            room = node.make_room(Tier.HBM, len(rows), node.replaceable(Tier.HBM))
            node.put(Tier.HBM, rows[:room])
            self._keep_what_would_go()

    def _is_worth(self, rows: Rows) -> bool:
        node = self._node
        if node.free(Tier.HBM) >= len(rows):
            return True
        view = node.view(Tier.HBM, node.replaceable(Tier.HBM))
        victims = node.victims(view, len(rows))
        if not victims:
            return False
        policy = node.policy
        if not learns(policy):
            return True
        going = np.array([at for at, _ in victims], dtype=np.int32)
        own = np.unique(node.columns.node[rows])
        now = node.clock.at
        return bool(policy.scores(view, own, now).min() > policy.scores(view, going, now).max())

    def _keep_what_would_go(self) -> None:
        """Copies to DRAM what HBM alone holds of what it would lose next."""
        node = self._node
        wanted = demotion_count(node.capacity[Tier.HBM], node.free(Tier.HBM), hbm_placement.MARKS)
        for at, count in node.victims(node.view(Tier.HBM), wanted) if wanted else ():
            path = node.tree.path(int(node.tree.tail_rows(Tier.HBM, at, count)[0]))
            alone = ~node.lacking(Tier.HBM, path)
            for tier in node.tiers:
                if tier is not Tier.HBM:
                    alone &= node.lacking(tier, path)
            kept = path[alone]
            kept = kept[: node.make_room(Tier.DRAM, len(kept))]
            node.links.down[Tier.HBM].move(len(kept) * node.block_bytes, node.clock.at)
            node.put(Tier.DRAM, kept)
