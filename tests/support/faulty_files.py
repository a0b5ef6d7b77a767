"""A disk that fails, hangs and fills on demand: the twin of RealFiles."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from prefixd_server.base.files import RealFiles

HOLD_TIMEOUT_S = 30.0
"""A call held for so long goes on: a test that failed must not leave its threads behind."""


@dataclass
class FaultyFiles(RealFiles):
    """Fails calls by name: files.fail("write_at", errno.EIO, after=2, times=1).

    `calls` lists what was done, as (call, path of the file), in order.
    torn: a failing write has written this share of its bytes.
    always: calls that fail with this number until it is taken out again.
    """

    torn: float = 0.0
    always: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    """Set once a call is held."""
    attempts: Counter[str] = field(default_factory=Counter)
    """Calls by name, those that failed too."""
    _faults: dict[str, list[int]] = field(default_factory=dict)
    _paths: dict[int, str] = field(default_factory=dict)
    _spoiled: list[tuple[str, int, int]] = field(default_factory=list)
    _holding: frozenset[str] = frozenset()
    _go_on: threading.Event = field(default_factory=threading.Event)

    def fail(self, call: str, number: int, *, after: int = 0, times: int = 1) -> None:
        """The call fails `times` times with errno `number`, after `after` good ones."""
        self._faults[call] = [0] * after + [number] * times

    def spoil(self, name: str, offset: int, length: int) -> None:
        """These bytes of the file cannot be read any more."""
        self._spoiled.append((name, offset, offset + length))

    def replace_sectors(self) -> None:
        """What was spoiled can be read again."""
        self._spoiled.clear()

    def forget_plans(self) -> None:
        """No failure of fail() is still to come."""
        self._faults.clear()

    def hold(self, *calls: str) -> None:
        """From now on such calls hang until go_on()."""
        self.held.clear()
        self._go_on.clear()
        self._holding = frozenset(calls)

    def hold_no_more(self) -> None:
        """What hangs does until go_on(); what comes now does not."""
        self._holding = frozenset()

    def go_on(self) -> None:
        """Nothing hangs any more."""
        self._holding = frozenset()
        self._go_on.set()

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._step("open", path.name)
        fd = super().open(path, flags, mode)
        self._paths[fd] = path.name
        return fd

    def read_at(self, fd: int, target: memoryview, offset: int) -> int:
        self._step("read_at", self._paths[fd])
        for name, first, end in self._spoiled:
            if name == self._paths[fd] and offset < end and first < offset + len(target):
                raise OSError(errno.EIO, "bad sector", name)
        return super().read_at(fd, target, offset)

    def write_at(self, fd: int, source: memoryview, offset: int) -> int:
        try:
            self._step("write_at", self._paths[fd])
        except OSError:
            whole = int(len(source) * self.torn) // 512 * 512
            if whole:
                self._tear(fd, bytes(source[:whole]), offset)
            raise
        return super().write_at(fd, source, offset)

    def sync_data(self, fd: int) -> None:
        self._step("sync_data", self._paths[fd])
        super().sync_data(fd)

    def sync_directory(self, directory: Path) -> None:
        self._step("sync_directory", directory.name)
        super().sync_directory(directory)

    def allocate(self, fd: int, length: int) -> None:
        self._step("allocate", self._paths[fd])
        super().allocate(fd, length)

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename", new.name)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._step("remove", path.name)
        super().remove(path)

    def _step(self, call: str, name: str) -> None:
        self.attempts[call] += 1
        if call in self._holding:
            self.held.set()
            self._go_on.wait(HOLD_TIMEOUT_S)
        planned = self._faults.get(call)
        number = planned.pop(0) if planned else self.always.get(call, 0)
        if number:
            raise OSError(number, os.strerror(number), name)
        self.calls.append((call, name))

    @staticmethod
    def _tear(fd: int, part: bytes, offset: int) -> None:
        """A partial write through the page cache, as a cut of power leaves it."""
        again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            os.pwrite(again, part, offset)
            os.fsync(again)
        finally:
            os.close(again)


DISK_FULL = errno.ENOSPC
DISK_BROKEN = errno.EIO
