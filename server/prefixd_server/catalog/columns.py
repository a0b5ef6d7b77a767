"""Columns: one array per property, one row per thing, in reserved memory.

Rows are handed out densely and taken back through a compact stack, so memory
follows the most rows that were ever in use at once. A column's length is final,
so arrays, views and memoryviews of it stay valid for ever.

Not here: what the properties mean to each other (tree.py, keytable.py,
catalog.py keep that).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from prefixd_server.base.errors import LimitReached
from prefixd_server.base.types import HASH_WORDS, Rows, Tier
from prefixd_server.catalog.reserved import reserve

TOUCH_BYTES = 64 * 1024
"""Memory is counted in pieces of this size, per column."""

VISIBLE = 1
"""Flag: committed, and so are all ancestors; readers may see the block."""
PINNED = 2
"""Flag: not evicted, only removed on request."""
COMMITTED = 4
"""Flag: the writer has finished; at least one copy is readable."""

NO_SPACE = 0xFFFFFFFF
"""Space of a row that was given back."""


def as_floats(column: NDArray[Any]) -> MutableSequence[float]:
    """A column's memory for scalar access: a memoryview, which typeshed thinks holds only integers."""
    return cast("MutableSequence[float]", column.data)


class Columns:
    """Rows of named columns, each an attribute: shape (row_count_max,) or (row_count_max, width).

    A fresh row is all zeros; a row that is allocated again holds what it held before.

    Args:
        row_count_max: most rows in use at once; below 2^31.
        layout: name -> (dtype, width).
    """

    def __init__(self, row_count_max: int, layout: Mapping[str, tuple[DTypeLike, int]]) -> None:
        self.row_count_max = row_count_max
        self.count = 0
        """Rows in use."""
        self.high_water = 0
        """Most rows ever in use at once; rows at and above it were never touched."""
        self._row_bytes: list[int] = []
        self._freed: NDArray[np.uint32] = reserve(np.uint32, row_count_max)
        self._freed_view = self._freed.data
        self._freed_count = 0
        self._freed_high_water = 0
        for name, (dtype, width) in layout.items():
            shape = row_count_max if width == 1 else (row_count_max, width)
            setattr(self, name, reserve(dtype, shape))
            self._row_bytes.append(np.dtype(dtype).itemsize * width)

    def allocate(self, count: int) -> Rows:
        """`count` rows in ascending order; consecutive when all are fresh.

        Raises:
            LimitReached: ROWS_EXHAUSTED; nothing is allocated then.
        """
        self._require(count)
        again = min(count, self._freed_count)
        self.count += count
        rows = np.empty(count, dtype=np.int32)
        if again:
            self._freed_count -= again
            rows[:again] = self._freed[self._freed_count : self._freed_count + again]
            rows[:again].sort()
        if again < count:
            first = self.high_water
            self.high_water += count - again
            rows[again:] = np.arange(first, self.high_water, dtype=np.int32)
        return rows

    def allocate_one(self) -> int:
        """One row. Raises LimitReached: ROWS_EXHAUSTED."""
        self._require(1)
        self.count += 1
        if self._freed_count:
            self._freed_count -= 1
            return self._freed_view[self._freed_count]
        self.high_water += 1
        return self.high_water - 1

    def free(self, rows: Rows) -> None:
        """Takes back distinct rows in use; the lowest are handed out next, so that runs lie in order."""
        assert len(rows) <= self.count, "more rows are freed than are in use"
        self.count -= len(rows)
        self._freed[self._freed_count : self._freed_count + len(rows)] = np.sort(rows)[::-1]
        self._freed_count += len(rows)
        self._freed_high_water = max(self._freed_high_water, self._freed_count)

    def free_one(self, row: int) -> None:
        """Takes back one row in use."""
        assert self.count > 0, "more rows are freed than are in use"
        self.count -= 1
        self._freed_view[self._freed_count] = row
        self._freed_count += 1
        self._freed_high_water = max(self._freed_high_water, self._freed_count)

    def rows_in_use(self) -> Rows:
        """All rows in use, ascending. A whole pass; for checks."""
        free = np.zeros(self.high_water, dtype=np.bool_)
        free[self._freed[: self._freed_count]] = True
        return np.flatnonzero(~free).astype(np.int32)

    def given_back(self, first: int = 0, end: int | None = None) -> Rows:
        """The rows to be handed out again, the next one last, or some of them: a copy."""
        return self._freed[: self._freed_count][first:end].astype(np.int32)

    @property
    def touched_bytes(self) -> int:
        """Memory in use: the most rows ever in use, per column in pieces of TOUCH_BYTES."""
        touched = [self.high_water * size for size in self._row_bytes]
        touched.append(self._freed_high_water * 4)
        return sum(-(-size // TOUCH_BYTES) * TOUCH_BYTES for size in touched)

    def _require(self, count: int) -> None:
        if self.count + count > self.row_count_max:
            raise LimitReached(
                "ROWS_EXHAUSTED",
                f"{count} more rows asked for, {self.count} of {self.row_count_max} are in use; "
                "evict, or raise catalog.block_count_max",
                limit=self.row_count_max,
            )


class BlockViews:
    """The scalar columns of BlockColumns as memoryviews: one element costs a third of numpy's.

    `key` has two dimensions: key[row, word].
    """

    def __init__(self, columns: BlockColumns) -> None:
        self.key = columns.key.data
        self.space = columns.space.data
        self.parent = columns.parent.data
        self.node = columns.node.data
        self.depth = columns.depth.data
        self.children = columns.children.data
        self.slot = {tier: slots.data for tier, slots in columns.slot.items()}
        self.checksum = columns.checksum.data
        self.flags = columns.flags.data


class BlockColumns(Columns):
    """One row per block that the catalog knows: 73 bytes.

    parent: row of the block before it in its run, NO_ROW for a first block.
    node: the prefix-tree node that the block belongs to.
    depth: blocks before it in its run.
    children: blocks that name this one as parent, in any state.
    slot[tier]: where its copy lies, NO_SLOT where there is none.
    """

    key: NDArray[np.uint64]
    space: NDArray[np.uint32]
    parent: NDArray[np.int32]
    node: NDArray[np.int32]
    depth: NDArray[np.uint32]
    children: NDArray[np.uint32]
    slot_hbm: NDArray[np.uint32]
    slot_dram: NDArray[np.uint32]
    slot_nvme: NDArray[np.uint32]
    checksum: NDArray[np.uint64]
    flags: NDArray[np.uint8]

    def __init__(self, row_count_max: int) -> None:
        layout: dict[str, tuple[Any, int]] = {
            "key": (np.uint64, HASH_WORDS),
            "space": (np.uint32, 1),
            "parent": (np.int32, 1),
            "node": (np.int32, 1),
            "depth": (np.uint32, 1),
            "children": (np.uint32, 1),
            "slot_hbm": (np.uint32, 1),
            "slot_dram": (np.uint32, 1),
            "slot_nvme": (np.uint32, 1),
            "checksum": (np.uint64, 1),
            "flags": (np.uint8, 1),
        }
        super().__init__(row_count_max, layout)
        self.slot = {Tier.HBM: self.slot_hbm, Tier.DRAM: self.slot_dram, Tier.NVME: self.slot_nvme}
        self.mv = BlockViews(self)

    @property
    def rows_end(self) -> int:
        """Rows in use are below."""
        return self.high_water

    def in_use(self, first: int, end: int) -> Rows:
        """The rows in use among [first, end), ascending; a freed row has NO_SPACE (keytable.py)."""
        return np.flatnonzero(self.space[first:end] != NO_SPACE).astype(np.int32) + np.int32(first)
