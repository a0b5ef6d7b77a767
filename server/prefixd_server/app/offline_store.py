"""A store as it lies on disk, with no daemon around: markers, segment files, index records.

For `check --offline` and `inspect`. Reading changes nothing; forget() is the
one thing that does. The data directory is locked meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.files import RealFiles, read_whole
from prefixd_server.index.records import (
    KEY_BYTES,
    KIND_BLOCK,
    KIND_NAMESPACE,
    RECORD_BYTES,
    RECORD_VERSION,
    Keys,
    NamespaceRecord,
    RecordError,
    Records,
    decode_namespace,
    intact,
    records_from,
)
from prefixd_server.index.store import Store, StoreDamaged, StoreFault, StoreRefused
from prefixd_server.media.aligned import aligned_buffer
from prefixd_server.media.nvme_files import lock_directory, open_direct
from prefixd_server.media.nvme_format import (
    HEADER_BYTES,
    INDEX_NAME,
    MARKER_BYTES_MAX,
    MARKER_NAME,
    FormatError,
    Marker,
    SegmentHeader,
    VersionError,
    decode_header,
    decode_marker,
    segment_of_name,
)

FORGET_RECORDS = 4096
"""Records that one durable write deletes."""


@dataclass(frozen=True, slots=True)
class SegmentOnDisk:
    """A file named like a segment. header is None when it cannot be read, or is another store's."""

    path: Path
    header: SegmentHeader | None
    length_bytes: int

    @property
    def whole(self) -> bool:
        """Whether the file has its header and its length."""
        return self.header is not None and self.length_bytes == HEADER_BYTES + self.header.segment_bytes


class OfflineStore:
    """See the module.

    Args:
        directory: the first directory of the store; its marker names the others.

    Raises:
        ConfigError: not a store, of a format not read here, in use, or its index cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        self.files = RealFiles()
        self.directory = directory.absolute()
        self.marker = self._read_marker()
        self.index_damage = ""
        """Why the index, or a part of it, cannot be read; empty when it can."""
        self.corrupt_keys: list[bytes] = []
        self.namespaces: list[NamespaceRecord] = []
        self.records: Records = records_from(b"")
        self._locks = [lock_directory(path) for path in self._present_directories()]
        self.segments = self._read_segments()
        self._read_index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lock in self._locks:
            os.close(lock)

    @property
    def index_directory(self) -> Path:
        """Where the index is."""
        return self.directory / INDEX_NAME

    def missing_directories(self) -> list[str]:
        """Directories that the marker names and that are not there."""
        return [name for name in self.marker.directories if not Path(name).is_dir()]

    def forget(self, keys: Keys, namespaces: Sequence[bytes] = ()) -> int:
        """Deletes records durably, and those that do not match their checksum; how many.

        An index that cannot be read through is rebuilt, one that cannot be opened is set aside.
        """
        store = self._open_index(read_only=False)
        try:
            if self.index_damage and not store.reset_reason:
                for _ in store.pairs(KIND_BLOCK):
                    pass
                store.rebuild((KIND_NAMESPACE, KIND_BLOCK))
            rows = keys.tobytes()
            doomed = [rows[at : at + KEY_BYTES] for at in range(0, len(rows), KEY_BYTES)]
            doomed += [*self.corrupt_keys, *namespaces]
            for start in range(0, len(doomed), FORGET_RECORDS):
                store.write([(key, None) for key in doomed[start : start + FORGET_RECORDS]])
            return len(doomed)
        finally:
            store.close()

    # -- reading -------------------------------------------------------------------------------

    def _read_marker(self) -> Marker:
        path = self.directory / MARKER_NAME
        try:
            return decode_marker(read_whole(self.files, path, MARKER_BYTES_MAX))
        except (OSError, FormatError, VersionError) as error:
            raise ConfigError(
                "NOT_A_STORE",
                f"{path}: {error}; give the first of nvme.directories, or DATA_DIR/nvme where none are named",
            ) from error

    def _present_directories(self) -> list[Path]:
        others = [Path(name) for name in self.marker.directories if Path(name) != self.directory]
        return [self.directory, *(path for path in others if path.is_dir())]

    def _read_segments(self) -> dict[int, SegmentOnDisk]:
        found: dict[int, SegmentOnDisk] = {}
        for directory in self._present_directories():
            for name in self.files.names(directory):
                segment = segment_of_name(name)
                if segment is not None:
                    found[segment] = self._read_segment(directory / name)
        return found

    def _read_segment(self, path: Path) -> SegmentOnDisk:
        fd, _ = open_direct(self.files, path, os.O_RDONLY)
        try:
            block = aligned_buffer(HEADER_BYTES)
            got = self.files.read_at(fd, block, 0)
            header: SegmentHeader | None = decode_header(block[:got])
        except (FormatError, VersionError):
            header = None
        finally:
            length = self.files.length(fd)
            self.files.close(fd)
        if header is not None and header.store_uuid != self.marker.store_uuid:
            header = None
        return SegmentOnDisk(path, header, length)

    def _open_index(self, *, read_only: bool) -> Store:
        try:
            return Store(self.index_directory, self.marker.store_uuid, read_only=read_only)
        except StoreRefused as error:
            raise ConfigError("INDEX_REFUSED", str(error)) from error
        except StoreDamaged:
            raise
        except StoreFault as error:
            raise ConfigError("INDEX_UNREADABLE", f"{self.index_directory}: {error}") from error

    def _read_index(self) -> None:
        if not self.index_directory.is_dir():
            return
        try:
            store = self._open_index(read_only=True)
        except StoreDamaged as damage:
            self.index_damage = str(damage)
            return
        try:
            self._read_namespaces(store)
            self._read_blocks(store)
        finally:
            store.close()
        if store.damaged:
            self.index_damage = "a part of the index cannot be read"

    def _read_namespaces(self, store: Store) -> None:
        for key, value in store.pairs(KIND_NAMESPACE):
            try:
                self.namespaces.append(decode_namespace(key, value))
            except RecordError:
                self.corrupt_keys.append(key)

    def _read_blocks(self, store: Store) -> None:
        rows: list[bytes] = []
        for key, value in store.pairs(KIND_BLOCK):
            if len(key) + len(value) == RECORD_BYTES and len(key) == KEY_BYTES:
                rows.append(key + value)
            else:
                self.corrupt_keys.append(key)
        if store.damaged:
            rows.sort()  # what lies behind damage came from the end
        packed = b"".join(rows)
        records = records_from(packed)
        good = intact(packed, len(rows)) & (records["version"] == RECORD_VERSION)
        self.corrupt_keys += [rows[at][:KEY_BYTES] for at in np.flatnonzero(~good)]
        self.records = records[good]
