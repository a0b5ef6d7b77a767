"""Leaf-first LRU: the oldest leaf loses its deepest blocks first (POLICY.md D1).

It equals LRU over blocks where each request touches its run from the tail to
the head, since the view lists nodes in that order, descendants before
ancestors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.views import Nodes, TierView
from prefixd_server.policy.choice import Choice
from prefixd_server.policy.policy import Victims


class LruPolicy:
    """See the module. No state."""

    name = "lru"

    def victims(self, view: TierView, block_count: int, now: float, rng: np.random.Generator) -> Victims:
        """See Policy. One walk from the old end: a node whose descendants all go is a leaf when it is met."""
        del now, rng  # neither decides here
        choice = Choice(view, block_count)
        if choice.left > 0:
            for node in view.by_age():
                if choice.is_leaf(node):
                    choice.take(node)
                    if choice.left <= 0:
                        break
        return choice.victims

    def scores(self, view: TierView, nodes: Nodes, now: float) -> NDArray[np.float64]:
        """See Policy: minus the idle seconds."""
        return view.last_use.take(nodes) - now

    def explain(self, view: TierView, node: int, now: float) -> dict[str, str]:
        """See Policy."""
        return {"idle": f"{now - float(view.last_use[node]):.1f} s"}
