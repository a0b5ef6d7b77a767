"""Makes RocksDB's write-ahead log durable: the binding has no synced write.

RocksDB hands every batch to the kernel before write() returns; the batch is in
the log with the highest number, also when that write began a new log. A log
that was left behind is either synced already, for every batch was synced before
the next, or its content is in a table file that RocksDB has synced.
"""

from __future__ import annotations

import os
from pathlib import Path

from prefixd_server.base.files import Files

_SUFFIX = ".log"


class LiveLog:
    """The log that the last batch went to. One thread uses it."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files
        self._number = -1
        self._fd = -1

    def sync(self) -> None:
        """Everything written so far survives a power cut. Raises OSError."""
        number = live_log_number(self._directory)
        if number != self._number:
            self.close()
            self._fd = self._files.open(self._directory / f"{number:06d}{_SUFFIX}", os.O_RDONLY)
            self._number = number
            self._files.sync_directory(self._directory)
        self._files.sync_data(self._fd)

    def close(self) -> None:
        """Lets go of the file. Idempotent."""
        if self._fd >= 0:
            self._files.close(self._fd)
        self._fd = self._number = -1


def live_log_number(directory: Path) -> int:
    """Number of the newest log. Raises FileNotFoundError when there is none."""
    with os.scandir(directory) as entries:
        numbers = [int(entry.name[:-4]) for entry in entries if _is_log(entry.name)]
    if not numbers:
        raise FileNotFoundError(f"no write-ahead log in {directory}")
    return max(numbers)


def _is_log(name: str) -> bool:
    return name.endswith(_SUFFIX) and name[: -len(_SUFFIX)].isdecimal()
