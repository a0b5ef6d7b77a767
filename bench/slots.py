"""The slot allocator: extents per run, fresh and aged, and what its calls cost.

    python -m bench.slots [--json OUT]

Aged: a pool is filled to 95 %, then turned over ten times by runs of random
length; room is made by evicting runs tail-first, only as much as is needed, so
that cut-off runs stay behind. Victims are either the oldest runs or random ones
(use in random order: the worst that LRU can do to an allocator). Every 16th run
is a probe of 512 blocks. Limits: 4 extents fresh, 32 aged (mean). Runs of 25
blocks on average with random victims leave holes of that size and nothing else:
there a run of 512 needs 20 extents whatever the allocator does, and the case is
shown but not judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from prefixd_server.base.types import Tier
from prefixd_server.catalog.slots import SlotTable

MIB = 1 << 20
SLOT_BYTES = 64 * 1024
PROBE_BLOCKS = 512
FRESH_LIMIT = 4
AGED_LIMIT = 32
FULL_SHARE = 0.95
TURNOVERS = 10


def fresh_table(total_bytes: int, segment_bytes: int) -> SlotTable:
    """One pool over the whole tier."""
    table = SlotTable(Tier.DRAM, segment_bytes, total_bytes // segment_bytes)
    for segment in range(table.segment_count):
        table.assign(segment, 0, SLOT_BYTES, segment_id=segment + 1)
    return table


def fresh(total_bytes: int, segment_bytes: int) -> float:
    """Most extents of a run of 512, while a fresh store fills up."""
    table = fresh_table(total_bytes, segment_bytes)
    worst = 0
    while table.free_count(0) >= PROBE_BLOCKS:
        worst = max(worst, len(table.extents(table.allocate(0, PROBE_BLOCKS), None)))
    return worst


class Ageing:
    """Runs come and go in one pool."""

    def __init__(self, table: SlotTable, victims: str, lengths: Callable[[np.random.Generator], int]) -> None:
        self.table = table
        self.rng = np.random.default_rng(7)
        self.victims = victims
        self.lengths = lengths
        self.runs: list[np.ndarray] = []
        self.used = 0
        self.capacity = table.slot_count(0)
        self.row = 0
        self.allocate_us: list[float] = []
        self.free_us: list[float] = []

    def turn(self, length: int) -> int:
        """One run comes, others make room; extents of the run."""
        over = self.used + length - int(FULL_SHARE * self.capacity)
        while over > 0:
            over -= self.evict(over)
        before = time.perf_counter()
        slots = self.table.allocate(0, length)
        extents = len(self.table.extents(slots, None))
        self.allocate_us.append(1e6 * (time.perf_counter() - before))
        assert len(slots) == length
        self.table.publish(slots, np.zeros(length, dtype=np.int32))
        self.used += length
        self.runs.append(slots)
        return extents

    def evict(self, count: int) -> int:
        """Cuts the tail of one victim, at most `count` slots."""
        place = 0 if self.victims == "oldest" else int(self.rng.integers(len(self.runs)))
        run = self.runs[place]
        kept, gone = run[: max(0, len(run) - count)], run[max(0, len(run) - count) :]
        if len(kept):
            self.runs[place] = kept
        elif self.victims == "oldest":
            self.runs.pop(0)
        else:
            self.runs[place] = self.runs[-1]
            self.runs.pop()
        before = time.perf_counter()
        self.table.free(gone[::-1].copy())
        self.free_us.append(1e6 * (time.perf_counter() - before))
        self.used -= len(gone)
        return len(gone)


def aged(
    total_bytes: int, segment_bytes: int, victims: str, lengths: Callable[[np.random.Generator], int]
) -> dict[str, float]:
    """Extents of the probes after TURNOVERS turnovers, and the calls' medians."""
    pool = Ageing(fresh_table(total_bytes, segment_bytes), victims, lengths)
    moved = 0
    while moved < TURNOVERS * pool.capacity:
        length = lengths(pool.rng)
        pool.turn(length)
        moved += length
    probes: list[int] = []
    pool.allocate_us.clear()
    pool.free_us.clear()
    while moved < (TURNOVERS + 1) * pool.capacity or len(probes) < 40:
        probes.append(pool.turn(PROBE_BLOCKS))
        for _ in range(15):
            length = lengths(pool.rng)
            pool.turn(length)
            moved += length
    assert pool.table.check() == []
    return {
        "mean_extents": statistics.fmean(probes),
        "worst_extents": max(probes),
        "allocate_us": statistics.median(pool.allocate_us),
        "free_us": statistics.median(pool.free_us),
        "touched_bytes_per_slot": pool.table.touched_bytes / pool.capacity,
    }


LENGTHS: dict[str, Callable[[np.random.Generator], int]] = {
    "8..512": lambda rng: int(rng.integers(8, 513)),
    "mostly short": lambda rng: min(512, 1 + int(rng.geometric(1 / 24))),
    "1..1024 log": lambda rng: int(2 ** (10 * rng.random())),
}
SHOWN_ONLY = ("random", "mostly short")
SIZES = {"512 MiB": (512 * MIB, 16 * MIB), "8 GiB": (8192 * MIB, 256 * MIB)}


HEADING = "pool      victims  run lengths    fresh   mean  worst  allocate us  free us  B/slot"


def line(found: dict[str, Any]) -> str:
    """One row below HEADING."""
    return (
        "{pool:9} {victims:8} {lengths:13} {fresh_extents:6} {mean_extents:6.1f} {worst_extents:6} "
        "{allocate_us:12.1f} {free_us:8.1f} {touched_bytes_per_slot:7.1f}"
    ).format(**found)


def main() -> None:
    """Runs everything; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    results = []
    print(HEADING)
    for size, (total, segment) in SIZES.items():
        worst = fresh(total, segment)
        for victims in ("oldest", "random"):
            for name, lengths in LENGTHS.items():
                found: dict[str, Any] = {"pool": size, "victims": victims, "lengths": name}
                found |= {"fresh_extents": worst, **aged(total, segment, victims, lengths)}
                results.append(found)
                print(line(found))
    judged = [r for r in results if (r["victims"], r["lengths"]) != SHOWN_ONLY]
    held = all(r["fresh_extents"] <= FRESH_LIMIT and r["mean_extents"] <= AGED_LIMIT for r in judged)
    print(f"limits: fresh <= {FRESH_LIMIT}, mean aged <= {AGED_LIMIT}: {'held' if held else 'MISSED'}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
