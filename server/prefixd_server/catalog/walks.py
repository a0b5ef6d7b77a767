"""Reading the prefix tree: runs of rows up and down its chains.

Rows of a node are linked by their parents only. Rows that were allocated
together are consecutive, which makes most walks a comparison of slices.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, Tier
from prefixd_server.base.views import Nodes
from prefixd_server.catalog.columns import BlockColumns
from prefixd_server.catalog.nodes import NO_NODE, NODE_LENGTH_MAX, Devices, NodeColumns
from prefixd_server.catalog.presence import ALL_SLOTS, Presence

_SCALAR_WALK_MAX = 12
_TAIL_PIECE_MIN = 64
_COUNTING = np.arange(NODE_LENGTH_MAX, dtype=np.int32)
_NOTHING: Rows = np.zeros(0, dtype=np.int32)


class TreeWalks:
    """The reading half of PrefixTree.

    Args:
        devices: of tiers that lie on several.
    """

    def __init__(self, columns: BlockColumns, nodes: NodeColumns, devices: Devices) -> None:
        self.columns = columns
        self.nodes = nodes
        self.presences = {
            (tier, device): Presence(tier, nodes, device, slots)
            for tier in Tier
            for device, slots in enumerate(devices.get(tier, (ALL_SLOTS,)))
        }
        """By tier and device."""
        self.tiers = {tier: self.presences[tier, 0] for tier in Tier if tier not in devices}
        """Of tiers that lie on one device."""

    # -- along one node ------------------------------------------------------------------------

    def upward(self, row: int, count: int) -> Rows:
        """`count` rows of one chain, from `row` toward its head."""
        parent = self.columns.mv.parent
        if count > _SCALAR_WALK_MAX:
            last = row - count + 1
            if last >= 0:
                parents = self.columns.parent[last + 1 : row + 1]
                if np.count_nonzero(parents - _COUNTING[: count - 1] != last) == 0:
                    return np.arange(row, last - 1, -1, dtype=np.int32)
        walked = [row]
        for _ in range(count - 1):
            row = parent[row]
            walked.append(row)
        return np.array(walked, dtype=np.int32)

    def head_depth(self, node: int) -> int:
        """Depth of the node's first block; the node must have blocks."""
        return self.columns.mv.depth[self.nodes.mv.head[node]]

    def node_rows(self, node: int) -> Rows:
        """The node's rows, parents before children."""
        length = self.nodes.mv.length[node]
        return self.upward(self.nodes.mv.tail[node], length)[::-1] if length else _NOTHING

    def tail_rows(self, tier: Tier, node: int, limit: int, device: int = 0) -> Rows:
        """Up to `limit` rows of the node that have a copy in `tier` on the device, deepest first."""
        left, row = self.nodes.mv.length[node], self.nodes.mv.tail[node]
        presence = self.presences[tier, device]
        if left and limit > 0 and presence.copies_view[node] == left:
            return self.upward(row, min(left, limit))
        slots = self.columns.slot[tier]
        found: list[Rows] = []
        wanted = limit
        while left and wanted > 0:
            piece = self.upward(row, min(left, max(wanted, _TAIL_PIECE_MIN) if found else wanted))
            left -= len(piece)
            row = self.columns.mv.parent[int(piece[-1])]
            held = presence.holds(slots.take(piece))
            chosen = piece if held.all() else piece[held]
            found.append(chosen[:wanted])
            wanted -= len(found[-1])
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else _NOTHING

    def by_device(self, tier: Tier, rows: Rows) -> Iterator[tuple[Presence, Rows]]:
        """Blocks with a copy in the tier, by where it lies."""
        only = self.tiers.get(tier)
        if only is not None:
            yield only, rows
            return
        slots = self.columns.slot[tier].take(rows)
        for presence in self.presences.values():
            if presence.tier is tier:
                part = rows[presence.holds(slots)]
                if len(part):
                    yield presence, part

    def ends_with(self, tier: Tier, row: int, device: int = 0) -> bool:
        """Whether no block would be left below `row` once the copies there below it are gone."""
        node = self.columns.mv.node[row]
        if self.nodes.mv.tail[node] != row:
            return False
        return not any(p.kids_view[node] for where, p in self.presences.items() if where != (tier, device))

    # -- across nodes --------------------------------------------------------------------------

    def nodes_of(self, rows: Rows) -> Nodes:
        """The nodes that hold the rows of one chain, each once."""
        node_of = self.columns.mv.node
        if node_of[int(rows[0])] == node_of[int(rows[-1])]:
            return self.columns.node[rows[:1]]
        return np.unique(self.columns.node[rows])

    def child_nodes(self, node: int) -> Iterator[int]:
        """The node's children, newest first. Not robust against changes meanwhile."""
        child = self.nodes.mv.first_child[node]
        while child != NO_NODE:
            yield child
            child = self.nodes.mv.next_sibling[child]

    def path(self, row: int) -> Rows:
        """The row's whole run: its first block, ..., the row."""
        mv = self.columns.mv
        parts: list[Rows] = []
        while row != NO_ROW:
            head = self.nodes.mv.head[mv.node[row]]
            parts.append(self.upward(row, mv.depth[row] - mv.depth[head] + 1))
            row = mv.parent[head]
        return np.concatenate(parts)[::-1] if len(parts) > 1 else parts[0][::-1]

    def path_without(self, tier: Tier, row: int) -> Rows:
        """Of the row's whole run, in its order, the blocks that have no copy in `tier`."""
        mv, copies = self.nodes.mv, self.tiers[tier].copies_view
        parts: list[Rows] = []
        while row != NO_ROW:
            node = self.columns.mv.node[row]
            head = mv.head[node]
            if copies[node] < mv.length[node]:
                rows = self.upward(row, self.columns.mv.depth[row] - self.columns.mv.depth[head] + 1)
                parts.append(rows[self.columns.slot[tier].take(rows) == NO_SLOT])
            row = self.columns.mv.parent[head]
        return np.concatenate(parts)[::-1] if parts else _NOTHING

    def children(self, row: int) -> Rows:
        """Rows of the blocks directly below."""
        node = self.columns.mv.node[row]
        tail = self.nodes.mv.tail[node]
        if row == tail:
            heads = [self.nodes.mv.head[child] for child in self.child_nodes(node)]
            return np.array(heads, dtype=np.int32)
        depth = self.columns.mv.depth
        return self.upward(tail, depth[tail] - depth[row])[-1:]

    def subtree(self, row: int) -> Rows:
        """The row and everything below, parents before children."""
        node = self.columns.mv.node[row]
        tail, depth = self.nodes.mv.tail[node], self.columns.mv.depth
        parts = [self.upward(tail, depth[tail] - depth[row] + 1)[::-1]]
        waiting = list(self.child_nodes(node))
        while waiting:
            node = waiting.pop()
            parts.append(self.node_rows(node))
            waiting.extend(self.child_nodes(node))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def below(self, top: int, limit: int) -> Rows:
        """Up to `limit` rows under node `top`, children before parents: what may be forgotten first."""
        mv = self.nodes.mv
        parts: list[Rows] = []
        node = self._deepest(top)
        while limit > 0 and node != top:
            rows = self.upward(mv.tail[node], min(mv.length[node], limit))
            parts.append(rows)
            limit -= len(rows)
            sibling = mv.next_sibling[node]
            node = self._deepest(sibling) if sibling != NO_NODE else mv.parent[node]
        return np.concatenate(parts) if parts else _NOTHING

    def lowest(self, row: int, limit: int) -> Rows:
        """The same of the row and everything below it."""
        node = self.columns.mv.node[row]
        below = self.below(node, limit)
        tail, depth = self.nodes.mv.tail[node], self.columns.mv.depth
        count = min(depth[tail] - depth[row] + 1, limit - len(below))
        return np.concatenate([below, self.upward(tail, count)]) if count else below

    def _deepest(self, node: int) -> int:
        """The first leaf under the node, by first children."""
        first_child = self.nodes.mv.first_child
        while first_child[node] != NO_NODE:
            node = first_child[node]
        return node

    def tail_depths(self, nodes: NDArray[np.int32]) -> NDArray[np.uint32]:
        """Depth of each node's deepest block; the nodes must have blocks."""
        return self.columns.depth[self.nodes.tail[nodes]]
