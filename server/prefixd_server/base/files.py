"""The seam for files that must outlive a crash: positioned I/O, syncs, directories.

Only what the NVMe tier needs. Everything here blocks, releases the GIL in its
system call, and raises OSError.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """The operating system's files, as far as the tier uses them. Offsets and lengths are bytes."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """A file descriptor, closed on exec."""
        ...

    def close(self, fd: int) -> None:
        """Lets go of a descriptor."""
        ...

    def read_at(self, fd: int, target: memoryview, offset: int) -> int:
        """Fills as much of `target` as one call does; 0 at the end of the file."""
        ...

    def write_at(self, fd: int, source: memoryview, offset: int) -> int:
        """Writes as much of `source` as one call does."""
        ...

    def sync_data(self, fd: int) -> None:
        """fdatasync: the data, and what is needed to read it back, survive a power cut."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Names made, renamed or removed in the directory survive a power cut."""
        ...

    def allocate(self, fd: int, length: int) -> None:
        """Gives the file `length` bytes of space; ENOSPC when there are not as many."""
        ...

    def length(self, fd: int) -> int:
        """Bytes in the file."""
        ...

    def names(self, directory: Path) -> list[str]:
        """What is in the directory, sorted."""
        ...

    def make_directory(self, directory: Path) -> None:
        """Makes the directory and those above it, mode 0700, unless they are there."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Replaces `new` in one step."""
        ...

    def remove(self, path: Path) -> None:
        """Removes a file."""
        ...


class RealFiles:
    """See Files."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """See Files."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """See Files."""
        os.close(fd)

    def read_at(self, fd: int, target: memoryview, offset: int) -> int:
        """See Files."""
        return os.preadv(fd, [target], offset)

    def write_at(self, fd: int, source: memoryview, offset: int) -> int:
        """See Files."""
        return os.pwritev(fd, [source], offset)

    def sync_data(self, fd: int) -> None:
        """See Files."""
        os.fdatasync(fd)

    def sync_directory(self, directory: Path) -> None:
        """See Files."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def allocate(self, fd: int, length: int) -> None:
        """See Files."""
        os.posix_fallocate(fd, 0, length)

    def length(self, fd: int) -> int:
        """See Files."""
        return os.fstat(fd).st_size

    def names(self, directory: Path) -> list[str]:
        """See Files."""
        return sorted(entry.name for entry in directory.iterdir())

    def make_directory(self, directory: Path) -> None:
        """See Files."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """See Files."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """See Files."""
        path.unlink()


def write_whole(files: Files, path: Path, content: bytes) -> None:
    """Replaces a small file durably: write aside, sync, rename, sync the directory. Raises OSError."""
    aside = path.with_name(path.name + ".tmp")
    fd = files.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        view, done = memoryview(content), 0
        while done < len(view):
            done += files.write_at(fd, view[done:], done)
        files.sync_data(fd)
    finally:
        files.close(fd)
    files.rename(aside, path)
    files.sync_directory(path.parent)


def read_whole(files: Files, path: Path, length_max: int) -> bytes:
    """A small file's content, at most `length_max` bytes of it. Raises OSError."""
    fd = files.open(path, os.O_RDONLY)
    try:
        buffer = memoryview(bytearray(min(length_max, files.length(fd))))
        done = 0
        while done < len(buffer) and (got := files.read_at(fd, buffer[done:], done)):
            done += got
        return bytes(buffer[:done])
    finally:
        files.close(fd)
