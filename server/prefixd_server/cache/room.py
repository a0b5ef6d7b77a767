"""Making room in DRAM, at once: free slots, spare segments, eviction.

Everything here is a step on the loop. What takes longer, emptying a segment of
one block size or tenant for another, is rebalancing.py's; room only says who is
hungry.
"""

from __future__ import annotations

import asyncio

from prefixd_server.base.types import NO_ROW, NO_SLOT, DeclineReason, Slots, SlotState, Tier
from prefixd_server.base.views import Evictable, TierView
from prefixd_server.cache.next_to_go import NextToGo
from prefixd_server.cache.state import State
from prefixd_server.cache.worth import AT_ANY_PRICE, Lost
from prefixd_server.catalog.events import BlocksRemoved, CopiesEvicted, CopiesLeased, CopiesReleased
from prefixd_server.policy.importance import Newcomers
from prefixd_server.policy.learning import learns
from prefixd_server.policy.policy import Victims

EVICTION_SLACK_SHARE = 1 / 64
EVICTION_SLACK_COUNT_MAX = 64
"""What one eviction frees beyond need, so that later runs find contiguous room: part of a pool, blocks."""
ASK_AGAIN_AFTER_S = 1.0
"""A pool that has segments, and got no other's, asks again after so long: it costs a look at all pools."""
RECLAIM_BLOCK_COUNT = 512
"""Blocks of a dropped namespace that are forgotten in one step."""


def slack_count(slot_count: int) -> int:
    """Blocks that one eviction frees beyond need, in a pool of so many slots."""
    return min(int(slot_count * EVICTION_SLACK_SHARE), EVICTION_SLACK_COUNT_MAX)


class Room:
    """See the module."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.hungry: dict[int, float] = {}
        """Pools that had not enough room, in order: they evicted, or got less than they asked for. What that
        has cost them, importance of a block as pools are compared by it. `wake` is set with it."""
        self.refused_at: dict[int, float] = {}
        """When a pool last asked for a segment and got none, monotonic seconds."""
        self.wake = asyncio.Event()
        count = state.catalog.slots[Tier.DRAM].segment_count
        self.former_tenant: list[str | None] = [None] * count
        """Tenant whose processes may have the segment mapped, by segment index."""
        self.assigned_at: dict[int, float] = {}
        """When a pool was last given a segment, monotonic seconds."""
        self.segment_ids: list[int] = list(range(1, count + 1))
        """Wire id of each segment's present memory, by segment index."""
        self._last_segment_id = count
        self.next_to_go: NextToGo | None = None
        """What DRAM drops first, where there is an NVMe tier that has it."""
        self._garbage: list[int] = []
        """Spaces of dropped namespaces whose blocks are still to be forgotten."""

    def allocate(
        self, pool: int, count: int, after: int | None, newcomers: Newcomers | None = None
    ) -> tuple[Slots, DeclineReason | None]:
        """Up to `count` RESERVED slots, as few extents as possible, and why there are fewer.

        Args:
            newcomers: what the slots are for, where that has to be worth more than what would go.
        """
        table = self._state.catalog.slots[Tier.DRAM]
        while table.free_count(pool) < count and self._assign_spare(pool):
            pass
        short = count - table.free_count(pool)
        if short > 0 and self._garbage:
            self.reclaim(short)
            short = count - table.free_count(pool)
        lost = Lost() if short > 0 and self._may_ask(pool) else None
        if short > 0:
            self._make_room(pool, count, newcomers, lost)
        slots = table.allocate(pool, count, after)
        if lost is not None:
            self._ask(pool, lost, newcomers)
        if len(slots) == count:
            return slots, None
        if not self.may_grow(pool):
            return slots, DeclineReason.QUOTA_REACHED
        grows = len(slots) == 0 and table.slot_count(pool) == 0
        return slots, DeclineReason.SEGMENT_PREPARING if grows else DeclineReason.TIER_FULL

    def _may_ask(self, pool: int) -> bool:
        if self._state.catalog.slots[Tier.DRAM].segment_count_of(pool) == 0 or pool not in self.refused_at:
            return True
        return self._state.clock.now() - self.refused_at[pool] >= ASK_AGAIN_AFTER_S

    def _ask(self, pool: int, lost: Lost, newcomers: Newcomers | None) -> None:
        """Tells rebalancing what want of room costs the pool: what had to go, else what does not get in."""
        worth = 0.0
        if lost.copies:
            worth = lost.worth / lost.copies
        elif newcomers is not None:
            worth = self._state.learner.ceiling_for_new(newcomers.history_new) * newcomers.weight
        slot_bytes = self._state.catalog.namespaces.pool_of(pool).slot_bytes
        self.hungry[pool] = self._state.costs.per_byte(worth, slot_bytes)
        self.wake.set()

    def _make_room(self, pool: int, count: int, newcomers: Newcomers | None, lost: Lost | None) -> None:
        """Evicts for `count` blocks and a little more; at any price where a slower tier has what goes."""
        table = self._state.catalog.slots[Tier.DRAM]
        slack = slack_count(table.slot_count(pool))
        if self.next_to_go is not None:
            self.evict(Tier.DRAM, pool, count - table.free_count(pool), slack=slack, lost=lost)
            return
        if newcomers is None:
            self.evict(Tier.DRAM, pool, count - table.free_count(pool) + slack, lost=lost)
            return
        placed = 0
        for part, history, _ in newcomers.parts(count):
            placed += part
            short = placed - table.free_count(pool)
            worth = self._state.learner.ceiling_for_new(history) * newcomers.weight
            if short > 0 and self.evict(Tier.DRAM, pool, short + slack, worth, lost=lost) < short:
                return

    def allocate_below(
        self, above: int, pool: int, count: int, newcomers: Newcomers | None = None
    ) -> tuple[Slots, DeclineReason | None]:
        """Slots for blocks below `above`, which making room for them must not evict.

        Once they are there, the closure of the prefix keeps it: an ancestor never goes first.
        """
        if above == NO_ROW:
            return self.allocate(pool, count, None, newcomers)
        table = self._state.catalog.slots[Tier.DRAM]
        slot = self._state.catalog.columns.slot[Tier.DRAM][above : above + 1].copy()
        if slot[0] == NO_SLOT or table.state[slot[0]] != SlotState.RESIDENT:
            return self.allocate(pool, count, None, newcomers)
        self._state.apply(CopiesLeased(Tier.DRAM, slot))
        try:
            return self.allocate(pool, count, int(slot[0]), newcomers)
        finally:
            self._state.apply(CopiesReleased(Tier.DRAM, slot))

    def evict(
        self,
        tier: Tier,
        pool: int,
        count: int,
        worth: float = AT_ANY_PRICE,
        evictable: Evictable | None = None,
        slack: int = 0,
        device: int = 0,
        lost: Lost | None = None,
    ) -> int:
        """Evicts up to `count` copies of the pool from `tier`, the policy's choice. Slots freed.

        Args:
            worth: what goes is worth less, to a policy that compares.
            evictable: what may go, where that is less than the catalog lets go.
            slack: copies beyond `count` that go when NVMe has them: no block is forgotten for these.
            device: of the tier.
            lost: what had to go is added to it.
        """
        catalog = self._state.catalog
        tenant = catalog.namespaces.pool_of(pool).tenant
        line = self.next_to_go if tier is Tier.DRAM else None
        choices = [evictable or catalog.evictable(tier, device)]
        if line is not None:
            choices.insert(0, line.ready(pool))
        evicted = 0
        for may_go in choices:
            view = catalog.tree.view(tier, pool, may_go, device=device)
            while evicted < count:
                victims = self._victims(view, count - evicted, worth)
                if lost is not None and victims:
                    lost.add(self._state, view, victims)
                freed = self._drop(pool, tier, victims, device)
                if freed == 0:
                    break
                evicted += freed
        if line is not None and evicted < count + slack:
            evicted += self._drop(pool, tier, line.spare(pool, count + slack - evicted))
        self._state.counters_of(tenant).evicted += evicted
        return evicted

    def _drop(self, pool: int, tier: Tier, victims: Victims, device: int = 0) -> int:
        """Evicts victims; slots freed."""
        freed = 0
        for node, count in victims:
            if tier is Tier.DRAM and self.next_to_go is not None:
                self.next_to_go.dropped(pool, node, count)
            rows = self._state.catalog.tree.tail_rows(tier, node, count, device)
            freed += self._state.apply(CopiesEvicted(tier, rows)).freed_count
        return freed

    def _victims(self, view: TierView, count: int, worth: float) -> Victims:
        policy, now, rng = self._state.policy, self._state.clock.now(), self._state.rng
        if learns(policy):
            return policy.victims_below(view, count, worth, now, rng)
        return policy.victims(view, count, now, rng)

    # -- segments ------------------------------------------------------------------------------

    def may_grow(self, pool: int) -> bool:
        """Whether the tenant's quota leaves room for one more segment."""
        return self._state.quotas.may_grow(self._state.catalog, Tier.DRAM, pool)

    def _assign_spare(self, pool: int) -> bool:
        """Gives the pool a segment that nobody uses and no other tenant has mapped."""
        if not self.may_grow(pool):
            return False
        tenant = self._state.catalog.namespaces.pool_of(pool).tenant
        for segment in self._state.catalog.slots[Tier.DRAM].unassigned():
            if self.former_tenant[segment] in (None, tenant):
                self.assign(segment, pool)
                return True
        return False

    def assign(self, segment: int, pool: int) -> None:
        """The segment serves this pool from now on."""
        chosen = self._state.catalog.namespaces.pool_of(pool)
        self.former_tenant[segment] = chosen.tenant
        self.assigned_at[pool] = self._state.clock.now()
        self._state.catalog.slots[Tier.DRAM].assign(
            segment, pool, chosen.slot_bytes, self.segment_ids[segment]
        )

    def renewed(self, segment: int) -> None:
        """The segment has fresh memory that nobody has mapped: a new wire id."""
        self.former_tenant[segment] = None
        self.segment_ids[segment] = self.new_segment_id()

    def new_segment_id(self) -> int:
        """A wire id that no segment of this boot has had, whatever its tier."""
        self._last_segment_id += 1
        return self._last_segment_id

    def segment_of_wire_id(self, tenant: str, segment_id: int) -> int | None:
        """The segment index, when the segment belongs to the tenant now."""
        try:
            segment = self.segment_ids.index(segment_id)
        except ValueError:
            return None
        return segment if self.former_tenant[segment] == tenant else None

    # -- dropped namespaces --------------------------------------------------------------------

    def discard(self, spaces: list[int]) -> None:
        """Blocks of these spaces are unreachable already; they are forgotten step by step."""
        self._garbage.extend(spaces)

    @property
    def has_garbage(self) -> bool:
        """Whether blocks of dropped namespaces are still to be forgotten."""
        return bool(self._garbage)

    def reclaim(self, block_count: int = RECLAIM_BLOCK_COUNT) -> int:
        """Forgets up to about `block_count` blocks of dropped namespaces. Blocks forgotten."""
        tree = self._state.catalog.tree
        forgotten = 0
        while self._garbage and forgotten < block_count:
            rows = tree.some_of(self._garbage[-1], block_count - forgotten)
            if len(rows) == 0:
                tree.drop_space(self._garbage.pop())
                continue
            forgotten += self._state.apply(BlocksRemoved(rows)).forgotten_count
        return forgotten
