"""What may be wrong in a catalog: each does one thing to it, and says by what words that is found.

The catalog has runs that share beginnings in DRAM, free rows, nodes and slots, and a block that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prefixd_server.base.types import NO_ROW, NO_SLOT, SlotState, Tier
from prefixd_server.catalog.catalog import Catalog
from prefixd_server.catalog.columns import COMMITTED, VISIBLE
from prefixd_server.catalog.nodes import NO_NODE

TIER = Tier.DRAM
POOL = (0, 0)
"""The first pool, on the only device."""
Damage = Callable[[Catalog], None]
Column = Callable[[Catalog], NDArray[Any]]
Place = Callable[[Catalog], int]


def a_row(catalog: Catalog) -> int:
    """A block in the middle of a node, visible and resident."""
    columns, nodes = catalog.columns, catalog.tree.nodes
    rows = columns.in_use(0, columns.rows_end)
    inner = (nodes.head[columns.node[rows]] != rows) & (nodes.tail[columns.node[rows]] != rows)
    return int(rows[inner & ((columns.flags[rows] & VISIBLE) != 0)][0])


def a_node(catalog: Catalog) -> int:
    """A node with a parent that has blocks."""
    nodes, length = catalog.tree.nodes, catalog.tree.nodes.length
    used = np.unique(catalog.columns.node[catalog.columns.in_use(0, catalog.columns.rows_end)])
    return int(used[length[nodes.parent[used]] > 0][0])


def a_first_child(catalog: Catalog) -> int:
    """A node with a sibling after it."""
    return int(catalog.tree.nodes.first_child[catalog.tree.nodes.parent[a_node(catalog)]])


def a_pool_node(catalog: Catalog) -> int:
    """The head of the recency list."""
    return catalog.tree.pool_nodes[0]


def a_slot(catalog: Catalog) -> int:
    """The slot of a_row()."""
    return int(catalog.columns.slot[TIER][a_row(catalog)])


def change(column: Column, at: Place, by: int) -> Damage:
    """Adds to one element."""

    def damage(catalog: Catalog) -> None:
        array = column(catalog)
        array[at(catalog)] += np.array(by).astype(array.dtype)

    return damage


def put(column: Column, at: Place, value: int) -> Damage:
    """Sets one element."""

    def damage(catalog: Catalog) -> None:
        column(catalog)[at(catalog)] = value

    return damage


def swapped_in_the_list(catalog: Catalog) -> None:
    """A node comes after its parent; all links agree."""
    presence, node = catalog.tree.tiers[TIER], a_node(catalog)
    above = int(catalog.tree.nodes.parent[node])
    before, after = int(presence.older[node]), int(presence.newer[node])
    presence.newer[before], presence.older[after] = after, before
    after = int(presence.newer[above])
    presence.newer[above], presence.older[node] = node, above
    presence.newer[node], presence.older[after] = after, node


def ring_of_its_own(catalog: Catalog) -> None:
    """A node is linked with itself alone."""
    presence, node = catalog.tree.tiers[TIER], a_node(catalog)
    before, after = int(presence.older[node]), int(presence.newer[node])
    presence.newer[before], presence.older[after] = after, before
    presence.newer[node] = presence.older[node] = node


def fork_in_a_node(catalog: Catalog) -> None:
    """A free row comes back as a second block at a place inside a node, with a slot and a key of its own."""
    columns, row = catalog.columns, a_row(catalog)
    twin = int(columns.allocate(1)[0])
    for name in ("space", "parent", "node", "depth", "children", "flags"):
        getattr(columns, name)[twin] = getattr(columns, name)[row]
    columns.key[twin] = 77
    slot = catalog.slots[TIER].allocate(0, 1)
    columns.slot[TIER][twin] = slot[0]
    catalog.slots[TIER].publish(slot, np.array([twin], dtype=np.int32))
    catalog.keys.insert(np.array([twin], dtype=np.int32))


def lost_entry(catalog: Catalog) -> None:
    """The key table forgets a row."""
    (table,) = catalog.keys.tables()
    entry = np.flatnonzero((table.entries & table.row_mask) == a_row(catalog) + 1)
    table.entries[entry] = 0


def entry_astray(catalog: Catalog) -> None:
    """An entry has a second, in a bucket where its key is not searched."""
    (table,) = catalog.keys.tables()
    value = table.entries[np.flatnonzero((table.entries & table.row_mask) == a_row(catalog) + 1)[0]]
    home = int(table.home(catalog.keys.mixed(np.array([a_row(catalog)], dtype=np.int32)))[0])
    bucket = (home + 2) % table.bucket_count
    table.buckets[bucket, np.flatnonzero(table.buckets[bucket] == 0)[0]] = value


def key_of_another(catalog: Catalog) -> None:
    """Two rows with one key."""
    columns, row = catalog.columns, a_row(catalog)
    columns.key[row] = columns.key[int(columns.parent[row])]


def row_given_back_twice(catalog: Catalog) -> None:
    """One free row is to be handed out twice, another never."""
    columns = catalog.columns
    assert len(columns.given_back()) > 1
    columns._freed[0] = columns._freed[1]


def row_in_use_given_back(catalog: Catalog) -> None:
    """A row in use is to be handed out."""
    catalog.columns._freed[0] = a_row(catalog)


def node_given_back_twice(catalog: Catalog) -> None:
    """One free node is to be handed out twice."""
    nodes = catalog.tree.nodes
    nodes.free(np.array([nodes.allocate_one()], dtype=np.int32))
    nodes.count -= 1
    nodes.free_one(int(nodes.given_back()[-1]))


def node_leaked(catalog: Catalog) -> None:
    """A node is in use and hangs nowhere."""
    catalog.tree.nodes.allocate_one()


def tally_off(catalog: Catalog) -> None:
    """A pool counts one FREE slot more."""
    catalog.slots[TIER]._tally[POOL][SlotState.FREE] += 1


def free_run_lost(catalog: Catalog) -> None:
    """Slots that are FREE and will never be allocated."""
    catalog.slots[TIER]._free_of[POOL].take(1, None)


def free_run_cut(catalog: Catalog) -> None:
    """A run that ends too early."""
    runs = catalog.slots[TIER]._free_of[POOL]
    start, end = runs.runs()[0]
    runs._end_of[start] = end - 1


def space_miscounted(catalog: Catalog) -> None:
    """A space has a block more than it counts, another that is not open one less."""
    counts = catalog.tree._block_counts
    counts[next(iter(counts))] -= 1
    counts[99] = 1


def not_waiting(catalog: Catalog) -> None:
    """A waiting block is visible."""
    (below,) = catalog.waiting.values()
    catalog.columns.flags[below] |= VISIBLE


def nodes(name: str) -> Column:
    """A column of the nodes."""
    return lambda catalog: getattr(catalog.tree.nodes, name)


def rows(name: str) -> Column:
    """A column of the blocks."""
    return lambda catalog: getattr(catalog.columns, name)


def presence(name: str) -> Column:
    """A column of the nodes in DRAM."""
    return lambda catalog: getattr(catalog.tree.tiers[TIER], name)


def slots(name: str) -> Column:
    """A column of the slots."""
    return lambda catalog: getattr(catalog.slots[TIER], name)


def counter(holder: Callable[[Catalog], object], name: str) -> Damage:
    """One more of what is counted."""

    def damage(catalog: Catalog) -> None:
        setattr(holder(catalog), name, getattr(holder(catalog), name) + 1)

    return damage


def parent_of(catalog: Catalog) -> int:
    """The row above a_row()."""
    return int(catalog.columns.parent[a_row(catalog)])


def a_leaf(catalog: Catalog) -> int:
    """A node in a leaf array."""
    (array,) = catalog.tree.tiers[TIER].leaf_arrays.values()
    return int(array.nodes[0])


def leaf_array(catalog: Catalog) -> object:
    """The leaves of the pool."""
    (array,) = catalog.tree.tiers[TIER].leaf_arrays.values()
    return array


def a_free_slot(catalog: Catalog) -> int:
    """A slot that is FREE."""
    return int(
        np.flatnonzero(catalog.slots[TIER].state[catalog.slots[TIER].slots_in(0)] == SlotState.FREE)[0]
    )


DAMAGES: dict[str, tuple[Damage, str]] = {
    "parent": (put(rows("parent"), a_row, NO_ROW), "one chain"),
    "node": (change(rows("node"), a_row, 1), "chain"),
    "depth": (change(rows("depth"), a_row, 1), "one deeper"),
    "children": (change(rows("children"), a_row, 1), "a block's child count"),
    "space": (put(rows("space"), a_row, 7), "of different spaces"),
    "slot": (put(rows("slot_dram"), a_row, NO_SLOT), "copies differ"),
    "another slot": (put(rows("slot_dram"), a_row, 0), "does not point back"),
    "invisible": (put(rows("flags"), parent_of, COMMITTED), "invisible parent"),
    "never committed": (put(rows("flags"), a_row, VISIBLE), "never committed"),
    "hidden": (put(rows("flags"), a_row, COMMITTED), "is not visible"),
    "key": (key_of_another, "key table"),
    "entry lost": (lost_entry, "not found by its key"),
    "entry astray": (entry_astray, "where its key is not searched"),
    "key count": (counter(lambda catalog: catalog.keys, "count"), "counts other keys"),
    "row twice": (row_given_back_twice, "given back twice"),
    "row in use": (row_in_use_given_back, "in use was given back"),
    "fork": (fork_in_a_node, "tree: "),
    "length": (change(nodes("length"), a_node, 1), "length is not"),
    "head": (change(nodes("head"), a_node, 1), "tree: "),
    "tail": (change(nodes("tail"), a_node, -1), "tree: "),
    "space of a node": (change(nodes("space"), a_node, 1), "spaces"),
    "first child": (put(nodes("first_child"), a_node, 1), "tree: "),
    "next sibling": (put(nodes("next_sibling"), a_first_child, NO_NODE), "tree: "),
    "previous sibling": (put(nodes("prev_sibling"), a_node, 0), "do not agree"),
    "parent of a node": (put(nodes("parent"), a_node, 0), "do not agree"),
    "child count": (change(nodes("child_count"), a_node, 1), "counts"),
    "node twice": (node_given_back_twice, "node"),
    "node leaked": (node_leaked, "hang nowhere"),
    "space count": (space_miscounted, "block count of space"),
    "copies": (change(presence("copies"), a_node, -1), "copies differ"),
    "kids": (change(presence("kids"), a_node, 1), "kids are miscounted"),
    "older": (change(presence("older"), a_node, 1), "list links"),
    "newer": (change(presence("newer"), a_node, 1), "list links"),
    "oldest": (change(presence("newer"), a_pool_node, 1), "list links"),
    "order": (swapped_in_the_list, "newer than its ancestor"),
    "ring": (ring_of_its_own, "exactly the nodes with copies"),
    "leaf place": (change(presence("leaf_place"), a_leaf, 1), "leaf"),
    "leaf count": (counter(leaf_array, "count"), "no leaf of its pool"),
    "state": (put(slots("state"), a_slot, SlotState.QUARANTINED), "QUARANTINED"),
    "row of a slot": (put(slots("row"), a_slot, NO_ROW), "names no block"),
    "freed": (put(slots("state"), a_slot, SlotState.FREE), "free"),
    "lease": (change(slots("leases"), a_free_slot, 1), "is leased"),
    "row of a free slot": (put(slots("row"), a_free_slot, 1), "names a block"),
    "leased count": (counter(lambda catalog: catalog.slots[TIER], "leased_count"), "counted as leased"),
    "tally": (tally_off, "slots by state"),
    "free run lost": (free_run_lost, "free runs"),
    "free run cut": (free_run_cut, "free runs"),
    "waiting": (not_waiting, "waiting"),
    "waiting count": (counter(lambda catalog: catalog, "waiting_count"), "waiting count"),
}
