"""The write budget of a drive: most bytes written in any 24 hours, a hard limit, also across restarts.

Counted by the hour of the wall clock: an hour counts until it is a day over, so no
24 hours ever hold more. What is booked is vouched for on disk before it is written,
a step ahead, so that a daemon that is killed again and again stays within it, too.
What a clock that was ahead has dated later than now counts as written now. Where more
was written than the limit, which was higher then, nothing is until that is a day ago.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from prefixd_server.base.clock import Clock
from prefixd_server.base.files import Files, read_whole, write_whole
from prefixd_server.media.movers import CallJob, Movers

HOUR_S = 3600.0
HOURS_COUNTED = 24
"""Whole hours before the present one that may still be within a day."""
AHEAD_SHARE = 1 / 64
"""Of the limit: vouched for at a time, and lost with a kill."""
FORMAT_VERSION = 1
FILE_BYTES_MAX = 65_536

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Booking:
    """So many units may be written; they count in this hour."""

    unit_count: int
    hour: int


class WriteBudget:
    """See the module. Owned by the event loop.

    Args:
        limit_bytes: in any 24 hours; 0 for none.
        path: where it is remembered; the directory is there.
        disk: the movers that write it.
    """

    def __init__(self, limit_bytes: int, clock: Clock, files: Files, path: Path, disk: Movers) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._files = files
        self._path = path
        self._disk = disk
        self._saving = asyncio.Lock()
        self._booked = self._load() if limit_bytes else {}
        """Bytes by hour since the epoch."""
        self._vouched = dict(self._booked)
        """What is on disk."""

    async def book(self, wanted_bytes: int, unit_bytes: int) -> Booking:
        """How many units of `unit_bytes` of those wanted may be written now.

        Raises:
            OSError: the disk cannot remember it; nothing may be written.
        """
        hour = int(self._clock.wall() // HOUR_S)
        units = wanted_bytes // unit_bytes
        if not self._limit_bytes:
            return Booking(units, hour)
        self._turn_to(hour)
        units = min(units, max(0, self._limit_bytes - self.booked_bytes) // unit_bytes)
        self._booked[hour] += units * unit_bytes
        assert not units or self.booked_bytes <= self._limit_bytes, "the write budget is hard"
        booking = Booking(units, hour)
        try:
            await self._vouch()
        except BaseException:
            self.give_back(booking, units * unit_bytes)
            raise
        return booking

    def give_back(self, booking: Booking, count_bytes: int) -> None:
        """Booked, and not written after all."""
        if booking.hour in self._booked:
            self._booked[booking.hour] -= count_bytes

    @property
    def booked_bytes(self) -> int:
        """In the last 24 hours, and what of the hour before."""
        return sum(self._booked.values())

    def _turn_to(self, hour: int) -> None:
        """From now on this hour is the last: what is older than a day goes, what is later is part of it."""
        counted = {hour: 0}
        for dated, count in self._booked.items():
            if dated >= hour - HOURS_COUNTED:
                at = min(dated, hour)
                counted[at] = counted.get(at, 0) + count
        self._booked = counted

    async def _vouch(self) -> None:
        """Has the disk remember at least what is booked."""
        async with self._saving:
            if all(count <= self._vouched.get(hour, 0) for hour, count in self._booked.items()):
                return
            left = max(0, self._limit_bytes - self.booked_bytes)
            ahead = min(int(self._limit_bytes * AHEAD_SHARE), left)
            last = max(self._booked)
            vouched = self._booked | {last: self._booked[last] + ahead}
            content = {"format_version": FORMAT_VERSION, "bytes_by_hour": vouched}
            save = partial(write_whole, self._files, self._path, json.dumps(content).encode())
            await self._disk.run(CallJob(save))
            self._vouched = vouched

    def _load(self) -> dict[int, int]:
        """What was written before this start. A file that cannot be read stands for all that may be."""
        try:
            found = json.loads(read_whole(self._files, self._path, FILE_BYTES_MAX))
            known = {FORMAT_VERSION: found["bytes_by_hour"]}[found["format_version"]]
            return {int(hour): int(count) for hour, count in known.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning(
                "the write budget counts as spent: its file is damaged",
                path=str(self._path),
                reason=str(error),
            )
            return {int(self._clock.wall() // HOUR_S): self._limit_bytes}
