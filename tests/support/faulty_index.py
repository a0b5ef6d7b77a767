"""An index process that fails as a full disk makes it fail, when a test says so: the twin of open_line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefixd_server.index.frames import Frame
from prefixd_server.index.line import IndexUnavailable, Line, open_line


@dataclass
class FaultyIndex:
    """Give its open() in the place of open_line.

    disk_full: no commit succeeds, and no process can open the database.
    """

    disk_full: bool = False
    opened: int = 0
    """Processes that were started."""

    async def open(self, directory: Path, store_uuid: bytes, reply_timeout_s: float) -> Line:
        """See open_line."""
        self._refuse()
        line = await open_line(directory, store_uuid, reply_timeout_s)
        self.opened += 1
        ask = line.ask

        async def faulty_ask(message: bytes) -> tuple[Frame, bytes]:
            self._refuse()
            return await ask(message)

        line.ask = faulty_ask
        return line

    def _refuse(self) -> None:
        if self.disk_full:
            raise IndexUnavailable("the index failed: No space left on device", disk_full=True)
