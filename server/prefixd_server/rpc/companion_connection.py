"""One connection of the companion socket: hello, then segments as they are asked for.

A descriptor is looked up and sent in one step of the loop, so that it cannot
have been closed, or its number given to something else, in between. While an
answer does not fit the socket's buffer nothing more is read.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from prefixd_server.base.errors import NotFound, PrefixdError
from prefixd_server.base.logs import logger
from prefixd_server.rpc import companion_packets as packets
from prefixd_server.rpc.deaths import Peer

log = logger(__name__)


class Host(Protocol):
    """What a connection asks of Companion."""

    def attach(self, connection: CompanionConnection, session_id: bytes) -> None:
        """The hello names this session. Raises PrefixdError."""
        ...

    def segment_fd(self, session_id: bytes, segment_id: int) -> tuple[int, int]:
        """(descriptor, length in bytes). Raises NotFound."""
        ...

    def closed(self, connection: CompanionConnection) -> None:
        """The connection is over."""
        ...


class CompanionConnection:
    """See the module. Owned by the event loop.

    Args:
        handshake_timeout_s: until the hello must have come.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        peer: Peer,
        host: Host,
        handshake_timeout_s: float,
    ) -> None:
        self.peer = peer
        self.socket = connection
        self.session_id: bytes | None = None
        self._loop = loop
        self._host = host
        self._owed: deque[int] = deque()
        """Segments asked for and not answered yet."""
        self._open = True
        self._blocked = False
        """Whether we wait for room in the socket's buffer, and read nothing."""
        self._timeout = loop.call_later(handshake_timeout_s, self._too_slow)
        loop.add_reader(connection.fileno(), self._guarded, self._read)

    def refuse(self, reason: str, message: str) -> None:
        """Says why, as far as the peer listens, and closes."""
        if self._open:
            with suppress(OSError):
                self._send(packets.refusal(reason, message))
            self.close()

    def close(self) -> None:
        """Ends the connection and tells the host. Idempotent."""
        if self._open:
            self._open = False
            self._timeout.cancel()
            self._loop.remove_reader(self.socket.fileno())
            self._loop.remove_writer(self.socket.fileno())
            self.socket.close()
            self._host.closed(self)

    # -- steps ---------------------------------------------------------------------------------

    def _guarded(self, step: Callable[[], None]) -> None:
        """The outermost seam of a connection: whatever a peer sends ends the connection at worst."""
        if not self._open:
            return
        try:
            step()
        except PrefixdError as error:
            self.refuse(error.reason, error.message)
        except OSError:
            self.close()
        except Exception:  # the loop goes on for everybody else; the log has what happened
            log.exception("companion connection failed", pid=self.peer.pid)
            self.refuse("INTERNAL", "the daemon failed to answer; its log says why")

    def _too_slow(self) -> None:
        self.refuse("HANDSHAKE_TIMEOUT", "the first packet, naming the session, did not come in time")

    def _read(self) -> None:
        try:
            packet, _, flags, _ = self.socket.recvmsg(packets.PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        if flags & socket.MSG_TRUNC:
            raise packets.too_long()
        if not packet:
            self.close()
        elif self.session_id is None:
            self._hello(packet)
        else:
            self._owed.extend(packets.parse_request(packet))
            self._answer()

    def _hello(self, packet: bytes) -> None:
        session_id = packets.parse_hello(packet)
        self._host.attach(self, session_id)
        self.session_id = session_id
        self._timeout.cancel()
        self._send(packets.ok())

    def _answer(self) -> None:
        """Sends what is owed until the socket's buffer is full; the rest when it has room again."""
        while self._owed and self._send_segment(self._owed[0]):
            self._owed.popleft()
        if self._owed and not self._blocked:
            self._blocked = True
            self._loop.remove_reader(self.socket.fileno())
            self._loop.add_writer(self.socket.fileno(), self._guarded, self._answer)
        elif self._blocked and not self._owed:
            self._blocked = False
            self._loop.remove_writer(self.socket.fileno())
            self._loop.add_reader(self.socket.fileno(), self._guarded, self._read)

    def _send_segment(self, segment_id: int) -> bool:
        """Answers for one segment; False when the buffer is full."""
        assert self.session_id is not None, "a segment is asked for only after the hello"
        try:
            fd, length_bytes = self._host.segment_fd(self.session_id, segment_id)
        except NotFound as error:
            if error.reason != "SEGMENT_UNKNOWN":
                raise
            return self._send(packets.segment_unknown(segment_id))
        return self._send(packets.segment(segment_id, length_bytes), fd)

    def _send(self, packet: bytes, fd: int | None = None) -> bool:
        """Sends one packet; False when the buffer is full. Raises OSError when the peer is gone."""
        try:
            if fd is None:
                self.socket.send(packet, socket.MSG_NOSIGNAL)
            else:
                socket.send_fds(self.socket, [packet], [fd], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True
