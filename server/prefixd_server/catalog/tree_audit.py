"""PrefixTree.check(): every invariant of the tree, its lists and its counts, in steps (passes.py).

Shares no code with what it verifies. What a block and its node say of each other is
verified in place. That a node's blocks are one chain follows, since the lengths of
all nodes add up to the blocks: from a node's tail up to its head there are as many
as its length, so no other block is left to name it. How the nodes hang together is
verified on a copy; presence_audit.py does the same for the tiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixd_server.base.types import NO_ROW, Rows
from prefixd_server.catalog.nodes import NO_NODE, NODE_LENGTH_MAX
from prefixd_server.catalog.passes import STRETCH, Problems, Steps, StepsTo, copied, marked, named, stretches
from prefixd_server.catalog.presence import Presence
from prefixd_server.catalog.presence_audit import audit_presence

if TYPE_CHECKING:
    from prefixd_server.catalog.tree import PrefixTree

HOPS = 1024
"""Children passed in a step."""


def audit_tree(tree: PrefixTree) -> Steps:
    """What is wrong, in words; empty when everything holds."""
    # What is not a tree is not walked further.
    if not (yield from _hangs_together(tree)):
        return
    yield from _lengths(tree)
    for first, end in stretches(tree.columns.rows_end):
        yield _blocks(tree, tree.columns.in_use(first, end))
        for presence in tree.presences.values():
            yield from _copies(tree, presence, tree.columns.in_use(first, end))
    for presence in tree.presences.values():
        yield from audit_presence(tree, presence)


def _hangs_together(tree: PrefixTree) -> StepsTo[bool]:
    """Child lists, their back links and counts; every node in use hangs under a pool node, once."""
    nodes = tree.nodes
    links = [nodes.parent, nodes.first_child, nodes.next_sibling, nodes.prev_sibling, nodes.child_count]
    copies = yield from copied(links, lambda: nodes.high_water)
    given_back, waiting, in_use_count = nodes.given_back(), list(tree.pool_nodes.values()), nodes.count
    yield []
    parent, first_child, next_sibling, prev_sibling, child_count = (copy.data for copy in copies)
    marks = yield from marked(given_back, len(parent))
    problems = named(np.count_nonzero(marks) != len(given_back), "tree: a node was given back twice")
    seen = marks.data
    hops = 0
    while waiting and not problems:
        node = waiting.pop()
        if seen[node]:
            problems.append(f"tree: node {node} is reached twice, or is free")
        seen[node] = True
        before, count, child = NO_NODE, 0, first_child[node]
        while child != NO_NODE and count <= in_use_count:
            if prev_sibling[child] != before or parent[child] != node:
                problems.append(f"tree: links of node {child} under node {node} do not agree")
            waiting.append(child)
            before, child, count, hops = child, next_sibling[child], count + 1, hops + 1
            if hops % HOPS == 0:
                yield []
        if count != child_count[node]:
            problems.append(f"tree: node {node} counts {child_count[node]} children, has {count}")
    if not problems and not marks.all():
        problems.append(f"tree: {np.count_nonzero(~marks)} nodes in use hang nowhere")
    yield problems
    return not problems


def _lengths(tree: PrefixTree) -> Steps:
    """The nodes of each space are as long as the space has blocks; only roots and pool nodes have none."""
    nodes = tree.nodes
    lengths, spaces = yield from copied([nodes.length, nodes.space], lambda: nodes.high_water)
    given_back, counts = nodes.given_back(), tree.block_counts()
    tops = np.array([*tree.pool_nodes.values(), *tree.space_roots.values()], dtype=np.int32)
    yield named(sum(counts.values()) != tree.columns.count, "tree: the spaces' blocks are not all blocks")
    free = yield from marked(given_back, len(lengths))
    bare = yield from marked(tops, len(lengths))
    for first, end in stretches(len(lengths)):
        in_use, length = ~free[first:end], lengths[first:end]
        held = in_use & (length > 0)
        found, places = np.unique(spaces[first:end][held], return_inverse=True)
        sums = np.bincount(places, weights=length[held]).astype(np.int64)
        for space, blocks in zip(found.tolist(), sums.tolist(), strict=True):
            counts[space] = counts.get(space, 0) - blocks
        yield named((in_use & (length == 0)) != bare[first:end], "tree: a node without blocks is no root")
    yield [f"tree: the block count of space {space} is wrong" for space, left in counts.items() if left]


def _blocks(tree: PrefixTree, rows: Rows) -> Problems:
    """Blocks against their nodes and parents: place, depth, child count, space, and where nodes hang."""
    columns, nodes = tree.columns, tree.nodes
    node, parent, depth = columns.node[rows], columns.parent[rows], columns.depth[rows]
    if ((node < 0) | (node >= nodes.high_water)).any():
        return ["tree: a block names a node that never was"]
    head, tail, length = nodes.head[node], nodes.tail[node], nodes.length[node]
    top, last, inner = rows == head, rows == tail, parent != NO_ROW
    return [
        *named(
            (columns.node[head] != node)
            | (columns.node[tail] != node)
            | (columns.depth[tail] - columns.depth[head] + 1 != length)
            | (length > NODE_LENGTH_MAX),
            "tree: a node's length is not the number of its blocks",
        ),
        *named(
            ~top & ~(inner & (columns.node[parent] == node))
            | ((depth == columns.depth[head]) != top)
            | ((depth == columns.depth[tail]) != last)
            | (depth > columns.depth[tail]),
            "tree: a node is not one chain",
        ),
        *named(
            top & (parent != nodes.tail[nodes.parent[node]]),
            "tree: a node does not hang below the tail of its parent",
        ),
        *named(
            inner & (depth != columns.depth[parent] + 1), "tree: a block is not one deeper than its parent"
        ),
        *named(~inner & (depth != 0), "tree: a first block is not at depth 0"),
        *named(
            columns.children[rows] != np.where(last, nodes.child_count[node], 1),
            "tree: a block's child count is wrong",
        ),
        *named(
            columns.space[rows] != nodes.space[node], "tree: a block and its node are of different spaces"
        ),
    ]


def _copies(tree: PrefixTree, presence: Presence, rows: Rows) -> Steps:
    """A node has as many copies here as its blocks have slots. Nodes that are here in part are walked."""
    node = tree.columns.node[rows]
    copies, length = presence.copies[node], tree.nodes.length[node]
    held = presence.holds(tree.columns.slot[presence.tier][rows])
    problem = f"tree: {presence.tier.name}: a node's copies differ from its blocks' slots"
    in_part = (copies > 0) & (copies < length)
    yield named(~in_part & ((held != (copies > 0)) | (copies > length)), problem)
    walked = 0
    for partial in node[in_part & (rows == tree.nodes.tail[node])].tolist():
        # It may have gone since; a free node has no copies.
        if presence.copies[partial] and presence.copies[partial] != _held(tree, presence, partial):
            yield [problem]
        walked += tree.nodes.mv.length[partial]
        if walked >= STRETCH:
            walked = 0
            yield []


def _held(tree: PrefixTree, presence: Presence, node: int) -> int:
    """Blocks of the node with a slot here, counted from its tail up."""
    parent, rows = tree.columns.mv.parent, [tree.nodes.mv.tail[node]]
    for _ in range(tree.nodes.mv.length[node] - 1):
        rows.append(parent[rows[-1]])
    return int(np.count_nonzero(presence.holds(tree.columns.slot[presence.tier][rows])))
