"""DRAM segments: sealed, allocated up front, prefaulted, renewed; too much is an error with a remedy."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prefixd_server.base.config import Config, DramConfig
from prefixd_server.base.errors import ConfigError
from prefixd_server.media import dram_limits, linux, memfd, memory_limit, numa
from prefixd_server.media.dram import DramMedium
from prefixd_server.media.medium import Medium

MIB = 1 << 20


@pytest.fixture
def dram() -> Iterator[DramMedium]:
    medium = DramMedium(2 * MIB, 3)
    yield medium
    medium.close()


def mapped_by_a_client(dram: DramMedium, segment: int) -> mmap.mmap:
    """A second mapping of the same memory, as an engine has it."""
    return mmap.mmap(dram.fd(segment), dram.segment_bytes)


def resident_pages(memory: mmap.mmap) -> int:
    """Pages of a mapping that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mincore(address, len(memory), pages) == 0
    return sum(page & 1 for page in pages)


def test_a_medium_is_what_the_protocol_says(dram: DramMedium) -> None:
    medium: Medium = dram
    medium.write(1, 4096, memoryview(b"block"))
    target = memoryview(bytearray(5))
    medium.read(1, 4096, target)
    assert bytes(target) == b"block"
    assert bytes(dram.view(1, 4096, 5)) == b"block"
    assert bytes(dram.view(0, 4096, 5)) == b"\0" * 5


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (2 * MIB, 1), (2 * MIB - 4, 5), (0, 2 * MIB + 1)])
def test_a_view_beyond_the_segment_is_refused(dram: DramMedium, offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        dram.view(0, offset, length)


@pytest.mark.parametrize("length", [0, MIB, 4 * MIB])
def test_nobody_can_change_a_segments_length(dram: DramMedium, length: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(dram.fd(0), length)
    with pytest.raises(PermissionError):
        os.posix_fallocate(dram.fd(0), 0, 4 * MIB)
    assert os.fstat(dram.fd(0)).st_size == 2 * MIB


def test_nobody_can_add_a_seal(dram: DramMedium) -> None:
    fcntl = pytest.importorskip("fcntl")
    with pytest.raises(PermissionError):
        fcntl.fcntl(dram.fd(0), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_all_memory_is_taken_before_the_first_use() -> None:
    dram = DramMedium(2 * MIB, 2, prefault=False)
    assert os.fstat(dram.fd(1)).st_blocks * 512 == 2 * MIB
    assert dram.wait_prefaulted(10)
    assert dram.prefaulted_bytes == 0
    dram.close()


def test_prefaulting_ends_with_all_memory_and_changes_nothing(dram: DramMedium) -> None:
    dram.view(2, 0, 4)[:] = b"keep"
    assert dram.wait_prefaulted(10)
    assert dram.prefaulted_bytes == 6 * MIB
    assert bytes(dram.view(2, 0, 4)) == b"keep"
    assert dram.page_kind in {"pages", "transparent-huge-pages"}


def test_prefaulting_works_on_kernels_without_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, length_bytes: int, advice: int) -> None:
        if advice == linux.MADV_POPULATE_WRITE:
            raise OSError(22, "no such advice")

    monkeypatch.setattr(linux, "madvise", refuse)
    segment = memfd.Memfd(2 * MIB)
    segment.view(0, 4)[:] = b"keep"
    assert segment.prefault(0) == 2 * MIB
    assert bytes(segment.view(0, 4)) == b"keep"
    segment.close()
    assert segment.prefault(0) == 0


def test_a_renewed_segment_has_fresh_memory_and_the_old_is_gone_though_a_client_maps_it(
    dram: DramMedium,
) -> None:
    assert dram.wait_prefaulted(10)
    dram.view(0, 0, 6)[:] = b"secret"
    client = mapped_by_a_client(dram, 0)
    assert client[:6] == b"secret"
    dram.renew(0)
    assert resident_pages(client) == 0
    assert client[:6] == b"\0" * 6
    client[:5] = b"haunt"
    assert bytes(dram.view(0, 0, 6)) == b"\0" * 6
    assert dram.prefaulted_bytes == 6 * MIB
    with pytest.raises(PermissionError):
        os.ftruncate(dram.fd(0), MIB)


def test_a_view_outlives_renewal_and_closing(dram: DramMedium) -> None:
    kept = dram.view(0, 0, 4)
    dram.renew(0)
    dram.close()
    assert len(bytes(kept)) == 4
    with pytest.raises(OSError, match="closed"):
        dram.fd(0)


def test_closing_gives_descriptors_back() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    dram = DramMedium(2 * MIB, 4)
    assert dram.wait_prefaulted(10)
    assert len(list(Path("/proc/self/fd").iterdir())) > before
    dram.close()
    dram.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_more_memory_than_there_is_names_size_limit_and_remedy() -> None:
    with pytest.raises(ConfigError, match=r"dram.size = 1TiB.*lower dram.size") as refused:
        DramMedium(1 << 30, 1024)
    assert refused.value.reason == "DRAM_UNAVAILABLE"
    assert int(refused.value.metadata["limit"]) < 1 << 40


def test_memory_that_fails_half_way_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = os.posix_fallocate

    def run_out(fd: int, offset: int, length: int) -> None:
        made.append(fd)
        if len(made) > 2:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", run_out)
    with pytest.raises(ConfigError, match="No space left"):
        DramMedium(2 * MIB, 6)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_huge_pages_that_were_not_set_aside_are_refused_with_the_remedy() -> None:
    if memory_limit.free_huge_page_bytes() >= 64 * MIB:
        pytest.skip("this machine has huge pages set aside")
    with pytest.raises(ConfigError, match=r"vm\.nr_hugepages"):
        DramMedium(32 * MIB, 2, huge_pages="hugetlb")


def test_too_many_segments_for_the_open_files_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ConfigError, match=r"open files.*LimitNOFILE"):
        dram_limits.raise_descriptor_limit(2000)


def test_the_soft_limit_of_open_files_is_raised_to_what_segments_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    dram_limits.raise_descriptor_limit(1000)
    assert asked == [(4096, 4096)]


def test_memory_is_bound_to_the_nodes_and_tells_where_it_is() -> None:
    node = numa.online_nodes()[0]
    dram = DramMedium(2 * MIB, 2, numa_nodes=(node,))
    assert dram.numa_nodes in {(node,), ()}
    dram.close()


def test_a_node_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"names node 1000; choose among 0"):
        DramMedium(2 * MIB, 1, numa_nodes=(1000,))


def test_the_medium_is_built_as_configured() -> None:
    config = Config(dram=DramConfig(size_bytes=8 * MIB, segment_bytes=2 * MIB, prefault=False))
    dram = DramMedium.from_config(config)
    assert (dram.segment_bytes, dram.segment_count) == (2 * MIB, 4)
    dram.close()


def test_a_cgroup_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = tmp_path / "system.slice" / "prefixd.service"
    service.mkdir(parents=True)
    (service / "memory.max").write_text("max\n")
    (service / "memory.current").write_text("1\n")
    (service.parent / "memory.max").write_text("3000\n")
    (service.parent / "memory.current").write_text("1000\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/system.slice/prefixd.service\n")
    monkeypatch.setattr(memory_limit, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_limit, "_CGROUP_OF_SELF", own)
    assert memory_limit.available_bytes() == 2000


def test_the_page_cache_of_a_cgroup_does_not_count_as_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice that has long been up is full of it; the kernel gives it up before it refuses anything."""
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2900\n")
    (tmp_path / "memory.stat").write_text(
        "anon 1000\nfile 1900\nshmem 300\ninactive_anon 1300\ninactive_file 1500\nactive_file 100\n"
    )
    own = tmp_path / "cgroup"
    own.write_text("0::/\n")
    monkeypatch.setattr(memory_limit, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_limit, "_CGROUP_OF_SELF", own)
    assert memory_limit.available_bytes() == 1700


def test_reading_and_writing_whole_extents_round_trips(dram: DramMedium) -> None:
    data = np.random.default_rng(3).integers(0, 256, MIB, dtype=np.uint8)
    dram.write(0, MIB, memoryview(data.tobytes()))
    back = bytearray(MIB)
    dram.read(0, MIB, memoryview(back))
    assert bytes(back) == data.tobytes()
