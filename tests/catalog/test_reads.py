"""catalog/reads.py: questions about runs of rows."""

from __future__ import annotations

import numpy as np
from prefixd_server.base.types import NO_ROW, NO_SLOT, Tier
from prefixd_server.catalog.columns import VISIBLE
from prefixd_server.catalog.reads import CatalogReads
from prefixd_server.catalog.slots import SlotTable

SLOT_BYTES = 4096
SLOT_COUNT = 4


def full_tier() -> CatalogReads:
    """DRAM of four slots, all resident; row i's copy lies in slot i, row 4 has none."""
    table = SlotTable(Tier.DRAM, SLOT_COUNT * SLOT_BYTES, 1)
    table.assign(0, 0, SLOT_BYTES, segment_id=1)
    reads = CatalogReads({Tier.DRAM: table}, 64, seed=1)
    rows = reads.columns.allocate(SLOT_COUNT + 1)
    slots = table.allocate(0, SLOT_COUNT)
    reads.columns.slot_dram[rows[:SLOT_COUNT]] = slots
    reads.columns.slot_dram[rows[SLOT_COUNT]] = NO_SLOT
    table.publish(slots, rows[:SLOT_COUNT])
    return reads


def test_a_block_without_a_copy_is_not_resident_though_the_last_slot_is() -> None:
    reads = full_tier()
    rows = np.arange(SLOT_COUNT + 1, dtype=np.int32)
    assert reads.resident(Tier.DRAM, rows).tolist() == [True] * SLOT_COUNT + [False]


def test_a_copy_that_is_about_to_go_is_not_resident() -> None:
    reads = full_tier()
    reads.slots[Tier.DRAM].evicting(reads.columns.slot_dram[:1].copy())
    assert reads.resident(Tier.DRAM, np.array([0, 1], dtype=np.int32)).tolist() == [False, True]


def test_an_unknown_block_is_not_visible_though_the_first_and_the_last_row_are() -> None:
    reads = full_tier()
    reads.columns.flags[[0, reads.columns.row_count_max - 1]] = VISIBLE
    assert reads.visible(np.array([0, NO_ROW, 1], dtype=np.int32)).tolist() == [True, False, False]
