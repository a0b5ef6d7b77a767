"""Why a block is where it is: its signals, what it is worth, and its standing in every tier.

Reads only; what is told is what the policy would decide now.
"""

from __future__ import annotations

import numpy as np

from prefixd_server.base.accounts import Explanation, Placement
from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, NamespaceRef, SlotState, Tier
from prefixd_server.base.views import TierView
from prefixd_server.cache.state import State
from prefixd_server.catalog.columns import PINNED, VISIBLE

LEAF_SAMPLE_COUNT = 1024


class Explaining:
    """See the module."""

    def __init__(self, state: State) -> None:
        self._state = state

    def explain(
        self, tenant: str, ref: NamespaceRef, shard: int, kv_group: int, key: Hashes
    ) -> Explanation | None:
        """What the policy makes of one block, None when it is not known. `key` has shape (1, 4)."""
        catalog, policy = self._state.catalog, self._state.policy
        namespace = catalog.namespaces.get(tenant, ref)
        space = catalog.namespaces.space(namespace, shard, kv_group)
        row = int(catalog.find(space, key)[0])
        if row == NO_ROW:
            return None
        node = int(catalog.columns.node[row])
        pool = catalog.namespaces.pool(tenant, namespace.spec.kv_groups[kv_group].slot_bytes)
        views = [self._view(tier, pool, row) for tier in sorted(catalog.slots)]
        now = self._state.clock.now()
        fastest = views[0]
        return Explanation(
            policy=policy.name,
            signals=tuple(policy.explain(fastest, node, now).items()),
            score=float(policy.scores(fastest, np.array([node], dtype=np.int32), now)[0]),
            placements=tuple(self._placement(view, row, node, now) for view in views),
        )

    def _view(self, tier: Tier, pool: int, row: int) -> TierView:
        """The tier, and of several devices the one where the block lies, else the first."""
        catalog = self._state.catalog
        table, slot = catalog.slots[tier], int(catalog.columns.slot[tier][row])
        device = 0 if slot == NO_SLOT else table.device_of(table.segment_of(slot))
        return catalog.tree.view(tier, pool, catalog.evictable(tier, device), device=device)

    def _placement(self, view: TierView, row: int, node: int, now: float) -> Placement:
        catalog = self._state.catalog
        slot = int(catalog.columns.slot[view.tier][row])
        rank = self._rank(view, node, now)
        if slot == NO_SLOT:
            return Placement(view.tier, False, False, rank, self._absent(view.tier, rank))
        held = self._held(view, row, slot, node)
        verdict = held or f"may go, after {rank:.0%} of what may go here"
        return Placement(view.tier, True, not held, rank, verdict)

    def _rank(self, view: TierView, node: int, now: float) -> float:
        """Part of the tier's leaves that are worth less than the node."""
        leaves = view.leaves()
        if len(leaves) > LEAF_SAMPLE_COUNT:
            # Drawn apart from the policy's own lots: looking must change nothing.
            leaves = np.random.default_rng(len(leaves)).choice(leaves, LEAF_SAMPLE_COUNT, replace=False)
        if len(leaves) == 0:
            return 0.0
        own = self._state.policy.scores(view, np.array([node], dtype=np.int32), now)[0]
        return float((self._state.policy.scores(view, leaves, now) < own).mean())

    def _held(self, view: TierView, row: int, slot: int, node: int) -> str:
        """Why the copy may not go now; empty when it may, or when only deeper blocks of its node go first."""
        catalog = self._state.catalog
        table = catalog.slots[view.tier]
        flags = int(catalog.columns.flags[row])
        leases = int(table.leases[slot]) - (view.tier in catalog.durable)
        if table.state[slot] == SlotState.RESERVED or not flags & VISIBLE:
            return "stays: it is being written, or waits for a block above it"
        if flags & PINNED:
            return "stays: it is pinned"
        if leases > 0:
            return f"stays: {leases} leases hold it"
        if view.kids[node]:
            return f"stays: {int(view.kids[node])} branches below it are kept here, and need it"
        return "" if view.evictable(node, int(view.copies[node])) else "stays: blocks below it need it"

    def _absent(self, tier: Tier, rank: float) -> str:
        worth = f"worth more than {rank:.0%} of what may go here"
        if tier is Tier.NVME:
            return f"not here; copied here before DRAM drops it, as there is room; {worth}"
        return f"not here; brought when a request asks for it; {worth}"
