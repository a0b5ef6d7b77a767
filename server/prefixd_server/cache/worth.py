"""What copies are worth: a batch in the tier below, and a segment's to the pool that has it.

Pools are compared by what the learner knows, whichever policy chooses within each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixd_server.base.types import Rows, Tier
from prefixd_server.base.views import Nodes, TierView
from prefixd_server.cache.state import State
from prefixd_server.policy.learning import learns
from prefixd_server.policy.policy import Policy, Victims

AT_ANY_PRICE = float("inf")
LEAF_SAMPLE_COUNT = 1024
"""Leaves of a pool that are looked at to tell what its segments are worth."""

Parts = list[tuple[int, float]]
"""(blocks, worth) of consecutive blocks: room for them is made at the cost of what is worth less."""


def by_worth(state: State, rows: Rows) -> tuple[Rows, Parts]:
    """Blocks of one space in the order of their worth, the greatest first and parents before children.

    A block is worth no more than its parents, without which it would be useless. Policies that do
    not compare give all the same worth, and leave the order.

    Args:
        rows: parents first.
    """
    catalog = state.catalog
    namespace, _, group = catalog.namespaces.owner(int(catalog.columns.space[rows[0]]))
    pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[group].slot_bytes)
    view = catalog.tree.view(Tier.DRAM, pool, lambda _node, _limit: 0)
    return ranked(state.policy, view, rows, catalog.columns.node[rows], state.clock.now())


def ranked(policy: Policy, view: TierView, rows: Rows, nodes: Nodes, now: float) -> tuple[Rows, Parts]:
    """by_worth() of blocks of one view, of which `nodes` tells the node of each."""
    if not learns(policy):
        return rows, [(len(rows), AT_ANY_PRICE)]
    edges = [0, *(np.flatnonzero(np.diff(nodes)) + 1).tolist(), len(rows)]
    firsts = nodes[edges[:-1]]
    scores = policy.scores(view, firsts, now).tolist()
    worth: dict[int, float] = {}
    for node, above, score in zip(firsts.tolist(), view.parent[firsts].tolist(), scores, strict=True):
        worth[node] = min(score, worth.get(above, AT_ANY_PRICE))
    order = sorted(range(len(firsts)), key=lambda at: -worth[int(firsts[at])])
    parts = [(edges[at + 1] - edges[at], worth[int(firsts[at])]) for at in order]
    return np.concatenate([rows[edges[at] : edges[at + 1]] for at in order]), parts


@dataclass(slots=True)
class Lost:
    """What a pool gave up to make room for itself: copies, and the sum of what they were worth."""

    copies: int = 0
    worth: float = 0.0

    def add(self, state: State, view: TierView, victims: Victims) -> None:
        """These go now."""
        nodes = np.array([node for node, _ in victims], dtype=np.int32)
        counts = np.array([count for _, count in victims])
        self.copies += int(counts.sum())
        self.worth += float(state.learner.scores(view, nodes, state.clock.now()) @ counts)


def segment_worth(state: State, pool: int) -> float:
    """What the pool would lose with one of its segments of DRAM, per slot of it: its least important blocks.

    Free slots are worth nothing. As many blocks as lie above the leaves are worth as much as the best leaf.
    """
    catalog = state.catalog
    table = catalog.slots[Tier.DRAM]
    slot_count = table.segment(table.segments_of(pool)[0]).slot_count
    view = catalog.tree.view(Tier.DRAM, pool, catalog.evictable(Tier.DRAM))
    leaves = view.leaves()
    going = slot_count - table.free_count(pool)
    if going <= 0 or len(leaves) == 0:
        return 0.0
    stands_for = 1.0
    if len(leaves) > LEAF_SAMPLE_COUNT:
        stands_for = len(leaves) / LEAF_SAMPLE_COUNT
        # Drawn apart from the policy's own lots: looking must change nothing.
        leaves = np.random.default_rng(len(leaves)).choice(leaves, LEAF_SAMPLE_COUNT)
    scores = state.learner.scores(view, leaves, state.clock.now())
    order = scores.argsort()
    counts = view.copies.take(leaves[order]) * stands_for
    taken = np.clip(going - (counts.cumsum() - counts), 0.0, counts)
    worth = float(taken @ scores[order] + (going - taken.sum()) * scores.max())
    return state.costs.per_byte(worth / slot_count, catalog.namespaces.pool_of(pool).slot_bytes)
