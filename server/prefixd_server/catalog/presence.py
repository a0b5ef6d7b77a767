"""Which nodes have copies in one tier, or on one device of it: counts, recency lists, leaves.

Per node: `copies`, its blocks with a copy here; `kids`, its child nodes with
copies here in them or below them. A node with copies is in its pool's recency
list; with copies and no kids it is a leaf, and in its pool's leaf array too.

A recency list is a ring through the pool node: newer[pool] is the oldest node,
older[pool] the newest. In it a node always comes before (is older than) its
ancestors, so the oldest is a leaf, and the order is that of blocks under LRU
where each request touches its run from the tail to the head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_SLOT, Slots, Tier
from prefixd_server.base.views import Nodes
from prefixd_server.catalog.nodes import NO_NODE, NodeColumns
from prefixd_server.catalog.reserved import reserve

ALL_SLOTS = range(NO_SLOT)


class LeafArray:
    """The leaves of one pool in one tier, dense and without order."""

    def __init__(self, node_count_max: int) -> None:
        self.nodes: Nodes = reserve(np.int32, node_count_max)
        self.view = self.nodes.data
        self.count = 0
        self.count_high_water = 0


class Presence:
    """See the module; one for each device of each tier. Its arrays are read only for others.

    Args:
        slots: of the device; all where the tier lies on one.
    """

    def __init__(self, tier: Tier, nodes: NodeColumns, device: int = 0, slots: range = ALL_SLOTS) -> None:
        self.tier = tier
        self._slots = slots
        self.node_count_max = nodes.row_count_max
        self.copies: NDArray[np.uint16] = nodes.of_tier("copies", tier, device)
        self.kids: NDArray[np.uint32] = nodes.of_tier("kids", tier, device)
        self.older: Nodes = nodes.of_tier("older", tier, device)
        self.newer: Nodes = nodes.of_tier("newer", tier, device)
        self.leaf_place: NDArray[np.uint32] = nodes.of_tier("leaf_place", tier, device)
        self.copies_view = self.copies.data
        self.kids_view = self.kids.data
        self.older_view = self.older.data
        self.newer_view = self.newer.data
        self._leaf_place_view = self.leaf_place.data
        self._parent = nodes.mv.parent
        self._space = nodes.mv.space
        self._pool_of_space: dict[int, int] = {}
        self.leaf_arrays: dict[int, LeafArray] = {}
        """Leaves by pool node."""
        self.used = False
        """Whether any copy was ever here: an idle tier costs nothing."""

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of the tier's slots, NO_SLOT among them, lie here."""
        if self._slots is ALL_SLOTS:
            everywhere: NDArray[np.bool_] = slots != NO_SLOT
            return everywhere
        here: NDArray[np.bool_] = (slots >= self._slots.start) & (slots < self._slots.stop)
        return here

    # -- pools -------------------------------------------------------------------

    def add_pool(self, pool_node: int) -> None:
        """An empty recency list."""
        self.older_view[pool_node] = self.newer_view[pool_node] = pool_node

    def add_space(self, space: int, pool_node: int) -> None:
        """Nodes of the space belong to the pool."""
        self._pool_of_space[space] = pool_node

    def pool_node_of(self, node: int) -> int:
        """The pool that the node, in use, belongs to."""
        return self._pool_of_space[self._space[node]]

    def drop_space(self, space: int) -> None:
        """The space has no nodes any more."""
        del self._pool_of_space[space]

    def leaf_array(self, pool_node: int) -> LeafArray:
        """The pool's leaves; made when first asked for."""
        array = self.leaf_arrays.get(pool_node)
        if array is None:
            array = self.leaf_arrays[pool_node] = LeafArray(self.node_count_max)
        return array

    # -- copies --------------------------------------------------------------------------------

    def add(self, node: int, count: int) -> None:
        """`count` more blocks of the node have a copy here."""
        self.used = True
        before = self.copies_view[node]
        self.copies_view[node] = before + count
        if before:
            return
        self._enter_list(node)
        if self.kids_view[node]:
            return
        self._add_leaf(node)
        self._appeared(node)

    def drop(self, node: int, count: int) -> None:
        """`count` blocks of the node lost their copy here."""
        left = self.copies_view[node] - count
        assert left >= 0, "more copies are dropped than the node has"
        self.copies_view[node] = left
        if left:
            return
        self._leave_list(node)
        if self.kids_view[node]:
            return
        self._drop_leaf(node)
        self._disappeared(node)

    def split(self, upper: int, lower: int, upper_count: int) -> None:
        """`upper`, new and linked into the tree, took over the head of `lower` with `upper_count` copies."""
        copies, kids = self.copies_view, self.kids_view
        lower_count = copies[lower] - upper_count
        if upper_count:
            copies[upper] = upper_count
            self._link(upper, self.newer_view[lower])
        kids[upper] = 1 if lower_count or kids[lower] else 0
        copies[lower] = lower_count
        if lower_count or not upper_count:
            return
        self._leave_list(lower)
        if not kids[lower]:
            self._drop_leaf(lower)
            self._add_leaf(upper)

    def _appeared(self, node: int) -> None:
        """The node's subtree has copies here, and had none."""
        kids, copies, parent = self.kids_view, self.copies_view, self._parent
        above = parent[node]
        while above != NO_NODE:
            before = kids[above]
            kids[above] = before + 1
            if before:
                return
            if copies[above]:
                self._drop_leaf(above)
                return
            above = parent[above]

    def _disappeared(self, node: int) -> None:
        """The node's subtree has no copies here, and had some."""
        kids, copies, parent = self.kids_view, self.copies_view, self._parent
        above = parent[node]
        while above != NO_NODE:
            left = kids[above] - 1
            kids[above] = left
            if left:
                return
            if copies[above]:
                self._add_leaf(above)
                return
            above = parent[above]

    # -- leaves --------------------------------------------------------------------------------

    def _add_leaf(self, node: int) -> None:
        array = self.leaf_array(self._pool_of_space[self._space[node]])
        self._leaf_place_view[node] = array.count
        array.view[array.count] = node
        array.count += 1
        array.count_high_water = max(array.count_high_water, array.count)

    def _drop_leaf(self, node: int) -> None:
        array = self.leaf_arrays[self._pool_of_space[self._space[node]]]
        array.count -= 1
        last = array.view[array.count]
        place = self._leaf_place_view[node]
        array.view[place] = last
        self._leaf_place_view[last] = place

    # -- recency -------------------------------------------------------------------------------

    def touch(self, path: list[int]) -> None:
        """Moves nodes to the new end, the first of `path` last.

        Args:
            path: nodes of one pool from the root down; those without copies are passed over.
        """
        copies, newer = self.copies_view, self.newer_view
        anchor = self._pool_of_space[self._space[path[0]]]
        # Nodes that lie together already, as the last use of the path has left them, move in one piece.
        first = last = NO_NODE
        for node in path:
            if not copies[node]:
                continue
            if newer[node] != first:
                if last != NO_NODE:
                    self._move(first, last, anchor)
                    anchor = first
                last = node
            first = node
        if last != NO_NODE:
            self._move(first, last, anchor)

    def _move(self, first: int, last: int, anchor: int) -> None:
        """Moves the piece of the list from first (oldest) to last right before anchor."""
        older, newer = self.older_view, self.newer_view
        if newer[last] == anchor:
            return
        before, after = older[first], newer[last]
        newer[before] = after
        older[after] = before
        before = older[anchor]
        newer[before] = first
        older[first] = before
        newer[last] = anchor
        older[anchor] = last

    def _enter_list(self, node: int) -> None:
        """Right before its nearest ancestor in the list; at the new end where there is none."""
        copies, parent = self.copies_view, self._parent
        above = parent[node]
        while not copies[above] and parent[above] != NO_NODE:
            above = parent[above]
        self._link(node, above)

    def _link(self, node: int, after: int) -> None:
        before = self.older_view[after]
        self.newer_view[before] = node
        self.older_view[node] = before
        self.newer_view[node] = after
        self.older_view[after] = node

    def _leave_list(self, node: int) -> None:
        before, after = self.older_view[node], self.newer_view[node]
        self.newer_view[before] = after
        self.older_view[after] = before
