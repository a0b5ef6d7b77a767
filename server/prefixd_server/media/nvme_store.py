"""Opens the directories of the NVMe tier: adopts what is ours, makes what is missing, refuses the rest.

Nothing that we did not make is ever removed or written to: a directory is ours
by its marker, a segment file by its name *and* the store's UUID in its header.
What is in the segments is not looked at.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.files import Files, read_whole, write_whole
from prefixd_server.base.logs import logger
from prefixd_server.media.aligned import aligned_buffer
from prefixd_server.media.nvme_files import (
    allow_descriptors,
    lock_directory,
    open_direct,
    refused,
    write_header,
)
from prefixd_server.media.nvme_format import (
    GENERATION_BITS,
    HEADER_BYTES,
    MARKER_BYTES_MAX,
    MARKER_NAME,
    STORE_UUID_BYTES,
    FormatError,
    Marker,
    SegmentHeader,
    VersionError,
    decode_header,
    decode_marker,
    file_bytes,
    segment_name,
    segment_of_name,
)

HARMLESS_NAMES = frozenset({"lost+found", "LOCK", MARKER_NAME + ".tmp"})
"""What a directory that is not ours yet may hold."""
SPARE_DESCRIPTORS = 512
"""Descriptors left for sockets, memfds and libraries beside one per segment."""

_log = logger(__name__)


@dataclass(slots=True)
class SegmentFile:
    """An open segment file. The header in memory is what is durable on disk."""

    path: Path
    fd: int
    header: SegmentHeader


@dataclass(slots=True)
class StoreReport:
    """What opening found and did; lists are of segment ids, `left_alone` of paths."""

    store_uuid: bytes
    direct: bool = True
    made: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    """Files of ours whose header or length was wrong: made anew, what they held is forgotten."""
    absent: list[int] = field(default_factory=list)
    """Segments for which the disk had no space, or whose header it cannot read."""
    orphans_removed: int = 0
    left_alone: list[Path] = field(default_factory=list)


class StoreOpener:
    """One opening of the store's directories.

    Args:
        directories: at least one; each ours already, or empty.
        segment_bytes: bytes of a segment, a multiple of 4096.
        segment_count: segments in all, over all directories.
    """

    def __init__(
        self, files: Files, directories: Sequence[Path], segment_bytes: int, segment_count: int
    ) -> None:
        self._files = files
        self._directories = [directory.absolute() for directory in directories]
        self._segment_bytes = segment_bytes
        self._segment_count = segment_count
        self._block = aligned_buffer(HEADER_BYTES)
        self._found: dict[int, SegmentFile] = {}
        self._unreadable: set[int] = set()
        self.report = StoreReport(b"")
        self.locks: list[int] = []
        """Descriptors that hold the directories; whoever takes the segments closes them, too."""

    def open(self) -> dict[int, SegmentFile]:
        """Open files by segment id. On failure none stays open.

        Raises:
            ConfigError: a directory or file is foreign, or of a format not read here; names the remedy.
            OSError: the disk fails.
        """
        allow_descriptors(self._segment_count + SPARE_DESCRIPTORS)
        try:
            for directory in self._directories:
                self._files.make_directory(directory)
                self.locks.append(lock_directory(directory))
            self.report.store_uuid = self._adopt_directories()
            for directory in self._directories:
                self._scan(directory)
            self._make_missing()
        except BaseException:
            for file in self._found.values():
                self._files.close(file.fd)
            for lock in self.locks:
                os.close(lock)
            raise
        if not self.report.direct:
            _log.warning(
                "no direct I/O on this filesystem: NVMe reads and writes go through the page cache, "
                "and compete with engines for memory",
                directories=[str(directory) for directory in self._directories],
            )
        return self._found

    # -- directories ---------------------------------------------------------------------------

    def _adopt_directories(self) -> bytes:
        markers = {directory: self._marker(directory) for directory in self._directories}
        uuids = {marker.store_uuid for marker in markers.values() if marker}
        if len(uuids) > 1:
            raise refused(
                "NVME_STORES_MIXED",
                "the directories belong to different stores: "
                + ", ".join(f"{d} to {m.store_uuid.hex()}" for d, m in markers.items() if m),
                "configure the directories of one store, or empty those of the other",
            )
        uuid = uuids.pop() if uuids else secrets.token_bytes(STORE_UUID_BYTES)
        wanted = Marker(uuid, tuple(map(str, self._directories)))
        for directory, marker in markers.items():
            if marker != wanted:
                write_whole(self._files, directory / MARKER_NAME, wanted.encode())
        return uuid

    def _marker(self, directory: Path) -> Marker | None:
        names = self._files.names(directory)
        if MARKER_NAME not in names:
            strangers = sorted(set(names) - HARMLESS_NAMES)
            if strangers:
                raise refused(
                    "NVME_DIRECTORY_FOREIGN",
                    f"{directory} is not empty and has no {MARKER_NAME} (found {', '.join(strangers[:3])})",
                    "give an empty directory; prefixd does not touch what it did not make",
                )
            return None
        try:
            return decode_marker(read_whole(self._files, directory / MARKER_NAME, MARKER_BYTES_MAX))
        except VersionError as error:
            raise _wrong_version(directory / MARKER_NAME, error) from error
        except FormatError as error:
            raise refused(
                "NVME_MARKER_DAMAGED",
                f"{directory / MARKER_NAME}: {error}",
                "restore the marker, or remove everything in the directory to start empty",
            ) from error

    # -- segment files -------------------------------------------------------------------------

    def _scan(self, directory: Path) -> None:
        for name in self._files.names(directory):
            segment_id = segment_of_name(name)
            if segment_id is not None:
                try:
                    self._adopt(directory / name, segment_id)
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    self._unreadable.add(segment_id)
                    _log.warning("segment left out: it cannot be read", segment=segment_id)

    def _adopt(self, path: Path, segment_id: int) -> None:
        fd = self._open(path, os.O_RDWR)
        keep = False
        try:
            header = self._header(path, fd)
            fits = (
                segment_id < self._segment_count
                and segment_id not in self._found
                and (header is None or header.segment_bytes == self._segment_bytes)
            )
            if fits:
                header = self._mended(fd, segment_id, header)
                self._found[segment_id] = SegmentFile(path, fd, header)
                keep = True
            elif header is not None:
                self._files.remove(path)
                self.report.orphans_removed += 1
            else:
                self.report.left_alone.append(path)
                _log.warning("left alone: named like ours, but its header does not say so", path=str(path))
        finally:
            if not keep:
                self._files.close(fd)

    def _header(self, path: Path, fd: int) -> SegmentHeader | None:
        """The file's header; None when it cannot be read as one."""
        got = self._files.read_at(fd, self._block, 0)
        try:
            header = decode_header(self._block[:got])
        except VersionError as error:
            raise _wrong_version(path, error) from error
        except FormatError:
            return None
        if header.store_uuid != self.report.store_uuid:
            raise refused(
                "NVME_SEGMENT_FOREIGN",
                f"{path} belongs to store {header.store_uuid.hex()}, its directory to "
                f"{self.report.store_uuid.hex()}",
                "move the file back where it came from, or remove it",
            )
        return header

    def _mended(self, fd: int, segment_id: int, header: SegmentHeader | None) -> SegmentHeader:
        """The header, if file and header are whole; else a fresh one over a file of full length."""
        whole = header is not None and header.segment_id == segment_id
        if header is not None and whole and self._files.length(fd) == file_bytes(self._segment_bytes):
            self.report.kept.append(segment_id)
            return header
        self.report.damaged.append(segment_id)
        _log.warning("segment damaged: what it held is forgotten", segment=segment_id)
        return self._prepare(fd, segment_id)

    def _make_missing(self) -> None:
        population = Counter(file.path.parent for file in self._found.values())
        full: set[Path] = set()
        for segment_id in range(self._segment_count):
            if segment_id in self._found:
                continue
            if segment_id in self._unreadable:
                self.report.absent.append(segment_id)
                continue
            while open_directories := [d for d in self._directories if d not in full]:
                directory = min(open_directories, key=lambda d: population[d])
                if self._make(directory, segment_id):
                    population[directory] += 1
                    break
                full.add(directory)
            else:
                self.report.absent.append(segment_id)
        for directory in self._directories:
            self._files.sync_directory(directory)
        if not self._found and self._unreadable:
            raise OSError(errno.EIO, "no segment can be read", str(self._directories[0]))
        if not self._found:
            raise refused(
                "NVME_NO_SPACE",
                f"no segment of {self._segment_bytes:,} bytes fits on the disk",
                "free space, or make nvme.size or nvme.segment smaller",
            )

    def _make(self, directory: Path, segment_id: int) -> bool:
        """Makes a segment file; False when the disk is full."""
        path = directory / segment_name(segment_id)
        fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            header = self._prepare(fd, segment_id)
        except OSError as error:
            self._files.close(fd)
            with suppress(OSError):
                self._files.remove(path)
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                _log.warning("disk full: fewer segments than configured", directory=str(directory))
                return False
            raise
        self._found[segment_id] = SegmentFile(path, fd, header)
        self.report.made.append(segment_id)
        return True

    def _prepare(self, fd: int, segment_id: int) -> SegmentHeader:
        """Space first, then the header that says that it is there."""
        header = SegmentHeader(
            self.report.store_uuid, segment_id, secrets.randbits(GENERATION_BITS), self._segment_bytes, 0
        )
        self._files.allocate(fd, file_bytes(self._segment_bytes))
        write_header(self._files, fd, header)
        return header

    def _open(self, path: Path, flags: int) -> int:
        fd, direct = open_direct(self._files, path, flags)
        self.report.direct &= direct
        return fd


def _wrong_version(path: Path, error: VersionError) -> ConfigError:
    return refused(
        "NVME_FORMAT_VERSION",
        f"{path}: {error}",
        "run the release that wrote it, or remove everything in the directory to start empty",
    )
