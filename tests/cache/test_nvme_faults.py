"""The NVMe tier on a disk that fails, hangs and fills: it pauses, says so, and comes back by itself.

Engines notice misses and pending blocks; nothing is stuck, nothing leaks, no byte is wrong.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefixd_server.base.accounts import Fault
from prefixd_server.base.errors import LimitReached
from prefixd_server.base.types import SlotState, Tier
from prefixd_server.cache.build import DiskSeams
from prefixd_server.cache.nvme_health import READ_ERROR_COUNT_MAX, NvmeHealth, NvmeState
from prefixd_server.index.process import IndexOptions
from prefixd_server.media.nvme_format import HEADER_BYTES, segment_name

from tests.support.engine import Engine
from tests.support.faulty_files import DISK_BROKEN, DISK_FULL, FaultyFiles
from tests.support.faulty_index import FaultyIndex
from tests.support.node import MIB, Node, packed
from tests.support.nvme_node import (
    BLOCK_BYTES,
    NVME,
    cold,
    fill,
    make_engine,
    nvme_stats,
    place_of,
    read,
    read_now,
    start,
    storage_of,
    stored,
    until,
)

RUN = 5
"""Blocks of a run that fill() and more() put."""
LONG_S = 10 * NVME.latency_max_s
OPTIONS = IndexOptions(reply_timeout_s=1.0, restart_pause_min_s=0.01, restart_pause_max_s=0.05)


@dataclass
class Scene:
    """A node over a disk that a test spoils, an engine, and runs of which most have fallen out of DRAM."""

    node: Node
    files: FaultyFiles
    index: FaultyIndex
    engine: Engine
    runs: list[list[bytes]]

    @property
    def health(self) -> NvmeHealth:
        return storage_of(self.node).nvme.health

    def count(self, fault: Fault) -> int:
        """As GetStats tells it."""
        return nvme_stats(self.node).fault_counts[fault]

    def comes_to(self, state: NvmeState) -> None:
        """Waits for a state of the tier while the clock goes on."""
        self.comes(lambda: self.health.state is state)

    def comes(self, happened: Callable[[], bool]) -> None:
        """Waits for something while the clock goes on, ten times as fast as the machine's."""

        async def waiting() -> None:
            async with asyncio.timeout(20):
                while not happened():
                    self.node.clock.advance(0.05)
                    await asyncio.sleep(0.005)

        self.node.run(waiting())

    def more(self, name: str, runs: int = 16) -> list[list[bytes]]:
        """Puts more runs than DRAM holds, without waiting for any to be demoted."""
        hashes = [self.engine.put((name, number), *range(4)) for number in range(runs)]
        self.node.run(asyncio.sleep(0.1))
        return hashes

    def ask(self, hashes: list[bytes]) -> int:
        """As read(), also while nothing is demoted."""
        self.node.run(self.node.cache.wait_for("red", self.engine.ref, packed(hashes), 10.0))
        return read_now(self.engine, hashes)

    def known(self, hashes: list[bytes]) -> int:
        """Blocks of a run that are kept in any tier."""
        return len(hashes) - self.node.cache.lookup("red", self.engine.ref, packed(hashes)).miss_count

    def nothing_is_under_way(self) -> bool:
        """No slot is on its way, and no lease is left but those that hold a record's slot."""
        for table in self.node.cache.state.catalog.slots.values():
            if (table.state == SlotState.RESERVED).any():
                return False
        dram = self.node.cache.state.catalog.slots[Tier.DRAM]
        nvme = self.node.cache.state.catalog.slots[Tier.NVME]
        return dram.lease_total() == 0 and int(nvme.leases.max(initial=0)) <= 1

    def settles(self) -> None:
        """Everything begun has ended, and the books balance."""
        self.node.run(until(self.nothing_is_under_way))
        assert self.node.cache.check() == []


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    files, index = FaultyFiles(), FaultyIndex()
    disk = DiskSeams(files=files, index_options=OPTIONS, open_index=index.open)
    node = start(tmp_path, NVME, disk, dram_bytes=2 * MIB)
    engine = make_engine(node)
    made = Scene(node, files, index, engine, fill(engine, 14))
    yield made
    files.go_on()
    files.always.clear()
    index.disk_full = False
    made.comes_to(NvmeState.READY)
    made.settles()
    node.close()


# -- errors ----------------------------------------------------------------------------------------


def test_a_block_that_cannot_be_read_is_a_miss_and_the_blocks_before_it_hit(scene: Scene) -> None:
    hashes = cold(scene.engine, scene.runs)[0]
    segment, position = place_of(scene.engine, hashes[2])
    scene.files.spoil(segment_name(segment), HEADER_BYTES + position * BLOCK_BYTES, BLOCK_BYTES)
    assert read(scene.engine, hashes) == 2
    assert scene.engine.hits(hashes) == 2
    assert scene.count(Fault.UNREADABLE) == 1
    assert scene.count(Fault.IO_ERROR) == 1
    assert scene.health.state is NvmeState.READY
    assert [read(scene.engine, other) for other in cold(scene.engine, scene.runs)[:3]] == [RUN] * 3


def test_a_read_that_succeeds_the_second_time_costs_nothing(scene: Scene) -> None:
    hashes = cold(scene.engine, scene.runs)[0]
    scene.files.fail("read_at", DISK_BROKEN)
    assert read(scene.engine, hashes) == RUN
    assert scene.count(Fault.IO_ERROR) == 1
    assert scene.count(Fault.UNREADABLE) == 0


def test_a_disk_whose_every_read_fails_is_paused_and_keeps_what_it_has(scene: Scene) -> None:
    runs = cold(scene.engine, scene.runs)
    scene.files.always["read_at"] = DISK_BROKEN
    assert [scene.ask(hashes) for hashes in runs] == [0] * len(runs)
    assert scene.health.state is NvmeState.PAUSED
    assert "reads failed in a row" in nvme_stats(scene.node).state_reason
    assert scene.count(Fault.IO_ERROR) >= READ_ERROR_COUNT_MAX
    known = sum(scene.known(hashes) for hashes in runs)
    assert known >= RUN * (len(runs) - READ_ERROR_COUNT_MAX)
    scene.files.always.clear()
    scene.comes_to(NvmeState.READY)
    assert nvme_stats(scene.node).state_reason == ""
    assert sum(read(scene.engine, hashes) for hashes in runs) == known


@pytest.mark.parametrize("call", ["write_at", "sync_data"])
def test_a_demotion_that_the_disk_refuses_leaks_nothing_and_is_done_again(scene: Scene, call: str) -> None:
    before = stored(scene.node)
    scene.files.always[call] = DISK_BROKEN
    scene.more("refused")
    assert scene.health.state is NvmeState.PAUSED
    scene.settles()
    assert stored(scene.node) <= before
    assert scene.count(Fault.IO_ERROR) >= 1
    del scene.files.always[call]
    scene.comes_to(NvmeState.READY)
    runs = fill(scene.engine, 12, name="after")
    assert [read(scene.engine, hashes) for hashes in runs] == [RUN] * 12


def test_probes_that_fail_come_less_and_less_often(scene: Scene) -> None:
    scene.files.always |= {"write_at": DISK_BROKEN, "allocate": DISK_BROKEN}
    scene.more("refused")
    assert scene.health.state is NvmeState.PAUSED

    async def probes_within(seconds: float) -> int:
        before = scene.files.attempts["allocate"]
        for _ in range(round(seconds / 0.05)):
            scene.node.clock.advance(0.05)
            await scene.health.step()
        return scene.files.attempts["allocate"] - before

    early = scene.node.run(probes_within(3.0))
    late = scene.node.run(probes_within(3.0))
    assert early >= 4
    assert late <= 1


# -- a disk that hangs -----------------------------------------------------------------------------


def hang(scene: Scene, hashes: list[bytes]) -> asyncio.Task[None]:
    """Has a read of the run hang, and somebody wait for it."""
    scene.files.hold("read_at")
    waiter = scene.node.loop.create_task(
        scene.node.cache.wait_for("red", scene.engine.ref, packed(hashes), 600.0)
    )
    scene.node.run(until(scene.files.held.is_set))
    return waiter


def test_a_disk_that_hangs_is_noticed_while_it_hangs_and_nobody_waits_for_it(scene: Scene) -> None:
    hashes = cold(scene.engine, scene.runs)[0]
    waiter = hang(scene, hashes)
    assert scene.health.state is NvmeState.READY
    scene.node.clock.advance(LONG_S)
    scene.node.run(until(waiter.done))
    assert scene.health.state is NvmeState.PAUSED
    assert "nvme.latency_max" in nvme_stats(scene.node).state_reason
    assert scene.count(Fault.SLOW) == 1
    answer = scene.engine.acquire(hashes)
    assert (answer.run.hit_count, answer.run.pending_count) == (0, RUN)
    assert scene.ask(cold(scene.engine, scene.runs)[1]) == 0
    scene.files.go_on()
    scene.comes_to(NvmeState.READY)
    assert read(scene.engine, hashes) == RUN


def test_while_the_disk_hangs_memory_is_served(scene: Scene) -> None:
    """Lookups, acquires, stores, verifications and copies in memory have other threads."""
    hashes = cold(scene.engine, scene.runs)[0]
    waiter = hang(scene, hashes)
    warm = scene.engine.put("warm", *range(4))
    began = time.monotonic()
    for _ in range(100):
        assert scene.engine.hits(warm) == RUN
        assert read_now(scene.engine, warm) == RUN
    assert time.monotonic() - began < 10, "each waits for a disk that hangs"

    async def got() -> int:
        stream = scene.node.cache.begin_get("red", scene.engine.ref, 0, 0, packed(warm))
        blocks = [len(view) async for _, _, view in stream]
        stream.close()
        return len(blocks)

    assert scene.node.run(got()) == RUN
    assert not waiter.done()
    scene.files.go_on()
    scene.node.run(until(waiter.done))
    assert read_now(scene.engine, hashes) == RUN


@pytest.mark.parametrize("call", ["write_at", "sync_data"])
def test_a_demotion_that_hangs_ends_when_the_disk_goes_on(scene: Scene, call: str) -> None:
    scene.files.hold(call)
    scene.more("hung")
    assert scene.files.held.wait(10)
    scene.node.clock.advance(LONG_S)
    scene.comes_to(NvmeState.PAUSED)
    # DRAM goes on by itself: what finds no place on NVMe is dropped.
    later = scene.more("meanwhile")
    assert scene.engine.hits(later[-1]) == RUN
    scene.files.go_on()
    scene.comes_to(NvmeState.READY)
    scene.settles()


def test_a_namespace_that_is_dropped_while_its_first_blocks_are_written_leaves_nothing(scene: Scene) -> None:
    other = make_engine(scene.node, model="other")
    scene.files.hold("write_at")
    for number in range(16):
        other.put(("other", number), *range(4))
    scene.node.run(until(scene.files.held.is_set))
    scene.node.run(scene.node.cache.drop_namespace("red", other.ref))
    scene.node.settle()
    scene.files.go_on()
    runs = fill(scene.engine, 12, name="after")
    assert [read(scene.engine, hashes) for hashes in runs] == [RUN] * 12
    scene.node.cache.raise_if_broken()
    scene.settles()


def test_a_slow_call_that_ended_before_anybody_looked_counts_too(scene: Scene) -> None:
    hashes = cold(scene.engine, scene.runs)[0]
    waiter = hang(scene, hashes)
    scene.node.clock.advance(LONG_S)
    scene.files.go_on()
    scene.node.run(until(waiter.done))
    scene.node.run(until(lambda: scene.count(Fault.SLOW) == 1))


# -- a disk that is full ---------------------------------------------------------------------------


def test_a_full_disk_stops_demotion_and_reads_go_on_until_there_is_room(scene: Scene) -> None:
    runs = cold(scene.engine, scene.runs)
    scene.index.disk_full = True
    scene.files.always["allocate"] = DISK_FULL
    scene.more("no room")
    scene.comes_to(NvmeState.FULL)
    before = stored(scene.node)
    assert "No space left" in nvme_stats(scene.node).state_reason
    scene.more("no room either")
    assert stored(scene.node) <= before
    assert [scene.ask(hashes) for hashes in runs[:5]] == [RUN] * 5
    assert scene.health.state is NvmeState.FULL
    assert scene.count(Fault.DISK_FULL) == 1
    scene.files.always.clear()
    scene.index.disk_full = False
    scene.comes_to(NvmeState.READY)
    assert [read(scene.engine, hashes) for hashes in fill(scene.engine, 12, name="room again")] == [RUN] * 12


def test_a_write_without_room_is_a_full_disk_and_no_broken_one(scene: Scene) -> None:
    scene.files.always |= {"write_at": DISK_FULL, "allocate": DISK_FULL}
    scene.more("no room")
    assert scene.health.state is NvmeState.FULL
    assert scene.count(Fault.IO_ERROR) == 0


# -- an index that dies ----------------------------------------------------------------------------


def test_an_index_that_dies_pauses_the_tier_until_another_has_opened_it(scene: Scene) -> None:
    pid = storage_of(scene.node).nvme.index.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    scene.node.run(until(lambda: scene.health.state is NvmeState.PAUSED))
    assert "index process" in nvme_stats(scene.node).state_reason
    scene.comes_to(NvmeState.READY)
    assert scene.index.opened >= 2
    assert scene.count(Fault.INDEX_FAULT) >= 1
    assert [read(scene.engine, hashes) for hashes in fill(scene.engine, 12, name="after")] == [RUN] * 12


def test_a_directory_that_vanishes_pauses_the_tier_until_it_is_back_and_nothing_is_made_in_its_place(
    scene: Scene, tmp_path: Path
) -> None:
    """A drive that was unmounted, or somebody who tidied up."""
    hashes = cold(scene.engine, scene.runs)[0]
    (tmp_path / "nvme").rename(tmp_path / "elsewhere")
    scene.more("late")
    scene.comes(lambda: storage_of(scene.node).nvme.health.state is NvmeState.PAUSED)
    # Several pauses before a probe, and several new index processes.
    opened = scene.index.opened
    until_s = scene.node.clock.now() + 10 * NVME.retry_pause_s
    scene.comes(lambda: scene.index.opened >= opened + 3 and scene.node.clock.now() > until_s)
    assert scene.health.state is NvmeState.PAUSED
    assert "is gone" in nvme_stats(scene.node).state_reason
    assert not (tmp_path / "nvme").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "nvme")
    scene.comes_to(NvmeState.READY)
    assert read(scene.engine, hashes) == RUN


def test_an_index_that_hangs_is_replaced(scene: Scene) -> None:
    pid = storage_of(scene.node).nvme.index.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    scene.more("unrecorded")
    # A disk that is slow for a moment pauses the tier, too: what counts is the next process.
    scene.comes(lambda: scene.index.opened >= 2)
    assert scene.count(Fault.INDEX_FAULT) >= 1
    scene.comes_to(NvmeState.READY)
    scene.settles()


def test_a_queue_that_is_full_is_no_fault(scene: Scene) -> None:
    scene.health.failed(LimitReached("MOVERS_BUSY", "copies are waiting", limit=1))
    assert scene.health.state is NvmeState.READY
