"""RocksDB behind the index: opens, writes durably, iterates, rebuilds what is damaged.

Runs in the index process (child.py) and in the offline tools, never in the
daemon: the binding holds the GIL through writes and flushes. Knows keys and
values, and of their meaning only the kinds.

A damaged database is a cache's loss, not its end: one that cannot be opened is
set aside and an empty one takes its place; one that cannot be read through is
rebuilt from what can be read from both ends.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import rocksdbpy

from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.files import Files, RealFiles
from prefixd_server.index.records import KIND_STORE, RecordError, RecordVersionError, checked, unchecked
from prefixd_server.index.wal import LiveLog

FORMAT_VERSION = 1
FORMAT_VERSION_MIN = 1
LOCK_WAIT_S = 5.0
"""How long a former index process, already killed, may take to be gone."""
BATCH_RECORDS = 4096
"""Records of one write while rebuilding."""

Pair: TypeAlias = tuple[bytes, bytes]
"""Key and value."""
Change: TypeAlias = tuple[bytes, bytes | None]
"""Key and new value; None deletes."""

_STORE_KEY = bytes([KIND_STORE])
_OPTIONS: dict[str, object] = {
    "create_if_missing": True,
    # Bounds the logs that a start replays, memory and disk: two logs and a table are there beside the tables.
    "set_write_buffer_size": 4 << 20,
    "set_max_background_jobs": 2,
    "set_max_open_files": 256,
}


class StoreFault(Exception):
    """The database failed; it must be closed and opened again before it is used."""

    @property
    def disk_full(self) -> bool:
        """Whether it failed for want of room. RocksDB tells so in words alone, the system's."""
        return any(os.strerror(number) in str(self) for number in (errno.ENOSPC, errno.EDQUOT))


class StoreDamaged(StoreFault):
    """What is on disk cannot be read."""


class StoreRefused(Exception):
    """Not ours to open: of another store, or of a format not read here. The message names the remedy."""


class Store:
    """An open database.

    Args:
        directory: of the database.
        store_uuid: of the NVMe directories that it belongs to.
        read_only: changes nothing on disk; what is damaged is left as it is.
        make: whether a directory that is missing is made. Not where there was one: it was removed or
            unmounted, and what is made in its place is foreign at the next start.

    Raises:
        StoreRefused: see there.
        StoreDamaged: it cannot be opened, and read_only forbids to set it aside.
        StoreFault: the disk fails, or another process has it open.
    """

    def __init__(
        self,
        directory: Path,
        store_uuid: bytes,
        files: Files | None = None,
        *,
        read_only: bool = False,
        make: bool = True,
    ) -> None:
        self._directory = directory
        self._uuid = store_uuid
        self._files = files or RealFiles()
        self.reset_reason = ""
        """Why a new, empty database took the place of the one that was there; empty when none did."""
        self.damaged = False
        """Set once iteration met records that cannot be read; rebuild() mends it."""
        self._log = LiveLog(directory, self._files)
        if read_only:
            self._db: Any = _opened(directory, read_only=True)
            with _faults():
                if self._db.get(_STORE_KEY) is not None:
                    self._claim()
            return
        with _faults():
            self._settle(make)
        self._db = self._open()
        try:
            self._claim()
        except StoreDamaged as damage:
            self.reset_reason = str(damage)
            self.close()
            self._set_aside()
            self._db = self._open()
            self._claim()

    # -- opening -------------------------------------------------------------------------------

    def _settle(self, make: bool) -> None:
        """Ends a rebuild that was cut short, and clears RocksDB's old reports. Raises StoreFault."""
        rebuilt = self._beside("new")
        if rebuilt.exists():
            if self._directory.exists():
                shutil.rmtree(rebuilt)
            else:
                rebuilt.rename(self._directory)
        if not make and not self._directory.exists():
            raise StoreFault(
                f"{self._directory} is gone; mount its drive or put it back, restart where it is lost"
            )
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for report in self._directory.glob("LOG.old.*"):
            report.unlink()

    def _open(self) -> Any:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return _opened(self._directory)
            except StoreDamaged as damage:
                self.reset_reason = str(damage)
                self._set_aside()
            except StoreFault as fault:
                if "lock" not in str(fault).lower() or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _set_aside(self) -> None:
        """Keeps one damaged database for whoever wants to look at it."""
        aside = self._beside("damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self._directory.rename(aside)
        self._directory.mkdir(mode=0o700)

    def _claim(self) -> None:
        """Checks whose database it is; writes it down when it is new. Raises StoreDamaged, StoreRefused."""
        with _faults():
            value = self._db.get(_STORE_KEY)
        if value is None:
            content = {"format_version": FORMAT_VERSION, "store_uuid": self._uuid.hex()}
            self.write([(_STORE_KEY, checked(_STORE_KEY, json.dumps(content).encode()))])
            return
        try:
            found = _store_facts(unchecked(_STORE_KEY, value))
        except RecordVersionError as error:
            raise StoreRefused(
                f"{self._directory}: {error}; run the release that wrote it, or remove the directory "
                "to start with an empty index"
            ) from error
        except RecordError as error:
            raise StoreDamaged(f"whose index it is cannot be read: {error}") from error
        if not FORMAT_VERSION_MIN <= found["format_version"] <= FORMAT_VERSION:
            raise StoreRefused(
                f"{self._directory} has format version {found['format_version']}, this release reads "
                f"{FORMAT_VERSION_MIN} to {FORMAT_VERSION}; run the release that wrote it, or remove the "
                "directory to start with an empty index"
            )
        if found["store_uuid"] != self._uuid.hex():
            raise StoreRefused(
                f"{self._directory} belongs to store {found['store_uuid']}, the data directories to "
                f"{self._uuid.hex()}; restore the one that belongs to them, or remove the directory"
            )

    # -- writing -------------------------------------------------------------------------------

    def write(self, changes: Sequence[Change]) -> None:
        """Applies the changes, in order, all or none, and makes them durable. Raises StoreFault."""
        batch = rocksdbpy.WriteBatch()
        for key, value in changes:
            if value is None:
                batch.delete(key)
            else:
                batch.add(key, value)
        with _faults():
            self._db.write(batch)
        failpoint("index.log_written")
        with _faults():
            self._log.sync()
        failpoint("index.log_synced")

    # -- reading -------------------------------------------------------------------------------

    def pairs(self, kind: int) -> Iterator[Pair]:
        """Every record of a kind: in key order, but for those behind damage, which come from the end.

        Nothing may be written meanwhile.
        """
        start, end = bytes([kind]), bytes([kind + 1])
        last = start
        try:
            with _faults():
                for key, value in self._db.iterator("from", start, 1):
                    if key >= end:
                        return
                    last = key
                    yield key, value
        except StoreFault:
            self.damaged = True
            yield from self._from_the_end(last, end)

    def _from_the_end(self, last: bytes, end: bytes) -> Iterator[Pair]:
        """The records between damage and the end of the kind, backwards."""
        try:
            with _faults():
                for key, value in self._db.iterator("from", end, -1):
                    if key <= last:
                        return
                    if key < end:
                        yield key, value
        except StoreFault:
            return

    def get(self, key: bytes) -> bytes | None:
        """The value of a key. Raises StoreFault."""
        with _faults():
            value: bytes | None = self._db.get(key)
        return value

    def disk_bytes(self) -> int:
        """Bytes of all files of the database."""
        return sum(path.stat().st_size for path in self._directory.iterdir() if path.is_file())

    # -- mending -------------------------------------------------------------------------------

    def rebuild(self, kinds: Sequence[int]) -> int:
        """Replaces the database by one of what can still be read; how many records that is.

        Raises:
            StoreFault: the disk fails. The old database is then still in place.
        """
        rebuilt = self._beside("new")
        shutil.rmtree(rebuilt, ignore_errors=True)
        fresh = _opened(rebuilt)
        kept = 0
        for kind in (KIND_STORE, *kinds):
            kept += _copy(self.pairs(kind), fresh)
        with _faults():
            fresh.flush()
            fresh.close()
        self.close()
        self._set_aside()
        self._directory.rmdir()
        rebuilt.rename(self._directory)
        self._files.sync_directory(self._directory.parent)
        self._db = _opened(self._directory)
        self.damaged = False
        return kept

    def close(self) -> None:
        """Closes the database; everything written is durable already."""
        self._log.close()
        with _faults():
            self._db.close()

    def _beside(self, what: str) -> Path:
        return self._directory.with_name(f"{self._directory.name}.{what}")


def _store_facts(content: bytes) -> dict[str, Any]:
    """Format version and UUID of a store. Raises RecordError."""
    try:
        found = json.loads(content)
        return {"format_version": int(found["format_version"]), "store_uuid": str(found["store_uuid"])}
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"not what the store's record holds: {error!r}") from error


def _copy(pairs: Iterator[Pair], target: Any) -> int:
    count, batch = 0, rocksdbpy.WriteBatch()
    for key, value in pairs:
        batch.add(key, value)
        count += 1
        if count % BATCH_RECORDS == 0:
            target.write(batch)
            batch = rocksdbpy.WriteBatch()
    target.write(batch)
    return count


def _opened(directory: Path, *, read_only: bool = False) -> Any:
    """A database of the binding's, whose own type stubs are wrong (options, iterators) and are not used."""
    options = rocksdbpy.Option()
    for name, value in _OPTIONS.items():
        setter: Callable[[object], None] = getattr(options, name)
        setter(value)
    with _faults():
        if read_only:
            return rocksdbpy.open_for_readonly(str(directory), options, False)
        return rocksdbpy.open(str(directory), options)


@contextmanager
def _faults() -> Iterator[None]:
    """Turns the binding's exceptions and the system's into ours.

    The class that the binding raises is not among the names it exports.
    """
    try:
        yield
    except OSError as error:
        raise StoreFault(f"{error.strerror or error}: {error.filename or 'write-ahead log'}") from error
    except Exception as error:
        if type(error).__name__ != "RocksDBPyException":
            raise
        message = str(error)
        if "Corruption" in message or "Iterator completed" in message:
            raise StoreDamaged(message) from error
        raise StoreFault(message) from error
