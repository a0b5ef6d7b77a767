"""Puts the loaded records of one space in the order in which blocks can exist: parents first, in chains.

A block without its ancestors is useless, so records that no chain from a root
reaches are orphans. Whole arrays at a time: a million records take half a second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Hashes
from prefixd_server.index.records import Records

Places = NDArray[np.int64]
"""Places in the arrays of records; -1 for none."""


@dataclass(frozen=True, slots=True)
class Chains:
    """Records as chains: consecutive blocks, each the child of the one before.

    order: places of all reachable records, chain after chain; a chain comes after
        the one that its parent is in, and of two at one depth the one used last is last.
    starts: where each chain starts in `order`, and len(order) at the end.
    parents: place of each chain's parent record; -1 for a chain from the root.
    orphans: places of the records without all their ancestors.
    """

    order: Places
    starts: Places
    parents: Places
    orphans: Places

    def __len__(self) -> int:
        return len(self.parents)


def chains_of(records: Records, rng: np.random.Generator) -> Chains:
    """chains() of records of one space."""
    hashes, parents = (np.ascontiguousarray(records[name]) for name in ("hash", "parent"))
    return chains(hashes, parents, records["depth"].astype(np.int64), records["last_use"].copy(), rng)


def chains(
    hashes: Hashes,
    parent_hashes: Hashes,
    depth: NDArray[np.int64],
    last_use: NDArray[np.float64],
    rng: np.random.Generator,
) -> Chains:
    """Chains of one space's records; each hash must be there once.

    Args:
        hashes, parent_hashes: shape (n, 4); zeros for the parent of a first block.
        depth: blocks before each in its run.
        last_use: any clock, seconds.
        rng: draws the secret that hashes are matched under; hostile tenants choose hashes.
    """
    count = len(hashes)
    parent = _parents(hashes, parent_hashes, depth, rng)
    reachable = _ends(parent, count) != count
    alive = np.flatnonzero(reachable)
    head = _heads(parent, alive, count)
    lengths = np.bincount(head[alive], minlength=count)
    tops = np.flatnonzero(lengths)
    tops = tops[np.lexsort((last_use[tops], depth[tops]))]
    starts = np.append(0, np.cumsum(lengths[tops]))
    start_of = np.zeros(count, dtype=np.int64)
    start_of[tops] = starts[:-1]
    order = np.empty(len(alive), dtype=np.int64)
    order[start_of[head[alive]] + depth[alive] - depth[head[alive]]] = alive
    parents = np.where(depth[tops] == 0, -1, parent[tops])
    return Chains(order, starts, parents, np.flatnonzero(~reachable))


def _parents(hashes: Hashes, wanted: Hashes, depth: NDArray[np.int64], rng: np.random.Generator) -> Places:
    """Place of each record's parent: itself for a root, len(hashes) where the parent is missing."""
    count = len(hashes)
    found = _matches(hashes, wanted, rng)
    linked = found >= 0
    linked &= depth[found] + 1 == depth
    roots = (depth == 0) & ~wanted.any(axis=1)
    parents: Places = np.where(roots, np.arange(count), np.where(linked, found, count))
    return parents


def _matches(hashes: Hashes, wanted: Hashes, rng: np.random.Generator) -> Places:
    """Where each wanted hash is among `hashes`, -1 where it is not: a table of places, probed linearly.

    Sorting a million hashes takes four times as long.
    """
    count = len(hashes)
    factors = rng.integers(0, 2**63, size=4, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    bits = max(4, (2 * count).bit_length())
    last, shift = (1 << bits) - 1, np.uint64(64 - bits)
    table = np.full(1 << bits, -1, dtype=np.int32)
    place, at = np.arange(count, dtype=np.int32), ((hashes @ factors) >> shift).astype(np.int64)
    while len(place):
        vacant = table.take(at) < 0
        table[at[vacant]] = place[vacant]
        # Of several for one vacant place the last one won.
        on = table.take(at) != place
        place, at = place[on], (at[on] + 1) & last
    found: Places = np.full(count, -1, dtype=np.int64)
    asked, at = np.arange(count), ((wanted @ factors) >> shift).astype(np.int64)
    while len(asked):
        there = table.take(at)
        some = there >= 0
        asked, at, there = asked[some], at[some], there[some]
        same = (hashes.take(there, axis=0) == wanted.take(asked, axis=0)).all(axis=1)
        found[asked[same]] = there[same]
        asked, at = asked[~same], (at[~same] + 1) & last
    return found


def _ends(parent: Places, missing: int) -> Places:
    """Where following parents leads: a root, or `missing`. Depth falls along every link, so it ends."""
    up: Places = np.append(parent, missing)
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return up[:-1]
        up = further


def _heads(parent: Places, alive: Places, count: int) -> Places:
    """The first record of each one's chain: a parent's chain goes on with one of its children."""
    below = alive[parent[alive] != alive]
    heir = np.full(count, -1, dtype=np.int64)
    heir[parent[below]] = below
    heirs = below[heir[parent[below]] == below]
    up = np.arange(count + 1)
    up[heirs] = parent[heirs]
    return _ends(up[:-1], count)
