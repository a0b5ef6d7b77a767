"""The DRAM tier: one sealed memfd per segment, all allocated before the daemon serves.

Engines map the same memory (rpc/companion.py hands the descriptors out). A
segment never changes tenant with its memory: renew() gives it a fresh one.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from prefixd_server.base.config import Config
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.sizes import format_size
from prefixd_server.base.types import Tier
from prefixd_server.media import numa
from prefixd_server.media.dram_limits import (
    raise_descriptor_limit,
    refuse_too_much,
    refuse_unknown_nodes,
    too_many_descriptors,
)
from prefixd_server.media.memfd import PREFAULT_PIECE_BYTES, Memfd

ALLOCATION_THREAD_COUNT_MAX = 4
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SMAPS_ROLLUP = Path("/proc/self/smaps_rollup")


class Pinner(Protocol):
    """Who page-locks memory for a device."""

    def pin(self, address: int, length_bytes: int) -> None:
        """Page-locks memory; pinning it again does nothing."""
        ...

    def unpin(self, address: int) -> bool:
        """Ends it; whether the memory is not pinned any more.

        Where a fault of the device keeps it pinned, devices go on to copy from and to the old pages, whatever
        is mapped at that address next: it must stay mapped.
        """
        ...


class DramMedium:
    """See the module. Implements media/medium.py.

    Args:
        segment_bytes: of every segment.
        segment_count: segments.
        huge_pages: "auto", "off" or "hugetlb".
        numa_nodes: to bind to; empty lets the kernel decide.
        prefault: whether a background thread makes all memory present.

    Raises:
        ConfigError: DRAM_UNAVAILABLE, DRAM_DESCRIPTORS or NUMA_NODE_UNKNOWN, before anything is served.
    """

    tier = Tier.DRAM

    def __init__(
        self,
        segment_bytes: int,
        segment_count: int,
        *,
        huge_pages: str = "auto",
        numa_nodes: tuple[int, ...] = (),
        prefault: bool = True,
    ) -> None:
        self.segment_bytes = segment_bytes
        self.segment_count = segment_count
        self._hugetlb = huge_pages == "hugetlb"
        self._make = partial(
            Memfd,
            segment_bytes,
            hugetlb=self._hugetlb,
            advise_huge=huge_pages == "auto" and _huge_pages_on_advice(),
            nodes=numa_nodes,
        )
        refuse_unknown_nodes(numa_nodes)
        refuse_too_much(segment_bytes * segment_count, self._hugetlb)
        raise_descriptor_limit(segment_count)
        self._memory = self._allocate_all()
        self._prefaulted_bytes = [0] * segment_count
        self._prefault_wanted = prefault
        self._stopping = threading.Event()
        self._page_kind = "huge-pages" if self._hugetlb else "pages"
        self.numa_nodes = self._nodes_in_use()
        """Nodes that the memory is on, ascending; empty where the kernel does not tell."""
        self._pinner: Pinner | None = None
        self._pinning = threading.Lock()
        """Held while memory is pinned, unpinned or replaced."""
        self._still_pinned: list[memoryview] = []
        """Of memory that is replaced and could not be unpinned: keeps it mapped."""
        self._prefaulter = threading.Thread(target=self._prefault_all, name="prefault", daemon=True)
        self._prefaulter.start()

    @classmethod
    def from_config(cls, config: Config) -> DramMedium:
        """As configured."""
        dram = config.dram
        return cls(
            config.segment_bytes,
            config.segment_count,
            huge_pages=dram.huge_pages,
            numa_nodes=dram.numa_nodes,
            prefault=dram.prefault,
        )

    # -- bytes ---------------------------------------------------------------------------------

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> memoryview:
        """See Medium; always the bytes themselves."""
        return self._memory[segment_index].view(offset_bytes, length_bytes)

    def read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        """See Medium."""
        source = self.view(segment_index, offset_bytes, target.nbytes)
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def write(self, segment_index: int, offset_bytes: int, source: memoryview) -> None:
        """See Medium."""
        target = self.view(segment_index, offset_bytes, source.nbytes)
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    # -- segments ------------------------------------------------------------------------------

    def fd(self, segment_index: int) -> int:
        """The segment's descriptor. Send it in the same step of the loop: renew() closes it."""
        return self._memory[segment_index].fd

    def renew(self, segment_index: int) -> None:
        """Gives the segment fresh memory; what it held is returned to the kernel, whoever still maps it.

        Takes as long as allocating it did: for mover threads. The caller sees to it that
        nobody uses the segment or asks for its descriptor meanwhile.

        Raises:
            OSError: no memory; the segment is without memory until a later renew() succeeds.
        """
        with self._pinning:
            old = self._memory[segment_index]
            self._prefaulted_bytes[segment_index] = 0
            if old.is_open:
                if self._pinner is not None and not self._pinner.unpin(old.address):
                    self._still_pinned.append(old.view(0, self.segment_bytes))
                old.discard()
                old.close()
            fresh = self._memory[segment_index] = self._make()
            if self._pinner is not None:
                self._pinner.pin(fresh.address, self.segment_bytes)
        if self._prefault_wanted:
            self._prefault(segment_index, fresh)

    def close(self) -> None:
        """Gives all memory back; views that somebody holds stay valid until dropped. Idempotent."""
        self._stopping.set()
        self._prefaulter.join()
        for memory in self._memory:
            memory.close()

    # -- devices -------------------------------------------------------------------------------

    def pin_with(self, pinner: Pinner) -> None:
        """Has all memory page-locked, now and after each renew(). Takes as long as touching it does."""
        self._pinner = pinner
        for index in range(self.segment_count):
            with self._pinning:
                if self._pinner is pinner and self._memory[index].is_open:
                    pinner.pin(self._memory[index].address, self.segment_bytes)

    def unpin(self) -> None:
        """Ends pin_with(), before the memory or the device goes."""
        with self._pinning:
            pinner, self._pinner = self._pinner, None
            for memory in self._memory:
                if pinner is not None and memory.is_open:
                    pinner.unpin(memory.address)

    # -- facts ---------------------------------------------------------------------------------

    @property
    def prefaulted_bytes(self) -> int:
        """Memory whose first touch is behind us."""
        return sum(self._prefaulted_bytes)

    @property
    def page_kind(self) -> str:
        """What most of the memory is mapped by: "pages", "transparent-huge-pages" or "huge-pages"."""
        return self._page_kind

    def wait_prefaulted(self, timeout_s: float | None = None) -> bool:
        """Waits for the background thread to end; whether it has."""
        self._prefaulter.join(timeout_s)
        return not self._prefaulter.is_alive()

    # -- steps ---------------------------------------------------------------------------------

    def _allocate_all(self) -> list[Memfd]:
        done: list[Memfd] = []
        threads = min(ALLOCATION_THREAD_COUNT_MAX, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="allocate") as pool:
            pending = [pool.submit(self._make) for _ in range(self.segment_count)]
            try:
                done.extend(future.result() for future in pending)
            except OSError as error:
                for future in pending:
                    future.cancel()
                pool.shutdown()
                for future in pending:
                    if not future.cancelled() and future.exception() is None:
                        future.result().close()
                raise self._unavailable(error) from error
        return done

    def _unavailable(self, error: OSError) -> ConfigError:
        size = format_size(self.segment_bytes * self.segment_count)
        if error.errno == errno.EMFILE:
            return too_many_descriptors(self.segment_count, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return ConfigError(
            "DRAM_UNAVAILABLE",
            f"dram.size = {size}: the memory could not be had ({error.strerror}); lower dram.size, or raise "
            "the memory limit of this service",
            key="dram.size",
            value=size,
        )

    def _nodes_in_use(self) -> tuple[int, ...]:
        found = {numa.node_of(memory.address) for memory in self._memory}
        return tuple(sorted(node for node in found if node is not None and node >= 0))

    def _prefault_all(self) -> None:
        if self._prefault_wanted:
            for index, memory in enumerate(self._memory):
                self._prefault(index, memory)
        if (
            not self._stopping.is_set()
            and not self._hugetlb
            and _mapped_huge_bytes() * 2 > self.prefaulted_bytes > 0
        ):
            self._page_kind = "transparent-huge-pages"

    def _prefault(self, index: int, memory: Memfd) -> None:
        """Piece by piece; ends early when the memory is replaced or the tier closes."""
        done = 0
        for offset in range(0, self.segment_bytes, PREFAULT_PIECE_BYTES):
            if self._stopping.is_set() or self._memory[index] is not memory:
                return
            done += memory.prefault(offset)
            self._prefaulted_bytes[index] = done


def _huge_pages_on_advice() -> bool:
    """Whether the kernel gives transparent huge pages to shared memory that asks for them."""
    try:
        return "[advise]" in _SHMEM_ENABLED.read_text()
    except OSError:
        return False


def _mapped_huge_bytes() -> int:
    """Shared memory that this process has mapped by huge pages."""
    try:
        lines = _SMAPS_ROLLUP.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:")), 0)
