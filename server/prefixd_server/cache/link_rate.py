"""What a link was measured to do: its rate while busy, and how much of the time it is.

Pure: times are arguments, in order, monotonic seconds.
"""

from __future__ import annotations

from collections import deque

INTERVAL_S_MIN = 0.02
"""Shorter busy times are put together to one measurement."""
SMOOTHING = 0.25
BUSY_COUNT_MAX = 4096


class LinkRate:
    """See the module. Busy from the first begin() to the end() of the last that is under way."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        """While busy, smoothed; None before the first measurement."""
        self._under_way = 0
        self._began_at = 0.0
        self._busy_s = 0.0
        self._bytes = 0
        self._busy: deque[tuple[float, float]] = deque(maxlen=BUSY_COUNT_MAX)
        """(began, ended) of busy times that are over."""

    def begin(self, now: float) -> None:
        """A copy begins."""
        if self._under_way == 0:
            self._began_at = now
        self._under_way += 1

    def end(self, now: float, size_bytes: int) -> None:
        """A copy has ended."""
        self._under_way -= 1
        self._bytes += size_bytes
        self._busy_s += now - self._began_at
        self._busy.append((self._began_at, now))
        self._began_at = now
        if self._busy_s >= INTERVAL_S_MIN:
            measured = self._bytes / self._busy_s
            before = self.bytes_per_s
            self.bytes_per_s = measured if before is None else before + SMOOTHING * (measured - before)
            self._busy_s, self._bytes = 0.0, 0

    def busy_share(self, now: float, span_s: float) -> float:
        """Part of the last `span_s` seconds in which something was under way, 0 to 1."""
        since = now - span_s
        while self._busy and self._busy[0][1] <= since:
            self._busy.popleft()
        busy = sum(ended - max(began, since) for began, ended in self._busy)
        if self._under_way:
            busy += now - max(self._began_at, since)
        return min(1.0, busy / span_s)
