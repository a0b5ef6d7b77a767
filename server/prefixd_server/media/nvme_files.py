"""Helpers of the NVMe tier around descriptors: direct I/O, one owner per directory, header blocks."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import time
from pathlib import Path

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.files import Files
from prefixd_server.media.aligned import aligned_buffer
from prefixd_server.media.nvme_format import HEADER_BYTES, SegmentHeader

HOLDER_DIES_WITHIN_S, HOLDER_POLL_S = 0.5, 0.005


def refused(reason: str, what: str, remedy: str) -> ConfigError:
    """The tier cannot be opened as it is configured."""
    return ConfigError(reason, f"{what}; {remedy}")


def lock_directory(directory: Path) -> int:
    """Takes the directory for this process, until the descriptor returned is closed.

    Waits a moment for its holder: of a process that dies the kernel closes one descriptor after the other,
    and whoever has its data directory already comes here next.

    Raises:
        ConfigError: ALREADY_RUNNING, when another process has it.
        OSError: it cannot be opened.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + HOLDER_DIES_WITHIN_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = error.errno in {errno.EWOULDBLOCK, errno.EACCES}
            if held and time.monotonic() < until:
                time.sleep(HOLDER_POLL_S)
                continue
            os.close(fd)
            if not held:
                raise
            raise refused(
                "ALREADY_RUNNING",
                f"{directory} is in use by another prefixd",
                "stop that one, or choose another directory",
            ) from error
        return fd


def open_direct(files: Files, path: Path, flags: int) -> tuple[int, bool]:
    """Opens a file past the page cache, or through it where the filesystem knows no other way.

    Returns:
        The descriptor, and whether it is direct. Raises OSError.
    """
    flags |= os.O_NOFOLLOW
    try:
        return files.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # A create that the filesystem refused for O_DIRECT may have left its file behind.
    return files.open(path, flags & ~os.O_EXCL), False


def write_header(files: Files, fd: int, header: SegmentHeader) -> None:
    """Writes the header block and syncs it. Raises OSError, and then disk may hold either header."""
    block = aligned_buffer(HEADER_BYTES)
    block[:] = header.encode()
    if files.write_at(fd, block, 0) != HEADER_BYTES:
        raise OSError(errno.EIO, "a header block was written in part")
    files.sync_data(fd)


def allow_descriptors(wanted: int) -> None:
    """Raises the soft limit on descriptors. ConfigError: NVME_DESCRIPTORS, when the hard one is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise refused(
            "NVME_DESCRIPTORS",
            f"{wanted} file descriptors are needed, one a segment, and the limit is {hard}",
            "raise it (ulimit -n, LimitNOFILE=), or make segments larger",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
