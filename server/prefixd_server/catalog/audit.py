"""Catalog.check(): every cross-link between columns, key table, tree and slots.

Ships in the product (`prefixd check`) and runs after each step of the tests.
Vectorised, but a whole pass: it holds the loop while it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, SlotState
from prefixd_server.catalog.columns import COMMITTED, VISIBLE

if TYPE_CHECKING:
    from prefixd_server.catalog.catalog import Catalog


def audit(catalog: Catalog) -> list[str]:
    """What is wrong, in words; empty when everything holds."""
    problems = [*catalog.tree.check(), *catalog.keys.check()]
    for table in catalog.slots.values():
        problems += table.check()
    rows = catalog.columns.rows_in_use()
    problems += _links(catalog, rows)
    problems += _copies(catalog, rows)
    problems += _waiting(catalog)
    return problems


def _links(catalog: Catalog, rows: Rows) -> list[str]:
    columns = catalog.columns
    problems = []
    in_use = np.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=np.bool_)
    in_use[rows] = True
    parents = columns.parent[rows]
    below = parents != NO_ROW
    if not in_use[parents[below]].all():
        problems.append("a block's parent is not in use")
    else:
        expected = np.bincount(parents[below], minlength=len(in_use))[rows]
        if (columns.children[rows] != expected).any():
            problems.append("child counts differ from the blocks that name the parent")
        visible = (columns.flags[rows] & VISIBLE) != 0
        if (visible[below] & ((columns.flags[parents[below]] & VISIBLE) == 0)).any():
            problems.append("a visible block has an invisible parent")
        if (visible & ((columns.flags[rows] & COMMITTED) == 0)).any():
            problems.append("a visible block was never committed")
        settled = (columns.flags[rows[below]] & COMMITTED) != 0
        parents_visible = (columns.flags[parents[below]] & VISIBLE) != 0
        if (settled & parents_visible & ~visible[below]).any():
            problems.append("a committed block with a visible parent is not visible")
    return problems


def _copies(catalog: Catalog, rows: Rows) -> list[str]:
    columns = catalog.columns
    problems = []
    has_copy = np.zeros(len(rows), dtype=np.bool_)
    readable = np.zeros(len(rows), dtype=np.bool_)
    for tier, table in catalog.slots.items():
        slots = columns.slot[tier][rows]
        held = slots != NO_SLOT
        has_copy |= held
        if (table.row[slots[held]] != rows[held]).any():
            problems.append(f"{tier.name}: a block's slot does not point back to it")
        states = table.state[slots[held]]
        readable[np.flatnonzero(held)[(states == SlotState.RESIDENT) | (states == SlotState.EVICTING)]] = True
        if ((states == SlotState.FREE) | (states == SlotState.QUARANTINED)).any():
            problems.append(f"{tier.name}: a block's slot is free or quarantined")
        owned = table.slots_with_row()
        if len(owned) != int(held.sum()):
            problems.append(
                f"{tier.name}: {len(owned)} slots name a block, {int(held.sum())} blocks name a slot"
            )
    if not has_copy.all():
        problems.append(f"{int((~has_copy).sum())} blocks have no copy in any tier")
    committed = (columns.flags[rows] & COMMITTED) != 0
    if (committed & ~readable).any():
        problems.append("a committed block has no readable copy")
    return problems


def _waiting(catalog: Catalog) -> list[str]:
    flags = catalog.columns.flags
    problems = []
    total = 0
    for above, below in catalog.waiting.items():
        total += len(below)
        if flags[above] & VISIBLE:
            problems.append("blocks wait for a parent that is visible")
        if any((int(flags[row]) & (COMMITTED | VISIBLE)) != COMMITTED for row in below):
            problems.append("a waiting block is not committed, or is visible already")
    if total != catalog.waiting_count:
        problems.append(f"waiting count is {catalog.waiting_count}, {total} blocks wait")
    return problems
