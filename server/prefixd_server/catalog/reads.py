"""What the catalog can be asked: the parts it is made of, and questions about runs of rows.

Reads only; catalog.py has the transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, Rows, Slots, SlotState, Tier
from prefixd_server.catalog.columns import COMMITTED, PINNED, VISIBLE, BlockColumns
from prefixd_server.catalog.journal import Journal
from prefixd_server.catalog.keytable import KeyTable
from prefixd_server.catalog.namespaces import Namespaces
from prefixd_server.catalog.slots import SlotTable
from prefixd_server.catalog.tree import PrefixTree

_RESIDENT = int(SlotState.RESIDENT)


@dataclass(frozen=True, slots=True, eq=False)
class Departure:
    """Blocks whose durable copies were dropped: their index records must go before their slots are free."""

    tier: Tier
    spaces: NDArray[np.uint32]
    keys: Hashes
    slots: Slots


class CatalogReads:
    """The reading half of Catalog; see there."""

    def __init__(
        self,
        tiers: Mapping[Tier, SlotTable],
        block_count_max: int,
        seed: int,
        durable: frozenset[Tier] = frozenset(),
    ) -> None:
        self.durable = durable
        self.departures: list[Departure] = []
        """Durable copies dropped since somebody last took this list."""
        self.columns = BlockColumns(block_count_max)
        self.keys = KeyTable(self.columns, seed)
        devices = {tier: table.device_slots for tier, table in tiers.items() if table.device_count > 1}
        self.tree = PrefixTree(self.columns, block_count_max, devices)
        self.slots = dict(tiers)
        self.namespaces = Namespaces()
        self.journal = Journal()
        self.block_count_max = block_count_max
        self.waiting: dict[int, list[int]] = {}
        """Committed rows whose parent is not visible yet, by parent row."""
        self.waiting_count = 0

    def find(self, space: int | None, hashes: Hashes) -> Rows:
        """Rows of a run's blocks, NO_ROW where unknown. A None space knows nothing."""
        if space is None:
            return np.full(len(hashes), NO_ROW, dtype=np.int32)
        return self.keys.find(space, hashes)

    def find_run(self, space: int | None, hashes: Hashes) -> Rows:
        """Rows of the leading blocks that are known, each below the one before it.

        What a caller sends need not be a chain: what follows a break in it is not kept.
        """
        rows = self.find(space, hashes)
        rows = rows[: leading(rows != NO_ROW)]
        if len(rows) < 2:
            return rows
        chained: Rows = rows[: 1 + leading(self.columns.parent.take(rows[1:]) == rows[:-1])]
        return chained

    def find_prefix(self, space: int | None, hashes: Hashes) -> Rows:
        """The same of a run that begins at a first block; nothing when it does not."""
        rows = self.find_run(space, hashes)
        return rows if len(rows) == 0 or self.columns.parent[rows[0]] == NO_ROW else rows[:0]

    def slot_bytes_of_row(self, row: int) -> int:
        """Bytes of a slot that a block of this row's kind takes."""
        namespace, _, kv_group = self.namespaces.owner(int(self.columns.space[row]))
        return namespace.spec.kv_groups[kv_group].slot_bytes

    def visible(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows are known and visible; NO_ROW is not."""
        seen: NDArray[np.bool_] = (self.columns.flags.take(rows, mode="clip") & VISIBLE) != 0
        seen &= rows >= 0
        return seen

    def resident(self, tier: Tier, rows: Rows) -> NDArray[np.bool_]:
        """Which known rows have a readable copy in `tier`."""
        slots = self.columns.slot[tier].take(rows)
        readable: NDArray[np.bool_] = self.slots[tier].state.take(slots, mode="clip") == _RESIDENT
        # NO_SLOT was clipped to the tier's last slot, which may well be resident.
        readable &= slots != NO_SLOT
        return readable

    def held(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows must not be forgotten now: pinned, still being written, or leased in some tier."""
        held: NDArray[np.bool_] = (self.columns.flags[rows] & (PINNED | COMMITTED)) != COMMITTED
        for tier, table in self.slots.items():
            slots = self.columns.slot[tier][rows]
            with_copy = slots != NO_SLOT
            held[with_copy] |= table.leases[slots[with_copy]] > (tier in self.durable)
        return held

    def evictable(self, tier: Tier, device: int = 0) -> Callable[[int, int], int]:
        """How many of a node's deepest copies may leave a device of `tier` now (base/views.py, Evictable).

        A copy may leave when it is visible, resident, unleased and unpinned, and
        when no block would stay behind without its parent.
        """
        table, placed = self.slots[tier], self.columns.slot[tier]
        unleased = int(tier in self.durable)
        lengths, here = self.tree.nodes.mv.length, self.tree.presences[tier, device].copies_view
        elsewhere = [
            presence.copies_view
            for (other, _), presence in self.tree.presences.items()
            if other is not tier and other in self.slots
        ]

        def count(node: int, limit: int) -> int:
            rows = self.tree.tail_rows(tier, node, limit, device)
            if len(rows) == 0:
                return 0
            slots = placed.take(rows)
            free_to_go = table.state.take(slots) == _RESIDENT
            free_to_go &= table.leases.take(slots) == unleased
            free_to_go &= (self.columns.flags.take(rows) & (VISIBLE | PINNED)) == VISIBLE
            others = [copies[node] for copies in elsewhere]
            if not any(others) and here[node] == lengths[node]:
                # No block has another copy, so they go from the tail on or not at all.
                return leading(free_to_go) if self.tree.ends_with(tier, int(rows[0]), device) else 0
            if lengths[node] not in others:
                free_to_go &= self._leaves_no_orphan(tier, rows, device)
            return leading(free_to_go)

        return count

    def _leaves_no_orphan(self, tier: Tier, rows: Rows, device: int) -> NDArray[np.bool_]:
        """Of a node's deepest copies there, which have one in another tier, or no block below that stays."""
        kept_elsewhere = np.zeros(len(rows), dtype=np.bool_)
        for other in self.slots:
            if other is not tier:
                kept_elsewhere |= self.columns.slot[other].take(rows) != NO_SLOT
        childless = np.empty(len(rows), dtype=np.bool_)
        childless[0] = self.tree.ends_with(tier, int(rows[0]), device)
        childless[1:] = ~kept_elsewhere[:-1] & (self.columns.parent.take(rows[:-1]) == rows[1:])
        return kept_elsewhere | childless

    def story(self, space: int, key: Hashes, now: float) -> tuple[str, ...]:
        """What is remembered of one block, oldest first."""
        return self.journal.story(space, key, now)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of all structures in use."""
        tables = sum(table.touched_bytes for table in self.slots.values())
        return (
            self.columns.touched_bytes
            + self.keys.nbytes
            + self.tree.touched_bytes
            + tables
            + self.journal.nbytes
        )
