"""Reads that fail: which block it is, and what of the others is good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prefixd_server.base.types import ChecksumAlgorithm
from prefixd_server.media.movers import CopyJob
from prefixd_server.media.nvme import NvmeMedium
from prefixd_server.media.nvme_format import HEADER_BYTES, segment_name

from tests.support.faulty_files import DISK_BROKEN, FaultyFiles
from tests.support.stores import SEGMENT_BYTES, SLOT_BYTES, blocks, small_store

COUNT = 4


class Memory:
    """A medium of plain memory."""

    def __init__(self) -> None:
        self.bytes = bytearray(SEGMENT_BYTES)

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> memoryview:
        return memoryview(self.bytes)[offset_bytes : offset_bytes + length_bytes]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[NvmeMedium, FaultyFiles, CopyJob, memoryview]]:
    files = FaultyFiles()
    medium = small_store(tmp_path, files=files)
    extent, sums = blocks(COUNT)
    medium.write(0, 0, extent)
    checksums = np.array(sums, dtype=np.uint64)
    job = CopyJob(medium, 0, 0, Memory(), 0, 0, SLOT_BYTES, SLOT_BYTES, checksums, ChecksumAlgorithm.XXH3_64)
    yield medium, files, job, extent
    medium.close()


@pytest.mark.parametrize("index", range(COUNT))
def test_the_block_that_cannot_be_read_is_found_and_those_before_it_are_read(
    stored: tuple[NvmeMedium, FaultyFiles, CopyJob, memoryview], index: int
) -> None:
    _, files, job, extent = stored
    files.spoil(segment_name(0), HEADER_BYTES + index * SLOT_BYTES, 512)
    result = job.perform()
    assert result.unread_from == index
    assert not result.bad.any()
    assert result.fault is not None
    assert result.fault.errno == DISK_BROKEN
    target = job.target.view(0, 0, COUNT * SLOT_BYTES)
    assert target[: index * SLOT_BYTES] == extent[: index * SLOT_BYTES]


def test_a_fault_that_passes_costs_no_block_and_is_told(
    stored: tuple[NvmeMedium, FaultyFiles, CopyJob, memoryview],
) -> None:
    _, files, job, extent = stored
    files.fail("read_at", DISK_BROKEN)
    result = job.perform()
    assert result.unread_from is None
    assert not result.bad.any()
    assert result.fault is not None
    assert job.target.view(0, 0, COUNT * SLOT_BYTES) == extent


def test_a_block_before_the_unreadable_one_is_still_verified(
    stored: tuple[NvmeMedium, FaultyFiles, CopyJob, memoryview],
) -> None:
    medium, files, job, _ = stored
    medium.write(0, SLOT_BYTES, memoryview(bytes(4096)))
    files.spoil(segment_name(0), HEADER_BYTES + 2 * SLOT_BYTES, 512)
    result = job.perform()
    assert result.bad.tolist() == [False, True, False, False]
    assert result.unread_from == 2
