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


class PoolView:
    """A TierView. `pool_node` is NO_NODE for a pool that has no space yet: an empty view."""

    def __init__(
        self,
        tree: TreeWalks,
        presence: Presence,
        pool_node: int,
        evictable: Evictable,
        without: NDArray[np.bool_] | None = None,
    ) -> None:
        nodes = tree.nodes
        self._tree = tree
        self._presence = presence
        self._pool_node = pool_node
        self._evictable = evictable
        self._chosen: Nodes | None = None
        if without is not None:
            leaves = self.leaves()
            self._chosen = leaves[~without.take(leaves)]
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
        node = newer[self._pool_node]
        while node != self._pool_node:
            yield node
            node = newer[node] if copies[node] else newer[self._pool_node]

    def tail_depths(self, nodes: Nodes) -> NDArray[np.uint32]:
        """See TierView."""
        return self._tree.tail_depths(nodes)

    def evictable(self, node: int, limit: int) -> int:
        """See TierView."""
        return self._evictable(node, limit)
