"""PrefixTree.check(): every invariant of the tree, its lists and its counts.

A whole pass that shares no code with what it verifies: it rebuilds links,
counts and presence from the blocks' parents and slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, NO_SLOT
from prefixd_server.catalog.nodes import NO_NODE, NODE_LENGTH_MAX
from prefixd_server.catalog.presence import Presence

if TYPE_CHECKING:
    from prefixd_server.catalog.tree import PrefixTree

Ints = NDArray[np.int64]


def audit_tree(tree: PrefixTree) -> list[str]:
    """What is wrong, in words; empty when everything holds."""
    nodes: Ints = tree.nodes.rows_in_use().astype(np.int64)
    rows: Ints = tree.columns.rows_in_use().astype(np.int64)
    problems = _siblings(tree, nodes)
    if problems:
        return problems
    problems = [*_chains(tree, nodes, rows), *_spaces(tree, rows)]
    if problems:
        return problems
    order = _below_first(tree)
    for presence in tree.tiers.values():
        problems += _presence(tree, presence, rows, order)
        problems += _lists(tree, presence, nodes[presence.copies[nodes] > 0].tolist())
    return problems


def _siblings(tree: PrefixTree, nodes: Ints) -> list[str]:
    """Child lists, their back links and counts; every node hangs under a pool node."""
    mv = tree.nodes.mv
    problems = []
    seen: set[int] = set()
    waiting = list(tree.pool_nodes.values())
    known = set(nodes.tolist())
    while waiting:
        node = waiting.pop()
        if node in seen or node not in known:
            return [f"tree: node {node} is reached twice, or is free"]
        seen.add(node)
        before, count, child = NO_NODE, 0, mv.first_child[node]
        while child != NO_NODE and count <= len(known):
            if mv.prev_sibling[child] != before or mv.parent[child] != node:
                problems.append(f"tree: links of node {child} under node {node} do not agree")
            waiting.append(child)
            before, child, count = child, mv.next_sibling[child], count + 1
        if count != mv.child_count[node]:
            problems.append(f"tree: node {node} counts {mv.child_count[node]} children, has {count}")
    if seen != known:
        problems.append(f"tree: {len(known - seen)} nodes in use hang nowhere")
    return problems


def _chains(tree: PrefixTree, nodes: Ints, rows: Ints) -> list[str]:
    """Blocks against nodes: node, length, head, tail, depth, children, and where nodes hang."""
    columns, mv = tree.columns, tree.nodes.mv
    problems = []
    lengths = np.bincount(columns.node[rows], minlength=int(nodes.max(initial=0)) + 1)
    if (lengths[nodes] != tree.nodes.length[nodes]).any():
        problems.append("tree: a node's length is not the number of its blocks")
    parents = columns.parent[rows]
    inner = parents != NO_ROW
    if (columns.depth[rows[inner]] != columns.depth[parents[inner]] + 1).any():
        problems.append("tree: a block is not one deeper than its parent")
    if columns.depth[rows[~inner]].any():
        problems.append("tree: a first block is not at depth 0")
    counted = np.bincount(parents[inner], minlength=int(rows.max(initial=0)) + 1)
    if (counted[rows] != columns.children[rows]).any():
        problems.append("tree: a block's child count is wrong")
    if (columns.space[rows] != tree.nodes.space[columns.node[rows]]).any():
        problems.append("tree: a block and its node are of different spaces")
    for node in nodes[tree.nodes.length[nodes] > 0].tolist():
        row, tail, length = mv.tail[node], mv.tail[node], mv.length[node]
        for _ in range(length - 1):
            row = columns.mv.parent[row]
            if row == NO_ROW or columns.mv.node[row] != node:
                problems.append(f"tree: node {node} is not one chain")
                break
        above = mv.tail[mv.parent[node]]
        if row != mv.head[node] or columns.mv.parent[row] != above or length > NODE_LENGTH_MAX:
            problems.append(f"tree: node {node} does not hang below the tail of its parent")
        if columns.mv.node[tail] != node:
            problems.append(f"tree: the tail of node {node} is another's block")
    return problems


def _spaces(tree: PrefixTree, rows: Ints) -> list[str]:
    problems: list[str] = []
    spaces, counts = np.unique(tree.columns.space[rows], return_counts=True)
    held = dict(zip(spaces.tolist(), counts.tolist(), strict=True))
    problems += [
        f"tree: the block count of space {space} is wrong"
        for space in tree.space_roots
        if tree.block_count(space) != held.pop(space, 0)
    ]
    if held:
        problems.append(f"tree: blocks of spaces that are not open: {sorted(held)}")
    return problems


def _below_first(tree: PrefixTree) -> list[int]:
    """All nodes, children before parents."""
    order: list[int] = []
    waiting = list(tree.pool_nodes.values())
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting.extend(tree.child_nodes(node))
    return order[::-1]


def _presence(tree: PrefixTree, presence: Presence, rows: Ints, order: list[int]) -> list[str]:
    """Copies from the slots, kids from the copies."""
    name, problems = presence.tier.name, []
    held = rows[tree.columns.slot[presence.tier][rows] != NO_SLOT]
    copies = np.bincount(tree.columns.node[held], minlength=max(order, default=0) + 1)
    kids = np.zeros_like(copies)
    for node in order:
        above = tree.nodes.mv.parent[node]
        if (copies[node] or kids[node]) and above != NO_NODE:
            kids[above] += 1
    if (presence.copies[order] != copies[order]).any():
        problems.append(f"tree: {name}: a node's copies differ from its blocks' slots")
    if (presence.kids[order] != kids[order]).any():
        problems.append(f"tree: {name}: a node's kids are miscounted")
    return problems


def _lists(tree: PrefixTree, presence: Presence, with_copies: list[int]) -> list[str]:
    """Recency lists hold exactly the nodes with copies, descendants first."""
    name, problems = presence.tier.name, []
    place: dict[int, int] = {}
    pool_of: dict[int, int] = {}
    for pool_node in tree.pool_nodes.values():
        before, node = pool_node, presence.newer_view[pool_node]
        while node != pool_node and node not in place:
            if presence.older_view[node] != before:
                problems.append(f"tree: {name}: list links at node {node} do not agree")
            place[node], pool_of[node] = len(place), pool_node
            before, node = node, presence.newer_view[node]
        if presence.older_view[pool_node] != before:
            problems.append(f"tree: {name}: the list's newest end is wrong")
    if set(place) != set(with_copies):
        return [*problems, f"tree: {name}: the recency lists do not hold exactly the nodes with copies"]
    parent = tree.nodes.mv.parent
    for node in with_copies:
        top = node
        while parent[top] != NO_NODE:
            top = parent[top]
            if place.get(top, len(place)) < place[node]:
                problems.append(f"tree: {name}: node {node} is newer than its ancestor {top}")
        if pool_of[node] != top:
            problems.append(f"tree: {name}: node {node} is in another pool's list")
    return problems + _leaves(presence, [node for node in with_copies if not presence.kids[node]], pool_of)


def _leaves(presence: Presence, expected: list[int], pool_of: dict[int, int]) -> list[str]:
    """Leaf arrays hold exactly the nodes with copies and no kids, each at the place it knows."""
    name, problems = presence.tier.name, []
    leaves: list[int] = []
    for pool_node, array in presence.leaf_arrays.items():
        held = array.nodes[: array.count].tolist()
        leaves += held
        for at, node in enumerate(held):
            if presence.leaf_place[node] != at or pool_of.get(node) != pool_node:
                problems.append(f"tree: {name}: the place of leaf {node} is wrong")
    if sorted(leaves) != sorted(expected):
        problems.append(f"tree: {name}: the leaf arrays do not hold exactly the leaves")
    return problems
