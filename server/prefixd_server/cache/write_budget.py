"""The daily write budget of a drive: most bytes written in any day, a hard limit."""

from __future__ import annotations

from prefixd_server.base.clock import Clock

DAY_S = 86_400.0


class WriteBudget:
    """Counts bytes written since the day began; a day begins with the first write after the last one ended.

    Args:
        limit_bytes: of one day; 0 for none.
    """

    def __init__(self, limit_bytes: int, clock: Clock) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._day_began = clock.now()
        self.written_bytes = 0
        """In this day."""

    def take(self, wanted_bytes: int, unit_bytes: int) -> int:
        """How many units of `unit_bytes` of those wanted may be written now; they are booked."""
        if self._clock.now() - self._day_began >= DAY_S:
            self._day_began = self._clock.now()
            self.written_bytes = 0
        units = wanted_bytes // unit_bytes
        if self._limit_bytes:
            units = min(units, max(0, self._limit_bytes - self.written_bytes) // unit_bytes)
        self.written_bytes += units * unit_bytes
        assert not self._limit_bytes or self.written_bytes <= self._limit_bytes, "the write budget is hard"
        return units

    def give_back(self, count_bytes: int) -> None:
        """Booked, and not written after all."""
        self.written_bytes -= count_bytes
