"""Evict: an operator has a run, or a whole namespace, forgotten, but for what is held.

However much it is, it goes a batch at a time: how the nodes hang is copied first,
and each is judged when its turn comes. What has come or was used meanwhile stays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, Hashes, NamespaceRef, Rows
from prefixd_server.cache.state import State
from prefixd_server.cache.turns import Turns
from prefixd_server.catalog.events import BlocksRemoved
from prefixd_server.catalog.nodes import NO_NODE
from prefixd_server.catalog.passes import StepsTo, copied

PAUSE_S = 0.001
"""After each batch, which takes as long."""
BATCH_BLOCK_COUNT = 512
BATCH_NODE_COUNT = 64
NODES_IN_A_STEP = 1024
"""Nodes that are gathered in one step."""


@dataclass(slots=True)
class Evicted:
    """Blocks that went, and that stay because they or blocks below them are held."""

    gone: int = 0
    held: int = 0


class Evicting:
    """See the module."""

    def __init__(self, state: State) -> None:
        self._state = state

    def evict(
        self, tenant: str, ref: NamespaceRef, hashes: Hashes | None, keep_count: int
    ) -> Turns[tuple[int, int]]:
        """Evicts a run's blocks beyond `keep_count` and what hangs below, or everything. (evicted, held)."""
        catalog = self._state.catalog
        namespace = catalog.namespaces.get(tenant, ref)
        total = Evicted()
        for space in list(namespace.spaces.values()):
            if hashes is None:
                yield from self._evict_below(space, catalog.tree.space_roots.get(space, NO_NODE), total)
                continue
            first = hashes[keep_count : keep_count + 1]
            row = self._row(space, first)
            if row != NO_ROW:
                yield from self._evict_below(space, catalog.columns.mv.node[row], total)
                # It may have gone since, or its node been divided.
                row = self._row(space, first)
            if row != NO_ROW:
                node = catalog.columns.mv.node[row]
                rows = catalog.tree.node_rows(node)
                from_it = rows[catalog.columns.depth[rows] >= catalog.columns.depth[row]]
                self._forget([self._free_to_go(from_it, catalog.tree.nodes.mv.child_count[node], total)])
        self._state.counters_of(tenant).evicted += total.gone
        return total.gone, total.held

    def _row(self, space: int, key: Hashes) -> int:
        return int(self._state.catalog.find(space, key)[0]) if len(key) else NO_ROW

    def _evict_below(self, space: int, top: int, total: Evicted) -> Turns[None]:
        """Evicts what hangs below node `top`, children first."""
        if top == NO_NODE:
            return
        tree, columns = self._state.catalog.tree, self._state.catalog.columns
        below, created = yield from self._nodes_below(top)
        parting: list[Rows] = []
        orphaned: Counter[int] = Counter()
        block_count = 0
        for number, node in enumerate(below, 1):
            tail = tree.nodes.mv.tail[node]
            stands = columns.mv.space[tail] == space and columns.mv.node[tail] == node
            if stands and tree.nodes.mv.created[node] == created[node]:
                rows = tree.node_rows(node)
                going = self._free_to_go(rows, tree.nodes.mv.child_count[node] - orphaned[node], total)
                parting.append(going)
                block_count += len(going)
                if len(going) == len(rows):
                    orphaned[tree.nodes.mv.parent[node]] += 1
            if block_count >= BATCH_BLOCK_COUNT or number % BATCH_NODE_COUNT == 0:
                self._forget(parting)
                parting, block_count = [], 0
                orphaned.clear()
                yield
        self._forget(parting)

    def _free_to_go(self, rows: Rows, child_count: int, total: Evicted) -> Rows:
        """Those of a node's deepest rows, given parents first, below which nothing stays."""
        held = np.flatnonzero(self._state.catalog.held(rows))
        kept = len(rows) if child_count else int(held[-1]) + 1 if len(held) else 0
        total.held += kept
        total.gone += len(rows) - kept
        return rows[kept:]

    def _forget(self, parting: list[Rows]) -> None:
        rows = np.concatenate([np.zeros(0, dtype=np.int32), *parting])
        if len(rows):
            self._state.apply(BlocksRemoved(rows))

    def _nodes_below(self, top: int) -> StepsTo[tuple[list[int], memoryview]]:
        """The nodes below `top`, children before parents, and when each node was made."""
        nodes = self._state.catalog.tree.nodes
        columns: list[NDArray[Any]] = [nodes.first_child, nodes.next_sibling, nodes.created]
        copies = yield from copied(columns, lambda: nodes.high_water)
        yield []
        first_child, next_sibling, created = (copy.data for copy in copies)
        found, waiting = [], [top]
        while waiting:
            child = first_child[waiting.pop()]
            while child != NO_NODE:
                found.append(child)
                waiting.append(child)
                child = next_sibling[child]
                if len(found) % NODES_IN_A_STEP == 0:
                    yield []
        found.reverse()
        return found, created
