"""The companion socket of one tenant: hands segments out, and notices when processes die.

docs/companion.md is its protocol; companion_connection.py speaks it. A process's
death is watched from its hello on until it happens or stops to matter, whether
or not its connection still stands: slots in quarantine wait for it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from prefixd_server.base.errors import LimitReached, NotFound, StateConflict
from prefixd_server.base.logs import logger
from prefixd_server.rpc import companion_packets as packets
from prefixd_server.rpc.companion_connection import CompanionConnection
from prefixd_server.rpc.deaths import DeathWatch, open_pidfd, peer_of
from prefixd_server.rpc.sockets import bind_unix

HANDSHAKE_TIMEOUT_S = 5.0
CONNECTION_COUNT_MAX = 2048
"""Open connections of one tenant: twice as many as the default bound on its sessions."""
ACCEPT_COUNT_MAX = 64
"""Connections accepted in one step of the loop."""
ACCEPT_PAUSE_S = 1.0
"""How long to wait when the process has no descriptors left."""

log = logger(__name__)


class Companions(Protocol):
    """What the companion socket asks and tells of the cache floor, on the event loop."""

    def attach(self, session_id: bytes, tenant: str, pid: int, uid: int) -> None:
        """A process shows itself for its session. Raises NotFound when the session is not open."""
        ...

    def segment_fd(self, tenant: str, segment_id: int) -> tuple[int, int]:
        """(descriptor, length in bytes), to be sent at once. Raises NotFound SEGMENT_UNKNOWN."""
        ...

    def is_remembered(self, session_id: bytes) -> bool:
        """Whether the session is open, or something still waits for its process's death."""
        ...

    def companion_lost(self, session_id: bytes) -> None:
        """The session's connection is gone; its process may live on."""
        ...

    def process_dead(self, session_id: bytes) -> None:
        """The session's process is dead: nothing of it can write any more."""
        ...


class Companion:
    """See the module. open() ... close(), both on the event loop.

    Args:
        path: of the socket; the caller holds the lock that makes it ours, and removes it in the end.
        tenant: whom everybody on this socket is.
        mode: permission bits of the socket.
        group: its group; empty keeps the daemon's own.
    """

    def __init__(
        self,
        path: Path,
        tenant: str,
        companions: Companions,
        mode: int,
        group: str,
        *,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        connection_count_max: int = CONNECTION_COUNT_MAX,
    ) -> None:
        self._path = path
        self._tenant = tenant
        self._companions = companions
        self._mode = mode
        self._group = group
        self._handshake_timeout_s = handshake_timeout_s
        self._connection_count_max = connection_count_max
        self._listener: socket.socket | None = None
        self._connections: set[CompanionConnection] = set()
        self._attached: dict[bytes, CompanionConnection] = {}

    async def open(self) -> None:
        """Listens when it returns. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._deaths = DeathWatch(self._loop, self._process_died)
        self._listener = bind_unix(self._path, socket.SOCK_SEQPACKET, self._mode, self._group)
        self._loop.add_reader(self._listener.fileno(), self._accept_some)

    async def close(self) -> None:
        """Closes everything and tells nobody: the daemon goes. Idempotent."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._attached.clear()
            for connection in list(self._connections):
                connection.close()
            self._deaths.close()

    @property
    def connection_count(self) -> int:
        """Open connections."""
        return len(self._connections)

    @property
    def watched_count(self) -> int:
        """Sessions whose process's death is watched for."""
        return len(self._deaths)

    # -- accepting -----------------------------------------------------------------------------

    def _accept_some(self) -> None:
        for _ in range(ACCEPT_COUNT_MAX):
            if self._listener is None:
                return
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._pause(error)
                return
            accepted.setblocking(False)
            self._take(accepted)

    def _pause(self, error: OSError) -> None:
        """Without descriptors the listener would stay readable and keep the loop busy."""
        assert self._listener is not None, "only an open listener accepts"
        log.error("cannot accept companion connections", tenant=self._tenant, error=error.strerror)
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept_some)

    def _take(self, accepted: socket.socket) -> None:
        try:
            peer = peer_of(accepted)
        except OSError:
            accepted.close()
            return
        if len(self._connections) >= self._connection_count_max:
            with suppress(OSError):
                accepted.send(
                    packets.refusal("CONNECTION_LIMIT", "too many connections of this tenant; close some")
                )
            accepted.close()
            return
        self._connections.add(
            CompanionConnection(self._loop, accepted, peer, self, self._handshake_timeout_s)
        )

    # -- what connections ask ------------------------------------------------------------------

    def attach(self, connection: CompanionConnection, session_id: bytes) -> None:
        """Binds a connection to its session, and watches its process.

        Raises:
            NotFound: SESSION_UNKNOWN; also when the process is dead already.
            StateConflict: SESSION_ATTACHED, when the session has a connection.
            LimitReached: no descriptor left.
        """
        if session_id in self._attached or session_id in self._deaths:
            raise StateConflict("SESSION_ATTACHED", "this session had its connection; open a new session")
        peer = connection.peer
        try:
            pidfd = open_pidfd(connection.socket, peer)
        except ProcessLookupError as error:
            raise NotFound("SESSION_UNKNOWN", "the process that connected is dead") from error
        except OSError as error:
            raise LimitReached(
                "DESCRIPTOR_LIMIT", f"the process cannot be watched: {error.strerror}"
            ) from error
        try:
            self._companions.attach(session_id, self._tenant, peer.pid, peer.uid)
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise
        self._attached[session_id] = connection
        if pidfd is not None:
            self._deaths.watch(session_id, pidfd)
        # The process's earlier sessions may be forgotten with this one: nobody waits for their death.
        for name in self._deaths.names():
            if name not in self._attached and not self._companions.is_remembered(name):
                self._deaths.forget(name)

    def segment_fd(self, session_id: bytes, segment_id: int) -> tuple[int, int]:
        """A segment for a session that is still known. Raises NotFound."""
        if not self._companions.is_remembered(session_id):
            raise NotFound("SESSION_UNKNOWN", "the session has ended; open a new one")
        return self._companions.segment_fd(self._tenant, segment_id)

    def closed(self, connection: CompanionConnection) -> None:
        """A connection is over: so is its session, and the watch unless slots wait for the death.

        Where the pid was not visible the kernel's end of file is all the proof there
        will be: a dead process's mappings are gone before its sockets are, and the
        client library unmaps before it closes.
        """
        self._connections.discard(connection)
        session_id = connection.session_id
        if session_id is None or self._attached.pop(session_id, None) is None:
            return
        self._companions.companion_lost(session_id)
        if session_id not in self._deaths:
            self._companions.process_dead(session_id)
        elif not self._companions.is_remembered(session_id):
            self._deaths.forget(session_id)

    def _process_died(self, session_id: bytes) -> None:
        connection = self._attached.pop(session_id, None)
        self._companions.process_dead(session_id)
        if connection is not None:
            connection.close()
