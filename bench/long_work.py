"""How long the largest requests, and a check of 1,000,000 blocks, keep the event loop from others.

    python -m bench.long_work [--blocks N] [--json OUT]

A cache floor over a DRAM tier of that many blocks of 4 KiB, filled with runs of 64
of which half continue another. Each kind of work is driven a turn at a time, through
the service where a request has many entries; a turn's time is this thread's. The
longest turn must not be another process's doing: each kind is repeated REPEATS times,
and the least of the longest turns counts.

Not here: Lookup, Acquire and Commit, which are one step each by design.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.base.config import LeaseConfig
from prefixd_server.base.types import HASH_COUNT_MAX, Hashes
from prefixd_server.cache.checking import Checking
from prefixd_server.cache.evicting import Evicting
from prefixd_server.rpc import answers
from prefixd_server.rpc.cache_service import CacheService
from prefixd_server.rpc.seat import Seat

from tests.support.node import Node, start_node
from tests.support.specs import spec

BLOCK_BYTES = 4096
SEGMENT_BYTES = 256 << 20
RUN_BLOCKS = 64
REPEATS = 3
LIMIT_MS = 2.0
TENANT = "red"


class Bench:
    """The cache floor, its service, and one engine."""

    def __init__(self, node: Node, block_count: int) -> None:
        self.node = node
        self.rng = np.random.default_rng(7)
        self.service = CacheService(node.cache, Seat(TENANT, True, "/unused"), LeaseConfig())
        self.session = {"session_id": node.open_session(TENANT, "one").session_id}
        self.name = node.cache.open_namespace(TENANT, spec(block_bytes=BLOCK_BYTES))
        self.ref = {"namespace": answers.namespace_ref(self.name)}
        self.block_count = block_count
        self.fill()

    def fill(self) -> None:
        """Stores runs until as many blocks are kept."""
        tails: list[Hashes] = []
        while self.kept_count + RUN_BLOCKS <= self.block_count:
            run = self.fresh(RUN_BLOCKS)
            goes_on = tails and self.rng.random() < 0.5
            self.store(run, tails[int(self.rng.integers(len(tails)))] if goes_on else None)
            tails.append(run[-1:].copy())

    @property
    def kept_count(self) -> int:
        """Blocks that are kept."""
        return self.node.cache.state.catalog.columns.count

    def fresh(self, count: int) -> Hashes:
        """Keys that nobody has."""
        return self.rng.integers(0, 2**64, (count, 4), dtype=np.uint64)

    def store(self, run: Hashes, parent: Hashes | None = None) -> None:
        """Reserves and commits a run, whatever its bytes."""
        ids = (TENANT, self.session["session_id"])
        reserved = self.node.cache.reserve(*ids, self.name, 0, 0, parent, run, None)
        if reserved.lease is not None:
            count = sum(extent.block_count for extent in reserved.extents)
            self.node.cache.commit(*ids, reserved.lease.token, 0, np.ones(count, dtype=np.uint64))

    # -- work: what it is measured on is made before it is yielded -----------------------------

    def check(self) -> Iterator[object]:
        """Everything."""
        yield from Checking(self.node.cache.state, self.node.cache.prefetching.holds).steps()

    def reserve(self) -> Iterator[object]:
        """A run as long as may be."""
        request = wire.ReserveRequest(
            **self.session, **self.ref, block_hashes=keys(self.fresh(HASH_COUNT_MAX))
        )
        return turns(self.service.reserve(request))

    def abort(self) -> Iterator[object]:
        """The same, given up."""
        ids = (TENANT, self.session["session_id"])
        run = self.fresh(HASH_COUNT_MAX)
        reserved = self.node.cache.reserve(*ids, self.name, 0, 0, None, run, None)
        token = b"" if reserved.lease is None else reserved.lease.token
        return turns(self.service.abort(wire.AbortRequest(**self.session, token=token)))

    def release(self) -> Iterator[object]:
        """As many leases as may be, of 64 blocks each."""
        run = self.fresh(RUN_BLOCKS)
        self.store(run)
        ids = (TENANT, self.session["session_id"], self.name)
        taken = [self.node.cache.acquire(*ids, run, 0, (0,), None).lease for _ in range(4096)]
        releases = [wire.LeaseRelease(token=lease.token) for lease in taken if lease is not None]
        return turns(self.service.release(wire.ReleaseRequest(**self.session, releases=releases)))

    def report(self) -> Iterator[object]:
        """As many reports as may be, of 16 blocks each."""
        run = keys(self.fresh(16))
        common = {**self.ref, "phase": wire.REQUEST_PHASE_STARTED, "block_hashes": run}
        names = (str(self.rng.integers(1 << 60)) for _ in range(1024))
        reports = [wire.UsageReport(request_id=name, **common) for name in names]
        return turns(self.service.report_usage(wire.ReportUsageRequest(**self.session, reports=reports)))

    def evict(self) -> Iterator[object]:
        """The whole namespace."""
        self.fill()
        return self._evicting()

    def _evicting(self) -> Iterator[object]:
        yield from Evicting(self.node.cache.state).evict(TENANT, self.name, None, 0)


def keys(hashes: Hashes) -> list[bytes]:
    """As on the wire."""
    return [row.tobytes() for row in hashes]


def turns(call: Coroutine[Any, Any, Any]) -> Iterator[object]:
    """A call that waits for nothing but its next turn."""
    yield from call.__await__()


def longest_ms(work: Callable[[], Iterator[object]]) -> tuple[float, float, int]:
    """(the least of the longest turns, all turns of that time, how many), in thread time."""
    best = (float("inf"), 0.0, 0)
    for _ in range(REPEATS):
        spent = []
        steps = work()
        gc.collect()
        gc.disable()
        while True:
            began = time.thread_time()
            ended = next(steps, steps) is steps
            spent.append(time.thread_time() - began)
            if ended:
                break
        gc.enable()
        best = min(best, (1e3 * max(spent), 1e3 * sum(spent), len(spent)))
    return best


def main() -> None:
    """Measures, prints a table against the limit; exit status 1 when it is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    size = -(-arguments.blocks * BLOCK_BYTES // SEGMENT_BYTES) * SEGMENT_BYTES
    results = {}
    missed = False
    leases = LeaseConfig(ttl_max_s=1000.0)
    with closing(start_node(size, SEGMENT_BYTES, leases, (TENANT,))) as node:
        bench = Bench(node, arguments.blocks)
        print(f"{bench.kept_count:,} blocks; limit {LIMIT_MS:g} ms a turn")
        for work in (bench.check, bench.reserve, bench.abort, bench.release, bench.report, bench.evict):
            longest, total, count = longest_ms(work)
            results[work.__name__] = {"longest_ms": longest, "total_ms": total, "turns": count}
            missed |= longest > LIMIT_MS
            print(
                f"  {work.__name__:10} longest {longest:6.2f} ms of {count:5} turns, {total:9.1f} ms in all"
            )
    print("MISSED" if missed else "held")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(missed)


if __name__ == "__main__":
    main()
