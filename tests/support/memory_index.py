"""An index process without a process: what is durable is a dict that outlives it. For virtual time.

Its times and its faults are the test's; what it answers follows child.py.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixd_server.index.frames import (
    HEAD,
    LOAD_NAMESPACES,
    LOAD_ROWS,
    SECTION_ROW_BYTES,
    Frame,
    Section,
    facts,
    frame,
    pair,
    pairs,
    sections,
)
from prefixd_server.index.line import IndexUnavailable, Line
from prefixd_server.index.records import KEY_BYTES, KIND_BLOCK, KIND_NAMESPACE, RECORD_BYTES

DELAY_S_MAX = 0.01


@dataclass
class MemoryIndex:
    """Give its open() in the place of open_line.

    disk_full: nothing can be opened or committed.
    die_within_commit: the next commit becomes durable or not, and its process is gone without an answer.
    """

    rng: random.Random
    durable: dict[bytes, bytes] = field(default_factory=dict)
    disk_full: bool = False
    die_within_commit: bool = False
    _line: MemoryLine | None = None

    async def open(self, directory: Path, store_uuid: bytes, reply_timeout_s: float, make: bool) -> Line:
        """See open_line."""
        del directory, store_uuid, reply_timeout_s, make
        await self.pause()
        self.refuse()
        self._line = MemoryLine(self)
        return self._line

    def kill(self) -> None:
        """The process is gone."""
        if self._line is not None:
            self._line.die()

    def refuse(self) -> None:
        """Raises what a full disk leads to."""
        if self.disk_full:
            raise IndexUnavailable("the index failed: No space left on device", disk_full=True)

    async def pause(self) -> None:
        """The time that everything takes."""
        await asyncio.sleep(self.rng.uniform(0, DELAY_S_MAX))

    def apply(self, body: memoryview) -> None:
        """Makes a group durable."""
        for kind, count, payload in sections(body):
            if kind is Section.PUT_PAIR:
                self.durable.update(pairs(payload))
            elif kind is Section.PUT_BLOCKS:
                for at in range(0, count * RECORD_BYTES, RECORD_BYTES):
                    row = bytes(payload[at : at + RECORD_BYTES])
                    self.durable[row[:KEY_BYTES]] = row[KEY_BYTES:]
            else:
                key_bytes = SECTION_ROW_BYTES[kind]
                for at in range(0, count * key_bytes, key_bytes):
                    self.durable.pop(bytes(payload[at : at + key_bytes]), None)

    def of_kind(self, kind: int) -> list[tuple[bytes, bytes]]:
        """What is durable, in key order."""
        return sorted((key, value) for key, value in self.durable.items() if key[0] == kind)


class MemoryLine(Line):
    """See Line."""

    def __init__(self, index: MemoryIndex) -> None:
        self._index = index
        self._answers = [facts(Frame.OPENED, reset_reason="")]
        self._gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """None that anybody has."""
        return 0

    def die(self) -> None:
        """As by SIGKILL."""
        if not self._gone.done():
            self._gone.set_result(-9)

    async def ask(self, message: bytes) -> tuple[Frame, bytes]:
        """See Line."""
        index = self._index
        kind, body = Frame(message[HEAD.size - 1]), memoryview(message)[HEAD.size :]
        await index.pause()
        if kind is Frame.COMMIT:
            index.refuse()
            if not index.die_within_commit or index.rng.random() < 0.5:
                index.apply(body)
            if index.die_within_commit:
                index.die_within_commit = False
                self.die()
            self._answers.append(frame(Frame.DONE))
        elif kind is Frame.BLOCKS:
            rows = [key + value for key, value in index.of_kind(KIND_BLOCK)]
            for first in range(0, len(rows), LOAD_ROWS):
                self._answers.append(frame(Frame.ROWS, b"".join(rows[first : first + LOAD_ROWS])))
            self._answers.append(facts(Frame.LOADED, records=len(rows), corrupt=0, damaged=False))
        elif kind is Frame.NAMESPACES:
            found = [pair(key, value) for key, value in index.of_kind(KIND_NAMESPACE)]
            for first in range(0, len(found), LOAD_NAMESPACES):
                self._answers.append(frame(Frame.PAIRS, b"".join(found[first : first + LOAD_NAMESPACES])))
            self._answers.append(facts(Frame.DONE, corrupt=0))
        return await self.answer()

    async def answer(self) -> tuple[Frame, bytes]:
        """See Line."""
        await self._index.pause()
        if self._gone.done():
            raise IndexUnavailable("the index process died")
        message = self._answers.pop(0)
        return Frame(message[HEAD.size - 1]), message[HEAD.size :]

    async def numbers(self, kind: Frame) -> dict[str, Any]:
        """See Line."""
        del kind
        return {"disk_bytes": 0}

    async def gone(self) -> int:
        """See Line."""
        return await asyncio.shield(self._gone)

    async def end(self) -> None:
        """See Line."""
        self.die()
