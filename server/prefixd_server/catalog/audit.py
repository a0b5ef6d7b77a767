"""Catalog.check(): every cross-link between columns, key table, tree and slots, in steps (passes.py).

Ships in the product (`prefixd check`) and runs after each step of the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, SlotState, Tier
from prefixd_server.catalog.columns import COMMITTED, NO_SPACE, VISIBLE
from prefixd_server.catalog.passes import Problems, Steps, marked, named, stretches
from prefixd_server.catalog.tree_audit import audit_tree

if TYPE_CHECKING:
    from prefixd_server.catalog.catalog import Catalog


def audit(catalog: Catalog) -> Steps:
    """What is wrong, in words; empty when everything holds."""
    yield from audit_tree(catalog.tree)
    yield from catalog.keys.steps()
    for table in catalog.slots.values():
        yield from table.steps()
    yield from _rows(catalog)
    for first, end in stretches(catalog.columns.rows_end):
        rows = catalog.columns.in_use(first, end)
        yield _links(catalog, rows) + _copies(catalog, rows)
    for tier, table in catalog.slots.items():
        for segment in range(table.segment_count):
            for first, end in stretches(table.segment(segment).slot_count):
                yield _owners(catalog, tier, segment, first, end)
    yield from _waiting(catalog)


def _rows(catalog: Catalog) -> Steps:
    """Every row is in use or to be handed out again, not both, and none of them twice."""
    columns = catalog.columns
    given_back, end = columns.given_back(), columns.rows_end
    in_use_count = int(np.count_nonzero(columns.space[:end] != NO_SPACE))
    yield [
        *named(in_use_count != columns.count, "rows: other blocks have a space than are in use"),
        *named(in_use_count + len(given_back) != end, "rows: some are neither in use nor free"),
    ]
    marks = yield from marked(given_back, end)
    yield named(np.count_nonzero(marks) != len(given_back), "rows: one was given back twice")
    for first, last in stretches(len(given_back)):
        free = columns.given_back(first, last)
        yield named(columns.space[free] != NO_SPACE, "rows: one in use was given back")


def _links(catalog: Catalog, rows: Rows) -> Problems:
    columns = catalog.columns
    flags, parents = columns.flags[rows], columns.parent[rows]
    visible, committed = (flags & VISIBLE) != 0, (flags & COMMITTED) != 0
    below = parents != NO_ROW
    parent_visible = (columns.flags[parents] & VISIBLE) != 0
    return [
        *named(
            below & (columns.space[parents] != columns.space[rows]),
            "a block's parent is not in use, or of another space",
        ),
        *named(visible & below & ~parent_visible, "a visible block has an invisible parent"),
        *named(visible & ~committed, "a visible block was never committed"),
        *named(
            committed & below & parent_visible & ~visible,
            "a committed block with a visible parent is not visible",
        ),
    ]


def _copies(catalog: Catalog, rows: Rows) -> Problems:
    columns = catalog.columns
    problems: Problems = []
    has_copy = np.zeros(len(rows), dtype=np.bool_)
    readable = np.zeros(len(rows), dtype=np.bool_)
    for tier, table in catalog.slots.items():
        slots = columns.slot[tier][rows]
        held = slots != NO_SLOT
        has_copy |= held
        if (slots[held] >= len(table.state)).any():
            problems.append(f"{tier.name}: a block names a slot that is none")
            continue
        states = table.state[slots[held]]
        problems += named(
            table.row[slots[held]] != rows[held], f"{tier.name}: a block's slot does not point back to it"
        )
        problems += named(
            (states == SlotState.FREE) | (states == SlotState.QUARANTINED),
            f"{tier.name}: a block's slot is free or quarantined",
        )
        readable[held] |= (states == SlotState.RESIDENT) | (states == SlotState.EVICTING)
    committed = (columns.flags[rows] & COMMITTED) != 0
    return [
        *problems,
        *named(~has_copy, "a block has no copy in any tier"),
        *named(committed & ~readable, "a committed block has no readable copy"),
    ]


def _owners(catalog: Catalog, tier: Tier, segment: int, first: int, end: int) -> Problems:
    """Some slots of a segment: one that names a block is that block's."""
    table, columns = catalog.slots[tier], catalog.columns
    where = table.slots_in(segment)
    first, end = where.start + first, min(where.start + end, where.stop)
    slots = np.flatnonzero(table.row[first:end] != NO_ROW) + first
    rows = table.row[slots]
    wrong = (
        (rows >= columns.rows_end) | (columns.slot[tier][rows] != slots) | (columns.space[rows] == NO_SPACE)
    )
    return named(wrong, f"{tier.name}: a slot names a block that does not name it")


def _waiting(catalog: Catalog) -> Steps:
    total = sum(map(len, catalog.waiting.values()))
    yield named(
        total != catalog.waiting_count, f"waiting count is {catalog.waiting_count}, {total} blocks wait"
    )
    flags = catalog.columns.flags
    parents = list(catalog.waiting)
    for first, end in stretches(len(parents), 64):
        problems: Problems = []
        for above in parents[first:end]:
            below = np.array(catalog.waiting.get(above, ()), dtype=np.int32)
            wrong = (flags[below] & (COMMITTED | VISIBLE)) != COMMITTED
            problems += named(wrong, "a waiting block is not committed, or is visible already")
            problems += named(
                bool(len(below)) and bool(flags[above] & VISIBLE), "blocks wait for a parent that is visible"
            )
        yield problems
