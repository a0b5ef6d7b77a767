"""What the companion socket may ask and tell: segments for living processes, and their deaths."""

from __future__ import annotations

from prefixd_server.base.errors import NotFound
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import Sessions
from prefixd_server.media.dram import DramMedium


class Companions:
    """The cache floor's side of rpc/companion.py."""

    def __init__(self, sessions: Sessions, room: Room, dram: DramMedium) -> None:
        self._room = room
        self._dram = dram
        self.attach = sessions.attach
        self.is_remembered = sessions.is_remembered
        self.companion_lost = sessions.companion_lost
        self.process_dead = sessions.process_dead

    def segment_fd(self, tenant: str, segment_id: int) -> tuple[int, int]:
        """(file descriptor, length in bytes) of a segment that belongs to the tenant.

        Raises:
            NotFound: SEGMENT_UNKNOWN, also when it is another tenant's.
        """
        segment = self._room.segment_of_wire_id(tenant, segment_id)
        if segment is None:
            raise NotFound(
                "SEGMENT_UNKNOWN",
                f"no segment {segment_id}; it was retired: acquire again",
                field="segments",
                value=segment_id,
            )
        return self._dram.fd(segment), self._dram.segment_bytes
