"""What a request log costs the drive, and what it gets for it: the real cache floor over real files.

The log is a prefix of a recorded one, the tiers are scaled down with it: blocks of
16 KiB stand for those of 512 tokens. Every write to the drive is seen at the file
seam, where the cap and the budget are asserted.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.config import NvmeConfig
from prefixd_server.base.files import RealFiles
from prefixd_server.base.types import Acquired, LeaseRelease, Tier
from prefixd_server.cache.build import DiskSeams
from prefixd_server.cache.storage import Storage
from prefixd_server.media.nvme_format import segment_of_name
from prefixd_server.simulate.traces import Trace, read_trace

from tests.support.engine import Engine
from tests.support.node import MIB, Node, packed, start_node
from tests.support.nvme_node import start, storage_of
from tests.support.repository import ROOT
from tests.support.specs import spec

LOG = ROOT / "tests/data/traces/mooncake_conversation_512.jsonl.zst"
BLOCK_BYTES = 16_384
DRAM_BYTES = 8 * MIB
DAY_S = 86_400.0
FILLED_MIN = 0.95
MEMORY = Path("/dev/shm")


@dataclass
class WatchedFiles(RealFiles):
    """Counts what is written to segments, and asserts at every write that cap and budget hold."""

    directory: Path
    cap_bytes: int
    budget_bytes: int = 0
    clock: ManualClock | None = None
    written_bytes: int = 0
    _names: dict[int, str] = field(default_factory=dict)
    _day: deque[tuple[float, int]] = field(default_factory=deque)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._names[fd] = path.name
        return fd

    def write_at(self, fd: int, source: memoryview, offset: int) -> int:
        done = super().write_at(fd, source, offset)
        if segment_of_name(self._names[fd]) is not None and offset > 0:
            self.written_bytes += done
            self._assert_budget(done)
        used = sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())
        assert used <= self.cap_bytes, f"{used} bytes on disk, the cap is {self.cap_bytes}"
        return done

    def _assert_budget(self, done: int) -> None:
        if self.clock is None:
            return
        self._day.append((self.clock.now(), done))
        while self._day[0][0] <= self.clock.now() - DAY_S:
            self._day.popleft()
        assert sum(count for _, count in self._day) <= self.budget_bytes


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is any: what is counted is not timed."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="prefixd-wear-") as made:
        yield Path(made)


def config(write_budget_bytes: int = 0) -> NvmeConfig:
    """A small tier; the clock of these tests jumps, which is no slowness of the disk's."""
    return NvmeConfig(
        size_bytes=96 * MIB,
        segment_bytes=2 * MIB,
        write_budget_bytes=write_budget_bytes,
        latency_max_s=600,
    )


def engine_of(node: Node) -> Engine:
    ref = node.cache.open_namespace("red", spec(block_bytes=BLOCK_BYTES))
    return Engine(node, node.open_session("red", "one"), ref, block_bytes=BLOCK_BYTES)


async def acquire(engine: Engine, hashes: list[bytes]) -> Acquired:
    """Waits for what NVMe has of the run, then leases it, on the node's loop."""
    if engine.node.cache.storage is not None:
        await engine.node.cache.wait_for("red", engine.ref, packed(hashes), 10.0)
    return engine.acquire(hashes)


async def migrate(storage: Storage) -> None:
    """One tick, and the copies that it begins: a disk that is fast beside the pauses between requests."""
    await storage.scheduler.tick()
    await storage.transfers.drain()


def serve(engine: Engine, hashes: list[bytes]) -> int:
    """One request: takes what is kept, stores the rest; blocks hit."""
    node = engine.node
    answer = node.run(acquire(engine, hashes))
    hits = answer.run.hit_count
    if hits < len(hashes):
        reserved = engine.reserve(hashes[hits:], hashes[hits - 1] if hits else None)
        if reserved.lease is not None:
            count = sum(extent.block_count for extent in reserved.extents)
            engine.commit(reserved, hashes[hits : hits + count])
    if answer.lease is not None:
        releases = [LeaseRelease(answer.lease.token)]
        node.run(node.cache.release("red", engine.session.session_id, releases))
    if node.cache.storage is not None:
        node.run(migrate(node.cache.storage))
    return hits


def requests(trace: Trace, count: int) -> Iterator[tuple[float, list[bytes]]]:
    """(seconds since the last one, prefix hashes) of the first requests."""
    keys = trace.hashes()
    last = 0.0
    for number in range(count):
        at = float(trace.arrival_s[number])
        yield at - last, [row.tobytes() for row in keys[trace.run(number)]]
        last = at


def test_a_full_tier_writes_each_block_that_it_takes_once_and_hits_like_one_that_may_rewrite(
    directory: Path,
) -> None:
    nvme = config()
    files = WatchedFiles(directory / "nvme", nvme.size_bytes)
    node = start(directory, nvme, DiskSeams(files=files), DRAM_BYTES)
    engine = engine_of(node)
    table = node.cache.state.catalog.slots[Tier.NVME]
    capacity = table.segment_count * (nvme.segment_bytes // BLOCK_BYTES)
    # Memory is rewritten without limit: with as much of it as is filled here, what is worth it always stays.
    filled_mib = int(FILLED_MIN * capacity) * BLOCK_BYTES // MIB
    rewriting = start_node(DRAM_BYTES + filled_mib // 2 * 2 * MIB, 2 * MIB, tenants=("red",))
    other = engine_of(rewriting)
    hits = hits_rewriting = 0
    turned_over = 0
    for pause, hashes in requests(read_trace(LOG), 8000):
        for one in (node, rewriting):
            one.clock.advance(pause)
        hits += serve(engine, hashes)
        hits_rewriting += serve(other, hashes)
        turned_over = files.written_bytes // (capacity * BLOCK_BYTES)
        if turned_over == 4:
            break
    tier = storage_of(node).nvme
    node.run(tier.flush_departures())
    # Records put and deleted, and the namespace's; those put and not deleted are there.
    admitted = (tier.index.counters.records - 1 + table.counts().resident) // 2
    assert turned_over == 4, "filled once, and turned over three times"
    assert table.counts().resident >= FILLED_MIN * capacity
    assert files.written_bytes <= 1.2 * admitted * BLOCK_BYTES
    assert hits >= 0.9 * hits_rewriting > 0
    assert node.cache.check() == []
    node.close()
    rewriting.close()


def test_two_days_of_writes_stay_within_cap_and_budget_at_every_write(directory: Path) -> None:
    budget_bytes, count = 4 * MIB, 300
    nvme = config(budget_bytes)
    files = WatchedFiles(directory / "nvme", nvme.size_bytes, budget_bytes)
    node = start(directory, nvme, DiskSeams(files=files), DRAM_BYTES)
    files.clock = node.clock
    engine = engine_of(node)
    for _, hashes in requests(read_trace(LOG), count):
        node.clock.advance(2 * DAY_S / count)
        serve(engine, hashes)
    assert budget_bytes < files.written_bytes <= 2 * budget_bytes
    assert node.cache.check() == []
    node.close()
