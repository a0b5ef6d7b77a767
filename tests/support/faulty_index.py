"""An index process that fails as a full disk makes it fail, when a test says so: the twin of open_line."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from prefixd_server.index.frames import HEAD, Frame
from prefixd_server.index.line import IndexUnavailable, Line, open_line


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class FaultyIndex:
    """Give its open() in the place of open_line.

    disk_full: no commit succeeds, and no process can open the database.
    """

    disk_full: bool = False
    lost_answers: int = 0
    """So many commits become durable, and nobody hears of it: the process seems to have died."""
    cut_loads: int = 0
    """So many loads end after their first records."""
    commits_go_on: asyncio.Event = field(default_factory=_set)
    """While it is not set, commits hang."""
    hangs: bool = False
    """Whether one does."""
    opened: int = 0
    """Processes that were started."""

    async def open(self, directory: Path, store_uuid: bytes, reply_timeout_s: float, make: bool) -> Line:
        """See open_line."""
        self._refuse()
        line = await open_line(directory, store_uuid, reply_timeout_s, make)
        self.opened += 1
        ask = line.ask

        async def faulty_ask(message: bytes) -> tuple[Frame, bytes]:
            self._refuse()
            _, kind = HEAD.unpack_from(message)
            if kind == Frame.COMMIT:
                self.hangs = not self.commits_go_on.is_set()
                await self.commits_go_on.wait()
                self.hangs = False
            answer = await ask(message)
            if kind == Frame.COMMIT and self.lost_answers:
                self.lost_answers -= 1
                raise IndexUnavailable("the index process died")
            if kind == Frame.BLOCKS and self.cut_loads:
                self.cut_loads -= 1
                line.answer = _cut
            return answer

        line.ask = faulty_ask
        return line

    def _refuse(self) -> None:
        if self.disk_full:
            raise IndexUnavailable("the index failed: No space left on device", disk_full=True)


async def _cut() -> tuple[Frame, bytes]:
    raise IndexUnavailable("the index process died")
