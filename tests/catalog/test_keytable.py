"""The key table against a dict, through growth and removal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prefixd_server.base.types import NO_ROW, Rows
from prefixd_server.catalog import keytable
from prefixd_server.catalog.columns import BlockColumns
from prefixd_server.catalog.keytable import BUCKET_ENTRIES, KeyTable, Mixer, Table

from tests.support.forest import hashes_of


def filled(columns: BlockColumns, space: int, numbers: range) -> Rows:
    rows = columns.allocate(len(numbers))
    columns.key[rows] = hashes_of(numbers)
    columns.space[rows] = space
    return rows


class KeyTableMachine(RuleBasedStateMachine):
    """Inserts, removals, searches and steps of growth, against a dict."""

    @initialize(seed=st.integers(0, 2**64))
    def begin(self, seed: int) -> None:
        self.columns = BlockColumns(60_000)
        self.table = KeyTable(self.columns, seed)
        self.model: dict[tuple[int, int], int] = {}
        self.next_number = 1

    @rule(space=st.integers(0, 3), count=st.sampled_from([1, 2, 5, 40, 300, 3000]))
    def insert(self, space: int, count: int) -> None:
        numbers = range(self.next_number, self.next_number + count)
        if self.columns.count + 2 * count > 60_000:
            return
        # The same hash in two spaces is two keys.
        for own in (space, space + 1):
            rows = filled(self.columns, own, numbers)
            self.table.insert(rows)
            self.model |= {(own, n): r for n, r in zip(numbers, rows.tolist(), strict=True)}
        self.next_number += count

    @rule(data=st.data(), share=st.sampled_from([0.02, 0.3, 0.9]))
    def remove(self, data: st.DataObject, share: float) -> None:
        if not self.model:
            return
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        names = list(self.model)
        chosen = [names[i] for i in rng.choice(len(names), max(1, int(share * len(names))), replace=False)]
        rows = np.array([self.model.pop(name) for name in chosen], dtype=np.int32)
        self.table.remove(rows)
        self.columns.free(rows)

    @rule(entry_budget=st.sampled_from([1, 100, 100_000]))
    def step(self, entry_budget: int) -> None:
        self.table.step(entry_budget)

    @rule(space=st.integers(0, 4), first=st.integers(0, 10_000), count=st.integers(1, 600))
    def find(self, space: int, first: int, count: int) -> None:
        numbers = range(first, first + count)
        expected = [self.model.get((space, n), NO_ROW) for n in numbers]
        assert self.table.find(space, hashes_of(numbers)).tolist() == expected
        assert self.table.find(space, hashes_of(numbers)[:1]).tolist() == expected[:1]

    @invariant()
    def holds_exactly_the_model(self) -> None:
        assert self.table.count == len(self.model)
        assert self.table.check() == []


TestKeyTableMachine = KeyTableMachine.TestCase
TestKeyTableMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_every_key_is_found_at_every_moment_of_growth() -> None:
    columns = BlockColumns(200_000)
    table = KeyTable(columns, seed=1)
    inserted = 0
    moving = 0
    rng = np.random.default_rng(3)
    while inserted < 120_000:
        table.insert(filled(columns, 4, range(inserted, inserted + 500)))
        inserted += 500
        sample = rng.integers(0, inserted, 300)
        assert table.find(4, hashes_of(sample.tolist())).tolist() == sample.tolist()
        moving += table.step(0)
    assert moving > 10
    assert table.check() == []


def test_absent_keys_and_other_spaces_are_not_found() -> None:
    columns = BlockColumns(10_000)
    table = KeyTable(columns, seed=2)
    table.insert(filled(columns, 1, range(5000)))
    assert (table.find(2, hashes_of(range(5000))) == NO_ROW).all()
    assert (table.find(1, hashes_of(range(5000, 9000))) == NO_ROW).all()
    assert table.find(1, hashes_of(range(0))).tolist() == []


def test_a_key_removed_from_the_middle_of_a_run_is_not_found_where_its_row_was() -> None:
    columns = BlockColumns(10_000)
    table = KeyTable(columns, seed=2)
    rows = filled(columns, 1, range(100))
    table.insert(rows)
    table.remove(rows[40:41])
    columns.free(rows[40:41])
    expected = rows.tolist()
    expected[40] = NO_ROW
    assert table.find(1, hashes_of(range(100))).tolist() == expected


def test_keys_that_differ_in_one_bit_are_two_keys() -> None:
    columns = BlockColumns(300)
    table = KeyTable(columns, seed=2)
    rows = columns.allocate(257)
    columns.key[rows] = 0
    bits = np.arange(256)
    columns.key[rows[1:], bits // 64] = np.uint64(1) << (bits % 64).astype(np.uint64)
    table.insert(rows)
    assert table.find(0, columns.key[rows]).tolist() == rows.tolist()


def test_keys_that_all_mix_alike_are_still_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = BlockColumns(1000)
    table = KeyTable(columns, seed=2)
    monkeypatch.setattr(Mixer, "run", lambda self, space, keys: np.full(len(keys), 2**31 + 1, np.uint32))
    monkeypatch.setattr(Mixer, "one", lambda self, space, key: 2**31 + 1)
    rows = filled(columns, 0, range(500))
    table.insert(rows)
    assert table.find(0, hashes_of(range(600))).tolist() == rows.tolist() + [NO_ROW] * 100
    assert table.find(0, hashes_of([499])).tolist() == [499]
    assert (table.find(1, hashes_of(range(500))) == NO_ROW).all()
    assert table.find(1, hashes_of([499])).tolist() == [NO_ROW]
    table.remove(rows[::2])
    columns.free(rows[::2])
    assert table.find(0, hashes_of(range(500)))[1::2].tolist() == rows[1::2].tolist()
    assert table.check() == []
    table.remove(rows[1::2])
    assert (table.find(0, hashes_of(range(500))) == NO_ROW).all()


def test_removal_leaves_no_trace_in_the_buckets() -> None:
    table = Table(64, row_bits=24)
    rng = np.random.default_rng(1)
    for _ in range(50):
        mixed = rng.integers(0, 2**32, 64 * BUCKET_ENTRIES * 95 // 100, dtype=np.uint32)
        rows = np.arange(len(mixed), dtype=np.int32)
        table.insert(mixed, rows)
        assert table.passed.any()
        assert table.remove(mixed, rows) is None
        assert not table.entries.any()
        assert not table.passed.any()


def test_keys_that_differ_only_in_high_bits_spread_over_the_buckets() -> None:
    """Multiplication alone would leave such keys in few buckets; a caller could choose them."""
    keys = np.zeros((65_536, 4), dtype=np.uint64)
    number = np.arange(65_536, dtype=np.uint64)
    for word in range(4):
        keys[:, word] = ((number >> np.uint64(4 * word)) & np.uint64(15)) << np.uint64(60)
    buckets = Mixer(9).run(0, keys) >> np.uint32(20)
    assert np.bincount(buckets.astype(np.int64), minlength=4096).max() < 16 * 8


def test_the_single_search_and_the_run_search_mix_alike() -> None:
    mixer = Mixer(123)
    keys = np.random.default_rng(1).integers(0, 2**64, (50, 4), dtype=np.uint64)
    spaces = np.arange(50, dtype=np.uint32)
    run = mixer.run(spaces, keys).tolist()
    assert run == [mixer.one(i, keys[i : i + 1]) for i in range(50)]
    assert [int(mixer.run(i, keys[i : i + 1])[0]) for i in range(50)] == run


def test_growth_is_paid_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No insert moves or touches more than its share, and growth always ends in time."""
    columns = BlockColumns(400_000)
    table = KeyTable(columns, seed=1)
    table.insert(filled(columns, 0, range(20_000)))
    moved: list[int] = []
    move = KeyTable._move

    def counted(self: KeyTable, entry_count: int) -> None:
        moved.append(entry_count)
        move(self, entry_count)

    monkeypatch.setattr(KeyTable, "_move", counted)
    for first in range(20_000, 300_000, 512):
        table.insert(filled(columns, 0, range(first, first + 512)))
    assert max(moved) <= max(keytable.STEP_ENTRIES_MIN, keytable.MOVED_PER_ROW * 512)
    assert table.check() == []


def test_memory_is_at_most_sixteen_bytes_a_key() -> None:
    columns = BlockColumns(400_000)
    table = KeyTable(columns, seed=1)
    for first in range(0, 300_000, 1000):
        table.insert(filled(columns, 0, range(first, first + 1000)))
        if first >= 50_000 and not table.step(0):
            assert table.nbytes <= 23 * table.count
    while table.step(10_000):
        pass
    assert table.nbytes <= 16 * table.count
