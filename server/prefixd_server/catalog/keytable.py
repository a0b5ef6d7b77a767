"""Key to row: an open-addressing hash table over (space, prefix hash), a run at a time.

Buckets of 16 four-byte entries (a cache line): the row plus one, and above it a
tag of what bits are left. A key lies in its home bucket or, where that was
full, in one of the next; `passed` counts per bucket the keys that went by, so a
search ends where none did, and a removal leaves nothing behind to clean up.
The full key is always compared. A run stored at once lies in consecutive rows:
those after its first key's are tried before the table is asked.

The table grows to double size step by step: first the new table's memory is
touched, then the old one's buckets are moved; meanwhile both are searched.
Every insert and remove advances it far enough that it always ends in time.

Callers choose the hashes, so the mixing is secret: multilinear over 32-bit
words modulo 2^64, whose upper half is strongly universal (Lemire and
Kaser, "Strongly universal string hashing is fast", 2014).
"""

from __future__ import annotations

import hashlib
import sys
from operator import mul

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.runs import leading
from prefixd_server.base.types import HASH_BYTES_MAX, HASH_WORDS, NO_ROW, Hashes, Rows
from prefixd_server.catalog.columns import NO_SPACE, BlockColumns
from prefixd_server.catalog.key_audit import audit_keys
from prefixd_server.catalog.passes import Steps, everything
from prefixd_server.catalog.reserved import release, reserve

BUCKET_ENTRIES = 16
BUCKET_COUNT_MIN = 64
LOAD_PERCENT_MAX = 70
"""A table beyond this share of its entries moves to one of double size."""
LOAD_PERCENT_PREPARE = 60
"""Beyond this one, the next table's memory is touched ahead."""
MOVED_PER_ROW = 4
"""Old entries looked at per row inserted or removed: a move ends long before the new table fills."""
TOUCHED_PER_ROW = 24
"""Entries of the next table touched per row inserted: 2 x 100 / (70 - 60) = 20 just do."""
STEP_ENTRIES_MIN = 1024
"""Least entries moved or touched at a time: a page of memory."""

_WORDS = 2 * HASH_WORDS
_U64_MAX = (1 << 64) - 1
_UPPER_HALF = slice(1 if sys.byteorder == "little" else 0, None, 2)
_WHOLE_KEY = np.dtype((np.void, HASH_BYTES_MAX))
"""A key as one element: compared in one call."""

Mixed = NDArray[np.uint32]
Buckets = NDArray[np.intp]


class Mixer:
    """Mixes (space, key) to 32 bits."""

    def __init__(self, seed: int) -> None:
        material = hashlib.shake_256(b"prefixd-keytable:%d" % seed).digest(8 * (_WORDS + 2))
        words = np.frombuffer(material, dtype=np.uint64)
        self._start, self._space_factor = int(words[0]), int(words[1])
        self._starts, self._space_factors = words[0:1], words[1:2]
        self._factors = words[2:]
        self._factor_list: list[int] = self._factors.tolist()

    def run(self, space: int | NDArray[np.uint32], keys: Hashes) -> Mixed:
        """Mixes many keys of one space, or each with its own."""
        total = keys.view(np.uint32).astype(np.uint64) @ self._factors
        if isinstance(space, int):
            total += np.uint64((self._start + self._space_factor * space) & _U64_MAX)
        else:
            total += space * self._space_factors + self._starts
        return total.view(np.uint32)[_UPPER_HALF].copy()

    def one(self, space: int, key: Hashes) -> int:
        """Mixes the only key of `key`."""
        words: list[int] = key.view(np.uint32)[0].tolist()
        total: int = sum(map(mul, self._factor_list, words), self._start + self._space_factor * space)
        return (total & _U64_MAX) >> 32


class Table:
    """One table of a fixed size: entries that are found again by mixed key.

    Args:
        bucket_count: a power of two, at most 2^24.
        row_bits: bits of an entry that name the row.
    """

    def __init__(self, bucket_count: int, row_bits: int) -> None:
        self.bucket_count = bucket_count
        self.entry_count_max = bucket_count * BUCKET_ENTRIES
        self.shift = 32 - (bucket_count.bit_length() - 1)
        self.row_bits = row_bits
        self._row_shift = np.uint32(row_bits)
        self.row_mask = np.uint32((1 << row_bits) - 1)
        self._in_use = np.uint32(1 << row_bits)
        self.entries: NDArray[np.uint32] = reserve(np.uint32, self.entry_count_max)
        self.buckets = self.entries.reshape(bucket_count, BUCKET_ENTRIES)
        self.entries_view = self.entries.data
        self.passed: NDArray[np.uint32] = np.zeros(bucket_count, dtype=np.uint32)
        """Keys that found each bucket full and went on to the next."""

    def home(self, mixed: Mixed) -> Buckets:
        """The bucket where a key is searched first: its upper bits."""
        return (mixed >> self.shift).astype(np.intp)

    def tags(self, mixed: Mixed) -> NDArray[np.uint32]:
        """An entry without its row: the lower bits, above the row, and one bit that is always set."""
        return (mixed << self._row_shift) | self._in_use

    def tag_of(self, mixed: int) -> int:
        """The same for one key, moved down to bit 0."""
        return (mixed | 1) & ((1 << (32 - self.row_bits)) - 1)

    def following(self, buckets: Buckets) -> Buckets:
        """The bucket searched after each."""
        return (buckets + 1) & (self.bucket_count - 1)

    def insert(self, mixed: Mixed, rows: Rows) -> None:
        """Adds entries that are absent. There must be room."""
        bucket, value = self.home(mixed), self._values(mixed, rows)
        while True:
            place = (self.buckets.take(bucket, axis=0) == 0).argmax(axis=1)
            at = bucket * BUCKET_ENTRIES + place
            full = self.entries.take(at) != 0
            if np.count_nonzero(full):
                np.add.at(self.passed, bucket[full], 1)
                bucket[full] = self.following(bucket[full])
                self.entries[at[~full]] = value[~full]
            else:
                self.entries[at] = value
            # Of several keys for one place the last one won; the others try again.
            again = self.entries.take(at) != value
            if not np.count_nonzero(again):
                return
            bucket, value = bucket[again], value[again]

    def remove(self, mixed: Mixed, rows: Rows) -> NDArray[np.bool_] | None:
        """Drops the entries of these rows; None when all were here, or else which were."""
        bucket, value = self.home(mixed), self._values(mixed, rows)
        hit = self._clear(bucket, value)
        if np.count_nonzero(hit) == len(hit):
            return None
        here = hit.copy()
        index = np.arange(len(rows))
        hops = 0
        while True:
            on = ~hit & (self.passed.take(bucket) != 0)
            index, value, bucket = index[on], value[on], self.following(bucket[on])
            if len(index) == 0:
                return None if here.all() else here
            hops += 1
            hit = self._clear(bucket, value)
            here[index[hit]] = True
            for hop in range(1, hops + 1):
                np.subtract.at(self.passed, (bucket[hit] - hop) & (self.bucket_count - 1), 1)

    def _clear(self, bucket: Buckets, value: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Drops each entry that lies in its bucket; tells which did."""
        place = (self.buckets.take(bucket, axis=0) == value[:, None]).argmax(axis=1)
        at = bucket * BUCKET_ENTRIES + place
        hit: NDArray[np.bool_] = self.entries.take(at) == value
        self.entries[at[hit]] = 0
        return hit

    def _values(self, mixed: Mixed, rows: Rows) -> NDArray[np.uint32]:
        """The entries of these rows; distinct for distinct rows, and never zero."""
        return self.tags(mixed) | (rows + 1).view(np.uint32)


class KeyTable:
    """See the module. Keys and spaces of the rows lie in `columns`; the table holds row numbers only."""

    def __init__(self, columns: BlockColumns, seed: int) -> None:
        self._columns = columns
        self._whole_keys = columns.key.view(_WHOLE_KEY).reshape(-1)
        self._mixer = Mixer(seed)
        self._mixed: Mixed = reserve(np.uint32, columns.row_count_max)
        self._row_bits = (columns.row_count_max + 1).bit_length()
        self._table = Table(BUCKET_COUNT_MIN, self._row_bits)
        self._prepare_count = self._table.entry_count_max * LOAD_PERCENT_PREPARE // 100
        self._old: Table | None = None
        self._moved_count = 0
        self._next: Table | None = None
        self._touched_count = 0
        self.count = 0
        """Keys in the table."""

    # -- search --------------------------------------------------------------------------------

    def find(self, space: int, hashes: Hashes) -> Rows:
        """Rows of the keys (space, hash), NO_ROW where absent.

        Args:
            hashes: shape (n, 4), C-contiguous.
        """
        if len(hashes) == 0:
            return np.empty(0, dtype=np.int32)
        first = self._find_one(space, hashes[:1])
        known = 1 if first == NO_ROW else self._follow(first, space, hashes)
        found: Rows = np.arange(first, first + known, dtype=np.int32)
        if known == len(hashes):
            return found
        return np.concatenate([found, self._find_many(space, hashes[known:])])

    def _follow(self, first: int, space: int, hashes: Hashes) -> int:
        """How many leading keys lie in the rows from `first` on: runs stored at once mostly lie so."""
        columns = self._columns
        end = min(first + len(hashes), columns.high_water)
        same = columns.key[first:end] == hashes[: end - first]
        count = leading(same.ravel()) // HASH_WORDS
        return leading(columns.space[first : first + count] == space)

    def _find_many(self, space: int, hashes: Hashes) -> Rows:
        found: Rows = np.empty(len(hashes), dtype=np.int32)
        found.fill(NO_ROW)
        mixed = self._mixer.run(space, hashes)
        keys = hashes.view(_WHOLE_KEY).reshape(-1)
        self._search(self._table, space, keys, mixed, found)
        if self._old is not None:
            missing = np.flatnonzero(found < 0)
            if len(missing):
                left: Rows = np.full(len(missing), NO_ROW, dtype=np.int32)
                self._search(self._old, space, keys[missing], mixed[missing], left)
                found[missing] = left
        return found

    def _search(self, table: Table, space: int, keys: NDArray[np.void], mixed: Mixed, found: Rows) -> None:
        """Fills in `found` where a key is in this table."""
        bucket, tag = table.home(mixed), table.tags(mixed)
        index: NDArray[np.intp] | None = None
        while True:
            entries = table.buckets.take(bucket, axis=0)
            alike = ((entries ^ tag[:, None]) <= table.row_mask).ravel().nonzero()[0]
            rows = (entries.take(alike) & table.row_mask).astype(np.intp) - 1
            asked = alike // BUCKET_ENTRIES if index is None else index.take(alike // BUCKET_ENTRIES)
            same = self._whole_keys.take(rows) == keys.take(asked)
            same &= self._columns.space.take(rows) == space
            found[asked[same]] = rows[same]
            on = table.passed.take(bucket).nonzero()[0]
            if len(on) == 0:
                return
            on = on[found.take(on if index is None else index[on]) < 0]
            if len(on) == 0:
                return
            index = on if index is None else index[on]
            tag, bucket = tag[on], table.following(bucket[on])

    def _find_one(self, space: int, key: Hashes) -> int:
        mixed = self._mixer.one(space, key)
        words: list[int] = key[0].tolist()
        row = self._search_one(self._table, space, words, mixed)
        if row == NO_ROW and self._old is not None:
            row = self._search_one(self._old, space, words, mixed)
        return row

    def _search_one(self, table: Table, space: int, words: list[int], mixed: int) -> int:
        keys, spaces = self._columns.mv.key, self._columns.mv.space
        row_bits, row_mask, tag = table.row_bits, int(table.row_mask), table.tag_of(mixed)
        bucket = mixed >> table.shift
        while True:
            first = bucket * BUCKET_ENTRIES
            for entry in table.entries_view[first : first + BUCKET_ENTRIES].tolist():
                if entry >> row_bits == tag:
                    row: int = (entry & row_mask) - 1
                    if spaces[row] == space and [keys[row, i] for i in range(HASH_WORDS)] == words:
                        return row
            if not table.passed[bucket]:
                return NO_ROW
            bucket = (bucket + 1) & (table.bucket_count - 1)

    # -- change --------------------------------------------------------------------------------

    def insert(self, rows: Rows) -> None:
        """Adds rows whose keys and spaces are in the columns already: distinct, and absent here."""
        if len(rows) == 0:
            return
        self._make_room(len(rows))
        mixed = self.mixed(rows)
        self._mixed[rows] = mixed
        self._table.insert(mixed, rows)
        self.count += len(rows)
        self._advance(len(rows))

    def remove(self, rows: Rows) -> None:
        """Drops rows that are here. Their space becomes NO_SPACE: a freed row is nobody's neighbour."""
        mixed = self._mixed.take(rows)
        here = self._table.remove(mixed, rows)
        if here is not None and self._old is not None:
            left = ~here
            here = self._old.remove(mixed[left], rows[left])
        assert here is None, "a removed key was not in the table"
        self._columns.space[rows] = NO_SPACE
        self.count -= len(rows)
        self._advance(len(rows))

    def step(self, entry_budget: int) -> bool:
        """Moves up to about `entry_budget` old entries; whether growth is still under way."""
        if self._old is not None:
            self._move(entry_budget)
        return self._old is not None

    # -- growth --------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        """Sees to it that `count` more keys stay below the load limit."""
        wanted = self.count + count
        if wanted * 100 <= self._table.entry_count_max * LOAD_PERCENT_MAX:
            return
        while self._old is not None:
            self._move(self._old.entry_count_max)
        bucket_count = 2 * self._table.bucket_count
        while wanted * 100 > bucket_count * BUCKET_ENTRIES * LOAD_PERCENT_MAX:
            bucket_count *= 2
        if self._next is None or self._next.bucket_count != bucket_count:
            self._next = Table(bucket_count, self._row_bits)
        self._old, self._table, self._next = self._table, self._next, None
        self._prepare_count = self._table.entry_count_max * LOAD_PERCENT_PREPARE // 100
        self._moved_count = self._touched_count = 0

    def _advance(self, row_count: int) -> None:
        """The share of growth that goes with `row_count` rows inserted or removed."""
        if self._old is not None:
            self._move(max(STEP_ENTRIES_MIN, MOVED_PER_ROW * row_count))
        elif self.count > self._prepare_count and self._touched_count < 2 * self._table.entry_count_max:
            self._touch(max(STEP_ENTRIES_MIN, TOUCHED_PER_ROW * row_count))

    def _touch(self, entry_count: int) -> None:
        """Makes the next table, and its memory piece by piece."""
        if self._next is None:
            self._next = Table(2 * self._table.bucket_count, self._row_bits)
            self._touched_count = 0
        first = self._touched_count
        self._touched_count = min(first + entry_count, self._next.entry_count_max)
        self._next.entries[first : self._touched_count] = 0

    def _move(self, entry_count: int) -> None:
        """Moves the next `entry_count` entries, at least, of the old table to the new one."""
        old = self._old
        assert old is not None
        first = self._moved_count
        whole = -(-entry_count // STEP_ENTRIES_MIN) * STEP_ENTRIES_MIN
        self._moved_count = min(first + whole, old.entry_count_max)
        piece = old.entries[first : self._moved_count]
        rows = (piece[piece != 0] & old.row_mask).astype(np.int32) - np.int32(1)
        piece[:] = 0  # release() clears whole pages only, and a page may be larger than this piece
        release(old.entries, first, len(piece))
        if len(rows):
            self._table.insert(self._mixed.take(rows), rows)
        if self._moved_count == old.entry_count_max:
            self._old = None

    # -- accounts ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Memory of all tables that exist now, and of the mixed keys by row."""
        total = sum(table.entries.nbytes + table.passed.nbytes for table in self.tables())
        total += self._columns.high_water * 4
        if self._next is not None:
            total += self._touched_count * 4 + self._next.passed.nbytes
        return total

    def check(self) -> list[str]:
        """What is wrong, in words: every row in use is found, once, and nothing else is."""
        return everything(self.steps())

    def steps(self) -> Steps:
        """The same, bit by bit (passes.py)."""
        return audit_keys(self, self._columns)

    def tables(self) -> list[Table]:
        """The tables where a key may be."""
        return [self._table] + ([self._old] if self._old is not None else [])

    def mixed(self, rows: Rows) -> Mixed:
        """The rows' keys, mixed anew."""
        return self._mixer.run(self._columns.space.take(rows), self._columns.key.take(rows, axis=0))
