"""Rows of columns: handed out, taken back, counted."""

from __future__ import annotations

import mmap
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_server.base.errors import LimitReached
from prefixd_server.base.types import Tier
from prefixd_server.catalog.columns import TOUCH_BYTES, BlockColumns, Columns
from prefixd_server.catalog.reserved import release, reserve


def make(row_count_max: int = 100) -> Columns:
    return Columns(row_count_max, {"size": (np.uint32, 1), "pair": (np.uint64, 2)})


def test_fresh_rows_are_consecutive_and_ascending() -> None:
    columns = make()
    assert columns.allocate(3).tolist() == [0, 1, 2]
    assert columns.allocate(2).tolist() == [3, 4]
    assert columns.allocate_one() == 5
    assert columns.count == 6


def test_freed_rows_are_used_again_before_fresh_ones_and_come_ascending() -> None:
    columns = make()
    columns.allocate(6)
    columns.free(np.array([4, 1, 2], dtype=np.int32))
    assert columns.allocate(4).tolist() == [1, 2, 4, 6]


def test_rows_that_were_freed_together_are_handed_out_in_order_part_by_part() -> None:
    columns = make(100)
    rows = columns.allocate(30)
    columns.free(np.random.default_rng(1).permutation(rows).astype(np.int32))
    parts = [columns.allocate(count).tolist() for count in (10, 10, 10)]
    assert [row for part in parts for row in part] == list(range(30))


def test_more_rows_than_the_limit_are_refused_and_nothing_is_taken() -> None:
    columns = make(10)
    columns.allocate(8)
    with pytest.raises(LimitReached) as refused:
        columns.allocate(3)
    assert refused.value.reason == "ROWS_EXHAUSTED"
    assert columns.allocate(2).tolist() == [8, 9]
    with pytest.raises(LimitReached):
        columns.allocate_one()


def test_columns_have_their_full_length_and_views_stay_valid() -> None:
    columns = BlockColumns(1000)
    assert columns.key.shape == (1000, 4)
    row = int(columns.allocate(900)[-1])
    columns.mv.parent[row] = 77
    assert columns.parent[row] == 77
    columns.key[row] = [1, 2, 3, 4]
    assert [columns.mv.key[row, i] for i in range(4)] == [1, 2, 3, 4]
    columns.slot[Tier.NVME][row] = 5
    assert columns.mv.slot[Tier.NVME][row] == columns.slot_nvme[row] == 5


def test_memory_is_counted_by_the_most_rows_ever_in_use() -> None:
    columns = make(1_000_000)
    assert columns.touched_bytes == 0
    columns.allocate(1)
    assert columns.touched_bytes == 2 * TOUCH_BYTES
    rows = columns.allocate(100_000)
    held = columns.touched_bytes
    assert 20 * 100_000 <= held <= 20 * 100_001 + 2 * TOUCH_BYTES
    columns.free(rows)
    columns.allocate(100_000)
    assert columns.touched_bytes == held + -(-400_000 // TOUCH_BYTES) * TOUCH_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.randoms(use_true_random=False)), max_size=40))
def test_a_row_is_never_handed_out_twice(steps: list[tuple[bool, int, Random]]) -> None:
    columns = make(64)
    held: set[int] = set()
    for is_free, count, random in steps:
        if is_free:
            chosen = random.sample(sorted(held), min(count, len(held)))
            columns.free(np.array(chosen, dtype=np.int32))
            held -= set(chosen)
        elif len(held) + count <= 64:
            rows = columns.allocate(count).tolist()
            assert rows == sorted(set(rows))
            assert not held & set(rows)
            held |= set(rows)
        assert columns.count == len(held)
        assert set(columns.rows_in_use().tolist()) == held


def test_released_memory_reads_as_zero_and_its_neighbours_stay() -> None:
    array = reserve(np.uint32, 10_000)
    array[:] = 1
    release(array, 1000, 5000)
    page = mmap.PAGESIZE // 4
    first, last = -(-1000 // page) * page, 6000 // page * page
    assert not array[first:last].any()
    assert array[:first].all()
    assert array[last:].all()
