"""Sorts out what an index gives after a start: which records count, and in what order their blocks can exist.

A record counts when its store, segment, generation, place and size are right
and no newer record names its slot. The columns that the catalog needs are taken
out while a batch is in the processor's cache; the rest of the record is let go.
Whole arrays, no I/O; sorted() takes half a second for a million records and
belongs on a thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.accounts import Fault
from prefixd_server.base.types import Checksums, Hashes
from prefixd_server.index.chains import Places, chains
from prefixd_server.index.records import Keys, Records, block_keys, keys_of

CHAIN_BLOCKS_MAX = 512
"""Longer chains are cut: one goes into the catalog in one step."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The store as it is: what a record must agree with.

    generations, slot_bytes: per segment; 0 where there is none.
    stride: slot ids per segment.
    damaged, missing: segments that this start found so; their generations are new.
    """

    store_uuid: bytes
    generations: NDArray[np.uint64]
    slot_bytes: NDArray[np.int64]
    segment_bytes: int
    stride: int
    damaged: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Recoverable:
    """The blocks of one space, parents first, in chains of at most CHAIN_BLOCKS_MAX.

    slots: ids, as int64. starts: where each chain starts, and the number of blocks at the end.
    parents: place of the block above each chain, -1 for a first block. last_use: per chain, wall clock.
    segments: those that hold any of the blocks.
    faults: those that are misplaced, by what was wrong.
    """

    hashes: Hashes
    checksums: Checksums
    slots: NDArray[np.int64]
    starts: Places
    parents: Places
    last_use: NDArray[np.float64]
    segments: list[int]
    misplaced: Keys
    orphaned: Keys
    faults: Counter[Fault]

    def __len__(self) -> int:
        return len(self.parents)


class _Columns(NamedTuple):
    """Of some records; as Recoverable has them."""

    hashes: Hashes
    parents: Hashes
    depth: NDArray[np.int64]
    last_use: NDArray[np.float64]
    checksums: Checksums
    slots: NDArray[np.int64]


class Sieve:
    """Takes the records of one space, batch by batch.

    Args:
        identity: of the space.
        block_bytes, slot_bytes: of its blocks.
    """

    def __init__(self, layout: Layout, identity: bytes, block_bytes: int, slot_bytes: int) -> None:
        self._layout = layout
        self._identity = identity
        self._block_bytes = block_bytes
        self._slot_bytes = slot_bytes
        self._misplaced: list[Keys] = []
        self._faults: Counter[Fault] = Counter()
        self._columns: list[_Columns] = []

    def add(self, records: Records) -> None:
        """Some of the records, in any order."""
        good, segments = self._well_placed(records)
        if not good.all():
            self._misplaced.append(keys_of(records[~good]))
            self._count_misplaced(records[~good], segments[~good])
            records, segments = records[good], segments[good]
        self._columns.append(
            _Columns(
                np.ascontiguousarray(records["hash"]),
                np.ascontiguousarray(records["parent"]),
                records["depth"].astype(np.int64),
                records["last_use"].copy(),
                records["checksum"].copy(),
                segments * self._layout.stride + records["slot"],
            )
        )

    def sorted(self, rng: np.random.Generator) -> Recoverable:
        """All that was added, once."""
        whole = _Columns(*(np.concatenate(parts) for parts in zip(*self._columns, strict=True)))
        # Giving so much memory back takes milliseconds; here, not on the loop.
        self._columns.clear()
        hashes, parents, depth, last_use, checksums, slots = self._without_doubles(whole)
        found = chains(hashes, parents, depth, last_use, rng)
        starts, above = _cut(found.starts, _places_of(found.parents, found.order, len(hashes)))
        return Recoverable(
            hashes=hashes.take(found.order, axis=0),
            checksums=checksums.take(found.order),
            slots=slots.take(found.order),
            starts=starts,
            parents=above,
            last_use=last_use.take(found.order[starts[:-1]]),
            segments=np.unique(slots // self._layout.stride).tolist(),
            misplaced=np.concatenate([*self._misplaced, block_keys(self._identity, hashes[:0])]),
            orphaned=block_keys(self._identity, hashes[found.orphans]),
            faults=self._faults,
        )

    def _well_placed(self, records: Records) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which name a slot of this store in its segment's present generation; and their segments."""
        layout = self._layout
        segments = records["segment"].astype(np.int64)
        good = segments < len(layout.generations)
        known = np.where(good, segments, 0)
        uuid = np.ascontiguousarray(records["store_uuid"]).view(np.uint64)
        good &= (uuid == np.frombuffer(layout.store_uuid, np.uint64)).all(axis=1)
        generations = layout.generations[known]
        good &= (generations == records["generation"]) & (generations != 0)
        good &= layout.slot_bytes[known] == self._slot_bytes
        good &= records["block_bytes"] == self._block_bytes
        good &= records["slot"] < layout.segment_bytes // self._slot_bytes
        return good, segments

    def _count_misplaced(self, records: Records, segments: NDArray[np.int64]) -> None:
        """What is wrong with these: a place that the store does not have, or an earlier use of one it has."""
        layout = self._layout
        possible = segments < len(layout.generations)
        known = np.where(possible, segments, 0)
        uuid = np.ascontiguousarray(records["store_uuid"]).view(np.uint64)
        possible &= (uuid == np.frombuffer(layout.store_uuid, np.uint64)).all(axis=1)
        possible &= records["block_bytes"] == self._block_bytes
        possible &= records["slot"] < layout.segment_bytes // self._slot_bytes
        earlier = possible & (layout.generations[known] != records["generation"])
        damaged = earlier & np.isin(segments, list(layout.damaged))
        missing = earlier & ~damaged & np.isin(segments, list(layout.missing))
        self._faults[Fault.SEGMENT_DAMAGED] += int(damaged.sum())
        self._faults[Fault.SEGMENT_MISSING] += int(missing.sum())
        self._faults[Fault.RECORD_STALE] += int((earlier & ~damaged & ~missing).sum())
        self._faults[Fault.RECORD_MISPLACED] += int((~earlier).sum())

    def _without_doubles(self, columns: _Columns) -> _Columns:
        """Of several records for one slot the one used last is the newest; bytes are verified anyway."""
        ascending = np.sort(columns.slots)
        if not (ascending[1:] == ascending[:-1]).any():
            return columns
        newest = np.argsort(columns.last_use, kind="stable")[::-1]
        _, first = np.unique(columns.slots[newest], return_index=True)
        chosen = np.zeros(len(newest), dtype=np.bool_)
        chosen[newest[first]] = True
        self._misplaced.append(block_keys(self._identity, columns.hashes[~chosen]))
        self._faults[Fault.RECORD_CONFLICT] += int((~chosen).sum())
        hashes, parents, depth, last_use, checksums, slots = columns
        return _Columns(
            hashes[chosen],
            parents[chosen],
            depth[chosen],
            last_use[chosen],
            checksums[chosen],
            slots[chosen],
        )


def _places_of(places: Places, order: Places, count: int) -> Places:
    """Places before reordering as places after; -1 stays."""
    moved = np.full(count + 1, -1, dtype=np.int64)
    moved[order] = np.arange(len(order))
    return moved[places]


def _cut(starts: Places, parents: Places) -> tuple[Places, Places]:
    """Chains cut to CHAIN_BLOCKS_MAX: a later piece hangs below the one before."""
    lengths = np.diff(starts)
    if not len(lengths) or lengths.max() <= CHAIN_BLOCKS_MAX:
        return starts, parents
    pieces = -(-lengths // CHAIN_BLOCKS_MAX)
    chain = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(chain)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    firsts = starts[chain] + number * CHAIN_BLOCKS_MAX
    return np.append(firsts, starts[-1]), np.where(number == 0, parents[chain], firsts - 1)
