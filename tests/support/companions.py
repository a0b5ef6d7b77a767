"""The cache floor as the companion socket sees it, over real memory; and raw ends of the socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prefixd_server.base.errors import NotFound
from prefixd_server.media.dram import DramMedium


@dataclass
class FakeCache:
    """Sessions and segments by hand. `told` lists what the socket has said, in order."""

    dram: DramMedium
    sessions: dict[bytes, str] = field(default_factory=dict)
    """Tenant of each session that is remembered."""
    owners: dict[int, str] = field(default_factory=dict)
    """Tenant of each segment; wire id n is segment index n - 1."""
    quarantined: set[bytes] = field(default_factory=set)
    told: list[tuple[str, bytes]] = field(default_factory=list)
    peers: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def attach(self, session_id: bytes, tenant: str, pid: int, uid: int) -> None:
        if self.sessions.get(session_id) != tenant:
            raise NotFound("SESSION_UNKNOWN", "no such session")
        self.told.append(("attach", session_id))
        self.peers[session_id] = (pid, uid)

    def segment_fd(self, tenant: str, segment_id: int) -> tuple[int, int]:
        if self.owners.get(segment_id) != tenant:
            raise NotFound("SEGMENT_UNKNOWN", "no such segment")
        return self.dram.fd(segment_id - 1), self.dram.segment_bytes

    def is_remembered(self, session_id: bytes) -> bool:
        return session_id in self.sessions

    def companion_lost(self, session_id: bytes) -> None:
        self.told.append(("lost", session_id))
        if session_id not in self.quarantined:
            self.sessions.pop(session_id, None)

    def process_dead(self, session_id: bytes) -> None:
        self.told.append(("dead", session_id))
        self.sessions.pop(session_id, None)

    def names(self, session_id: bytes) -> list[str]:
        """What was told of one session."""
        return [name for name, of in self.told if of == session_id]


class RawPeer:
    """A client that sends whatever it likes, awaited on the loop that also serves."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.socket.connect(str(path))

    def send(self, packet: bytes) -> None:
        """One packet."""
        self.socket.send(packet)

    def ask(self, **value: object) -> None:
        """One JSON packet."""
        self.send(json.dumps(value).encode())

    async def receive(self) -> tuple[dict[str, object] | None, list[int]]:
        """The next packet and its descriptors; None when the daemon has closed."""
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
                return (json.loads(packet) if packet else None), fds
            except BlockingIOError:
                await readable(self.socket)

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()


async def readable(file: socket.socket | int) -> None:
    """Waits until something can be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(file, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(file)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for a state that another process or thread brings about; fails after the timeout."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the awaited state did not come"
        await asyncio.sleep(0.002)
