"""The catalog's index: bytes per block, time of a lookup of 512, the longest step while it grows.

    python -m bench.catalog [--large] [--json OUT]

A store is grown from nothing to 1,000,000 blocks (and 10,000,000 with --large)
by runs of 8 to 512 blocks, of which three in five continue an earlier run from
somewhere in it; one in four steps uses a known run as well. Each step is what a
request costs the loop: find, allocate, insert, add, copies. Lookups are of 512
blocks, half of them runs that are known, half random keys (every entry a cache
miss); a whole lookup adds visibility and slots.

Lookups are medians of wall time. The longest step must not be another process's
doing: the same growth is run REPEATS times, each step counts with its shortest
time, in time of this thread, and the collector of Python's cycles is off.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, Rows, Tier
from prefixd_server.catalog.columns import COMMITTED, VISIBLE, BlockColumns
from prefixd_server.catalog.keytable import KeyTable
from prefixd_server.catalog.slots import SlotTable
from prefixd_server.catalog.tree import PrefixTree

RUN_BLOCKS = 512
LOOKUPS = 2000
REPEATS = 3
SEGMENT_BYTES = 256 << 20
SLOT_BYTES = 64 << 10
LIMITS = {
    1_000_000: {"bytes_per_block": 160, "find_ms": 0.10, "lookup_ms": 0.25, "step_ms": 2.0},
    10_000_000: {"bytes_per_block": 160, "find_ms": 0.25, "lookup_ms": 0.45, "step_ms": 2.0},
}


class Store:
    """Columns, keys, tree and DRAM slots, grown by a made-up workload."""

    def __init__(self, block_count: int) -> None:
        self.rng = np.random.default_rng(7)
        self.columns = BlockColumns(block_count + RUN_BLOCKS)
        self.keys = KeyTable(self.columns, seed=7)
        self.tree = PrefixTree(self.columns, block_count + RUN_BLOCKS)
        self.tree.add_space(0, pool=0)
        slots_per_segment = SEGMENT_BYTES // SLOT_BYTES
        segment_count = -(-(block_count + RUN_BLOCKS) // slots_per_segment)
        self.slots = SlotTable(Tier.DRAM, SEGMENT_BYTES, segment_count)
        for segment in range(segment_count):
            self.slots.assign(segment, 0, SLOT_BYTES, segment_id=segment + 1)
        self.tails: list[int] = []
        """Deepest rows of runs, to continue."""
        self.now = 0.0

    def step(self) -> float:
        """One request; seconds of this thread's time."""
        count = int(self.rng.integers(8, RUN_BLOCKS + 1))
        hashes = self.rng.integers(0, 2**64, (count, 4), dtype=np.uint64)
        parent = NO_ROW
        used: Rows | None = None
        if self.tails and self.rng.random() < 0.6:
            path = self.tree.path(self.tails[int(self.rng.integers(len(self.tails)))])
            parent = int(path[int(self.rng.integers(len(path) * 3 // 4, len(path)))])
        if self.tails and self.rng.random() < 0.25:
            used = self.tree.path(self.tails[int(self.rng.integers(len(self.tails)))])
        self.now += 0.01
        began = time.thread_time()
        if used is not None:
            self.tree.touch(used, self.now)
        row = self._put(hashes, parent)
        spent = time.thread_time() - began
        self.tails.append(row)
        return spent

    def _put(self, hashes: Hashes, parent: int) -> int:
        columns = self.columns
        assert self.keys.find(0, hashes)[0] == NO_ROW
        rows = columns.allocate(len(hashes))
        columns.key[rows] = hashes
        columns.space[rows] = 0
        columns.flags[rows] = VISIBLE | COMMITTED
        columns.checksum[rows] = 1
        for slots in columns.slot.values():
            slots[rows] = NO_SLOT
        self.keys.insert(rows)
        self.tree.add(0, parent, rows, self.now)
        chosen = self.slots.allocate(0, len(rows))
        columns.slot_dram[rows] = chosen
        self.slots.row[chosen] = rows
        self.slots.publish(chosen, rows)
        self.tree.copies_added(Tier.DRAM, rows)
        return int(rows[-1])

    def lookup(self, hashes: Hashes) -> int:
        """What a Lookup asks: how many leading blocks are visible and readable in DRAM."""
        rows = self.keys.find(0, hashes)
        hit = rows >= 0
        hit &= (self.columns.flags.take(rows, mode="clip") & VISIBLE) != 0
        slots = self.columns.slot_dram.take(rows, mode="clip")
        hit &= slots != NO_SLOT
        missing = (~hit).nonzero()[0]
        return int(missing[0]) if len(missing) else len(hit)

    def runs(self) -> list[Hashes]:
        """Keys to look up: known runs of 512, and as many sets of 512 random known keys."""
        found: list[Hashes] = []
        for at in self.rng.permutation(len(self.tails)).tolist():
            path = self.tree.path(self.tails[at])
            if len(path) >= RUN_BLOCKS:
                found.append(self.columns.key[path[-RUN_BLOCKS:]].copy())
            if len(found) == LOOKUPS // 2:
                break
        scattered = [self.rng.integers(0, self.columns.count, RUN_BLOCKS) for _ in range(LOOKUPS // 2)]
        return [
            item
            for pair in zip(found, (self.columns.key[s] for s in scattered), strict=False)
            for item in pair
        ]

    @property
    def metadata(self) -> dict[str, int]:
        """Bytes of each structure."""
        return {
            "columns": self.columns.touched_bytes,
            "keys": self.keys.nbytes,
            "tree": self.tree.touched_bytes,
            "slots": self.slots.touched_bytes,
        }


def median_ms(call: Callable[[Hashes], object], runs: list[Hashes]) -> float:
    """Median wall time of one call, each on another run."""
    spent = []
    for run in runs:
        began = time.perf_counter()
        call(run)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e3


def grow(block_count: int) -> tuple[Store, list[float], float]:
    """A grown store, the time of each step in seconds, and the most bytes per block in its second half."""
    store = Store(block_count)
    steps = []
    worst_bytes = 0.0
    gc.collect()
    gc.disable()
    while store.columns.count < block_count:
        steps.append(store.step())
        if store.columns.count > block_count // 2:
            worst_bytes = max(worst_bytes, sum(store.metadata.values()) / store.columns.count)
    gc.enable()
    return store, steps, worst_bytes


def measure(block_count: int) -> dict[str, float]:
    """Grows a store REPEATS times, and measures the last."""
    times = [grow(block_count)[1] for _ in range(REPEATS - 1)]
    store, last, worst_bytes = grow(block_count)
    steps = np.min([*times, last], axis=0)
    runs = store.runs()
    pairs = [runs[0::2], runs[1::2]]
    total = sum(store.metadata.values())
    return {
        "blocks": store.columns.count,
        "blocks_per_node": store.columns.count / store.tree.nodes.count,
        "bytes_per_block": total / store.columns.count,
        "bytes_per_block_worst": worst_bytes,
        **{f"{name}_bytes_per_block": size / store.columns.count for name, size in store.metadata.items()},
        "find_ms": max(median_ms(lambda run: store.keys.find(0, run), part) for part in pairs),
        "find_run_ms": median_ms(lambda run: store.keys.find(0, run), pairs[0]),
        "lookup_ms": max(median_ms(store.lookup, part) for part in pairs),
        "find_one_ms": median_ms(lambda run: store.keys.find(0, run[:1]), runs),
        "step_median_ms": float(np.median(steps)) * 1e3,
        "step_ms": float(steps.max()) * 1e3,
    }


def main() -> None:
    """Measures, prints a table against the limits; exit status 1 when one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="10,000,000 blocks too (a few minutes, 2 GiB)")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    results = {}
    missed = False
    for block_count in (1_000_000, 10_000_000) if arguments.large else (1_000_000,):
        result = results[block_count] = measure(block_count)
        print(f"{block_count:,} blocks, {result['blocks_per_node']:.1f} a node")
        for name, value in result.items():
            limit = LIMITS[block_count].get(name.removesuffix("_worst"))
            against = "" if limit is None else f"   limit {limit:g}   {100 * value / limit:.0f} % of it"
            over = limit is not None and value > limit
            missed |= over
            print(f"  {name:24} {value:12.3f}{against}{'   MISSED' if over else ''}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(missed)


if __name__ == "__main__":
    main()
