"""What a batch of copies is worth in the tier below: who comes first, and at whose cost."""

from __future__ import annotations

import numpy as np

from prefixd_server.base.types import Rows, Tier
from prefixd_server.base.views import Nodes, TierView
from prefixd_server.cache.state import State
from prefixd_server.policy.learning import learns
from prefixd_server.policy.policy import Policy

AT_ANY_PRICE = float("inf")

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
