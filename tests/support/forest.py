"""Columns, key table and tree together, with a plain model beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, Rows, Tier
from prefixd_server.catalog.columns import BlockColumns
from prefixd_server.catalog.keytable import KeyTable
from prefixd_server.catalog.nodes import ONE_EACH, Devices
from prefixd_server.catalog.tree import PrefixTree


def hashes_of(numbers: list[int] | range) -> Hashes:
    """One hash per number, spread over all words."""
    words = np.array(numbers, dtype=np.uint64)[:, None]
    return words * np.array([3, 5, 7, 11], dtype=np.uint64) + np.array([1, 0, 2, 0], dtype=np.uint64)


@dataclass
class Block:
    """What the model knows of a block."""

    space: int
    parent: int
    tiers: set[Tier] = field(default_factory=set)


class Forest:
    """Applies each change to the real structures and to the model; `verify` compares them.

    Args:
        devices: of tiers that lie on several; a row's number tells its copy's.
    """

    def __init__(
        self,
        block_count_max: int = 100_000,
        spaces: tuple[int, ...] = (0, 1, 2),
        devices: Devices = ONE_EACH,
    ) -> None:
        self._devices = devices
        self.columns = BlockColumns(block_count_max)
        self.keys = KeyTable(self.columns, seed=5)
        self.tree = PrefixTree(self.columns, block_count_max, devices)
        self.blocks: dict[int, Block] = {}
        self.key_of: dict[int, int] = {}
        self._next_key = 1
        for space in spaces:
            self.tree.add_space(space, pool=space // 2)

    def add(self, space: int, parent: int, count: int, now: float, tiers: tuple[Tier, ...] = ()) -> Rows:
        """A new chain with fresh keys, with copies in `tiers`."""
        rows = self.columns.allocate(count)
        numbers = range(self._next_key, self._next_key + count)
        self._next_key += count
        self.columns.key[rows] = hashes_of(numbers)
        self.columns.space[rows] = space
        for slots in self.columns.slot.values():
            slots[rows] = NO_SLOT
        self.keys.insert(rows)
        self.tree.add(space, parent, rows, now)
        for row, number in zip(rows.tolist(), numbers, strict=True):
            self.blocks[row] = Block(space, parent)
            self.key_of[row] = number
            parent = row
        for tier in tiers:
            self.copy(tier, rows)
        return rows

    def copy(self, tier: Tier, rows: Rows) -> None:
        """Copies of blocks that have none in the tier."""
        where = self._devices.get(tier, (range(7, 8),))
        self.columns.slot[tier][rows] = [where[self.device_of(tier, row)].start for row in rows.tolist()]
        self.tree.copies_added(tier, rows)
        for row in rows.tolist():
            self.blocks[row].tiers.add(tier)

    def drop(self, tier: Tier, rows: Rows) -> None:
        """No more copies in the tier."""
        self.tree.copies_dropped(tier, rows)
        self.columns.slot[tier][rows] = NO_SLOT
        for row in rows.tolist():
            self.blocks[row].tiers.remove(tier)

    def device_of(self, tier: Tier, row: int) -> int:
        """Where a copy of the row goes."""
        return row // 5 % len(self._devices[tier]) if tier in self._devices else 0

    def forget(self, rows: Rows) -> None:
        """Copies, tree, keys, rows."""
        for tier in Tier:
            held = rows[self.columns.slot[tier][rows] != NO_SLOT]
            if len(held):
                self.drop(tier, held)
        self.tree.remove(rows)
        self.keys.remove(rows)
        self.columns.free(rows)
        for row in rows.tolist():
            del self.blocks[row], self.key_of[row]

    def path(self, row: int) -> list[int]:
        """The model's run up to `row`."""
        run = []
        while row != NO_ROW:
            run.append(row)
            row = self.blocks[row].parent
        return run[::-1]

    def children(self, row: int) -> set[int]:
        """The model's blocks directly below."""
        return {r for r, block in self.blocks.items() if block.parent == row}

    def subtree(self, row: int) -> set[int]:
        """The model's blocks at and below `row`."""
        found = {row}
        for r in sorted(self.blocks, key=lambda r: len(self.path(r))):
            if self.blocks[r].parent in found:
                found.add(r)
        return found

    def verify(self) -> None:
        """Every invariant, and the counts of the model."""
        assert self.tree.check() == []
        assert self.keys.check() == []
        assert self.columns.count == self.keys.count == len(self.blocks)
        assert set(self.columns.rows_in_use().tolist()) == set(self.blocks)
        for row, block in self.blocks.items():
            assert self.columns.parent[row] == block.parent
            assert self.columns.space[row] == block.space
