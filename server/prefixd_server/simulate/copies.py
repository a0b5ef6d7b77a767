"""What lies in which tier of a replayed node, and what may leave: copies, holds, eviction.

Eviction takes the policy's choice as the daemon's does (cache/room.py): from DRAM above
NVMe first what can go without a loss (cache/next_to_go.py).

Not here: who asks for what (tiers.py), and copies that no request waits for (background.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_SLOT, Rows, Tier
from prefixd_server.base.views import Evictable, TierView
from prefixd_server.cache.next_to_go import NextToGo
from prefixd_server.cache.room import slack_count
from prefixd_server.cache.state import Metered
from prefixd_server.cache.worth import AT_ANY_PRICE
from prefixd_server.policy.learning import learns
from prefixd_server.policy.policy import Policy, Victims
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.history import POOL, SOME_SLOT, ReplayState
from prefixd_server.simulate.links import Links
from prefixd_server.simulate.traces import Trace


class ReplayClock:
    """The trace's clock: it stands where the replay has come to."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        """See Clock."""
        return self.at

    def wall(self) -> float:
        """See Clock."""
        return self.at


class NodeCopies(ReplayState):
    """See the module.

    Args:
        capacity_blocks: by tier, fastest first; DRAM among them unless it is one alone.
        block_bytes: bytes of one block's KV.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        capacity_blocks: dict[Tier, int],
        block_bytes: int,
        seed: int,
        serving: ServingModel | None = None,
        use_stops: bool = True,
    ) -> None:
        assert len(capacity_blocks) == 1 or Tier.DRAM in capacity_blocks, "the other tiers stand beside DRAM"
        super().__init__(trace, policy, seed, serving, use_stops)
        self.tiers = list(capacity_blocks)
        self.store_tier = Tier.DRAM if Tier.DRAM in capacity_blocks else self.tiers[0]
        """Where new blocks are written."""
        self.capacity = capacity_blocks
        self.block_bytes = block_bytes
        self.links = Links()
        self.clock = ReplayClock()
        self.metered: list[Metered] = []
        self.used = dict.fromkeys(self.tiers, 0)
        self.holds: dict[Tier, NDArray[np.int32]] = {
            tier: np.zeros(trace.block_count, dtype=np.int32) for tier in self.tiers
        }
        """Running requests and prefetches that need each block's copy there."""
        self.held_count = dict.fromkeys(self.tiers, 0)
        """Copies that somebody needs."""
        self.line = NextToGo(self) if {Tier.DRAM, Tier.NVME} <= capacity_blocks.keys() else None

        self._held: dict[int, list[tuple[Tier, Rows]]] = {}
        """What running requests hold, by request."""

    @property
    def catalog(self) -> NodeCopies:
        """What a line asks: `tree`, `columns`, `evictable`."""
        return self

    # -- copies --------------------------------------------------------------------------------

    def free(self, tier: Tier) -> int:
        """Slots without a copy."""
        return self.capacity[tier] - self.used[tier]

    def lacking(self, tier: Tier, rows: Rows) -> NDArray[np.bool_]:
        """Which of the blocks have no copy in the tier."""
        none: NDArray[np.bool_] = self.columns.slot[tier].take(rows) == NO_SLOT
        return none

    def put(self, tier: Tier, rows: Rows) -> None:
        """These blocks have a copy in the tier from now on."""
        if len(rows):
            self.columns.slot[tier][rows] = SOME_SLOT
            self.tree.copies_added(tier, rows)
            self.used[tier] += len(rows)

    def drop(self, tier: Tier, rows: Rows) -> None:
        """Drops copies; blocks without another are forgotten."""
        self.tree.copies_dropped(tier, rows)
        self.columns.slot[tier][rows] = NO_SLOT
        self.used[tier] -= len(rows)
        gone = rows[~self._kept_elsewhere(tier, rows)]
        if len(gone):
            if self.listener is not None:
                reused = bool(self.tree.nodes.reused[self.columns.node[gone[0]]])
                self.listener.evicted(gone, reused)
            self.tree.remove(gone)
            self.columns.free(gone)

    def view(self, tier: Tier, evictable: Evictable | None = None) -> TierView:
        """The tier as a policy sees it."""
        return self.tree.view(tier, POOL, evictable or self.evictable(tier))

    # -- holds ---------------------------------------------------------------------------------

    def hold(self, tier: Tier, rows: Rows) -> None:
        """Somebody more needs these copies."""
        held = self.holds[tier]
        self.held_count[tier] += len(rows) - int(np.count_nonzero(held.take(rows)))
        held[rows] += 1

    def let_go(self, tier: Tier, rows: Rows) -> None:
        """One of those who need them does no more."""
        held = self.holds[tier]
        held[rows] -= 1
        self.held_count[tier] -= len(rows) - int(np.count_nonzero(held.take(rows)))

    def hold_for(self, request: int, tier: Tier, rows: Rows) -> None:
        """A running request needs these copies until it ends."""
        self.hold(tier, rows)
        self._held.setdefault(request, []).append((tier, rows))

    def end_replies(self, now: float) -> None:
        """The replies that have ended by now: the policy is told, and nothing is held for them."""
        for ended in self.running.ended(now):
            self.tell_end(ended)
            for tier, rows in self._held.pop(ended.request, ()):
                self.let_go(tier, rows)

    # -- what may leave ------------------------------------------------------------------------

    def make_room(self, tier: Tier, count: int, evictable: Evictable | None = None) -> int:
        """Sees to it that `count` copies fit, and from DRAM a little more; how many do.

        Args:
            evictable: what may go for them, where that is less than all.
        """
        short = count - self.free(tier)
        if short > 0:
            self.evict(tier, short, evictable=evictable)
            if tier is Tier.DRAM and self.line is not None:
                beyond = count + slack_count(self.capacity[tier]) - self.free(tier)
                self._drop_victims(tier, self.line.spare(POOL, beyond))
        return min(count, self.free(tier))

    def evict(
        self, tier: Tier, count: int, worth: float = AT_ANY_PRICE, evictable: Evictable | None = None
    ) -> int:
        """Drops up to `count` copies from the tier, the policy's choice; how many went.

        Args:
            worth: what goes is worth less, to a policy that compares.
        """
        choices = [evictable or self.evictable(tier)]
        if tier is Tier.DRAM and self.line is not None:
            choices.insert(0, self.line.ready(POOL))
        evicted = 0
        for may_go in choices:
            view = self.view(tier, may_go)
            while evicted < count:
                gone = self._drop_victims(tier, self.victims(view, count - evicted, worth))
                if gone == 0:
                    break
                evicted += gone
        return evicted

    def _drop_victims(self, tier: Tier, victims: Victims) -> int:
        for node, count in victims:
            if tier is Tier.DRAM and self.line is not None:
                self.line.dropped(POOL, node, count)
            self.drop(tier, self.tree.tail_rows(tier, node, count))
        return sum(count for _, count in victims)

    def victims(self, view: TierView, count: int, worth: float = AT_ANY_PRICE) -> Victims:
        """What the policy drops next."""
        if learns(self.policy):
            return self.policy.victims_below(view, count, worth, self.clock.at, self.rng)
        return self.policy.victims(view, count, self.clock.at, self.rng)

    def evictable(self, tier: Tier) -> Evictable:
        """Copies that nobody holds, and whose going leaves no block without its parent."""
        holds = self.holds[tier]

        def count(node: int, limit: int) -> int:
            rows = self.tree.tail_rows(tier, node, limit)
            rows = rows[: leading(holds.take(rows) == 0)]
            if len(rows) == 0:
                return 0
            kept = self._kept_elsewhere(tier, rows)
            childless = np.empty(len(rows), dtype=np.bool_)
            childless[0] = self.tree.ends_with(tier, int(rows[0]))
            childless[1:] = ~kept[:-1] & (self.columns.parent.take(rows[:-1]) == rows[1:])
            return leading(kept | childless)

        return count

    def replaceable(self, tier: Tier) -> Evictable:
        """What may go for a copy that is made for speed alone: no block is forgotten for it."""
        evictable = self.evictable(tier)

        def count(node: int, limit: int) -> int:
            return leading(
                self._kept_elsewhere(tier, self.tree.tail_rows(tier, node, evictable(node, limit)))
            )

        return count

    def _kept_elsewhere(self, tier: Tier, rows: Rows) -> NDArray[np.bool_]:
        kept = np.zeros(len(rows), dtype=np.bool_)
        for other in self.tiers:
            if other is not tier:
                kept |= ~self.lacking(other, rows)
        return kept
