"""A file system that is really full: writing stops, reading goes on, and room ends it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd_server.base.accounts import Fault
from prefixd_server.base.config import NvmeConfig
from prefixd_server.cache.build import DiskSeams
from prefixd_server.cache.nvme_health import NvmeState
from prefixd_server.index.process import IndexOptions

from tests.support.node import MIB, Node, packed
from tests.support.nvme_node import cold, fill, make_engine, nvme_stats, read, read_now, start, storage_of

NVME = NvmeConfig(size_bytes=32 * MIB, segment_bytes=2 * MIB, retry_pause_s=0.05)
OPTIONS = IndexOptions(restart_pause_min_s=0.01, restart_pause_max_s=0.05)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(where)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill_up(disk: Path) -> Path:
    """Takes all room that is left."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free)
    return ballast


async def comes_to(node: Node, state: NvmeState) -> None:
    health = storage_of(node).nvme.health
    async with asyncio.timeout(30):
        while health.state is not state:
            node.clock.advance(0.05)
            await asyncio.sleep(0.005)


@pytest.mark.filterwarnings("ignore:no direct I/O")
def test_a_full_file_system_stops_writing_alone(small_disk: Path) -> None:
    node = start(small_disk, NVME, DiskSeams(index_options=OPTIONS), dram_bytes=2 * MIB)
    engine = make_engine(node)
    runs = cold(engine, fill(engine, 14))
    ballast = fill_up(small_disk)

    async def until_full() -> None:
        number = 0
        while storage_of(node).nvme.health.state is not NvmeState.FULL:
            number += 1
            assert number < 2000, "the index has room without end"
            engine.put(("more", number), *range(4))
            node.clock.advance(0.05)
            await asyncio.sleep(0.01)

    node.run(until_full())
    assert nvme_stats(node).fault_counts[Fault.DISK_FULL] == 1
    kept = [
        hashes for hashes in runs if engine.node.cache.lookup("red", engine.ref, packed(hashes)).hit_count
    ]
    for hashes in kept[:3]:
        node.run(node.cache.wait_for("red", engine.ref, packed(hashes), 10.0))
        assert read_now(engine, hashes) == len(hashes)
    ballast.unlink()
    node.run(comes_to(node, NvmeState.READY))
    after = fill(engine, 12, name="after")
    assert [read(engine, hashes) for hashes in after] == [5] * 12
    assert node.cache.check() == []
    node.close()
