"""One tier's part of PrefixTree.check(): copies, kids, recency lists and leaves, in steps (passes.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.views import Nodes
from prefixd_server.catalog.nodes import NO_NODE
from prefixd_server.catalog.passes import (
    STRETCH,
    Problems,
    Steps,
    StepsTo,
    copied,
    filled,
    marked,
    named,
    stretches,
)
from prefixd_server.catalog.presence import Presence

if TYPE_CHECKING:
    from prefixd_server.catalog.tree import PrefixTree

ROUNDS_MAX = 64
"""Twice what the deepest tree takes."""


def audit_presence(tree: PrefixTree, presence: Presence) -> Steps:
    """What is wrong, in words; the nodes are known to be a forest."""
    yield _ends(tree, presence)
    yield from _leaves(tree, presence)
    for first, end in stretches(tree.nodes.high_water):
        yield _links(tree, presence, first, end)
    yield from _order(tree, presence)


def _leaves(tree: PrefixTree, presence: Presence) -> Steps:
    """Whoever is in a leaf array is a leaf of that pool, at the place that it knows."""
    for pool_node, array in list(presence.leaf_arrays.items()):
        for first, end in stretches(array.count):
            leaves = array.nodes[first : min(end, array.count)]
            places = np.arange(first, first + len(leaves))
            wrong = presence.leaf_place[leaves] != places
            wrong |= (presence.copies[leaves] == 0) | (presence.kids[leaves] != 0)
            wrong |= _pools(tree, leaves) != pool_node
            yield named(wrong, f"tree: {presence.tier.name}: a leaf array holds what is no leaf of its pool")


def _ends(tree: PrefixTree, presence: Presence) -> Problems:
    """The links of the lists' ends agree."""
    return _linked(presence, np.array(list(tree.pool_nodes.values()), dtype=np.int32))


def _linked(presence: Presence, nodes: Nodes) -> Problems:
    newer, older = presence.newer[nodes], presence.older[nodes]
    broken = (presence.older[newer] != nodes) | (presence.newer[older] != nodes)
    return named(broken, f"tree: {presence.tier.name}: list links do not agree")


def _links(tree: PrefixTree, presence: Presence, first: int, end: int) -> Problems:
    """Nodes with copies: their links in the recency list agree, and the leaves among them are listed."""
    nodes = np.flatnonzero(presence.copies[first:end]).astype(np.int32) + np.int32(first)
    leaves = nodes[presence.kids[nodes] == 0]
    pools, places = _pools(tree, leaves), presence.leaf_place[leaves]
    listed = np.zeros(len(leaves), dtype=np.bool_)
    for pool_node, array in presence.leaf_arrays.items():
        mine = (pools == pool_node) & (places < array.count)
        listed[mine] = array.nodes[places[mine]] == leaves[mine]
    problem = f"tree: {presence.tier.name}: a leaf is not in its pool's leaf array"
    return _linked(presence, nodes) + named(~listed, problem)


def _pools(tree: PrefixTree, nodes: Nodes) -> Nodes:
    """The pool node of each node, by its space's root."""
    spaces, places = np.unique(tree.nodes.space[nodes], return_inverse=True)
    roots = [tree.space_roots.get(space, NO_NODE) for space in spaces.tolist()]
    pools = [NO_NODE if root == NO_NODE else tree.nodes.mv.parent[root] for root in roots]
    found: Nodes = np.array(pools, dtype=np.int32)[places]
    return found


def _order(tree: PrefixTree, presence: Presence) -> Steps:
    """Recency lists hold exactly the nodes with copies, descendants first; kids are counted right."""
    name, nodes = presence.tier.name, tree.nodes
    columns: list[NDArray[Any]] = [nodes.parent, presence.kids, presence.copies, presence.newer]
    parent, kids, copies, newer = yield from copied(columns, lambda: nodes.high_water)
    given_back, pool_nodes = nodes.given_back(), list(tree.pool_nodes.values())
    yield []
    free = yield from marked(given_back, len(parent))
    yield from _kids(name, parent, kids, copies, free)
    place, pool = yield from _places(newer, pool_nodes)
    yield from _go_up(parent, place, free)
    for first, end in stretches(len(parent)):
        listed = (place[first:end] >= 0) & (pool[first:end] != np.arange(first, end))
        held = copies[first:end] > 0
        nodes_held = np.flatnonzero(held) + first
        above = parent[nodes_held]
        newer_than_above = (place[above] <= place[nodes_held]) | (pool[above] != pool[nodes_held])
        yield [
            *named(
                listed != held, f"tree: {name}: the recency lists do not hold exactly the nodes with copies"
            ),
            *named(
                newer_than_above,
                f"tree: {name}: a node is newer than its ancestor, or in another pool's list",
            ),
        ]


def _kids(
    name: str, parent: Nodes, kids: NDArray[np.uint32], copies: NDArray[np.uint16], free: NDArray[np.bool_]
) -> Steps:
    """Every node counts its children that have copies in them or below."""
    counted = yield from filled(len(parent), np.uint32)
    for first, end in stretches(len(parent)):
        present = ~free[first:end] & (parent[first:end] != NO_NODE)
        present &= (copies[first:end] > 0) | (kids[first:end] > 0)
        np.add.at(counted, parent[first:end][present], np.uint32(1))
        yield []
    for first, end in stretches(len(parent)):
        wrong = ~free[first:end] & (kids[first:end] != counted[first:end])
        yield named(wrong, f"tree: {name}: a node's kids are miscounted")


def _places(newer: Nodes, pool_nodes: list[int]) -> StepsTo[tuple[NDArray[np.int32], Nodes]]:
    """By node: its place in the lists put end to end, -1 outside; the pool node of its list, NO_NODE.

    A pool node comes after its list.
    """
    places = yield from filled(len(newer), np.int32, -1)
    pools = yield from filled(len(newer), np.int32, NO_NODE)
    place, pool, follows = places.data, pools.data, newer.data
    count = 0
    for pool_node in pool_nodes:
        node = follows[pool_node]
        while node != pool_node and place[node] < 0:
            place[node], pool[node] = count, pool_node
            node, count = follows[node], count + 1
            if count % STRETCH == 0:
                yield []
        place[pool_node], pool[pool_node] = count, pool_node
        count += 1
    return places, pools


def _go_up(above: Nodes, place: NDArray[np.int32], free: NDArray[np.bool_]) -> Steps:
    """Makes of each node's parent its nearest ancestor with a place.

    A pointer to a node without one goes on to where that node's points, so that each
    round doubles how far they have come.
    """
    for _ in range(ROUNDS_MAX):
        moved = False
        for first, end in stretches(len(above)):
            to = above[first:end]
            going = np.flatnonzero(~free[first:end] & (to != NO_NODE) & (place[to] < 0))
            to[going] = above[to[going]]
            moved |= len(going) > 0
            yield []
        if not moved:
            return
