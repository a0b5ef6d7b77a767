"""The NVMe tier's medium: preallocated segment files, read and written past the page cache.

Knows segments, offsets, generations and what is durable; not keys, not what
is in a slot. Every method blocks; mover threads call them, several at a time
(positioned I/O on descriptors that never change).

The order that keeps the tier honest is the caller's: write(), flush(), the
index record, visible; and raise_generation() before a segment's first reuse.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.clock import Clock, SystemClock
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.files import Files, RealFiles
from prefixd_server.base.types import SLOT_ALIGNMENT_BYTES, Tier
from prefixd_server.media.aligned import aligned_buffer, is_aligned, round_up
from prefixd_server.media.nvme_files import write_header
from prefixd_server.media.nvme_format import HEADER_BYTES, INDEX_NAME, MARKER_NAME, file_bytes
from prefixd_server.media.nvme_probe import probe
from prefixd_server.media.nvme_store import StoreOpener, StoreReport
from prefixd_server.media.stopwatch import Stopwatch

SEGMENT_BYTES_DEFAULT = 256 << 20


class NvmeMedium:
    """See Medium and the module.

    Args:
        directories: one or more, each ours or empty; segments are spread over them.
        segment_count: segments in all.
        segment_bytes: bytes of a segment, a multiple of SLOT_ALIGNMENT_BYTES.
        clock: what the disk's calls are timed by.

    Raises:
        ConfigError: see StoreOpener.open.
        OSError: the disk fails.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        segment_count: int,
        segment_bytes: int = SEGMENT_BYTES_DEFAULT,
        files: Files | None = None,
        clock: Clock | None = None,
    ) -> None:
        if segment_bytes % SLOT_ALIGNMENT_BYTES or segment_count < 1 or not directories:
            raise ValueError(
                f"{segment_count} segments of {segment_bytes} bytes in {len(directories)} directories"
            )
        self._files = files or RealFiles()
        self._directories = [directory.absolute() for directory in directories]
        self.stopwatch = Stopwatch(clock or SystemClock())
        """Of every read, write and sync since the store was opened."""
        self._segment_bytes = segment_bytes
        self.segment_count = segment_count
        self.index_directory = directories[0].absolute() / INDEX_NAME
        opener = StoreOpener(self._files, directories, segment_bytes, segment_count)
        self._segments = opener.open()
        self._locks = opener.locks
        self.report: StoreReport = opener.report
        self.generations: NDArray[np.uint64] = np.zeros(segment_count, dtype=np.uint64)
        """Generation of each segment by index; what an index record must carry to count. 0: absent."""
        for segment_id, file in self._segments.items():
            self.generations[segment_id] = file.header.generation

    @property
    def tier(self) -> Tier:
        """See Medium."""
        return Tier.NVME

    @property
    def segment_bytes(self) -> int:
        """See Medium."""
        return self._segment_bytes

    @property
    def store_uuid(self) -> bytes:
        """The store that these directories make up, 16 bytes."""
        return self.report.store_uuid

    @property
    def preallocated_bytes(self) -> int:
        """Bytes of all segment files, headers included."""
        return len(self._segments) * file_bytes(self._segment_bytes)

    def present(self) -> list[int]:
        """Indexes of the segments that have a file, ascending."""
        return sorted(self._segments)

    def slot_bytes(self, segment_index: int) -> int:
        """Slot size of the segment's present use; 0 when it was never assigned."""
        return self._segments[segment_index].header.slot_bytes

    def generation(self, segment_index: int) -> int:
        """The segment's present generation."""
        return self._segments[segment_index].header.generation

    def read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        """See Medium. Aligned memory is read into directly, other memory by way of a buffer."""
        target = target.cast("B") if target.format != "B" or target.ndim != 1 else target
        if is_aligned(target):
            self._read(segment_index, offset_bytes, target)
            return
        staged = aligned_buffer(round_up(target.nbytes))
        self._read(segment_index, offset_bytes, staged)
        target[:] = staged[: target.nbytes]

    def write(self, segment_index: int, offset_bytes: int, source: memoryview) -> None:
        """See Medium. What lies between the source's end and the next 4 KiB becomes zeros.

        Not durable before flush().
        """
        source = source.cast("B") if source.format != "B" or source.ndim != 1 else source
        if not is_aligned(source):
            staged = aligned_buffer(round_up(source.nbytes))
            staged[: source.nbytes] = source
            source = staged
        fd, at = self._place(segment_index, offset_bytes, source.nbytes)
        done = 0
        with self.stopwatch.call():
            while done < source.nbytes:
                done += self._files.write_at(fd, source[done:], at + done)
        failpoint("nvme.written")

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> memoryview | None:
        """See Medium: not addressable."""
        del segment_index, offset_bytes, length_bytes
        return None

    def flush(self, segment_indexes: Iterable[int]) -> None:
        """Makes everything written to these segments durable. Raises OSError.

        After a failure nothing written since the last good flush may be trusted,
        not even when a later flush succeeds: write it again.
        """
        for segment_index in segment_indexes:
            with self.stopwatch.call():
                self._files.sync_data(self._segments[segment_index].fd)
        failpoint("nvme.flushed")

    def raise_generation(self, segment_index: int, slot_bytes: int) -> int:
        """Starts a new use of a segment: index records of earlier ones no longer count, durably.

        Returns:
            The new generation.

        Raises:
            OSError: disk may hold either generation; call again before the segment is used.
        """
        file = self._segments[segment_index]
        raised = file.header.raised(slot_bytes)
        with self.stopwatch.call():
            write_header(self._files, file.fd, raised)
        file.header = raised
        self.generations[segment_index] = raised.generation
        failpoint("nvme.generation_raised")
        return raised.generation

    def probe(self) -> None:
        """Returns when every directory is the store's still, and its disk works.

        Raises:
            OSError: ENOENT when one was unmounted or emptied, ENOSPC when one is full.
        """
        for directory in self._directories:
            with self.stopwatch.call():
                if MARKER_NAME not in self._files.names(directory):
                    raise FileNotFoundError(
                        errno.ENOENT, f"no {MARKER_NAME} there: not mounted, or emptied", str(directory)
                    )
                probe(self._files, directory)

    def close(self) -> None:
        """Closes the files. No call may be under way. Idempotent."""
        for file in self._segments.values():
            self._files.close(file.fd)
        for lock in self._locks:
            os.close(lock)
        self._segments, self._locks = {}, []

    def _read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        fd, at = self._place(segment_index, offset_bytes, target.nbytes)
        done = 0
        with self.stopwatch.call():
            while done < target.nbytes:
                got = self._files.read_at(fd, target[done:], at + done)
                if got == 0:
                    raise OSError(
                        errno.EIO, f"segment {segment_index} ends before byte {offset_bytes + done}"
                    )
                done += got

    def _place(self, segment_index: int, offset_bytes: int, length_bytes: int) -> tuple[int, int]:
        """(descriptor, offset in the file) of an extent that lies within its segment."""
        if offset_bytes % SLOT_ALIGNMENT_BYTES or not 0 <= offset_bytes <= self._segment_bytes - length_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {offset_bytes + length_bytes} of a segment of {self._segment_bytes}"
            )
        return self._segments[segment_index].fd, HEADER_BYTES + offset_bytes
