"""What the policy costs the loop over a full DRAM of 1,000,000 blocks, in steady state.

    python -m bench.policy_tick [--blocks N] [--seconds N] [--policy importance|lru] [--json OUT]

Conversations of a made-up workload, 100 requests a second: three in four continue
one with 16 blocks, the others begin one with 64 below a shared prompt. DRAM is
full and an NVMe tier of twice the blocks is there; what is planned to be copied down
is copied at once. Per second of the workload's clock there are 100 ticks.

    tick      what a tick plans: the line of what DRAM drops next, and what of it is to be copied
    learn     what a request's use teaches, decay and rebuilding of the index with it
    evict     taking room for what a request stores

Time of this thread. A step that is repeated at other times cannot be measured twice,
so the longest one is given beside the 99.9th percentile: on a busy machine the
longest is mostly a page fault or another's doing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.config import LeaseConfig, MigrationConfig
from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, Rows, StopReason, Tier
from prefixd_server.cache.costs import Costs
from prefixd_server.cache.next_to_go import NextToGo
from prefixd_server.cache.room import Room
from prefixd_server.cache.scheduler import Scheduler
from prefixd_server.cache.state import State
from prefixd_server.cache.watching import Watchers
from prefixd_server.cache.workload import Workload
from prefixd_server.catalog.catalog import Catalog
from prefixd_server.catalog.events import BlocksCommitted, BlocksReserved, CopyPublished, CopyStarted
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.catalog.slots import SlotTable
from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.lru import LruPolicy

from tests.support.specs import spec

BLOCK_BYTES = 4096
SEGMENT_BYTES = 256 << 20
TICKS_PER_S = 100
REQUESTS_PER_S = 100
PROMPT_COUNT, PROMPT_BLOCKS = 50, 32
NEW_BLOCKS, MORE_BLOCKS = 64, 16
REPLY_S = 3.0
TICK_LIMIT_MS_PER_S = 20.0
STEP_LIMIT_MS = 2.0


class Bench:
    """A catalog, a policy and a line, without memory, disk and threads."""

    def __init__(self, block_count: int) -> None:
        segments = -(-block_count * BLOCK_BYTES // SEGMENT_BYTES)
        tables = {
            Tier.DRAM: SlotTable(Tier.DRAM, SEGMENT_BYTES, segments),
            Tier.NVME: SlotTable(Tier.NVME, SEGMENT_BYTES, 2 * segments),
        }
        importance = ImportancePolicy()
        self.clock = ManualClock()
        self.rng = np.random.default_rng(5)
        catalog = Catalog(tables, 4 * block_count, 5, frozenset({Tier.NVME}))
        self.state = State(
            catalog=catalog,
            policy=importance,
            policies={"importance": importance, "lru": LruPolicy()},
            learner=importance,
            costs=Costs(catalog, weighs=False),
            dram=cast("Any", None),
            media={},
            movers=cast("Any", None),
            clock=self.clock,
            limits=LeaseConfig(),
            rng=self.rng,
            drain_timeout_s=1.0,
            boot_id=b"",
        )
        self.room = Room(self.state)
        self.room.next_to_go = NextToGo(self.state)
        self.workload = Workload(self.state, Watchers())
        self.claimed: set[int] = set()
        self.scheduler = Scheduler(
            self.state,
            cast("Any", None),
            cast("Any", self),
            cast("Any", self),
            cast("Any", None),
            self.room.next_to_go,
        )
        namespaces = self.state.catalog.namespaces
        self.namespace: Namespace = namespaces.open("t", spec(block_bytes=BLOCK_BYTES), 1, 0.0, 9)
        self.space = namespaces.make_space(self.namespace, 0, 0)
        self.pool = namespaces.pool("t", BLOCK_BYTES)
        self.state.catalog.tree.add_space(self.space, self.pool)
        for segment in range(2 * segments):
            tables[Tier.NVME].assign(segment, self.pool, BLOCK_BYTES, segment, 1)
        self.prompts = [self._fresh(PROMPT_BLOCKS) for _ in range(PROMPT_COUNT)]
        self.conversations: list[Hashes] = []
        self.ending: list[tuple[float, str]] = []
        self.number = 0
        self.spent: dict[str, list[float]] = {"tick": [], "learn": [], "evict": []}

    @property
    def config(self) -> MigrationConfig:
        """Stands for Migration: the scheduler's watermarks."""
        return MigrationConfig()

    def _fresh(self, count: int) -> Hashes:
        return self.rng.integers(0, 2**64, (count, 4), dtype=np.uint64)

    def timed(self, what: str, began: float) -> None:
        """Books a step."""
        self.spent[what].append(time.thread_time() - began)

    def request(self) -> None:
        """One request arrives: used, stored; and those whose replies have ended."""
        self.number += 1
        now = self.clock.now()
        if self.conversations and self.rng.random() < 0.75:
            at = int(len(self.conversations) * (1 - self.rng.random() ** 2))
            run = np.concatenate(
                [self.conversations[min(at, len(self.conversations) - 1)], self._fresh(MORE_BLOCKS)]
            )
        else:
            prompt = self.prompts[int(self.rng.integers(PROMPT_COUNT))]
            run = np.concatenate([prompt, self._fresh(NEW_BLOCKS)])
        self.conversations.append(run)
        del self.conversations[:-20_000]
        rows = self.state.catalog.find(self.space, run)
        known = int((rows == NO_ROW).argmax())
        name = ("t", "one", str(self.number))
        began = time.thread_time()
        self.workload.used(name, self.namespace, run, {(0, 0): rows[:known]})
        self.timed("learn", began)
        self._store(run[known:], int(rows[known - 1]) if known else NO_ROW)
        self.ending.append((now + REPLY_S, str(self.number)))
        while self.ending[0][0] <= now:
            ended = ("t", "one", self.ending.pop(0)[1])
            self.workload.ended(ended, int(self.rng.integers(1, 1000)), StopReason.END_TURN)

    def _store(self, missing: Hashes, above: int) -> None:
        began = time.thread_time()
        newcomers = self.workload.newcomers(self.namespace, missing, above)
        slots, _ = self.room.allocate_below(above, self.pool, len(missing), newcomers)
        self.timed("evict", began)
        if len(slots):
            self.state.apply(BlocksReserved(self.space, above, missing[: len(slots)], Tier.DRAM, slots))
            self.state.apply(BlocksCommitted(Tier.DRAM, slots, np.ones(len(slots), dtype=np.uint64)))

    def tick(self) -> None:
        """One tick's plan; what it names is copied at once."""
        began = time.thread_time()
        plan = self.scheduler.plan(self.pool)
        self.timed("tick", began)
        for rows in plan:
            self._copy_down(rows)

    def _copy_down(self, rows: Rows) -> None:
        table = self.state.catalog.slots[Tier.NVME]
        if table.free_count(self.pool) < len(rows):
            self.room.evict(Tier.NVME, self.pool, 4 * len(rows))
            for gone in self.state.catalog.departures:
                table.unlease(gone.slots)
            self.state.catalog.departures.clear()
        rows = rows[self.state.catalog.columns.slot[Tier.NVME][rows] == NO_SLOT]
        slots = table.allocate(self.pool, len(rows))
        if len(slots):
            self.state.apply(CopyStarted(Tier.NVME, rows[: len(slots)], slots))
            self.state.apply(CopyPublished(Tier.NVME, rows[: len(slots)], slots))

    def run(self, seconds: float) -> None:
        """So much of the workload's time."""
        for step in range(int(seconds * TICKS_PER_S)):
            self.clock.advance(1 / TICKS_PER_S)
            if step % (TICKS_PER_S // REQUESTS_PER_S) == 0:
                self.request()
            self.tick()

    def fill(self, block_count: int) -> None:
        """Until DRAM is full."""
        table = self.state.catalog.slots[Tier.DRAM]
        while table.counts(self.pool).resident < block_count * 0.99:
            self.clock.advance(1 / REQUESTS_PER_S)
            self.request()
            if self.number % 10 == 0:
                self.tick()


def main() -> None:
    """Measures, prints, judges; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the workload's time, measured")
    parser.add_argument("--policy", choices=("importance", "lru"), default="importance")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    bench = Bench(arguments.blocks)
    bench.fill(arguments.blocks)
    bench.state.policy = bench.state.policies[arguments.policy]
    bench.run(20.0)
    for steps in bench.spent.values():
        steps.clear()
    gc.collect()
    gc.freeze()
    gc.disable()
    bench.run(arguments.seconds)
    results: dict[str, float] = {"blocks": bench.state.catalog.columns.count}
    for name, steps in bench.spent.items():
        results[f"{name}_ms_per_s"] = 1e3 * sum(steps) / arguments.seconds
        results[f"{name}_step_p999_ms"] = 1e3 * float(np.quantile(steps, 0.999))
        results[f"{name}_step_max_ms"] = 1e3 * max(steps)
    missed = results["tick_ms_per_s"] > TICK_LIMIT_MS_PER_S
    missed |= any(results[f"{name}_step_p999_ms"] > STEP_LIMIT_MS for name in ("tick", "learn"))
    for name, value in results.items():
        print(f"  {name:24} {value:14,.3f}")
    print(
        f"limits: tick {TICK_LIMIT_MS_PER_S:g} ms a second, steps {STEP_LIMIT_MS:g} ms: "
        f"{'MISSED' if missed else 'held'}"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(missed)


if __name__ == "__main__":
    main()
