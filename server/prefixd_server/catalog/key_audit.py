"""KeyTable.check(): every row in use is found by its key, once, and nothing else is; in steps (passes.py).

From the rows: each one's entry lies on the way on which its key is searched, and no
other entry on it has that key. From the entries: each names a row in use and lies on
that row's way. So there are as many entries as rows, whatever they count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Rows
from prefixd_server.catalog.columns import NO_SPACE, BlockColumns
from prefixd_server.catalog.passes import Problems, Steps, named, stretches

if TYPE_CHECKING:
    from prefixd_server.catalog.keytable import Buckets, KeyTable, Mixed, Table

BUCKETS_IN_A_STEP = 512


def audit_keys(keys: KeyTable, columns: BlockColumns) -> Steps:
    """What is wrong, in words; empty when everything holds."""
    yield named(keys.count != columns.count, "key table: counts other keys than there are rows in use")
    for first, end in stretches(columns.rows_end):
        yield _found(keys, columns, columns.in_use(first, end))
    looked_at: list[Table] = []
    while fresh := [table for table in keys.tables() if not any(table is other for other in looked_at)]:
        for table in fresh:
            looked_at.append(table)
            for first, end in stretches(table.bucket_count, BUCKETS_IN_A_STEP):
                yield _entries(keys, columns, table, first, end)


def _found(keys: KeyTable, columns: BlockColumns, rows: Rows) -> Problems:
    """Rows in use are found by their keys: each itself, and nothing beside it."""
    mixed = keys.mixed(rows)
    times = np.zeros(len(rows), dtype=np.int64)
    others = False
    for table in keys.tables():
        asked, bucket = np.arange(len(rows)), table.home(mixed)
        tags = table.tags(mixed)
        for _ in range(table.bucket_count):
            entries = table.buckets[bucket]
            at, place = ((entries ^ tags[asked, None]) <= table.row_mask).nonzero()
            named_rows = (entries[at, place] & table.row_mask).astype(np.int32) - 1
            # What is no row is found from its entry.
            named_rows = np.clip(named_rows, 0, columns.rows_end - 1)
            wanted = rows[asked[at]]
            same = (columns.key[named_rows] == columns.key[wanted]).all(axis=1)
            same &= columns.space[named_rows] == columns.space[wanted]
            others |= bool((named_rows[same] != wanted[same]).any())
            np.add.at(times, asked[at[same]], 1)
            on = table.passed[bucket] > 0
            asked, bucket = asked[on], table.following(bucket[on])
            if len(asked) == 0:
                break
    return named(others, "key table: two rows have one key") + named(
        times != 1, "key table: a row is not found by its key, or more than once"
    )


def _entries(keys: KeyTable, columns: BlockColumns, table: Table, first: int, end: int) -> Problems:
    """Entries of some buckets: each names a row in use, and lies where its key is searched."""
    bucket, place = table.buckets[first:end].nonzero()
    entries = table.buckets[first:end][bucket, place]
    rows = (entries & table.row_mask).astype(np.int32) - 1
    known = (rows >= 0) & (rows < columns.rows_end)
    known[known] = columns.space[rows[known]] != NO_SPACE
    rows, entries, bucket = rows[known], entries[known], bucket[known] + first
    mixed = keys.mixed(rows)
    wrong = (entries & ~table.row_mask) != table.tags(mixed)
    return named(~known, "key table: an entry names a row that is not in use") + named(
        wrong | ~_reached(table, mixed, bucket), "key table: an entry lies where its key is not searched"
    )


def _reached(table: Table, mixed: Mixed, bucket: Buckets) -> NDArray[np.bool_]:
    """Which of the buckets a search for the key comes to."""
    at = table.home(mixed)
    reached: NDArray[np.bool_] = at == bucket
    going = np.flatnonzero(~reached)
    for _ in range(table.bucket_count):
        if len(going) == 0:
            break
        going = going[table.passed[at[going]] > 0]
        at[going] = table.following(at[going])
        reached[going] = at[going] == bucket[going]
        going = going[~reached[going]]
    return reached
