"""The NVMe medium: bytes, durability, generations, faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.types import Tier
from prefixd_server.media.aligned import aligned_buffer
from prefixd_server.media.nvme import NvmeMedium
from prefixd_server.media.nvme_format import HEADER_BYTES, segment_name

from tests.support.faulty_files import DISK_BROKEN, DISK_FULL, FaultyFiles
from tests.support.stores import SEGMENT_BYTES, SLOT_BYTES, blocks, small_store


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[NvmeMedium]:
    opened = small_store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[NvmeMedium, FaultyFiles]]:
    files = FaultyFiles()
    opened = small_store(tmp_path, files=files)
    files.calls.clear()
    yield opened, files
    opened.close()


def test_extents_come_back_as_they_were_written(medium: NvmeMedium) -> None:
    assert medium.tier is Tier.NVME
    extent, _ = blocks(4)
    medium.write(1, SLOT_BYTES, extent)
    again = aligned_buffer(len(extent))
    medium.read(1, SLOT_BYTES, again)
    assert again == extent


@pytest.mark.parametrize("length", [1, 4095, 5000])
def test_memory_of_any_address_and_length_is_served(medium: NvmeMedium, length: int) -> None:
    data = bytes(np.random.default_rng(0).bytes(length))
    medium.write(0, 4096, memoryview(b"x" + data)[1:])
    again = memoryview(bytearray(length + 1))[1:]
    medium.read(0, 4096, again)
    assert again == data


def test_arrays_are_served_as_bytes(medium: NvmeMedium) -> None:
    source = np.arange(1024, dtype=np.float32)
    medium.write(0, 0, memoryview(source))
    target = np.zeros(1024, dtype=np.float32)
    medium.read(0, 0, memoryview(target))
    assert (source == target).all()


@pytest.mark.parametrize(
    ("offset", "length"), [(-4096, 4096), (1, 4096), (SEGMENT_BYTES, 4096), (SEGMENT_BYTES - 4096, 8192)]
)
def test_no_extent_reaches_beyond_its_segment(medium: NvmeMedium, offset: int, length: int) -> None:
    memory = aligned_buffer(length)
    with pytest.raises(ValueError, match="of a segment"):
        medium.write(0, offset, memory)
    with pytest.raises(ValueError, match="of a segment"):
        medium.read(0, offset, memory)


def test_several_threads_read_and_write_at_once(medium: NvmeMedium) -> None:
    extents = [blocks(2, seed)[0] for seed in range(8)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            place = number * 2 * SLOT_BYTES
            again = aligned_buffer(2 * SLOT_BYTES)
            for _ in range(5):
                medium.write(0, place, extents[number])
                medium.read(0, place, again)
                assert again == extents[number]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_flush_syncs_the_segments_it_is_told_and_no_other(
    faulty: tuple[NvmeMedium, FaultyFiles],
) -> None:
    medium, files = faulty
    medium.write(1, 0, blocks(1)[0])
    medium.flush([1])
    assert files.calls == [("write_at", segment_name(1)), ("sync_data", segment_name(1))]


def test_a_raised_generation_is_on_disk_before_it_is_known(
    faulty: tuple[NvmeMedium, FaultyFiles], tmp_path: Path
) -> None:
    medium, files = faulty
    before = medium.generation(0)
    files.fail("sync_data", DISK_BROKEN)
    with pytest.raises(OSError, match="Input/output"):
        medium.raise_generation(0, SLOT_BYTES)
    assert medium.generation(0) == before
    assert medium.raise_generation(0, SLOT_BYTES) == before + 1
    assert int(medium.generations[0]) == before + 1
    assert files.calls[-2:] == [("write_at", segment_name(0)), ("sync_data", segment_name(0))]
    medium.close()
    again = small_store(tmp_path)
    assert (again.generation(0), again.slot_bytes(0)) == (before + 1, SLOT_BYTES)
    again.close()


@pytest.mark.parametrize("number", [DISK_BROKEN, DISK_FULL])
def test_a_disk_that_fails_says_so(faulty: tuple[NvmeMedium, FaultyFiles], number: int) -> None:
    medium, files = faulty
    extent, _ = blocks(1)
    for call, act in {
        "write_at": lambda: medium.write(0, 0, extent),
        "read_at": lambda: medium.read(0, 0, extent),
        "sync_data": lambda: medium.flush([0]),
    }.items():
        files.fail(call, number)
        with pytest.raises(OSError, match=r"\[Errno"):
            act()
        act()


def test_a_torn_write_leaves_the_medium_usable(faulty: tuple[NvmeMedium, FaultyFiles]) -> None:
    medium, files = faulty
    extent, _ = blocks(2)
    files.torn = 0.5
    files.fail("write_at", DISK_BROKEN)
    with pytest.raises(OSError, match="Input/output"):
        medium.write(0, 0, extent)
    again = aligned_buffer(len(extent))
    medium.read(0, 0, again)
    assert again[:SLOT_BYTES] == extent[:SLOT_BYTES]
    assert again[SLOT_BYTES:] != extent[SLOT_BYTES:]
    medium.write(0, 0, extent)
    medium.read(0, 0, again)
    assert again == extent


def test_a_stalled_write_holds_up_nobody_else(faulty: tuple[NvmeMedium, FaultyFiles]) -> None:
    medium, files = faulty
    extent, _ = blocks(1)
    medium.write(1, 0, extent)
    files.hold("write_at", "sync_data")
    writer = threading.Thread(target=medium.write, args=(0, 0, extent))
    writer.start()
    assert files.held.wait(10)
    again = aligned_buffer(len(extent))
    medium.read(1, 0, again)
    assert again == extent
    assert writer.is_alive()
    files.go_on()
    writer.join()


def test_a_file_that_was_cut_short_is_an_error_and_not_zeros(medium: NvmeMedium, tmp_path: Path) -> None:
    with (tmp_path / segment_name(0)).open("r+b") as file:
        file.truncate(HEADER_BYTES + SLOT_BYTES)
    memory = aligned_buffer(2 * SLOT_BYTES)
    with pytest.raises(OSError, match="ends before byte"):
        medium.read(0, 0, memory)


def test_bytes_outlive_the_medium(tmp_path: Path) -> None:
    extent, _ = blocks(3)
    first = small_store(tmp_path)
    first.write(1, 0, extent)
    first.flush([1])
    first.close()
    second = small_store(tmp_path)
    again = aligned_buffer(len(extent))
    second.read(1, 0, again)
    assert again == extent
    assert second.report.kept == [0, 1]
    assert second.store_uuid == first.store_uuid
    second.close()


def test_a_directory_has_one_owner(medium: NvmeMedium, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another") as raised:
        small_store(tmp_path)
    assert raised.value.reason == "ALREADY_RUNNING"


def test_an_owner_that_is_just_dying_is_waited_for(
    medium: NvmeMedium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd_server.media.nvme_files.time.sleep", lambda _: medium.close())
    small_store(tmp_path).close()
    medium.close()
    small_store(tmp_path).close()


def test_a_medium_is_closed_once(tmp_path: Path) -> None:
    medium = small_store(tmp_path)
    medium.close()
    medium.close()
    with pytest.raises(KeyError):
        medium.read(0, 0, aligned_buffer(4096))
