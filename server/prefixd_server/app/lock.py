"""One daemon per socket and per data directory, by flock; what a dead one left is removed under the lock.

The kernel lets go of a flock when its holder dies, so a lock can neither be
stale nor be stolen. The file stays behind, with the pid of its last holder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

from prefixd_server.base.config import config_error
from prefixd_server.base.errors import PrefixdError
from prefixd_server.rpc.seat import companion_path, staging_directory

HOLDER_WRITES_WITHIN_S = 0.5
"""Between taking the lock and writing the pid lie microseconds, on a busy machine more."""
HOLDER_POLL_S = 0.005


class AlreadyRunning(PrefixdError):
    """Another daemon holds the lock."""


class Lock:
    """An exclusive lock on a file, from acquire() to release() or the process's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    @property
    def is_held(self) -> bool:
        """Whether we hold it."""
        return self._fd >= 0

    def acquire(self) -> None:
        """Takes the lock and writes our pid into the file.

        Raises:
            AlreadyRunning: names the holder.
            ConfigError: the file cannot be made.
        """
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise config_error("lock", str(self.path), "", f"cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder_of(fd)
            os.close(fd)
            raise AlreadyRunning(
                "ALREADY_RUNNING",
                f"{self.path} is held by the prefixd with pid {holder}; stop that one, or choose another "
                "socket or data directory",
                pid=holder,
                path=self.path,
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Lets go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder_of(fd: int) -> str:
    """The pid in a lock file that another holds; waits a moment for a holder that has just taken it.

    Until that one has written, the file is empty or names a holder that is dead.
    """
    deadline = time.monotonic() + HOLDER_WRITES_WITHIN_S
    while True:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        if (text.isdecimal() and _is_alive(int(text))) or time.monotonic() > deadline:
            return text or "unknown"
        time.sleep(HOLDER_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def socket_lock(socket: Path) -> Lock:
    """The lock of a socket."""
    return Lock(socket.with_name(socket.name + ".lock"))


def data_dir_lock(data_dir: Path) -> Lock:
    """The lock of a data directory."""
    return Lock(data_dir / "LOCK")


def remove_sockets(socket: Path, *, published: bool = True) -> None:
    """Removes a socket, its companion and what was being made of them; the caller holds the lock.

    Args:
        published: False leaves those that another daemon still listens on, to be replaced by rename.

    Raises:
        ConfigError: something else than a socket is in the way.
    """
    for path in (socket, companion_path(socket)):
        shutil.rmtree(staging_directory(path), ignore_errors=True)
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise config_error("configuration", "socket", path, "is there already and is not a socket")
            if published:
                path.unlink()
        except FileNotFoundError:
            continue
