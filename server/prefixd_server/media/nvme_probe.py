"""Asks a directory's disk whether it works again: room, a write, a sync, a read, each a little.

The probe's file is its own: nothing of the store is written to.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from prefixd_server.base.files import Files
from prefixd_server.media.aligned import aligned_buffer
from prefixd_server.media.nvme_files import open_direct
from prefixd_server.media.nvme_format import HEADER_BYTES

PROBE_NAME = "probe.tmp"
PROBE_ROOM_BYTES = 1 << 20
"""What a disk that was full must have again: the index goes on with no less."""


def probe(files: Files, directory: Path) -> None:
    """Returns when the disk took and gave back a block. Raises OSError: ENOSPC when it is (still) full."""
    path = directory / PROBE_NAME
    fd, _ = open_direct(files, path, os.O_RDWR | os.O_CREAT)
    try:
        files.allocate(fd, PROBE_ROOM_BYTES)
        sent, got = aligned_buffer(HEADER_BYTES), aligned_buffer(HEADER_BYTES)
        sent[:] = secrets.token_bytes(HEADER_BYTES)
        files.write_at(fd, sent, 0)
        files.sync_data(fd)
        files.read_at(fd, got, 0)
        if got != sent:
            raise OSError(errno.EIO, "the disk gave back other bytes than it took", str(path))
    finally:
        files.close(fd)
        files.remove(path)
