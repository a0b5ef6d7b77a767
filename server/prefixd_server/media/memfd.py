"""One DRAM segment's memory: a memfd, allocated, sealed and mapped.

Its length can never change and no further seal can be set, so a client that has
the descriptor cannot make the daemon fault beyond the end (it could punch holes;
they read as zeros, which a checksum catches). There is no name: nothing is left
behind by a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading

import numpy as np

from prefixd_server.media import linux, numa

PAGE_BYTES = mmap.PAGESIZE
PREFAULT_PIECE_BYTES = 16 << 20
"""Prefaulted in one go: a few milliseconds, so that closing never waits for long."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memfd:
    """See the module. close() may be called while others still hold views: those stay valid.

    Args:
        length_bytes: a multiple of the page size.
        hugetlb: from the huge pages that were set aside.
        advise_huge: asks for transparent huge pages.
        nodes: NUMA nodes to bind to; empty lets the kernel decide.

    Raises:
        OSError: ENOMEM or ENOSPC without memory, EINVAL for nodes that do not exist.
    """

    def __init__(
        self,
        length_bytes: int,
        *,
        hugetlb: bool = False,
        advise_huge: bool = False,
        nodes: tuple[int, ...] = (),
    ) -> None:
        self.length_bytes = length_bytes
        self._lock = threading.Lock()
        """Guards closing against a prefault under way."""
        self._open = False
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (linux.MFD_HUGETLB if hugetlb else 0)
        self._fd = os.memfd_create("prefixd-segment", flags)
        try:
            os.ftruncate(self._fd, length_bytes)
            self._map = mmap.mmap(self._fd, length_bytes)
            self._open = True
            self.address = linux.address_of(self._map)
            self._allocate(advise_huge, nodes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise

    def _allocate(self, advise_huge: bool, nodes: tuple[int, ...]) -> None:
        """Binds, advises, then takes every page: rules hold only for pages taken after them."""
        if nodes:
            numa.bind(self.address, self.length_bytes, nodes)
        linux.madvise(self.address, self.length_bytes, linux.MADV_DONTDUMP)
        if advise_huge:
            # fallocate() does not know the mapping's advice; faults do.
            with contextlib.suppress(OSError):
                linux.madvise(self.address, self.length_bytes, linux.MADV_HUGEPAGE)
                for offset in range(0, self.length_bytes, PREFAULT_PIECE_BYTES):
                    self.prefault(offset)
        os.posix_fallocate(self._fd, 0, self.length_bytes)

    @property
    def is_open(self) -> bool:
        """Whether close() was not called yet."""
        return self._open

    @property
    def fd(self) -> int:
        """The descriptor, to be sent to a client at once: it is valid until close()."""
        if not self._open:
            raise OSError(errno.EBADF, "the segment's memory is closed")
        return self._fd

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """The bytes themselves, writable."""
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self.length_bytes:
            raise ValueError(f"[{offset_bytes}, +{length_bytes}) is not within {self.length_bytes} bytes")
        return memoryview(self._map)[offset_bytes : offset_bytes + length_bytes]

    def prefault(self, offset_bytes: int) -> int:
        """Makes one piece present and writable in our page table; its bytes, 0 when closed.

        Contents do not change, so it may run while the memory is in use.
        """
        length = min(PREFAULT_PIECE_BYTES, self.length_bytes - offset_bytes)
        with self._lock:
            if not self._open:
                return 0
            try:
                linux.madvise(self.address + offset_bytes, length, linux.MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Before Linux 5.14: a read maps a page of shared memory writable.
                np.frombuffer(self._map, np.uint8, length, offset_bytes)[::PAGE_BYTES].sum()
        return length

    def discard(self) -> None:
        """Gives the pages back to the kernel, even while somebody else keeps a mapping."""
        linux.punch_hole(self.fd, 0, self.length_bytes)

    def close(self) -> None:
        """Unmaps and closes. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                # With views about, the mapping lives as long as the last of them.
                with contextlib.suppress(BufferError):
                    self._map.close()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
