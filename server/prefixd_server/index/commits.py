"""Commits that wait for the index process, and how they are put together in groups.

Pure bookkeeping on the loop: what was handed in first is sent first, a group
holds at most GROUP_RECORDS_MAX records, a commit larger than that spans groups
and is done with its last one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prefixd_server.base.errors import LimitReached
from prefixd_server.index.frames import (
    GROUP_RECORDS_MAX,
    SECTION_ROW_BYTES,
    Frame,
    Section,
    frame,
    pair,
    section,
)
from prefixd_server.index.records import Keys, NamespaceRecord, Records


@dataclass(slots=True)
class Ticket:
    """One commit: done once `left` records have become durable."""

    left: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Part:
    """Records of one kind of one commit; those before `at` are taken."""

    ticket: Ticket
    kind: Section
    count: int
    payload: memoryview
    at: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Records that become durable together, and whose they are."""

    message: bytes
    shares: tuple[tuple[Ticket, int], ...]
    record_count: int


class CommitQueue:
    """See the module.

    Args:
        record_count_max: records that may wait; beyond it add() raises LimitReached.
    """

    def __init__(self, record_count_max: int) -> None:
        self._record_count_max = record_count_max
        self._parts: deque[_Part] = deque()
        self.record_count = 0
        """Records that wait."""

    def add(
        self,
        puts: Records | None,
        deletes: Keys | None,
        namespaces: Sequence[NamespaceRecord],
        forgotten: Sequence[bytes] = (),
    ) -> asyncio.Future[None]:
        """Queues namespaces, then deletes, then forgotten, then puts. The result comes once all of them are
        durable.

        Raises:
            LimitReached: INDEX_QUEUE_FULL.
        """
        parts: list[tuple[Section, int, bytes]] = [
            (Section.PUT_PAIR, 1, pair(record.key(), record.encode())) for record in namespaces
        ]
        if deletes is not None and len(deletes):
            parts.append((Section.DELETE_BLOCKS, len(deletes), deletes.tobytes()))
        if forgotten:
            parts.append((Section.DELETE_NAMESPACES, len(forgotten), b"".join(forgotten)))
        if puts is not None and len(puts):
            parts.append((Section.PUT_BLOCKS, len(puts), puts.tobytes()))
        total = sum(count for _, count, _ in parts)
        if self.record_count + total > self._record_count_max:
            raise LimitReached(
                "INDEX_QUEUE_FULL",
                f"{self.record_count} index records wait for the disk, {total} more pass the limit of "
                f"{self._record_count_max}; retry",
                limit=self._record_count_max,
            )
        ticket = Ticket(total, asyncio.get_running_loop().create_future())
        ticket.done.add_done_callback(_retrieve)
        if total == 0:
            ticket.done.set_result(None)
        self._parts.extend(_Part(ticket, kind, count, memoryview(raw)) for kind, count, raw in parts)
        self.record_count += total
        return ticket.done

    def take(self) -> Group | None:
        """The next group, in the order of add(); None when nothing waits."""
        sections: list[bytes] = []
        shares: list[tuple[Ticket, int]] = []
        room = GROUP_RECORDS_MAX
        while self._parts and room:
            part = self._parts[0]
            count = min(room, part.count - part.at)
            row_bytes = SECTION_ROW_BYTES.get(part.kind, len(part.payload))
            payload = part.payload[part.at * row_bytes : (part.at + count) * row_bytes]
            sections.append(section(part.kind, count, payload))
            shares.append((part.ticket, count))
            part.at += count
            room -= count
            if part.at == part.count:
                self._parts.popleft()
        if not sections:
            return None
        taken = GROUP_RECORDS_MAX - room
        self.record_count -= taken
        return Group(frame(Frame.COMMIT, b"".join(sections)), tuple(shares), taken)

    def fail(self, error: Exception) -> None:
        """Ends every commit that waits; nothing waits afterwards."""
        for part in self._parts:
            fail([part.ticket], error)
        self._parts.clear()
        self.record_count = 0


def settle(group: Group) -> None:
    """The group is durable."""
    for ticket, count in group.shares:
        ticket.left -= count
        if ticket.left == 0 and not ticket.done.done():
            ticket.done.set_result(None)


def fail(tickets: Sequence[Ticket], error: Exception) -> None:
    """These commits are not known to be durable."""
    for ticket in tickets:
        if not ticket.done.done():
            ticket.done.set_exception(error)


def _retrieve(future: asyncio.Future[None]) -> None:
    """A failure whose waiter was cancelled is nobody's: it must not be reported as forgotten."""
    if not future.cancelled():
        future.exception()
