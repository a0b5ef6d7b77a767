"""One pool of one tier as a policy sees it: base/views.py over the tree's arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Tier
from prefixd_server.base.views import Evictable, Nodes
from prefixd_server.catalog.nodes import NO_NODE
from prefixd_server.catalog.presence import Presence
from prefixd_server.catalog.walks import TreeWalks

_NO_NODES: Nodes = np.zeros(0, dtype=np.int32)


BY_AGE_COUNT_MAX = 2048
"""Nodes that a view without some of them walks over, half a millisecond."""


class PoolView:
    """A TierView. `pool_node` is NO_NODE for a pool that has no space yet: an empty view.

    Args:
        without: by node, what is left out; then by_age() ends after BY_AGE_COUNT_MAX nodes.
        after: where by_age() begins then, behind this node; the old end where it has no copies of this pool.
    """

    def __init__(
        self,
        tree: TreeWalks,
        presence: Presence,
        pool_node: int,
        evictable: Evictable,
        without: NDArray[np.bool_] | None = None,
        after: int = NO_NODE,
    ) -> None:
        nodes = tree.nodes
        self._tree = tree
        self._presence = presence
        self._pool_node = pool_node
        self._evictable = evictable
        self._chosen: Nodes | None = None
        self._without = without
        self.reached = NO_NODE
        """The last node that by_age() gave or left out; NO_NODE at the new end."""
        if without is not None:
            leaves = self.leaves()
            self._chosen = leaves[~without.take(leaves)]
            if after != NO_NODE and presence.copies_view[after] and presence.pool_node_of(after) == pool_node:
                self.reached = after
        self.parent: Nodes = nodes.parent
        self.length: NDArray[np.uint16] = nodes.length
        self.copies: NDArray[np.uint16] = presence.copies
        self.kids: NDArray[np.uint32] = presence.kids
        self.last_use: NDArray[np.float64] = nodes.last_use
        self.created: NDArray[np.float64] = nodes.created
        self.use_count: NDArray[np.uint32] = nodes.use_count
        self.reused: NDArray[np.uint8] = nodes.reused
        self.attention: NDArray[np.float32] = nodes.attention
        self.gap_class: NDArray[np.uint8] = nodes.gap_class
        self.output_class: NDArray[np.uint8] = nodes.output_class
        self.hint: NDArray[np.uint8] = nodes.hint

    @property
    def tier(self) -> Tier:
        """See TierView."""
        return self._presence.tier

    @property
    def leaf_count(self) -> int:
        """See TierView."""
        if self._chosen is not None:
            return len(self._chosen)
        array = self._presence.leaf_arrays.get(self._pool_node)
        return 0 if array is None else array.count

    def leaves(self) -> Nodes:
        """See TierView."""
        if self._chosen is not None:
            return self._chosen
        array = self._presence.leaf_arrays.get(self._pool_node)
        return _NO_NODES if array is None else array.nodes[: array.count]

    def oldest(self) -> Iterator[int]:
        """See TierView."""
        kids = self._presence.kids_view
        return (node for node in self.by_age() if not kids[node])

    def by_age(self) -> Iterator[int]:
        """See TierView."""
        if self._pool_node == NO_NODE:
            return
        newer, copies = self._presence.newer_view, self._presence.copies_view
        if self._without is not None:
            yield from self._others_by_age(self._without.data)
            return
        node = newer[self._pool_node]
        while node != self._pool_node:
            yield node
            node = newer[node] if copies[node] else newer[self._pool_node]

    def _others_by_age(self, without: memoryview) -> Iterator[int]:
        newer = self._presence.newer_view
        node = newer[self._pool_node if self.reached == NO_NODE else self.reached]
        for _ in range(BY_AGE_COUNT_MAX):
            if node == self._pool_node:
                self.reached = NO_NODE
                return
            self.reached = node
            if not without[node]:
                yield node
            node = newer[node]

    def tail_depths(self, nodes: Nodes) -> NDArray[np.uint32]:
        """See TierView."""
        return self._tree.tail_depths(nodes)

    def evictable(self, node: int, limit: int) -> int:
        """See TierView."""
        return self._evictable(node, limit)
