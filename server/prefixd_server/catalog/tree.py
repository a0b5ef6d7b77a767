"""The prefix tree: which block follows which, in nodes that share one history.

A node is a chain of consecutive blocks that were always used together. It is
split where a request ends inside it or leaves it; statistics, recency and
presence are kept per node, so a request costs by the nodes on its path and not
by its blocks. Children hang below a node's tail, never inside it.

The tree owns the block columns parent, node, depth and children. Not here: keys
(keytable.py), slots (slots.py), who may see a block (catalog.py), and what a
policy makes of it all. The event loop owns it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, Rows, Tier
from prefixd_server.base.views import Evictable
from prefixd_server.catalog.columns import TOUCH_BYTES, BlockColumns
from prefixd_server.catalog.nodes import (
    NO_NODE,
    NODE_LENGTH_MAX,
    NODES_WITHOUT_BLOCKS_MAX,
    ONE_EACH,
    Devices,
    NodeColumns,
)
from prefixd_server.catalog.passes import everything
from prefixd_server.catalog.tree_audit import audit_tree
from prefixd_server.catalog.tree_view import PoolView
from prefixd_server.catalog.walks import TreeWalks


class PrefixTree(TreeWalks):
    """See the module.

    Args:
        columns: of the blocks; rows are the caller's, who allocates and frees them.
        node_count_max: most nodes; as many as blocks can always be needed, and the
            roots of spaces and pools come on top.
        devices: of tiers that lie on several.
    """

    def __init__(self, columns: BlockColumns, node_count_max: int, devices: Devices = ONE_EACH) -> None:
        super().__init__(columns, NodeColumns(node_count_max + NODES_WITHOUT_BLOCKS_MAX, devices), devices)
        self.last_use: NDArray[np.float64] = self.nodes.last_use
        self.use_count: NDArray[np.uint32] = self.nodes.use_count
        self.attention: NDArray[np.float32] = self.nodes.attention
        self.pool_nodes: dict[int, int] = {}
        """Pool node by pool."""
        self.space_roots: dict[int, int] = {}
        """Root node by space."""
        self._block_counts: dict[int, int] = {}

    # -- spaces --------------------------------------------------------------------------------

    def add_space(self, space: int, pool: int) -> None:
        """Opens a space, whose copies go to slots of `pool` in every tier."""
        assert space not in self.space_roots, "a space is opened once"
        pool_node = self.pool_nodes.get(pool)
        if pool_node is None:
            pool_node = self.pool_nodes[pool] = self._new_node(0, 0.0)
            self.nodes.mv.parent[pool_node] = NO_NODE
            for presence in self.presences.values():
                presence.add_pool(pool_node)
        root = self.space_roots[space] = self._new_node(space, 0.0)
        self._block_counts[space] = 0
        self._adopt(pool_node, root)
        for presence in self.presences.values():
            presence.add_space(space, pool_node)

    def drop_space(self, space: int) -> None:
        """Closes a space that has no blocks left; one that was never opened is closed already."""
        root = self.space_roots.pop(space, None)
        if root is None:
            return
        assert self._block_counts.pop(space) == 0, "a dropped space still has blocks"
        self._disown(root)
        self.nodes.free_one(root)
        for presence in self.presences.values():
            presence.drop_space(space)

    def block_count(self, space: int) -> int:
        """Blocks of the space, in any state; none when it is not open."""
        return self._block_counts.get(space, 0)

    def block_counts(self) -> dict[int, int]:
        """The blocks of every open space."""
        return dict(self._block_counts)

    def roots(self, space: int) -> Rows:
        """The first blocks of all runs of the space."""
        root = self.space_roots.get(space)
        heads = [] if root is None else [self.nodes.mv.head[child] for child in self.child_nodes(root)]
        return np.array(heads, dtype=np.int32)

    def some_of(self, space: int, limit: int) -> Rows:
        """Up to `limit` blocks of the space with no other block below them, children before parents."""
        root = self.space_roots.get(space)
        return np.zeros(0, dtype=np.int32) if root is None else self.below(root, limit)

    # -- growth --------------------------------------------------------------------------------

    def add(self, space: int, parent_row: int, rows: Rows, now: float) -> list[int]:
        """Hangs a new chain below a block, or below nothing when parent_row is NO_ROW.

        Counts as the chain's first use, and as a sign of life of the path above: its
        nodes are as recent as `now`, their use counts stay.

        Args:
            rows: in run order, at least one; their tree columns are written here.

        Returns:
            The nodes that hold them, in run order.
        """
        assert len(rows) > 0, "a chain has at least one block"
        blocks = self.columns
        anchor, depth = self.space_roots[space], 0
        if parent_row != NO_ROW:
            anchor = blocks.mv.node[parent_row]
            assert self.nodes.mv.space[anchor] == space, "a parent is of the same space"
            if self.nodes.mv.tail[anchor] != parent_row:
                anchor = self._split(anchor, parent_row)
            depth = blocks.mv.depth[parent_row] + 1
            blocks.mv.children[parent_row] += 1
            if self.nodes.mv.last_use[anchor] < now:
                self._make_recent(self._path_of(anchor), now)
        at = rows.astype(np.intp)
        blocks.parent[at[1:]] = rows[:-1]
        blocks.mv.parent[int(rows[0])] = parent_row
        blocks.depth[at] = np.arange(depth, depth + len(rows), dtype=np.uint32)
        blocks.children[at] = 1
        blocks.mv.children[int(rows[-1])] = 0
        self._block_counts[space] += len(rows)
        placed = self._append(anchor, rows)
        nodes = [anchor] if placed else []
        while placed < len(rows):
            anchor = self._grow_node(anchor, rows[placed : placed + NODE_LENGTH_MAX], now)
            nodes.append(anchor)
            placed += NODE_LENGTH_MAX
        return nodes

    def _append(self, node: int, rows: Rows) -> int:
        """Lengthens the node when the new blocks share its history; how many it took."""
        mv = self.nodes.mv
        length = mv.length[node]
        alone = mv.child_count[node] == 0 and mv.use_count[node] <= 1
        if length == 0 or length >= NODE_LENGTH_MAX or not alone:
            return 0
        taken = rows[: NODE_LENGTH_MAX - length]
        self.columns.node[taken] = node
        mv.length[node] = length + len(taken)
        mv.tail[node] = int(taken[-1])
        return len(taken)

    def _grow_node(self, parent: int, rows: Rows, now: float) -> int:
        """A new node with these rows below `parent`."""
        node = self._new_node(self.nodes.mv.space[parent], now)
        mv = self.nodes.mv
        mv.head[node], mv.tail[node], mv.length[node] = int(rows[0]), int(rows[-1]), len(rows)
        self.columns.node[rows] = node
        self._adopt(parent, node)
        return node

    def _new_node(self, space: int, now: float) -> int:
        node = self.nodes.allocate_one()
        mv = self.nodes.mv
        mv.space[node] = space
        mv.first_child[node] = NO_NODE
        mv.child_count[node] = mv.length[node] = 0
        mv.head[node] = mv.tail[node] = NO_ROW
        mv.attention[node] = 0.0
        mv.last_use[node] = mv.created[node] = now
        mv.use_count[node] = 1
        mv.reused[node] = mv.gap_class[node] = mv.output_class[node] = mv.hint[node] = 0
        # Fresh or given back, a node has no copies and no child that has any.
        return node

    def _split(self, node: int, row: int) -> int:
        """Divides the node after `row`; the new node is the upper part, and is returned.

        The lower part keeps its number, its children and its place in every list.
        """
        mv, depth = self.nodes.mv, self.columns.mv.depth
        length, head = mv.length[node], mv.head[node]
        upper_length = depth[row] - depth[head] + 1
        assert 0 < upper_length < length, "a node is split inside"
        rows = self.upward(row, upper_length)
        upper = self._new_node(mv.space[node], 0.0)
        for column in mv.history:
            column[upper] = column[node]
        mv.attention[upper] = mv.attention[node] * upper_length / length
        mv.attention[node] -= mv.attention[upper]
        mv.head[upper], mv.tail[upper], mv.length[upper] = head, row, upper_length
        self.columns.node[rows] = upper
        above = mv.parent[node]
        self._disown(node)
        mv.length[node] = length - upper_length
        mv.head[node] = int(self.upward(mv.tail[node], length - upper_length)[-1])
        self._adopt(above, upper)
        self._adopt(upper, node)
        for presence in self.presences.values():
            held = presence.copies_view[node]
            if held and held < length:
                held = int(presence.holds(self.columns.slot[presence.tier][rows]).sum())
            presence.split(upper, node, min(held, upper_length))
        return upper

    def _adopt(self, parent: int, child: int) -> None:
        mv = self.nodes.mv
        first = mv.first_child[parent]
        mv.parent[child] = parent
        mv.prev_sibling[child] = NO_NODE
        mv.next_sibling[child] = first
        if first != NO_NODE:
            mv.prev_sibling[first] = child
        mv.first_child[parent] = child
        mv.child_count[parent] += 1

    def _disown(self, child: int) -> None:
        mv = self.nodes.mv
        parent, before, after = mv.parent[child], mv.prev_sibling[child], mv.next_sibling[child]
        if before == NO_NODE:
            mv.first_child[parent] = after
        else:
            mv.next_sibling[before] = after
        if after != NO_NODE:
            mv.prev_sibling[after] = before
        mv.child_count[parent] -= 1

    # -- use -----------------------------------------------------------------------------------

    def touch(self, rows: Rows, now: float) -> list[int]:
        """One access by a request that hits `rows`; the nodes of its path, from the root down.

        Equal to path_nodes(), then use(); a policy that learns from what the nodes
        were before calls them itself.
        """
        path = self.path_nodes(rows)
        self.use(path, now)
        return path

    def path_nodes(self, rows: Rows) -> list[int]:
        """The nodes that hold exactly these rows, from the root down; the last is split where the path ends.

        Args:
            rows: a run from its first block on, at least one, without gaps.
        """
        blocks, last = self.columns, int(rows[-1])
        assert blocks.mv.parent[int(rows[0])] == NO_ROW, "a path begins at a first block"
        node = blocks.mv.node[last]
        if self.nodes.mv.tail[node] != last:
            self._split(node, last)
            node = blocks.mv.node[last]
        return self._path_of(node)

    def _path_of(self, node: int) -> list[int]:
        """The node and its ancestors that have blocks, from the root down."""
        length, parent = self.nodes.mv.length, self.nodes.mv.parent
        upward = []
        while length[node]:
            upward.append(node)
            node = parent[node]
        upward.reverse()
        return upward

    def use(self, path: list[int], now: float) -> None:
        """Counts one use of each node of a path, and makes them the most recent: the root the very last."""
        use_count, reused = self.nodes.mv.use_count, self.nodes.mv.reused
        for node in path:
            use_count[node] += 1
            reused[node] = 1
        self._make_recent(path, now)

    def _make_recent(self, path: list[int], now: float) -> None:
        last_use = self.nodes.mv.last_use
        for node in path:
            last_use[node] = now
        for presence in self.presences.values():
            if presence.used:
                presence.touch(path)

    # -- copies --------------------------------------------------------------------------------

    def copies_added(self, tier: Tier, rows: Rows) -> None:
        """These blocks, which had none, have a copy in the tier. Parents first, where the order matters.

        A node that had no copies there takes its place in the recency list right before
        its nearest ancestor, or the newest place where there is none.
        """
        for presence, part in self.by_device(tier, rows):
            for node, count in self._counted(part):
                presence.add(node, count)

    def copies_dropped(self, tier: Tier, rows: Rows) -> None:
        """These blocks are about to lose their copy in the tier: their slots still say where it lies."""
        for presence, part in self.by_device(tier, rows):
            for node, count in self._counted(part):
                presence.drop(node, count)

    def _counted(self, rows: Rows) -> list[tuple[int, int]]:
        """(node, rows of it) for each stretch of rows of one node."""
        if len(rows) == 0:
            return []
        nodes = self.columns.node.take(rows)
        first = (nodes[1:] != nodes[:-1]).nonzero()[0]
        if len(first) == 0:
            return [(int(nodes[0]), len(rows))]
        starts = [0, *(first + 1).tolist()]
        ends = [*starts[1:], len(rows)]
        return [(int(nodes[start]), end - start) for start, end in zip(starts, ends, strict=True)]

    # -- removal -------------------------------------------------------------------------------

    def remove(self, rows: Rows) -> None:
        """Forgets distinct blocks without copies, of which no descendant stays. The caller frees the rows.

        Cheapest where each node's rows come together, upward or downward.
        """
        parts = self._parts(rows)
        if parts is None:
            order = np.lexsort((self.columns.depth[rows], self.columns.node[rows]))
            parts = self._parts(rows[order])
            assert parts is not None, "removed blocks are the deepest of their nodes"
        # Deepest nodes first, so that a node has lost its children before it goes.
        parts.sort(reverse=True)
        for _, node, top, count in parts:
            self.shorten(node, top, count)

    def _parts(self, rows: Rows) -> list[tuple[int, int, int, int]] | None:
        """(depth of the highest row, node, that row, row count) of each node; None when rows are mixed up."""
        depth = self.columns.mv.depth
        parts = []
        start = 0
        for node, count in self._counted(rows):
            first, last = int(rows[start]), int(rows[start + count - 1])
            if depth[first] > depth[last]:
                first, last = last, first
            if depth[last] - depth[first] + 1 != count:
                return None
            parts.append((depth[first], node, first, count))
            start += count
        return parts if len({node for _, node, _, _ in parts}) == len(parts) else None

    def shorten(self, node: int, top: int, count: int) -> None:
        """Forgets the `count` deepest blocks of a node without children, of which `top` is the highest.

        As remove() demands; nodes below come before. The caller frees the rows.
        """
        mv, blocks = self.nodes.mv, self.columns.mv
        assert mv.child_count[node] == 0, "a removed block still has blocks below it"
        self._block_counts[mv.space[node]] -= count
        above = blocks.parent[top]
        if above != NO_ROW:
            blocks.children[above] -= 1
        left = mv.length[node] - count
        assert blocks.depth[mv.tail[node]] == blocks.depth[top] + count - 1, "removal begins at the tail"
        if left:
            mv.length[node] = left
            mv.tail[node] = above
            return
        for presence in self.presences.values():
            assert not presence.copies_view[node], "copies are dropped first"
        self._disown(node)
        self.nodes.free_one(node)

    # -- views and accounts --------------------------------------------------------------------

    def view(
        self,
        tier: Tier,
        pool: int,
        evictable: Evictable,
        without: NDArray[np.bool_] | None = None,
        after: int = NO_NODE,
        device: int = 0,
    ) -> PoolView:
        """What a policy sees of one pool of one tier; cheap to make, and good for as long as the tree.

        Args:
            evictable: how many of a node's deepest copies may go now (base/views.py).
            without: by node, what to leave out; the view is good until the next change then.
            after: with that, where its walk by age goes on (tree_view.py).
            device: of the tier, whose copies alone are seen.
        """
        pool_node = self.pool_nodes.get(pool, NO_NODE)
        return PoolView(self, self.presences[tier, device], pool_node, evictable, without, after)

    @property
    def touched_bytes(self) -> int:
        """Memory in use, as Columns counts it."""
        arrays = [array for presence in self.presences.values() for array in presence.leaf_arrays.values()]
        pieces = sum(-(-array.count_high_water * 4 // TOUCH_BYTES) for array in arrays)
        return self.nodes.touched_bytes + pieces * TOUCH_BYTES

    def check(self) -> list[str]:
        """What is wrong, in words; empty when every invariant of the tree holds."""
        return everything(audit_tree(self))
