"""Notices when processes die, by pidfds on the event loop.

The kernel marks a pidfd readable once every thread of the process is gone, and
with them its mappings: after that nothing of the process can write.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

SO_PEERPIDFD = 77
"""Since Linux 6.5: a descriptor of the peer itself, so that a reused pid cannot be mistaken for it."""
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected, as the kernel says. pid is 0 when it is in a pid namespace that we cannot see into."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The peer's credentials when it connected. Raises OSError."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(packed)
    return Peer(pid, uid)


def open_pidfd(connection: socket.socket, peer: Peer) -> int | None:
    """A pidfd of the peer; None when its pid is not visible.

    Raises:
        ProcessLookupError: the peer is dead already.
    """
    if peer.pid == 0:
        return None
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise
        if error.errno != errno.ENOPROTOOPT:
            raise ProcessLookupError(errno.ESRCH, "the peer is dead") from error
    pidfd = os.pidfd_open(peer.pid)
    if _has_hung_up(connection):
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, "the peer is dead, its pid may be another's by now")
    return pidfd


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    return bool(poll.poll(0))


class DeathWatch:
    """Calls back once for each watched process that dies. Owned by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._on_death = on_death
        self._pidfds: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._pidfds

    def __len__(self) -> int:
        return len(self._pidfds)

    def names(self) -> list[bytes]:
        """All that are watched."""
        return list(self._pidfds)

    def watch(self, name: bytes, pidfd: int) -> None:
        """Watches a process under a name; takes the pidfd over."""
        self.forget(name)
        self._pidfds[name] = pidfd
        self._loop.add_reader(pidfd, self._died, name)

    def forget(self, name: bytes) -> None:
        """Watches no longer; does nothing for a name that is not watched."""
        pidfd = self._pidfds.pop(name, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Forgets all."""
        for name in list(self._pidfds):
            self.forget(name)

    def _died(self, name: bytes) -> None:
        self.forget(name)
        self._on_death(name)
